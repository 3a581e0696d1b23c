"""What a round costs, how many tokens it has to yield to pay, and why a mode did not help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speculon.core.telemetry import RequestStats, SpeculationStats
from speculon.core.types import Reason, SpanOutcome
from speculon.measure.bench.measure import Measurement, Step

SPEEDS = (1.0, 1.5, 2.0)  # times plain decoding
HALVINGS = 40  # of [0, 1]: beyond what is shown
CORRECTED = (SpanOutcome.TAIL, SpanOutcome.EARLY, SpanOutcome.EARLY_STOP)
PAYS, EVEN, UNCLEAR = "pays", "even", "unclear"
NO_PROPOSALS, GATED = "no proposals", "gated"
LOW_ACCEPTANCE, DRAFT_COST, VERIFY_COST = "low acceptance", "draft cost", "verify cost"
# by a policy
GATES = {Reason.COLD, Reason.COOLDOWN, Reason.LOW_ACCEPTANCE, Reason.COST, Reason.LOAD, Reason.SOLO}

Profile = Mapping[str, float]  # part of a decoding call -> its mean ms for each text


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Decoding calls that verified drafts; in the first of a text a draft model reads the prompt."""

    calls: int
    step_ms: float  # mean
    draft: float  # share of the step, as the next two
    target: float
    rest: float
    draft_ms_per_position: float
    tokens_per_target_call: float  # per text, as everywhere


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a round has to yield for decoding to be `speed` times as fast as plain."""

    speed: float
    tokens_per_target_call: float
    acceptance: float | None  # the same at every position; None: impossible, even if every draft is accepted


def rounds_of(measurements: list[Measurement]) -> RoundCosts | None:
    """None when no decoding call verified a draft."""
    steps = [step for step in decoding(measurements) if step.drafted]
    if not steps:
        return None
    parts = [(step.step_ms, step.draft_ms, step.forward_ms) for step in steps]
    whole, draft, target = map(sum, zip(*parts, strict=True))
    return RoundCosts(
        calls=len(steps),
        step_ms=whole / len(steps),
        draft=draft / whole,
        target=target / whole,
        rest=(whole - draft - target) / whole,
        draft_ms_per_position=draft / sum(step.drafted for step in steps),
        tokens_per_target_call=sum(step.generated for step in steps) / sum(step.spans for step in steps),
    )


def needs(rounds: RoundCosts, plain_ms: float, k: int) -> list[Requirement]:
    """Tokens per target call, and acceptance, for each of `SPEEDS`, from costs at batch size 1.

    A plain step costs c_1 = `plain_ms` and yields one token; a round that drafts costs c_K = `rounds.step_ms`
    and yields tau. Decoding is s times as fast as plain where tau / c_K = s / c_1, so tau = s * c_K / c_1.
    When each of K drafts is accepted with probability a, given that those before it are, tau = sum_{i=0..K}
    a^i (Leviathan 2023, eq. 1), which is solved for a.
    """
    needed = [(speed, speed * rounds.step_ms / plain_ms) for speed in SPEEDS]
    return [Requirement(speed, tokens, equal_acceptance(tokens, k)) for speed, tokens in needed]


def equal_acceptance(tokens_per_call: float, k: int) -> float | None:
    """The a of sum_{i=0..K} a^i = tokens per call, by bisection; None beyond K + 1, 0 up to one token."""
    if tokens_per_call > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_low = sum(middle**i for i in range(k + 1)) < tokens_per_call
        low, high = (middle, high) if too_low else (low, middle)
    return high


def reached(done: SpeculationStats) -> float:
    """Accepted drafts among those whose predecessors were accepted: with a correction that is one more."""
    missed = sum(done.span_outcomes.get(kind, 0) for kind in CORRECTED)
    return done.accepted / max(1, done.accepted + missed)


def mean_step_ms(measurements: list[Measurement]) -> float | None:
    """Of the decoding calls; None when there were none."""
    steps = decoding(measurements)
    return sum(step.step_ms for step in steps) / len(steps) if steps else None


def decoding(measurements: list[Measurement]) -> list[Step]:
    return [step for measurement in measurements for step in measurement.steps if step.decoding]


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
