"""A small model of the same vocabulary guesses token by token (Leviathan 2023; Chen 2023).

Its keys and values lie in layers of its own in the target's pages, so prefix hits, rollback and preemption need no code here:
`seq.drafted` says how far they reach, and whatever is missing is computed in one call when a draft is next wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from speculon.batch import Batch
from speculon.config import ModelObject, SpeculationConfig
from speculon.core import Draft, Needs, Sequence, Verdict
from speculon.errors import ConfigError, ModelError
from speculon.grammar import Scouts
from speculon.models.forecast import forecast
from speculon.models.load import load_target, load_tokenizer, wrap_model
from speculon.models.target import Target
from speculon.proposers.base import TargetFacts
from speculon.sampling import NEVER, Row, pick, weigh
from speculon.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import DraftLease

NAME = "draft_model"

Piece = tuple[Sequence, int, list[int]]  # a sequence, a position in it, and the ids from there on


class DraftModel:
    """One forward per draft position for all sequences of the round."""

    def __init__(self, load: Callable[[], Target], forecast: Needs, target: TargetFacts, min_confidence: float = 0.0):
        self.needs, self._load = forecast, load
        self.vocab_size, self.min_confidence = target.vocab_size, min_confidence
        self.max_rows = target.rows or sys.maxsize  # of a call: what was promised as scratch
        self.model: Target

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> DraftModel:
        source = config.drafts.get(NAME)
        if source is None:
            raise ConfigError(f"{NAME} needs draft = a checkpoint")
        if isinstance(source, str):
            dtype, device = getattr(torch, target.dtype), torch.device(target.device)
            needs = forecast(source, dtype, device, target.rows, target.scored, target.fuse, target.compile)
            return cls(partial(load_draft, source, target), needs, target, config.draft_min_confidence)
        model = wrap_draft(source, target)
        needs = replace(model.needs(target.rows, target.scored), bytes_fixed=0)  # in memory already: nothing to load or promise
        drafter = cls(lambda: model, needs, target, config.draft_min_confidence)
        drafter.model = model
        return drafter

    def load(self) -> None:
        self.model = self._load()
        self.needs = replace(
            self.needs, layers=self.model.layers, max_context=self.model.max_context, bytes_fixed=self.model.num_bytes
        )

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt is computed with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        drafts: list[list[int]] = [[] for _ in seqs]
        sure: list[list[float]] = [[] for _ in seqs]
        probs: list[list[Tensor]] = [[] for _ in seqs]
        scouts = Scouts(seqs)
        active = list(range(len(seqs)))
        self._catch_up(seqs, lease)
        while active:
            logits = self._next([(seqs[i], drafts[i]) for i in active], lease)  # [len(active), V]
            bans = scouts.forbid(active, logits.device)
            rows = [Row(seqs[i], seqs[i].rules, tuple(drafts[i]), forbidden=bans.get(i)) for i in active]
            weights = weigh(logits, rows)
            tokens = pick(weights, rows)  # with the target's noise, so that the two agree often
            chosen = torch.tensor(tokens, device=logits.device)[:, None]
            confidence = (logits.gather(-1, chosen)[:, 0] - logits.logsumexp(-1)).exp().tolist()
            for row, (i, token, share) in enumerate(zip(active, tokens, confidence, strict=True)):
                drafts[i].append(token)
                sure[i].append(share)
                if seqs[i].rejection:
                    probs[i].append(weights[row].softmax(-1))
            active = [
                i
                for i in active
                if scouts.go_on(i, drafts[i][-1]) and len(drafts[i]) < budgets[i] and sure[i][-1] >= self.min_confidence
            ]
        return [
            Draft(tuple(d), (NAME,) * len(d), torch.stack(q) if q else None, tuple(c))
            for d, q, c in zip(drafts, probs, sure, strict=True)
        ]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: Tensor | None) -> None:
        """Nothing to learn: the commit has set `seq.drafted` back to what was accepted."""

    def release(self, seq: Sequence) -> None:
        """Its pages go with the target's."""

    def _catch_up(self, seqs: list[Sequence], lease: DraftLease) -> None:
        """Computes what is missing, in calls of at most `max_rows` rows, until the next call can take the rest."""
        while sum(len(seq.tokens) - seq.drafted.get(NAME, 0) for seq in seqs) > self.max_rows:
            room, pieces = self.max_rows, []
            for seq in seqs:
                start = seq.drafted.get(NAME, 0)
                missing = seq.tokens[start:-1][:room]  # the last token is for the call that is scored
                pieces += [(seq, start, missing)] * bool(missing)
                room -= len(missing)
            if not pieces:
                return
            self._forward(pieces, [], lease)

    def _next(self, texts: list[tuple[Sequence, list[int]]], lease: DraftLease) -> Tensor:
        """Logits [B, V] after each text, computing what its layers have not seen."""
        pieces: list[Piece] = []
        last, row = [], -1
        for seq, draft in texts:
            start, written = seq.drafted.get(NAME, 0), len(seq.tokens)
            ids = [*seq.tokens[start:], *draft] if start < written else draft[start - written :]
            row += len(ids)
            last.append(row)
            pieces.append((seq, start, ids))
        logits = self._forward(pieces, last, lease)[:, : self.vocab_size]
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=NEVER)  # one of the two may be padded

    def _forward(self, pieces: list[Piece], scored: list[int], lease: DraftLease) -> Tensor:
        """Runs the pieces as one flat row; logits [R, V] of the `scored` rows."""
        ids = [token for _, _, piece in pieces for token in piece]
        positions = [start + i for _, start, piece in pieces for i in range(len(piece))]
        spans = [(seq, start, start + len(piece)) for seq, start, piece in pieces]
        flat = (torch.tensor(numbers, dtype=torch.long, device=self.model.device) for numbers in (ids, positions, scored))
        input_ids, position_ids, score_rows = flat
        batch = Batch([], input_ids[None], position_ids[None], score_rows)
        logits = self.model.forward(batch, lease.view(spans)).logits
        for seq, _, end in spans:
            seq.drafted[NAME] = end
        return logits


