"""A small head over the target's own hidden states drafts token by token (EAGLE-3, Li et al. 2025).

The states of every position lie in pages, as its own keys and values do, so a sequence may be preempted,
start behind a prefix that was found, or be computed again: nothing that it needs is ever lost. See
`models.eagle` for which row lies where.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from speculon.checkpoints.eagle3_config import Eagle3Config, TargetShape, check_pair
from speculon.checkpoints.families import read_eagle3_config
from speculon.checkpoints.locate import locate
from speculon.config import SpeculationConfig
from speculon.core import Draft, Needs, Stop, Verdict, no_draft
from speculon.errors import ConfigError
from speculon.models.draft_runs import run_of_head
from speculon.models.eagle import EagleHead, agreement
from speculon.models.eagle_load import head_needs, load_head
from speculon.models.target import Runner
from speculon.proposers.base import States, TargetFacts
from speculon.proposers.chain import Piece, catch_up, draft_chain, mark
from speculon.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import DraftLease

NAME = "eagle3"
NOT_READY = no_draft(Stop.NOT_READY)
TAPS, CONTEXT, FLAGS = "taps", "max_context", ("norm_before_residual", "norm_output")

PROBE = (
    "Speculative decoding lets a small model draft what a large one will write. The large model reads all "
    "drafts at once and keeps those that it would have written itself, so the text is the same, and it comes "
    "sooner. How much sooner depends on how often the drafts are right: "
    "def mean(values): return sum(values) / len(values)"
)

log = logging.getLogger("speculon")


class Eagle3Drafter:
    """One call of the head per draft position for all sequences of the round."""

    def __init__(self, head_config: Eagle3Config, target: TargetFacts, min_confidence: float = 0.0):
        assert target.model is not None
        self.tap_layouts, self.tokenizer = head_config.tap_layouts(target.num_layers), target.tokenizer
        self.head_config, self.target, self.min_confidence = head_config, target.model, min_confidence
        self.vocab_size, self.max_rows = target.vocab_size, target.rows or sys.maxsize
        self.needs: Needs = head_needs(
            head_config, self.tap_layouts[0], target.model, target.rows, target.scored, target.compile
        )
        self.compile = target.compile
        self.head: EagleHead
        self.runner: Runner

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> Eagle3Drafter:
        source = config.drafts.get(NAME)
        if not isinstance(source, str):
            raise ConfigError(f"{NAME} needs draft = a checkpoint's folder")
        if target.model is None:
            raise ConfigError(f"{NAME} reads the target's states, and there is no target")
        head_config, model = overridden(read_eagle3_config(locate(source)), config.options), target.model
        odd = check_pair(
            head_config,
            TargetShape(model.hidden_size, model.vocab_size, len(model.layers), type(model.model).__name__),
        )
        log.info("%s: %s", NAME, head_config.summary(len(model.layers)))
        for note in (*head_config.notes, *odd):
            log.warning("%s: %s", NAME, note)
        return cls(head_config, target, config.draft_min_confidence)

    def load(self) -> None:
        self.head = load_head(self.head_config, self.target)
        layers = self.needs.layers[1:]
        self.runner = run_of_head(self.head, layers, self.target, self.compile)
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

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt is read with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        """Nothing after a single token: there are no states before it."""
        able = [len(seq.tokens) > 1 for seq in seqs]
        drafts = iter(self._propose(list(compress(seqs, able)), list(compress(budgets, able)), lease))
        return [next(drafts) if yes else NOT_READY for yes in able]

    def _propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        own = lease.after(1)  # the first layer holds the taps
        rest = catch_up(NAME, seqs, self.max_rows, partial(self._read, lease=lease), first=1)
        states: dict[int, Tensor] = {}  # by index, of its last row [H]

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            if not drafts[which[0]]:
                after = self._read([rest[i] for i in which], lease)
            else:
                ends = [len(seqs[i].tokens) + len(drafts[i]) for i in which]
                pieces = [(seqs[i], end - 1, end) for i, end in zip(which, ends, strict=True)]
                ids = [drafts[i][-1] for i in which]
                after = self._forward(pieces, ids, torch.stack([states[i] for i in which]), own)
            states.update(zip(which, after, strict=True))
            return self.head.logits(after, self.vocab_size)

        return draft_chain(NAME, seqs, budgets, forward, self.min_confidence)

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """Nothing to learn: the rows of drafts, which read the head's own states, are written again from the
        target's.
        """

    def release(self, seq: Sequence) -> None:
        """Its pages go with the target's."""

    def _read(self, pieces: list[Piece], lease: DraftLease) -> Tensor:  # [B, H]
        """Rows of committed states; the state after each piece."""
        ids = [token for seq, start, end in pieces for token in seq.tokens[start:end]]
        taps = lease.taps([(seq, start - 1, end - 1) for seq, start, end in pieces])
        states = self._forward(pieces, ids, self.head.fuse(taps), lease.after(1))
        mark(NAME, pieces)
        lengths = torch.tensor([end - start for _, start, end in pieces], device=states.device)
        return states[lengths.cumsum(0) - 1]

    @torch.inference_mode()
    # [T, H] -> [T, H]
    def _forward(self, pieces: list[Piece], ids: list[int], states: Tensor, own: DraftLease) -> Tensor:
        positions = [slot - 1 for _, start, end in pieces for slot in range(start, end)]
        flat = torch.tensor([ids, positions], device=states.device)
        return self.runner.run(flat[0], states, flat[1], own.view(pieces, first=1))


def overridden(head_config: Eagle3Config, options: Mapping[str, Any]) -> Eagle3Config:
    """What a config says wrongly, or not at all, as the user knows it: `taps`, outputs of 0-based target
    layers, `max_context` in positions, and the flags.

    Raises `ConfigError` for a value of another kind.
    """
    given = {name: options[name] for name in (TAPS, CONTEXT, *FLAGS) if name in options}
    for name, value in given.items():
        if name == TAPS:
            good = are_layers(value) and len(value) == head_config.taps
            expected = f"a list of {head_config.taps} layers in rising order"
        elif name == CONTEXT:
            good, expected = type(value) is int and value > 0, "a number of positions"
        else:
            good, expected = type(value) is bool, "true or false"
        if not good:
            raise ConfigError(f"options.{name} = {value!r}: for {head_config.path} it is {expected}")
    taps: dict[str, Any] = {"tap_ids": tuple(given.pop(TAPS)), "after": True} if TAPS in given else {}
    return replace(head_config, **given, **taps)


def are_layers(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and all(type(tap) is int for tap in value)
        and sorted(set(value)) == list(value)
    )
