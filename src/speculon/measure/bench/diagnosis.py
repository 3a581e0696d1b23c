"""Why a mode did not help."""

from __future__ import annotations

from collections.abc import Mapping

from speculon.core.telemetry import RequestStats
from speculon.core.types import Reason

PAYS, EVEN, UNCLEAR = "pays", "even", "unclear"
NO_PROPOSALS, GATED = "no proposals", "gated"
LOW_ACCEPTANCE, DRAFT_COST, VERIFY_COST = "low acceptance", "draft cost", "verify cost"
# by a policy
GATES = {Reason.COLD, Reason.COOLDOWN, Reason.LOW_ACCEPTANCE, Reason.COST, Reason.LOAD, Reason.SOLO}

Profile = Mapping[str, float]  # part of a decoding call -> its mean ms for each text


def gated(stats: RequestStats) -> bool:
    """Whether a policy decided against drafts."""
    return any(stats.reasons[gate] for gate in GATES)


def diagnose(
    stats: RequestStats, call: Profile, plain: Profile, ratio: float, noise: tuple[float, float]
) -> str:
    """`call`, `plain`: mean ms of a decoding call per text; `noise`: of plain decoding over itself.

    Where most calls had no draft and little was lost, it is the reason for that. Otherwise it is the largest
    of three losses, in ms per call: rejected drafts (each a plain call), drafting, verifying.
    """
    low, high = noise
    if ratio > high:
        return PAYS
    reasons = {reason: n for reason, n in stats.reasons.items() if reason != Reason.MAX_TOKENS}
    silent = sum(reasons.values()) >= stats.rounds
    if reasons and silent and (ratio >= low or not stats.rounds):
        first = max(reasons, key=reasons.__getitem__)
        return NO_PROPOSALS if first == Reason.NO_MATCH else f"{GATED}: {first}"
    losses = losses_of(stats, call, plain)
    tokens = 1 + stats.accepted / max(1, stats.target_calls)  # of a call
    if not losses or tokens * sum(plain.values()) > sum(call.values()):  # decoding itself was faster
        return EVEN if ratio >= low else UNCLEAR
    return max(losses, key=losses.__getitem__)


def losses_of(stats: RequestStats, call: Profile, plain: Profile) -> dict[str, float]:
    """ms per call that were spent in vain; empty where nothing was decoded, or drafted."""
    drafted = stats.drafted_at.total()
    if not (call and plain and drafted):
        return {}
    return {
        LOW_ACCEPTANCE: (drafted - stats.accepted) / stats.target_calls * sum(plain.values()),
        DRAFT_COST: call["propose"] - plain["propose"],
        VERIFY_COST: call["forward"] - plain["forward"],
    }
