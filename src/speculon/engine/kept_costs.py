"""What rounds cost, kept in the cache folder, so that a start need not measure what an earlier one has.

It is where the costs begin, no more: they follow what this process measures, and the file follows them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.core.config import EngineConfig
from speculon.core.config.file import cache_folder
from speculon.core.errors import ModelError
from speculon.core.kept_files import key_of, read_json, write_json
from speculon.runtimes.base import Facts
from speculon.speculation.control.cost import Costs
from speculon.speculation.events import versions

log = logging.getLogger("speculon")


class KeptCosts:
    """The costs of one engine and their file, which engines of the same content and machine share."""

    def __init__(self, costs: Costs, path: Path | None, key: str) -> None:
        self.costs, self._path, self._key = costs, path, key
        self.warm = False  # whether they are those of a warm-up, with what was measured since

    @classmethod
    def of(cls, costs: Costs, config: EngineConfig, facts: Facts) -> KeptCosts:
        """Where nothing can be kept its file is none."""
        if (folder := cache_folder()) is None:
            return cls(costs, None, "")
        settings = sorted(config.speculation.drafts), config.speculation.draft_quantization
        machine = sorted(facts.form.items()), sorted(facts.adapters.items()), sorted(versions().items())
        try:
            key = key_of(("costs", settings, machine), files_of(config))
        except (ModelError, OSError):  # a drafter that is gone, or no file at all
            return cls(costs, None, "")
        return cls(costs, folder / f"costs-{key}.json", key)

    def restore(self) -> None:
        """Begins with the costs of an earlier start, unless some are known. A file that is missing or damaged
        changes nothing.
        """
        if self.costs.known:
            self.warm = True
            return
        if self._path is None or (content := read_json(self._path, self._key)) is None:
            return
        try:
            self.costs.restore(content["costs"])
            self.warm = content["warm"] is True
        except (ValueError, KeyError, TypeError) as error:
            log.info("%s is not read: %.200s", self._path, error)

    def save(self) -> None:
        """Writes what is known now."""
        if self._path is not None and self.costs.known:
            write_json(self._path, self._key, {"warm": self.warm, "costs": self.costs.state()})


def files_of(config: EngineConfig) -> Iterator[Path]:
    """The weights of the model and of its drafters."""
    for path in (config.model, *config.speculation.drafts.values()):
        if not isinstance(path, str):
            raise ModelError(f"{type(path).__name__}: a model in memory has no files")
        yield from read_checkpoint(locate(path, fetch=False)).files
