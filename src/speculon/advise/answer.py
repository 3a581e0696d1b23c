"""An advice in sentences. Every speed in it is marked: measured, or predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from speculon.advise.advice import Advice, Speedup
from speculon.advise.maths import Cascade, SpeedEstimate, best, break_even, dearest_draft
from speculon.advise.plan import LOOKUP_METHODS
from speculon.advise.trial import Candidate, Result, Trial

NOISY = 0.05  # guess: of plain decoding against itself
STRONG = 0.15  # guess: share of the measured speed that a prediction may be off by, outside both intervals
MISFIT = 0.2  # guess: median error of the cost model that is worth a sentence
FEW = 4  # texts


def answer(advice: Advice) -> list[str]:
    """The whole answer, a sentence or two a line, the most important first."""
    lines = [headline(advice), *(measured(advice, trial) for trial in advice.trials)]
    lines += [*other_concurrency(advice), round_line(advice), *thresholds(advice), *by_group(advice)]
    return [*lines, *warnings(advice)]


def headline(advice: Advice) -> str:
    chosen, batch = advice.chosen, advice.plan.at_once
    found, estimate = advice.speedup(chosen, batch), advice.predicted(chosen, batch)
    assert found is not None, "what is chosen was measured, or predicted"
    predicted = f"predicted {times(estimate)}" if estimate else "not predicted, since its policy sets K"
    basis = predicted if found.measured else "not measured live"
    over = f"over plain decoding at concurrency {batch}; {basis}."
    if advice.helps:
        return f"Yes: use {chosen.label}. {speed(found).capitalize()} {over}"
    rank = "the best prediction"
    if found.measured:
        rank = f"the fastest of {len(advice.trials[0].results)} settings measured"
    noise = " The interval includes 1: more prompts may settle it." if found.ratio > 1 else ""
    return f"No: leave speculation off. {chosen.label} is {rank}: {speed(found)} {over}{noise}"


def speed(found: Speedup) -> str:
    return f"{'measured' if found.measured else 'predicted'} {times(found)}"


# measured


def measured(advice: Advice, trial: Trial) -> str:
    """What was measured at one concurrency, in descending order."""
    ranked = sorted(trial.results, key=lambda result: -result.ratio)
    parts = []
    for result in ranked:
        estimate = advice.predicted(result.candidate, trial.concurrency)
        parts.append(f"{result.candidate.label}: {times(result)}{beside(result, estimate)}")
    prompts = "held-out prompts" if trial.held_out else "prompts, the same as for the prediction"
    return (
        f"Measured at concurrency {trial.concurrency} on {trial.texts} {prompts}: {'; '.join(parts)}; "
        f"plain decoding against itself {trial.again:.2f}x."
    )


def beside(result: Result, estimate: SpeedEstimate | None) -> str:
    """The prediction, also at the tokens per call of these prompts: the rest is an error of the costs."""
    if estimate is None:
        return ""
    share = result.tokens_per_call / estimate.speed.tokens_per_call
    corrected = f" ({estimate.ratio * share:.2f}x at the tokens per call of these prompts)"
    return f", predicted {estimate.ratio:.2f}x{corrected if abs(share - 1) > NOISY else ''}"


def agrees(result: Result, estimate: SpeedEstimate | None) -> bool:
    """Whether prediction and measurement could be the same number, or are close."""
    if estimate is None or (result.low <= estimate.high and estimate.low <= result.high):
        return True
    return abs(estimate.ratio / result.ratio - 1) <= STRONG


def other_concurrency(advice: Advice) -> list[str]:
    """The chosen setting at each other concurrency, and what is predicted to be faster there."""
    plan = advice.plan
    parts = [at_concurrency(advice, batch) for batch in plan.batches if batch != plan.at_once]
    if not parts:
        return []
    paying = [batch for batch in plan.batches if plan.at_once <= batch <= (advice.up_to or 0)]
    basis = ""
    if not all(map(advice.trial_at, paying)):
        basis = ", in part by prediction" if advice.trials else ", by prediction"
    up_to = f" It pays up to concurrency {advice.up_to}{basis}." if advice.helps else ""
    return [f"{advice.chosen.label} at other concurrency: {'; '.join(parts)}.{up_to}"]


def at_concurrency(advice: Advice, batch: int) -> str:
    found, trial = advice.speedup(advice.chosen, batch), advice.trial_at(batch)
    line = f"{batch}: neither measured nor predicted"
    if found:
        verdict = "pays" if found.pays else "does not pay" if found.high < 1 else "may not pay"
        line = f"{batch}: {speed(found)}, {verdict}"
    if trial and trial.fastest.candidate == advice.chosen:
        return line
    if trial:
        return f"{line} ({trial.fastest.candidate.label}: measured {times(trial.fastest)})"
    other = best(advice.at(batch))
    better = other.low > 1 and (found is None or other.ratio > found.ratio)
    return f"{line} ({setting(other)}: predicted {times(other)})" if better else line


# predicted


def round_line(advice: Advice) -> str:
    """What a round of the chosen setting yields and takes."""
    one, now = advice.forecast, advice.forecast.speed
    edge = ""
    if one.k == advice.plan.k:
        edge = f" K = {one.k} is the largest considered: try --num-speculative-tokens {2 * one.k}."
    return (
        f"By the cost model, a target call with {setting(one)} yields {now.tokens_per_call:.2f} tokens and "
        "takes "
        f"{now.round_ms / now.plain_ms:.2f} plain steps: {now.verify_ms:.1f} ms to verify, "
        f"{now.draft_ms + now.read_ms:.1f} ms to draft; a plain step takes {now.plain_ms:.1f} ms.{edge}"
    )


def thresholds(advice: Advice) -> list[str]:
    """From which acceptance rate on each method is predicted to pay, and up to which cost of a draft."""
    return [threshold(advice, cascade) for cascade in advice.cascades if len(cascade.methods) == 1]


def threshold(advice: Advice, cascade: Cascade) -> str:
    batch, name = advice.plan.at_once, cascade.name
    estimates = advice.at(batch, name)
    one, needed = best(estimates), break_even(advice.round_costs(cascade, batch))
    rate = one.acceptance.rate()
    if rate is None:
        return f"`{name}` never had a draft in these texts."
    if needed is None:
        return (
            f"By the cost model `{name}` could not pay even if every draft were accepted (found: "
            f"{rate:.0%}): "
            f"a draft costs {one.draft_cost:.2f} of a plain step, and verification has its cost, too. "
            "A much smaller drafter is needed."
        )
    minimum, k = needed
    from_rate = (
        f"from an acceptance rate of {minimum:.0%} on" if minimum >= 0.005 else "at any acceptance rate"
    )
    line = f"By the cost model `{name}` pays {from_rate} (K = {k}); found: {rate:.0%}."
    if name in LOOKUP_METHODS:
        return line
    dearest = dearest_draft(estimates)
    if dearest <= 0:
        return (
            f"{line} At that rate not even a free draft pays: verification costs more than these drafts gain."
        )
    return (
        f"{line} At that rate a draft may cost {dearest:.2f} of a plain step; it costs {one.draft_cost:.2f}."
    )


def by_group(advice: Advice) -> list[str]:
    """The forecast by where the prompts come from."""
    groups = advice.groups
    if len(groups) < 2:
        return []
    each = listed(f"{name} {times(one)}" for name, one in groups.items())
    losing = [name for name, one in groups.items() if one.high < 1]
    turn_off = f" Turn it off in requests of {listed(losing)}." if losing and advice.helps else ""
    return [f"Predicted by prompt group, with {setting(advice.forecast)}: {each}.{turn_off}"]


# warnings


def warnings(advice: Advice) -> list[str]:
    """Why the figures may be wrong, and what they do not cover."""
    return [
        *(line for trial in advice.trials for line in trial_warnings(advice, trial)),
        *loop_warnings(advice),
        *text_warnings(advice),
        *(f"`{method}` was not considered: {reason}." for method, reason in advice.lacking.items()),
    ]


def trial_warnings(advice: Advice, trial: Trial) -> Iterator[str]:
    wrong = [
        result.candidate.label
        for result in sorted(trial.results, key=lambda result: -result.ratio)
        if not agrees(result, advice.predicted(result.candidate, trial.concurrency))
    ]
    at = f"at concurrency {trial.concurrency}"
    if wrong:
        yield f"Prediction and measurement disagree {at} for {listed(wrong)}: the measurement counts."
    if abs(trial.again - 1) > NOISY:
        yield f"The machine was not quiet {at}: measure again."


def loop_warnings(advice: Advice) -> Iterator[str]:
    looping = [one for one in advice.continuations if one.loops]
    alone = advice.among(looping)
    if alone is None:
        return
    texts = f"{len(looping)} of {len(advice.continuations)} texts"
    many = f"{texts} end repeating themselves, which is easily drafted"
    if advice.rests_on_loops:
        yield f"{many}, and too few do not: these figures are too high."
    else:
        yield f"{many}; they are left out. Over them alone {times(alone)} is predicted."


def text_warnings(advice: Advice) -> Iterator[str]:
    texts = len(advice.continuations)
    if texts < FEW:
        yield f"{texts} text{'s' * (texts > 1)} measured: the interval does not cover other texts."
    if (misfit := advice.fits[0].misfit(advice.timed)) > MISFIT:
        yield f"The cost model is off by {misfit:.0%} for half of the steps: predictions are rough."


def setting(one: SpeedEstimate) -> str:
    return Candidate(one.cascade, one.k).label


def times(one: Any) -> str:
    return f"{one.ratio:.2f}x ({one.low:.2f} to {one.high:.2f})"


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
