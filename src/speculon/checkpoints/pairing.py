"""Which of the folders around a target hold a drafter for it?

Looks at configs, headers and tokenizer files; loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.checkpoints.eagle3_config import (
    Eagle3Config,
    TargetShape,
    check_offsets,
    check_pair,
    read_offsets,
)
from speculon.checkpoints.families import Family, family_of
from speculon.checkpoints.headers import Checkpoint, read_json, refuse_unsafe
from speculon.errors import ConfigError, CorruptWeights, ModelError, UnsupportedModel, WrongPair

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that was looked at: its drafter and what is odd about the pair, or why there is none."""

    path: Path
    near: int  # 0: in the target's folder, or in the one that was named; 1: beside the target
    family: Family | None = None
    odd: tuple[str, ...] = ()
    refusal: str | None = None

    @property
    def rank(self) -> tuple[int, int, int, str]:
        assert self.family is not None
        found = self.family.sheet or self.family.checkpoint
        return len(self.odd), self.near, found.num_bytes if found else 0, str(self.path)


@dataclass(frozen=True, slots=True)
class Search:
    """What came of a search: at most one drafter for each method, and a line for every folder."""

    drafts: dict[str, str]
    lines: tuple[str, ...]


def is_search(draft: str) -> bool:
    """`auto`, or `auto:FOLDER`; a folder of that name is `./auto`."""
    return draft == AUTO or draft.startswith(f"{AUTO}:")


def search(draft: str, target: Checkpoint) -> Search:
    """The drafters that fit, the likeliest for each method.

    Raises `ConfigError` for a folder that is not there.
    """
    seen = [candidate(path, near, target) for path, near in around(draft, target.path)]
    taken: dict[str, Candidate] = {}
    for one in sorted((one for one in seen if one.refusal is None), key=lambda one: one.rank):
        assert one.family is not None
        assert one.family.method is not None
        taken.setdefault(one.family.method, one)
    lines = tuple(line_of(one, taken) for one in seen)
    return Search({method: str(one.path) for method, one in taken.items()}, lines)


def around(draft: str, target: Path) -> Iterator[tuple[Path, int]]:
    """Folders with a config, and how near each is, without the target's own."""
    named = draft.removeprefix(AUTO).removeprefix(":")
    here = Path(named).expanduser() if named else target
    if draft != AUTO and (not named or not here.is_dir()):
        raise ConfigError(f"draft = {draft!r}: {AUTO}:FOLDER needs a folder that is there")
    places = [(here, 0), *((path, 0) for path in below(here))]
    if not named:
        places += [(path, 1) for path in below(target.absolute().parent)]
    known = {target.resolve()}
    for path, near in places:
        if path.resolve() not in known and (path / "config.json").is_file():
            known.add(path.resolve())
            yield path, near


def below(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # not ours to read: nothing of it can be a drafter
        return []


def candidate(path: Path, near: int, target: Checkpoint) -> Candidate:
    try:
        family = family_of(path)
        odd = check_fit(family, target)
        return Candidate(path, near, family.beside(target.num_layers), odd)
    except ModelError as error:
        return Candidate(path, near, refusal=str(error).removeprefix(f"{path}: "))


def check_fit(family: Family, target: Checkpoint) -> tuple[str, ...]:
    """Raises `ModelError` where the drafter cannot draft for the target; returns what is odd about the pair."""
    if family.sheet is not None:
        return check_head(family.sheet, target)
    if family.checkpoint is None:
        raise UnsupportedModel(family.refusal or family.line)
    return check_model(family.checkpoint, target)


def check_head(sheet: Eagle3Config, target: Checkpoint) -> tuple[str, ...]:
    odd = check_pair(sheet, TargetShape.of(target))
    check_offsets(sheet.path, read_offsets(sheet), sheet.vocab_size)
    return odd


def check_model(draft: Checkpoint, target: Checkpoint) -> tuple[str, ...]:
    """A draft model is smaller than its target, and has its tokenizer."""
    refuse_unsafe(draft, allow_pickle=False)
    mine, theirs = draft.num_parameters or 0, target.num_parameters or 0
    if theirs and mine >= theirs:
        raise WrongPair(f"a model of {mine:,} parameters, the target has {theirs:,}")
    own, wanted = vocabulary(draft.path), vocabulary(target.path)
    wrong = next((token for token, i in wanted.items() if own.get(token) != i), None)
    if wrong is not None:
        at = own.get(wrong, "none")
        raise WrongPair(f"another tokenizer: the id of {wrong!r} is {at}, the target's is {wanted[wrong]}")
    return ()


def vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id, from tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WrongPair(f"no tokenizer.json in {folder} to compare")
    file: Any = read_json(path, CorruptWeights)
    try:
        known, added = file["model"]["vocab"], file.get("added_tokens") or ()
        ids = dict(known) if isinstance(known, dict) else {token: i for i, (token, _) in enumerate(known)}
        return ids | {one["content"]: one["id"] for one in added}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptWeights(f"{path}: no tokenizer's vocabulary") from None


def line_of(one: Candidate, taken: dict[str, Candidate]) -> str:
    if one.refusal is not None or one.family is None:
        return f"{one.path}: left out: {one.refusal}"
    family = one.family
    best = taken[family.method or ""]
    verdict = f"taken as {family.method}" if best is one else f"left out: fits, but {best.path} is likelier"
    return f"{one.path}: {'; '.join((family.line, *one.odd))}: {verdict}"
