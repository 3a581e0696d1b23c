"""A language model that drafts all tokens of a round in one forward (PARD, An et al. 2025).

It reads the tokens that it has not seen, then K - 1 mask tokens at the positions after them. The logits after
the last token are those of the first draft, and those after each mask are those of the next. The keys and
values of masks are never counted: `Pages.drafted` says how many real tokens it has read, so that the next
round, which begins there, writes over them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from speculon.core.errors import ModelError, UnsupportedModel
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.draft_model.model_drafter import ModelDrafter
from speculon.runtimes.torch.drafters.families import MASK_TOKENS
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.model.target import Target
from speculon.speculation.proposers.chain import draft_at_once, draft_chain, independent

if TYPE_CHECKING:
    from torch import Tensor

NAME = "pard"


class Pard(ModelDrafter):
    """One forward per round for all of its sequences."""

    method = NAME
    mask: int  # an id of the draft model

    def take(self, model: Target) -> None:
        if model.recurrent:
            raise UnsupportedModel(
                f"draft {model.name}: {NAME} with a recurrent state, which would have seen mask tokens"
            )
        super().take(model)
        self.mask = mask_token(model)

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        room = max(1, self.max_rows - sum(ks) + len(ks))  # beside the mask tokens
        rest = self.pages.catch_up(seqs, room, self._read)
        logits = self._block(rest, ks)
        if all(map(independent, seqs)):
            return draft_at_once(NAME, seqs, ks, logits, self.min_confidence)
        first = [*accumulate(ks, initial=0)]

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            return logits[[first[i] + len(drafts[i]) for i in which]]

        return draft_chain(NAME, seqs, ks, forward, self.min_confidence)

    def _block(self, rest: list[TokenRange], ks: list[int]) -> Tensor:
        """Logits of all drafts of the round, [K, V] of each sequence end to end."""
        ids: list[list[int]] = []
        ranges: list[TokenRange] = []
        scored: list[int] = []
        row = 0
        for (seq, start, end), k in zip(rest, ks, strict=True):
            ids.append(self._as_read(seq.tokens[start:end]) + [self.mask] * (k - 1))
            ranges.append((seq, start, end + k - 1))
            last = row + end - start - 1  # the last token's
            scored += range(last, last + k)
            row += len(ids[-1])
        logits = self._run(ranges, ids, scored)
        self.pages.mark(rest)  # without the mask tokens
        return logits


def mask_token(model: Target) -> int:
    """The mask id, in the place of a token to be drafted. Raises `ModelError` where its config names none."""
    config = model.model.config.get_text_config()
    mask = next((value for name in MASK_TOKENS if (value := getattr(config, name, None)) is not None), None)
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        names = ", ".join(MASK_TOKENS)
        raise ModelError(
            f"draft {model.name}: {NAME} needs a mask token ({names}) below "
            f"{config.vocab_size} in its config, not {mask!r}"
        )
    return mask
