"""A small model of the same vocabulary drafts token by token (Leviathan 2023; Chen 2023).

Its keys and values lie in layers of its own in the target's pages, and its recurrent states, if any, in slots
of its own. So prefix hits, rollback and preemption need no code here: `seq.drafted` says how far they reach,
and whatever is missing is computed in one call when a draft is next requested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from speculon.batch import Batch, Runs, joined
from speculon.checkpoints.memory import model_needs
from speculon.config import ModelObject, SpeculationConfig
from speculon.core import Draft, Needs, Verdict
from speculon.errors import ConfigError, ModelError
from speculon.kv.draft_slots import PER_SEQUENCE, spare_slots
from speculon.kv.states import KEPT_BYTES, slot_bytes
from speculon.models.load import load_target, wrap_model
from speculon.models.target import Target
from speculon.models.tokenizer import load_tokenizer
from speculon.proposers.base import States, TargetFacts
from speculon.proposers.chain import Piece, catch_up, draft_chain, mark
from speculon.sampling import NEVER
from speculon.sequence import Sequence
from speculon.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import DraftLease

NAME = "draft_model"


class DraftModel:
    """One forward per draft position for all sequences of the round."""

    def __init__(
        self,
        load: Callable[[], Target],
        needs: Needs,
        target: TargetFacts,
        min_confidence: float = 0.0,
        drafts: int = 0,
    ):
        """`drafts` are the most of a round, after each of which a recurrent state may be kept."""
        self._sequences, self._drafts = target.sequences, drafts
        self.needs, self._load = self.with_slots(needs), load
        self.vocab_size, self.min_confidence = target.vocab_size, min_confidence
        self.max_rows = target.rows or sys.maxsize  # of a call: as estimated for its scratch memory
        self.model: Target

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> DraftModel:
        source = config.drafts.get(NAME)
        if source is None:
            raise ConfigError(f"{NAME} needs draft = a checkpoint")
        if isinstance(source, str):
            dtype, device = getattr(torch, target.dtype), torch.device(target.device)
            needs = model_needs(
                source, dtype, device, target.rows, target.scored, target.fuse, target.compile
            )
            load = partial(load_draft, source, target)
            return cls(load, needs, target, config.draft_min_confidence, config.most())
        model = wrap_draft(source, target)
        # in memory already: nothing to load or to estimate
        needs = replace(model.needs(target.rows, target.scored), bytes_fixed=0)
        drafter = cls(lambda: model, needs, target, config.draft_min_confidence, config.most())
        drafter.model = model
        return drafter

    def load(self) -> None:
        self.model = self._load()
        needs = replace(
            self.needs,
            layers=self.model.layers,
            max_context=self.model.max_context,
            bytes_fixed=self.model.num_bytes,
            states=self.model.state_specs,
        )
        self.needs = self.with_slots(needs)

    def with_slots(self, needs: Needs) -> Needs:
        """The same with slots for its recurrent states: for each sequence, and spare ones within a step."""
        each = slot_bytes(needs.states)
        if not each:
            return needs
        spare = spare_slots(self._sequences, self._drafts, each, KEPT_BYTES)
        count = PER_SEQUENCE * self._sequences + spare
        return replace(needs, spare_states=spare, bytes_states=count * each)

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt is computed with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        rest = catch_up(NAME, seqs, self.max_rows, partial(self._read, lease=lease))

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            if not drafts[which[0]]:
                return self._next(
                    [rest[i] for i in which], [seqs[i].tokens[rest[i][1] :] for i in which], lease
                )
            ends = [len(seqs[i].tokens) + len(drafts[i]) for i in which]
            pieces = [(seqs[i], end - 1, end) for i, end in zip(which, ends, strict=True)]
            return self._next(pieces, [drafts[i][-1:] for i in which], lease)

        return draft_chain(NAME, seqs, budgets, forward, self.min_confidence)

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """Nothing to learn: the commit has set `seq.drafted` back to what was accepted."""

    def release(self, seq: Sequence) -> None:
        """Its pages and slots go with the target's."""

    def _read(self, pieces: list[Piece], lease: DraftLease) -> None:
        self._forward(pieces, [seq.tokens[start:end] for seq, start, end in pieces], [], lease)

    def _next(self, pieces: list[Piece], ids: list[list[int]], lease: DraftLease) -> Tensor:
        """Logits [B, V] after each piece."""
        ends = [total - 1 for total in accumulate(len(piece) for piece in ids)]
        logits = self._forward(pieces, ids, ends, lease)[:, : self.vocab_size]
        # one of the two may be padded
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=NEVER)

    def _forward(
        self, pieces: list[Piece], ids: list[list[int]], scored: list[int], lease: DraftLease
    ) -> Tensor:
        """Runs the pieces as one flat row; logits [R, V] of the `scored` rows."""
        positions = [position for _, start, end in pieces for position in range(start, end)]
        tokens = [token for piece in ids for token in piece]
        batch = Batch.of([], tokens, positions, scored, self.model.device, prompts_of(pieces))
        logits = self.model.forward(batch, lease.view(pieces)).logits
        lease.done(pieces, ids)
        mark(NAME, pieces)
        return logits


def prompts_of(pieces: list[Piece]) -> Runs:
    """The rows of pieces, end to end, that belong to prompts."""
    runs, row = [], 0
    for seq, start, end in pieces:
        if start < seq.request.prompt_len:
            runs.append((row, row + min(end, seq.request.prompt_len) - start))
        row += end - start
    return joined(runs)


def load_draft(path: str, target: TargetFacts) -> Target:
    """The checkpoint as a checked Target on the target's device, in its dtype."""
    if target.tokenizer is not None:
        check_same_ids(path, Tokenizer(load_tokenizer(path)), target.tokenizer)
    draft = load_target(
        path,
        dtype=target.dtype,
        device=target.device,
        fused=target.fuse,
        compile=target.compile,
        batch_invariant=None if target.batch_invariant else False,
    )
    return draft if target.tokenizer is not None else check_size(draft, target)


def wrap_draft(model: ModelObject, target: TargetFacts) -> Target:
    """A checked Target over a model in memory, which stays as and where it is. Does not modify `model`."""
    if str(model.device) != target.device:
        raise ModelError(f"draft {type(model).__name__} is on {model.device}, the target on {target.device}")
    invariant = None if target.batch_invariant else False
    draft = wrap_model(model, fused=target.fuse, compile=target.compile, batch_invariant=invariant)
    return check_size(draft, target)


def check_size(draft: Target, target: TargetFacts) -> Target:
    """Raises `ModelError` for a draft with fewer ids than the target: all that can be compared without two
    tokenizers.
    """
    if draft.vocab_size < target.vocab_size:
        raise ModelError(
            f"draft {draft.name}: its vocabulary has {draft.vocab_size} ids, the target's {target.vocab_size}"
        )
    return draft


def check_same_ids(path: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raises `ModelError` where an id means another token; a padded vocabulary is no difference."""
    mine, theirs = draft.inner.get_vocab(), target.inner.get_vocab()
    wrong = next((token for token, i in theirs.items() if mine.get(token, i) != i), None)
    missing = theirs.keys() - mine.keys()
    if wrong is not None:
        raise ModelError(
            f"{path}: draft and target disagree on {wrong!r}: id {mine[wrong]} and {theirs[wrong]}"
        )
    if missing:
        raise ModelError(
            f"{path}: the draft lacks {len(missing)} of the target's tokens, e.g. {sorted(missing)[0]!r}"
        )
