"""Checks the drafters in the settings by headers and tokenizer files, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from speculon.checkpoints.families import DFLASH, DRAFT_MODEL, EAGLE3
from speculon.checkpoints.headers import Checkpoint, read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.checkpoints.pairing import vocabulary
from speculon.config import EngineConfig
from speculon.errors import ConfigError, ModelError, WrongPair


def check_drafts(config: EngineConfig) -> None:
    """Raises `ConfigError` for a method without a drafter, `WrongPair` for a draft model that cannot fit."""
    method, drafts = config.speculation.method, config.speculation.drafts
    if method in (DRAFT_MODEL, EAGLE3, DFLASH) and method not in drafts:
        raise ConfigError(f"method = {method!r} needs a drafter: set draft (--draft FOLDER)")
    draft = drafts.get(DRAFT_MODEL)
    if not isinstance(draft, str):
        return
    try:
        mine = read_checkpoint(locate(draft))
        target = read_checkpoint(locate(config.model, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return  # the loader names what is wrong with a checkpoint
    check_sizes(mine, target)
    check_tokenizers(mine.path, target.path)


def check_sizes(draft: Checkpoint, target: Checkpoint) -> None:
    """A draft model with more parameters than its target never saves time: most likely they are swapped."""
    if draft.quantization or target.quantization:
        return  # packed weights: the headers do not tell the number of parameters
    mine, theirs = draft.num_parameters, target.num_parameters
    if mine and theirs and mine > theirs:
        raise WrongPair(
            f"the draft model is larger than the target: {draft.path} has {mine:,} parameters, "
            f"{target.path} has {theirs:,}; are draft and model swapped?"
        )


def check_tokenizers(draft: Path, target: Path) -> None:
    """Every token of the target needs the same id in the draft model, which may have more tokens."""
    if not all((folder / "tokenizer.json").is_file() for folder in (draft, target)):
        return  # of another format: compared when both are loaded
    try:
        ids, expected = vocabulary(draft), vocabulary(target)
    except ModelError:
        return  # the loader names what is wrong with it
    wrong = [token for token, i in expected.items() if ids.get(token) != i]
    if wrong:
        raise WrongPair(
            f"different tokenizers: {len(wrong):,} of the {len(expected):,} tokens of {target} "
            f"have another id, or none, in {draft}"
        )
