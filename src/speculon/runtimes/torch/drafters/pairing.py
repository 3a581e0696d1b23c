"""Finds drafters that fit a target, from configs, headers and tokenizer files; loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from speculon.checkpoints.headers import Checkpoint, read_checkpoint, refuse_unsafe
from speculon.checkpoints.hub import cached_models, hub_id
from speculon.checkpoints.spelling import compare
from speculon.core.errors import ConfigError, ModelError, UnsupportedModel, WrongPair
from speculon.runtimes.torch.drafters.config import (
    DrafterConfig,
    TargetShape,
    check_offsets,
    check_pair,
    read_offsets,
)
from speculon.runtimes.torch.drafters.families import Family, family_of
from speculon.runtimes.torch.drafters.known import published_for
from speculon.runtimes.torch.drafters.mtp.tensors import MtpConfig

AUTO, ANOTHER = "auto", "another tokenizer"
# distance from a target: in its folder or the named one, next to it, published for it and in the hub's cache,
# another one in that cache
WITHIN, BESIDE, PUBLISHED, CACHED = range(4)
PublishedDrafters = Mapping[str, Iterable[str]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that was examined: its drafter, warnings about the pair, and the reason for refusal."""

    path: Path
    distance: int  # WITHIN, BESIDE, PUBLISHED or CACHED
    family: Family | None = None
    warnings: tuple[str, ...] = ()
    refusal: str | None = None
    namesake: bool = False  # its name begins with the target's, as `X-assistant` does

    @property
    def name(self) -> str:
        name = hub_id(self.path)
        return str(self.path) if name is None else f"{name} (in the hub's cache)"

    @property
    def rank(self) -> tuple[int, int, bool, int, str]:
        assert self.family is not None
        weights = self.family.head or self.family.checkpoint
        size = weights.num_bytes if weights else 0
        return len(self.warnings), self.distance, not self.namesake, size, str(self.path)


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search: at most one drafter for each method, and a log line for every folder."""

    drafts: dict[str, str]
    lines: tuple[str, ...]


def is_search(draft: str) -> bool:
    """`auto`, or `auto:FOLDER`; a folder of that name is `./auto`."""
    return draft == AUTO or draft.startswith(f"{AUTO}:")


def search(draft: str, target: Checkpoint, known: PublishedDrafters = MappingProxyType({})) -> Search:
    """The best drafter for each method; `known` adds to the table of published ones.

    Raises `ConfigError` for a folder that does not exist.
    """
    seen = [candidate(path, distance, target) for path, distance in around(draft, target.path, known)]
    taken: dict[str, Candidate] = {}
    for best in sorted((fit for fit in seen if fit.refusal is None), key=lambda fit: fit.rank):
        assert best.family is not None
        assert best.family.method is not None
        taken.setdefault(best.family.method, best)
    lines = tuple(log_line(examined, taken) for examined in seen)
    if draft == AUTO:
        cached = cached_models()
        absent = (name for name in published_for(target.path, known) if name not in cached)
        lines += tuple(f"{name}: published for this target, and not in the hub's cache" for name in absent)
    return Search({method: str(best.path) for method, best in taken.items()}, lines)


def around(
    draft: str, target: Path, known: PublishedDrafters = MappingProxyType({})
) -> Iterator[tuple[Path, int]]:
    """Folders with a config, without the target's own, and the distance of each; the hub's cache is searched
    where no folder is named.
    """
    named = draft.removeprefix(AUTO).removeprefix(":")
    here = Path(named).expanduser() if named else target
    if draft != AUTO and (not named or not here.is_dir()):
        raise ConfigError(f"draft = {draft!r}: {AUTO}:FOLDER needs a folder that is there")
    places = [(here, WITHIN), *((path, WITHIN) for path in below(here))]
    if not named:
        beside = [] if hub_id(target) else below(target.absolute().parent)  # those are its other versions
        cached, published = cached_models(), published_for(target, known)
        places += [(path, BESIDE) for path in beside]
        places += [(path, PUBLISHED if name in published else CACHED) for name, path in cached.items()]
    seen = {target.resolve()}
    for path, distance in places:
        if path.resolve() not in seen and (path / "config.json").is_file():
            seen.add(path.resolve())
            yield path, distance


def below(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # unreadable: no drafter in it can be loaded
        return []


def candidate(path: Path, distance: int, target: Checkpoint) -> Candidate:
    """As `examine`; a language model that fits with a warning is refused, too."""
    examined = examine(path, distance, target)
    if examined.warnings and examined.family is not None and examined.family.checkpoint is not None:
        # it fits, but who knows whether it is meant for it
        return replace(examined, refusal=f"{examined.warnings[0]}; only used where draft names it")
    return examined


def examine(path: Path, distance: int, target: Checkpoint) -> Candidate:
    family = None
    try:
        family = family_of(path)
        warnings = check_fit(family, target)
        namesake = path.name.startswith(f"{target.path.resolve().name}-")
        return Candidate(path, distance, family.for_target(target.num_layers), warnings, None, namesake)
    except (ModelError, OSError) as error:  # of one folder: the others may be read
        return Candidate(path, distance, family, refusal=str(error).removeprefix(f"{path}: "))


def check_fit(family: Family, target: Checkpoint) -> tuple[str, ...]:
    """Warnings about the pair. Raises `ModelError` where the drafter cannot draft for the target."""
    if family.head is not None:
        return check_head(family.head, target)
    if family.modules is not None:
        return check_modules(family.modules, target)
    if family.checkpoint is None:
        raise UnsupportedModel(family.refusal or family.summary)
    return check_model(family.checkpoint, target)


def check_head(head: DrafterConfig, target: Checkpoint) -> tuple[str, ...]:
    shape = TargetShape.of(target)
    warnings = check_pair(head, shape)
    check_offsets(head.path, read_offsets(head), shape.vocab_size)
    return warnings


def check_modules(modules: MtpConfig, target: Checkpoint) -> tuple[str, ...]:
    """Raises `WrongPair` for modules of another target: their layers are of the target's own class."""
    of = read_checkpoint(modules.path)
    mine, theirs = ((model.model_type, model.num_layers, model.hidden_size) for model in (of, target))
    if mine != theirs:
        words = "{} of {} layers and width {}"
        raise WrongPair(f"MTP modules for {words.format(*mine)}, the target is {words.format(*theirs)}")
    return ()


def check_model(draft: Checkpoint, target: Checkpoint) -> tuple[str, ...]:
    """A warning about another tokenizer. Raises `ModelError` unless the draft model is smaller than the
    target and has enough of its tokens.
    """
    refuse_unsafe(draft, allow_pickle=False)
    size, target_size = draft.num_parameters or 0, target.num_parameters or 0
    if target_size and size >= target_size:
        raise WrongPair(f"a model of {size:,} parameters, the target has {target_size:,}")
    if draft.tensor_types is not None or target.tensor_types is not None:
        return ()  # tokenizers in GGUF files are compared when both are loaded
    overlap = compare(draft.path, target.path)
    return () if overlap is None else (f"{ANOTHER}: {overlap.check(draft.path, target.path)}",)


def log_line(examined: Candidate, taken: dict[str, Candidate]) -> str:
    family, refusal = examined.family, examined.refusal
    if refusal is not None or family is None:
        return f"{examined.name}: left out: {refusal}"
    best = taken[family.method or ""]
    left_out = f"left out: fits, but {best.name} is preferred"
    verdict = f"taken as {family.method}" if best is examined else left_out
    return f"{examined.name}: {'; '.join((family.summary, *examined.warnings))}: {verdict}"
