"""Defaults of sampling that a checkpoint brings, as far as vLLM takes them: `generation_config.json`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import read_json
from speculon.checkpoints.locate import locate
from speculon.core.config import EngineConfig
from speculon.core.config.models import check_field
from speculon.core.errors import InvalidParameter, ModelError

FILE = "generation_config.json"
# the file's field -> ours; `do_sample` is not among them
NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
LIMIT = "max_tokens"
NAMES |= {"max_new_tokens": LIMIT}

log = logging.getLogger("speculon")


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """The fields of `SamplingParams` that the model's file sets, unless the settings leave it out.

    A GGUF file has none. Raises `ModelError` for a file that is not JSON.
    """
    if not config.generation_config:
        return {}
    defaults = read_defaults(locate(config.model, trust_remote_code=config.trust_remote_code) / FILE)
    if defaults:
        values = ", ".join(f"{name} = {value}" for name, value in defaults.items())
        log.info(
            "%s: requests that set none have %s, from its %s (generation_config = true)",
            *(config.model, values, FILE),
        )
    return defaults


def read_defaults(path: Path) -> dict[str, Any]:
    """A value that no request may have is left out, with a warning."""
    written = read_json(path, ModelError) if path.is_file() else {}
    if not isinstance(written, dict):
        raise ModelError(f"{path}: not a JSON object")
    defaults = {}
    for theirs, ours in NAMES.items():
        if (value := written.get(theirs)) is None:
            continue
        try:
            if not isinstance(value, int | float) or isinstance(value, bool) or (ours == LIMIT and value < 1):
                raise InvalidParameter(theirs, value, "must be a number in its range")
            check_field(ours, value)
            defaults[ours] = int(value) if ours in (LIMIT, "top_k") else value
        except InvalidParameter as error:
            log.warning("%s: %s is ignored: %s", path, theirs, error)
    return defaults
