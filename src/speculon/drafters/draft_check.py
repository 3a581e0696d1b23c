"""Checks the drafters in the settings by headers and tokenizer files, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, CorruptWeights, ModelError, WrongPair
from speculon.drafters.families import DFLASH, DRAFT_MODEL, EAGLE3, PARD
from speculon.drafters.mtp.tensors import MTP, mtp_of
from speculon.loading.headers import Checkpoint, read_checkpoint
from speculon.loading.locate import locate
from speculon.loading.spelling import compare


def check_drafts(config: EngineConfig) -> None:
    """Raises `ConfigError` for a method without a drafter, `WrongPair` for a draft model that cannot fit.

    For method `mtp`, raises `ModelError` for a target without such layers.
    """
    method, drafts = config.speculation.method, config.speculation.drafts
    if method in (DRAFT_MODEL, PARD, EAGLE3, DFLASH) and method not in drafts:
        raise ConfigError(f"method = {method!r} needs a drafter: set draft (--draft FOLDER)")
    if method == MTP and method not in drafts:
        mtp_of(locate(config.model, trust_remote_code=config.trust_remote_code))
    for draft in (drafts.get(DRAFT_MODEL), drafts.get(PARD)):
        if isinstance(draft, str):
            check_draft(draft, config)


def check_draft(draft: str, config: EngineConfig) -> None:
    """Raises `WrongPair` for a language model that cannot draft for the settings' target."""
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
    """A draft model of another tokenizer needs enough of the target's tokens."""
    if not all((folder / "tokenizer.json").is_file() for folder in (draft, target)):
        return  # of another format: compared when both are loaded
    try:
        overlap = compare(draft, target)
    except CorruptWeights:
        return  # the loader names what is wrong with it
    if overlap is not None:
        overlap.check(draft, target)
