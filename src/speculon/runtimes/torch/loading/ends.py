"""The tokens that end a sequence: those that a checkpoint's configs, its tokenizer or its template name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from speculon.core.errors import ModelError
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.torch.model.target import Target

log = logging.getLogger("speculon")


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end a sequence: the generation config's, else the config's."""
    return of_part("generation config", getattr(model, "generation_config", None)) or of_config(model)


def of_config(model: PreTrainedModel) -> frozenset[int]:
    return of_part("config", model.config.get_text_config())


def of_part(part: str, config: object) -> frozenset[int]:
    """The ids that a config names. Raises `ModelError` for what cannot be one."""
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list | tuple | set) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        raise ModelError(f"eos_token_id = {named!r} of the {part}: must be a token id, or a list of them")
    return frozenset(token for token in ids if token >= 0)  # -1 stands for none


def add_ends(target: Target, tokenizer: Tokenizer | None) -> None:
    """Ends sequences also at the tokens that the tokenizer knows as ends, and says which these are.

    Of the config's, where the generation config has others, special ones alone: a class has defaults, which
    may be words.
    """
    if tokenizer is None:
        return
    named = tokenizer.end_ids | of_config(target.model) & tokenizer.special_ids
    added = sorted(token for token in named - target.eos_ids if token < target.vocab_size)
    if added:
        log.warning(
            "%s: the model's configs and its tokenizer differ in the tokens that end a text: it ends at %s, "
            "and also at %s",
            target.name,
            listed(target.eos_ids, tokenizer),
            listed(added, tokenizer),
        )
        target.eos_ids |= set(added)


def listed(ids: Iterable[int], tokenizer: Tokenizer) -> str:
    names: Any = (f"{token} ({tokenizer.token_text(token)!r})" for token in sorted(ids))
    return ", ".join(names) or "none"
