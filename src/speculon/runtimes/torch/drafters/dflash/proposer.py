"""A drafter over the target's own hidden states drafts a block of tokens in one forward (DFlash, z-lab 2026;
with a Markov head DSpark, with convolutions and a selector DFlash2, both 2026).

Its layers make keys and values of the states of every position, and keep these in pages, too.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.dflash.config import DFlashConfig
from speculon.runtimes.torch.drafters.dflash.network import DFlashNetwork, Drawing, load_dflash
from speculon.runtimes.torch.drafters.dflash.sight import block_view
from speculon.runtimes.torch.drafters.families import read_dflash_config
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.runner import choose_run, estimate_needs
from speculon.runtimes.torch.drafters.state_drafter import Overrides, StateDrafter, checked_config
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.speculation.proposers.chain import draft_at_once, draft_chain, independent

if TYPE_CHECKING:
    from torch import Tensor

NAME = "dflash"
OVERRIDES = Overrides(flags=("sample_from_anchor",))


class DFlashDrafter(StateDrafter):
    """One call of the drafter per round for all of its sequences."""

    def __init__(self, config: DFlashConfig, host: DrafterHost, min_confidence: float = 0.0):
        super().__init__(host, min_confidence)
        self.config = config
        taps, sizes = config.tap_layouts(len(self.target.layers))[0], (host.rows, host.scored)
        self.needs = estimate_needs(config, taps, self.target, *sizes, self.compile, numbers=3)
        self.network: DFlashNetwork

    @classmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> DFlashDrafter:
        checkpoint = checked_config(NAME, config, host.model, read_dflash_config, OVERRIDES)
        return cls(checkpoint, host, config.draft_min_confidence)

    def load(self) -> None:
        self.network = load_dflash(self.config, self.target)
        layers = self.needs.layers[1:]
        self.runner = choose_run(self.network, layers, self.target, self.compile)

    @torch.inference_mode()
    def _propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        rest = self.pages.catch_up(seqs, self.max_rows, self._read)
        # the last token is the anchor: the target has no states of it yet
        if ranges := [(seq, start, end - 1) for seq, start, end in rest if start < end - 1]:
            self._read(ranges)
        drawing = Drawing.of(self.network, self.vocab_size, self._blocks(seqs, ks))
        if not self.network.in_turn and all(map(independent, seqs)):
            logits, sure = drawing.all_logits()
            return draft_at_once(NAME, seqs, ks, logits, self.min_confidence, sure)

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            previous = [drafts[i][-1] if drafts[i] else seqs[i].tokens[-1] for i in which]
            return drawing.logits(which, len(drafts[which[0]]), previous)

        chances = None if self.network.confidence_head is None else lambda: drawing.sure
        return draft_chain(NAME, seqs, ks, forward, self.min_confidence, chances)

    def _read(self, ranges: list[TokenRange]) -> None:
        """Writes the drafter's keys and values of committed positions."""
        positions = [position for _, start, end in ranges for position in range(start, end)]
        at = torch.tensor(positions, device=self.target.device)
        self.network.write_context(self.pages.taps(ranges), at, self.own.view(ranges))
        self.pages.mark(ranges)

    def _blocks(self, seqs: list[Sequence], ks: list[int]) -> list[Tensor]:
        """The states of the rows that draft, [K, H] of each sequence."""
        skipped = 0 if self.config.sample_from_anchor else 1
        blocks = [(seq, len(seq.tokens) - 1, k + skipped) for seq, k in zip(seqs, ks, strict=True)]
        ids: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        for seq, n, rows in blocks:
            ids += [seq.tokens[n], *[self.config.mask_token_id] * (rows - 1)]
            positions += range(n, n + rows)
            numbers += range(rows)
        flat = torch.tensor([ids, positions, numbers], device=self.target.device)
        states = self.runner.run(*flat, block_view(self.own, blocks))
        ends = accumulate((rows for _, _, rows in blocks), initial=0)
        return [states[start + skipped : end] for start, end in pairwise(ends)]
