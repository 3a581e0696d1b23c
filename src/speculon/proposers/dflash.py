"""A drafter over the target's own hidden states drafts a block of tokens in one forward (DFlash, z-lab 2026;
with a Markov head DSpark, 2026).

The target's states of every position lie in pages, as for EAGLE-3, and so do the keys and values that each
layer of the drafter makes of them. `seq.drafted` says how many positions have these; what is missing is
computed with the next draft.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, Any

import torch

from speculon.checkpoints.dflash_config import DFlashConfig
from speculon.checkpoints.eagle3_config import TargetShape, check_pair
from speculon.checkpoints.families import read_dflash_config
from speculon.checkpoints.locate import locate
from speculon.config import SpeculationConfig
from speculon.core import Draft, Needs, Stop, Verdict, no_draft
from speculon.errors import ConfigError
from speculon.models.dflash import DFlashModel, Drawing
from speculon.models.dflash_attention import block_view
from speculon.models.dflash_load import dflash_needs, load_dflash
from speculon.models.draft_runs import run_of_blocks
from speculon.models.target import Runner
from speculon.proposers.base import States, TargetFacts
from speculon.proposers.chain import Piece, catch_up, draft_at_once, draft_chain, independent, mark
from speculon.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import DraftLease

NAME = "dflash"
NOT_READY = no_draft(Stop.NOT_READY)
TAPS, FROM_ANCHOR = "taps", "sample_from_anchor"

log = logging.getLogger("speculon")


class DFlashDrafter:
    """One call of the drafter per round for all of its sequences."""

    def __init__(self, config: DFlashConfig, target: TargetFacts, min_confidence: float = 0.0):
        assert target.model is not None
        self.config, self.target, self.min_confidence = config, target.model, min_confidence
        self.vocab_size, self.max_rows = target.vocab_size, target.rows or sys.maxsize
        self.compile = target.compile
        self.needs: Needs = dflash_needs(config, target.model, target.rows, target.scored, target.compile)
        self.model: DFlashModel
        self.runner: Runner

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> DFlashDrafter:
        source = config.drafts.get(NAME)
        if not isinstance(source, str):
            raise ConfigError(f"{NAME} needs draft = a checkpoint's folder")
        if target.model is None:
            raise ConfigError(f"{NAME} reads the target's states, and there is no target")
        read, model = overridden(read_dflash_config(locate(source)), config.options), target.model
        shape = TargetShape(
            model.hidden_size, model.vocab_size, len(model.layers), type(model.model).__name__
        )
        odd = check_pair(read, shape)
        log.info("%s: %s", NAME, read.summary(len(model.layers)))
        for note in (*read.notes, *odd):
            log.warning("%s: %s", NAME, note)
        return cls(read, target, config.draft_min_confidence)

    def load(self) -> None:
        self.model = load_dflash(self.config, self.target)
        layers = self.needs.layers[1:]
        self.runner = run_of_blocks(self.model, layers, self.target, self.compile)

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt's states are read with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        """Nothing after a single token: there are no states before it."""
        able = [len(seq.tokens) > 1 for seq in seqs]
        if not any(able):
            return [NOT_READY] * len(seqs)
        drafts = iter(self._propose(list(compress(seqs, able)), list(compress(budgets, able)), lease))
        return [next(drafts) if yes else NOT_READY for yes in able]

    @torch.inference_mode()
    def _propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        read = partial(self._read, lease=lease)
        rest = catch_up(NAME, seqs, self.max_rows, read)
        # the last token is the anchor: the target has no states of it yet
        if pieces := [(seq, start, end - 1) for seq, start, end in rest if start < end - 1]:
            read(pieces)
        budgets = [min(k, self.config.max_drafts) for k in budgets]
        drawing = Drawing.of(self.model, self.vocab_size, self._blocks(seqs, budgets, lease.after(1)))
        if self.model.markov is None and all(map(independent, seqs)):
            logits, sure = drawing.all_logits()
            return draft_at_once(NAME, seqs, budgets, logits, self.min_confidence, sure)

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            previous = [drafts[i][-1] if drafts[i] else seqs[i].tokens[-1] for i in which]
            return drawing.logits(which, len(drafts[which[0]]), previous)

        chances = None if self.model.confidence is None else lambda: drawing.sure
        return draft_chain(NAME, seqs, budgets, forward, self.min_confidence, chances)

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """Nothing to learn: the states of accepted drafts are in the pages, and nothing of a block is."""

    def release(self, seq: Sequence) -> None:
        """Its pages go with the target's."""

    def _read(self, pieces: list[Piece], lease: DraftLease) -> None:
        """Writes the drafter's keys and values of committed positions."""
        positions = [position for _, start, end in pieces for position in range(start, end)]
        at = torch.tensor(positions, device=self.target.device)
        self.model.write_context(lease.taps(pieces), at, lease.after(1).view(pieces))
        mark(NAME, pieces)

    def _blocks(self, seqs: list[Sequence], ks: list[int], own: DraftLease) -> list[Tensor]:
        """The states of the rows that draft, [K, H] of each sequence."""
        skipped = 0 if self.config.sample_from_anchor else 1
        blocks = [(seq, len(seq.tokens) - 1, k + skipped) for seq, k in zip(seqs, ks, strict=True)]
        ids: list[int] = []
        positions: list[int] = []
        for seq, n, rows in blocks:
            ids += [seq.tokens[n], *[self.model.mask_token_id] * (rows - 1)]
            positions += range(n, n + rows)
        flat = torch.tensor([ids, positions], device=self.target.device)
        states = self.runner.run(flat[0], flat[1], block_view(own, blocks))
        ends = accumulate((rows for _, _, rows in blocks), initial=0)
        return [states[start + skipped : end] for start, end in pairwise(ends)]


def overridden(config: DFlashConfig, options: Mapping[str, Any]) -> DFlashConfig:
    """What a config says wrongly, or not at all, as the user knows it: `taps`, outputs of 0-based target
    layers in the order of fc's columns, and `sample_from_anchor`.

    Raises `ConfigError` for a value of another kind.
    """
    if FROM_ANCHOR in options:
        given = options[FROM_ANCHOR]
        if type(given) is not bool:
            raise ConfigError(f"options.{FROM_ANCHOR} = {given!r}: for {config.path} it is true or false")
        config = replace(config, sample_from_anchor=given)
    if TAPS in options:
        taps = options[TAPS]
        good = isinstance(taps, list | tuple) and all(type(tap) is int for tap in taps)
        if not good or len(taps) != config.taps:
            raise ConfigError(
                f"options.{TAPS} = {taps!r}: for {config.path} it is a list of {config.taps} layers"
            )
        config = replace(config, tap_ids=tuple(taps), after=True)
    return config
