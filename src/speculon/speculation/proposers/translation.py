"""Between the ids of a target and those of a draft model with another tokenizer, position by position.

A draft is a token of the target, and its q is the draft model's distribution over the tokens that both have,
renormalised. So verification needs to know nothing of it (Timor et al. 2025, token-level intersection).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from speculon.checkpoints.spelling import SAMPLE, Overlap, Spelling, same_ids
from speculon.decoding.sampling import NEVER
from speculon.decoding.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("speculon")


class Translation:
    """Target ids to draft ids where the draft model reads, its logits to the target's columns."""

    def __init__(self, overlap: Overlap, vocab_size: int, draft_size: int, device: torch.device):
        """Of V = `vocab_size` and Vd = `draft_size` logits; ids beyond these have no partner."""
        inside = [overlap.read_as(token) for token in range(vocab_size)]
        self._ids = [token if token < draft_size else overlap.other for token in inside]
        self._draft_size = draft_size
        self._columns = torch.full((vocab_size,), draft_size, device=device)  # one more: NEVER
        pairs = [(a, b) for a, b in overlap.partners.items() if a < vocab_size and b < draft_size]
        if pairs:
            targets, drafts = torch.tensor(pairs, device=device).unbind(1)
            self._columns[targets] = drafts

    def read(self, tokens: list[int]) -> list[int]:
        """What the draft model reads for these tokens of the target."""
        return [self._ids[token] for token in tokens]

    def logits(self, logits: Tensor) -> Tensor:
        """[R, Vd] -> [R, V]: columns of tokens that the draft model does not have are NEVER."""
        return F.pad(logits[:, : self._draft_size], (0, 1), value=NEVER).index_select(-1, self._columns)


def tokenizer_overlap(draft: Tokenizer, target: Tokenizer, path: str) -> Overlap | None:
    """The overlap of the tokenizers of a draft model, which is at `path`, and of its target; None where every
    token of the target has the same id in both.

    Raises `WrongPair` where too few tokens have a partner, or where their bytes are not known.
    """
    if same_ids(draft.inner.get_vocab(), target.inner.get_vocab()):
        return None
    overlap = Overlap.of(
        Spelling.of(target, "the target"),
        Spelling.of(draft, path),
        target.encode(SAMPLE, add_special_tokens=False),
        roles=[(special(target, name), special(draft, name)) for name in ("bos", "eos")],
        other=next((i for name in ("unk", "pad", "eos") if (i := special(draft, name)) is not None), 0),
    )
    log.warning("%s: its tokenizer differs from the target's, so drafts are translated: %s", path, overlap)
    return overlap.check(path, "the target")


def special(tokenizer: Tokenizer, name: str) -> int | None:
    own = getattr(tokenizer.inner, f"{name}_token", None)
    return None if own is None else tokenizer.token_id(str(own))
