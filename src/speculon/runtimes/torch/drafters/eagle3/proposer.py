"""A small head over the target's own hidden states drafts token by token (EAGLE-3, Li et al. 2025).

See `runtimes.torch.drafters.eagle3.network` for which row lies where.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config
from speculon.runtimes.torch.drafters.eagle3.network import PAIR_WIDTHS, Eagle3Network, agreement
from speculon.runtimes.torch.drafters.families import read_eagle3_config
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.layers import load_network
from speculon.runtimes.torch.drafters.runner import choose_run, estimate_needs
from speculon.runtimes.torch.drafters.state_drafter import (
    Overrides,
    StateDrafter,
    after_states,
    checked_config,
)
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.speculation.proposers.chain import draft_chain
from speculon.speculation.proposers.tree import Node, draft_trees

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.torch.kv.store import View

NAME = "eagle3"
OVERRIDES = Overrides(("norm_before_residual", "norm_output"), ("max_context",), rising=True)

PROBE = (
    "Speculative decoding lets a small model draft what a large one will write. The large model reads all "
    "drafts at once and keeps those that it would have written itself, so the text is the same, and it comes "
    "sooner. How much sooner depends on how often the drafts are right: "
    "def mean(values): return sum(values) / len(values)"
)

log = logging.getLogger("speculon")


class Eagle3Drafter(StateDrafter):
    """One call of the head per draft position for all sequences of the round."""

    def __init__(self, head_config: Eagle3Config, host: DrafterHost, min_confidence: float = 0.0):
        super().__init__(host, min_confidence)
        self.tap_layouts, self.tokenizer = head_config.tap_layouts(len(self.target.layers)), host.tokenizer
        self.head_config = head_config
        taps, sizes = self.tap_layouts[0], (host.rows, host.scored)
        self.needs = estimate_needs(head_config, taps, self.target, *sizes, self.compile, PAIR_WIDTHS)
        self.head: Eagle3Network

    @classmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Eagle3Drafter:
        checkpoint = checked_config(NAME, config, host.model, read_eagle3_config, OVERRIDES)
        return cls(checkpoint, host, config.draft_min_confidence)

    def load(self) -> None:
        self.head = load_network(Eagle3Network, self.head_config, self.target)
        layers = self.needs.layers[1:]
        self.runner = choose_run(self.head, layers, self.target, self.compile)
        if len(self.tap_layouts) > 1 and self.tokenizer is not None:
            self.needs = replace(
                self.needs, taps=self._better_reading(self.tokenizer.encode(PROBE)[: self.target.max_context])
            )

    def _better_reading(self, ids: list[int]) -> tuple[int, ...]:
        """Where a config's taps can be read in two ways: those with which the head drafts better."""
        layers = self.needs.layers[1:]
        shares = {taps: agreement(self.head, self.target, layers, taps, ids) for taps in self.tap_layouts}
        best = max(shares, key=lambda taps: shares[taps])
        shown = ", ".join(f"after layers {list(taps)} {share:.0%}" for taps, share in shares.items())
        log.info(
            "%s: two tap layouts are possible; acceptance on a short text: %s; used: %s",
            NAME,
            shown,
            list(best),
        )
        return best

    def _propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        rest = self.pages.catch_up(seqs, self.max_rows, self._read, first=1)
        states: dict[int, Tensor] = {}  # by index, of its last row [H]

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            if not drafts[which[0]]:
                after = self._read([rest[i] for i in which])
            else:
                ends = [len(seqs[i].tokens) + len(drafts[i]) for i in which]
                ranges = [(seqs[i], end - 1, end) for i, end in zip(which, ends, strict=True)]
                ids = [drafts[i][-1] for i in which]
                after = self._forward(ranges, ids, torch.stack([states[i] for i in which]))
            states.update(zip(which, after, strict=True))
            return self.head.logits(after, self.vocab_size)

        return draft_chain(NAME, seqs, ks, forward, self.min_confidence)

    def propose_trees(self, seqs: list[Sequence], ks: list[int], depths: list[int]) -> list[Draft]:
        """As `Branching` says."""
        return after_states(seqs, [*zip(ks, depths, strict=True)], self._propose_trees)

    def _propose_trees(self, seqs: list[Sequence], shapes: list[tuple[int, int]]) -> list[Draft]:
        states: dict[Node | int, Tensor] = {}  # [H] after each node, and after the sequences, by index

        def root() -> Tensor:
            after = self._read(self.pages.catch_up(seqs, self.max_rows, self._read, first=1))
            states.update(enumerate(after))
            return self.head.logits(after, self.vocab_size)

        def read(nodes: list[Node]) -> Tensor:
            before = torch.stack(
                [states[node.tree if node.parent is None else node.parent] for node in nodes]
            )
            positions = [len(seqs[node.tree].tokens) + node.depth - 1 for node in nodes]
            view = self.own.view_of_nodes([(seqs[node.tree], node.read) for node in nodes], first=1)
            after = self._run([node.token for node in nodes], positions, before, view)
            states.update(zip(nodes, after, strict=True))
            return self.head.logits(after, self.vocab_size)

        return draft_trees(NAME, seqs, shapes, root, read, self.min_confidence)

    def _read(self, ranges: list[TokenRange]) -> Tensor:  # [B, H]
        """Rows of committed states; the state after each range."""
        ids = [token for seq, start, end in ranges for token in seq.tokens[start:end]]
        taps = self.pages.taps([(seq, start - 1, end - 1) for seq, start, end in ranges])
        states = self._forward(ranges, ids, self.head.fuse(taps))
        self.pages.mark(ranges)
        lengths = torch.tensor([end - start for _, start, end in ranges], device=states.device)
        return states[lengths.cumsum(0) - 1]

    # [T, H] -> [T, H]
    def _forward(self, ranges: list[TokenRange], ids: list[int], states: Tensor) -> Tensor:
        positions = [slot - 1 for _, start, end in ranges for slot in range(start, end)]
        return self._run(ids, positions, states, self.own.view(ranges, first=1))

    @torch.inference_mode()
    def _run(self, ids: list[int], positions: list[int], states: Tensor, view: View) -> Tensor:
        flat = torch.tensor([ids, positions], device=states.device)
        return self.runner.run(flat[0], states, flat[1], view)
