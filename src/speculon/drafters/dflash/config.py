"""The config of a DFlash or DSpark drafter in one set of names, whichever project wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speculon.core.errors import WrongPair
from speculon.drafters.config import AUTHORS, DrafterConfig

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"

MarkovType = Literal["vanilla", "gated", "rnn"]
# Where a sliding window of W begins for the row at position p of a block whose anchor is at position n:
# at p - W + 1, at p - W, or at n - W for all rows.
WindowStart = Literal["row", "before_row", "before_anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """A DFlash drafter, or a DSpark one, which has a Markov head or a confidence head as well.

    Its taps are in the order of fc's columns.
    """

    window_start: WindowStart = "row"
    causal: tuple[bool, ...]  # of each layer: whether a row of the block sees no later row
    after: bool = True  # id j is the output of layer j, else its input
    target_layers: int | None = None  # N of the target that it was trained for
    block_size: int  # rows of a block, the anchor among them
    sample_from_anchor: bool  # row k drafts the token after its position, else that at its position
    mask_token_id: int
    markov: MarkovType | None = None
    markov_rank: int = 0  # r
    confidence: bool = False  # whether a head predicts each draft's chance of acceptance
    confidence_with_markov: bool = False  # and reads the embedding of the previous token, too

    @property
    def max_drafts(self) -> int:
        """The most drafts of one block: the first row drafts only where it is sampled from."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def family(self) -> str:
        return "DSpark" if self.markov or self.confidence else "DFlash"

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Raises `WrongPair` where it was trained for another number of layers."""
        if self.target_layers not in (None, num_layers):
            trained = f"a target of {self.target_layers} layers"
            raise WrongPair(f"{self.path}: was trained for {trained}, the target has {num_layers}")
        if self.tap_ids is not None:
            return (self.tap_ids if self.after else tuple(j - 1 for j in self.tap_ids),)
        if self.taps == 1:
            return ((num_layers // 2,),)
        step = (num_layers - 4) / (self.taps - 1)
        return (tuple(round(1 + i * step) for i in range(self.taps)),)

    def summary(self, num_layers: int | None = None) -> str:
        taps = f"{self.taps} tap{'s' * (self.taps > 1)} of width {self.target_hidden:,}"
        block = f"blocks of {self.block_size} rows with up to {self.max_drafts} drafts"
        parts = [self.shape, f"{taps} {self.describe_taps(num_layers)}", block]
        if self.draft_vocab_size is not None and self.vocab_size is not None:
            parts.append(f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens")
        return f"{self.family} drafter by {AUTHORS[self.format]}: {', '.join(parts)}; {self.size}"

    def describe_taps(self, num_layers: int | None = None) -> str:
        if num_layers is not None:
            return f"after layers {', '.join(map(str, self.tap_layouts(num_layers)[0]))}"
        if self.tap_ids is None:
            return "after evenly spaced layers"
        ids = ", ".join(map(str, self.tap_ids))
        return f"after layers {ids}" if self.after else f"before layers {ids}"

    def describe_block(self) -> str:
        """One line for people on how a block is drafted from."""
        first = "the anchor's row drafts" if self.sample_from_anchor else "the anchor's row does not draft"
        heads = [f"a {self.markov} Markov head of rank {self.markov_rank}"] if self.markov else []
        heads += ["a confidence head"] if self.confidence else []
        return ", ".join([f"{self.block_size} rows", first, *heads])