def load_draft(path: str, target: TargetFacts) -> Target:
    """The checkpoint as a checked Target on the target's device, in its dtype."""
    if target.tokenizer is not None:
        check_same_ids(path, Tokenizer(load_tokenizer(path)), target.tokenizer)
    draft = load_target(path, dtype=target.dtype, device=target.device, fused=target.fuse, compile=target.compile)
    return draft if target.tokenizer is not None else check_size(draft, target)


def wrap_draft(model: ModelObject, target: TargetFacts) -> Target:
    """A checked Target over a model in memory, which stays as and where it is. Does not modify `model`."""
    if str(model.device) != target.device:
        raise ModelError(f"draft {type(model).__name__} is on {model.device}, the target on {target.device}")
    return check_size(wrap_model(model, fused=target.fuse, compile=target.compile), target)


def check_size(draft: Target, target: TargetFacts) -> Target:
    """Raises `ModelError` for a draft with fewer ids than the target: all that can be compared without two tokenizers."""
    if draft.vocab_size < target.vocab_size:
        raise ModelError(f"draft {draft.name}: its vocabulary has {draft.vocab_size} ids, the target's {target.vocab_size}")
    return draft


def check_same_ids(path: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raises `ModelError` where the same id stands for another token; a padded vocabulary is no difference."""
    mine, theirs = draft.inner.get_vocab(), target.inner.get_vocab()
    wrong = next((token for token, i in theirs.items() if mine.get(token, i) != i), None)
    missing = theirs.keys() - mine.keys()
    if wrong is not None:
        raise ModelError(f"{path}: draft and target disagree on {wrong!r}: id {mine[wrong]} and {theirs[wrong]}")
    if missing:
        raise ModelError(f"{path}: the draft lacks {len(missing)} of the target's tokens, among them {sorted(missing)[0]!r}")
