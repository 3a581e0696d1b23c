"""Drafting token by token with a model, whatever it reads: the loop over draft positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from speculon.core.types import Draft, Stop
from speculon.decoding.sampling import NEVER, ScoredRow, pick, round_stream, weigh
from speculon.decoding.sequence import Sequence
from speculon.decoding.text.grammar import LookAheadMatchers

if TYPE_CHECKING:
    from torch import Tensor

# (which sequences, all drafts so far) -> logits [len(which), V]
DraftForward = Callable[[list[int], list[list[int]]], "Tensor"]


def draft_chain(
    method: str,
    seqs: list[Sequence],
    ks: list[int],
    forward: DraftForward,
    min_confidence: float,
    chances: Callable[[], list[float]] | None = None,
) -> list[Draft]:
    """A draft per sequence, one position after the other for all of them; it ends where the drafter is less
    sure than this.

    It is as sure as its own probability of the token; or as `chances` says, of the latest call of `forward`.
    """
    drafts: list[list[int]] = [[] for _ in seqs]
    sure: list[list[float]] = [[] for _ in seqs]
    probs: list[list[Tensor]] = [[] for _ in seqs]
    stops: list[Stop | None] = [None] * len(seqs)
    ahead = LookAheadMatchers(seq.grammar for seq in seqs)
    active = list(range(len(seqs)))
    while active:
        logits = forward(active, drafts)  # [len(active), V]
        bans = ahead.forbid(active, logits.device)
        rows = [
            ScoredRow(seqs[i], seqs[i].request.rules, tuple(drafts[i]), round_stream(seqs[i]), bans.get(i))
            for i in active
        ]
        weights = weigh(logits, rows)
        empty = without_choice(weights) if bans else ()
        tokens = pick(weights, rows)  # with the target's noise where rows are matched: the two agree often
        confidence = chances() if chances is not None else shares(logits, tokens)
        for row, (i, token, share) in enumerate(zip(active, tokens, confidence, strict=True)):
            if row in empty:
                stops[i] = Stop.GRAMMAR
                continue
            drafts[i].append(token)
            sure[i].append(share)
            if seqs[i].request.needs_q:
                probs[i].append(weights[row].softmax(-1))
            stops[i] = why_stop(len(drafts[i]) == ks[i], ahead.go_on(i, token), share >= min_confidence)
        active = [i for i in active if stops[i] is None]
    return [
        Draft(tuple(d), (method,) * len(d), torch.stack(q) if q else None, tuple(c), stop=stop)
        for d, q, c, stop in zip(drafts, probs, sure, stops, strict=True)
    ]


def without_choice(weights: Tensor) -> list[int]:
    """Rows of [B, V] where no token is left: the grammar allows none that the drafter has. They have no q."""
    return (~(weights > NEVER).any(-1)).nonzero().flatten().tolist()


def draft_at_once(
    method: str,
    seqs: list[Sequence],
    ks: list[int],
    logits: Tensor,  # [sum of ks, V]
    min_confidence: float,
    chances: list[float] | None = None,
) -> list[Draft]:
    """The same where no draft depends on those before it: all positions of all sequences in one call.

    For sequences that are `independent`. `chances` replace the drafter's own probabilities.
    """
    # the tokens before a row count, and no more than that
    rows = [
        ScoredRow(seq, seq.request.rules, (0,) * i, round_stream(seq))
        for seq, k in zip(seqs, ks, strict=True)
        for i in range(k)
    ]
    weights = weigh(logits, rows)
    tokens = pick(weights, rows)
    sure = chances if chances is not None else shares(logits, tokens)
    drafts, start = [], 0
    for seq, budget in zip(seqs, ks, strict=True):
        unsure = (i + 1 for i in range(budget - 1) if sure[start + i] < min_confidence)
        end = start + next(unsure, budget)
        stop = why_stop(end - start == budget, True, False)
        q = weights[start:end].softmax(-1) if seq.request.needs_q else None
        names = (method,) * (end - start)
        drafts.append(Draft(tuple(tokens[start:end]), names, q, tuple(sure[start:end]), stop=stop))
        start += budget
    return drafts


def independent(seq: Sequence) -> bool:
    """Whether the sequence's own rules read no draft before a row: neither a grammar nor penalties."""
    return seq.grammar is None and not seq.request.rules.adjusts


def shares(logits: Tensor, tokens: list[int]) -> list[float]:
    """The probability of each row's token, from logits [B, V]."""
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    return (logits.gather(-1, chosen)[:, 0] - logits.logsumexp(-1)).exp().tolist()


def why_stop(full: bool, allowed: bool, sure: bool) -> Stop | None:
    """Why a chain ends at its last token; None while it goes on."""
    if full:
        return Stop.LIMIT
    if not allowed:
        return Stop.GRAMMAR
    return None if sure else Stop.CONFIDENCE
