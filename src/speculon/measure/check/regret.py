"""Where two outputs first differ, and whether the token there is a tie or a fault.

Batches of other shapes add up floats in another order, so an output may differ where two tokens are nearly
equal. The regret of a token, in nat, is the score of the best token less its own. The score of a greedy token
is its logit after penalties, bias and masks. That of a seeded one is less T log E, with temperature T and
the noise E of its position: the argmax of that is drawn (Gumbel 1954). A rounding may also take a token
across the edge of a filter, so only tokens that are clearly inside count as better.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import exp

import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import TokenLogprobs, shared_length
from speculon.decoding.sampling import NEVER, SMALLEST, ScoredRow, adjust, keep_likely, row_noise

TIE_NATS = 1e-4  # fp32, law 6 of docs/architecture.md
TOP = 8  # guess: the second best token of a batch is among so many of another
MAX_SLACK = 50.0  # nat; e^50 widens any filter to everything


def tie_limit(measured: float, *, coarse: bool, invariant: bool) -> float:
    """Below this regret, in nat, a difference is a tie.

    `measured` is how far plain decoding differs from itself, where the dtype is `coarse`: less than 32 bits.
    Zero where rows are `invariant`: there near-ties are decided alike too.
    """
    if invariant:
        return 0.0
    return max(measured, TIE_NATS) if coarse else TIE_NATS


def first_difference(a: Seq[int], b: Seq[int]) -> int | None:
    """The first index at which they differ, or one ends; None where they are equal."""
    shared = shared_length(a, b)
    return None if shared == len(a) == len(b) else shared


def at_or_none(tokens: Seq[int], at: int) -> int | None:
    return tokens[at] if at < len(tokens) else None


@torch.inference_mode()
def token_regret(logits: Tensor, row: ScoredRow, token: int, limit: float = 0.0) -> float:
    """The regret of `token` in nat, by the target's raw logits [V] of its row; infinite where p = 0.

    Logits may be wrong by `limit` nat. So tokens at the edge of a filter do not count as better, and `token`
    itself may be at the edge.
    """
    scores = adjust(logits[None], [row])[0] if row.rules.adjusts else logits  # [V]
    if row.rules.greedy:
        return float(scores.amax() - scores[token])
    params = row.rules.params
    temperature = max(params.temperature, SMALLEST)
    # relative to the best token first: a tiny temperature would overflow the quotient
    inside, among = filtered((scores - scores.amax()) / temperature, params, token, limit / temperature)
    if not among:
        return float("inf")
    noise = row_noise([row], len(scores), scores.device).view(-1)  # [V]
    noisy = scores.double() - temperature * noise.double().log()
    return max(0.0, float(noisy.masked_fill(~inside, NEVER).amax() - noisy[token]))


def filtered(logits: Tensor, params: SamplingParams, token: int, slack: float) -> tuple[Tensor, bool]:  # [V]
    """Which tokens survive the filters although any logit is wrong by `slack`, and whether `token` may."""
    inside = keep_likely(logits[None], [widened(params, -slack)])[0] > NEVER
    if 0 < params.top_k < len(logits):
        inside &= logits > logits.topk(params.top_k + 1).values[-1] + slack
    raised = logits.clone()
    raised[token] += slack
    return inside, bool(keep_likely(raised[None], [widened(params, slack)])[0, token] > NEVER)


def widened(params: SamplingParams, slack: float) -> SamplingParams:
    """The filters as they are when probabilities change by a factor of e^slack."""
    factor = exp(max(-MAX_SLACK, min(slack, MAX_SLACK)))
    top_p, min_p = min(1.0, params.top_p * factor), min(1.0, params.min_p / factor)
    return params.model_copy(update={"top_p": top_p if params.top_p < 1 else 1.0, "min_p": min_p})


def movement(decoded: TokenLogprobs, fresh: TokenLogprobs) -> float | None:
    """The change of the gap between the two best tokens of a position that is computed twice; None of one."""
    if len(decoded.top) < 2:
        return None
    (a, best), (b, second) = decoded.top[:2]
    known, beyond = dict(fresh.top), fresh.top[-1][1]
    return abs((best - second) - (known.get(a, beyond) - known.get(b, beyond)))
