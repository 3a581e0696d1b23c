"""An advice in words and in tables. Every speed in it is marked: measured, or predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from speculon.bench.advise import LOOKED_UP, Advice, Outcome
from speculon.bench.advise_check import Candidate, Check, Result
from speculon.bench.advise_maths import Estimate, Way, best, break_even, by_position, dearest_draft
from speculon.bench.advise_measure import grid as measured_ks
from speculon.bench.tables import grid, number

NOISY = 0.05  # of plain decoding against itself
STRONG = 0.15  # of the measured speed: a prediction this far off, beyond both intervals, was wrong
MISFIT = 0.2  # median error of the cost model that is worth a word
COLUMNS = ("method", "K", "measured", "predicted", "90 %", "tok/call", "accepted", "needed", "cost", "max")
LEGEND = (
    "measured, predicted: decoding speed over plain; 90 %: where the prediction lies if texts and times are drawn anew; "
    "tok/call: tokens per target call; accepted: of judged drafts; needed: acceptance rate from which on some K pays, by the "
    "cost model; cost: of a draft, as a share of a plain step; max: the cost that would still pay at that acceptance rate"
)
ACCEPTANCE_LEGEND = (
    "acceptance rate at each position of a draft, when those before it were accepted, at the largest K"
)
COSTS_LEGEND = (
    "ms by the fitted cost model: of a step of the target with K drafts of each sequence, and of a proposal"
)


def answer(advice: Advice) -> list[str]:
    """The whole answer, a sentence or two a line, the most important first."""
    lines = [
        headline(advice),
        *(checked(advice, check) for check in advice.checks),
        *other_concurrency(advice),
        why(advice),
    ]
    return [*lines, *thresholds(advice), *where(advice), *doubts(advice)]


def headline(advice: Advice) -> str:
    one, batch = advice.chosen, advice.wish.at_once
    found, estimate = advice.outcome(one, batch), advice.predicted(one, batch)
    assert found is not None, "what is chosen was measured, or predicted"
    predicted = f"predicted {times(estimate)}" if estimate else "not predicted, since its policy sets K"
    over = (
        f"over plain decoding at concurrency {batch}; {predicted if found.measured else 'not measured live'}."
    )
    if advice.helps:
        return f"Yes: use {one.label}. {speed(found).capitalize()} {over}"
    some = (
        f"the fastest of {len(advice.checks[0].results)} settings measured"
        if found.measured
        else "the best prediction"
    )
    noise = " The interval includes 1: more prompts may settle it." if found.ratio > 1 else ""
    return f"No: leave speculation off. {one.label} is {some}: {speed(found)} {over}{noise}"


def speed(found: Outcome) -> str:
    return f"{'measured' if found.measured else 'predicted'} {times(found)}"


def checked(advice: Advice, check: Check) -> str:
    """What was measured at one concurrency, in descending order, and which predictions were wrong."""
    ranked = sorted(check.results, key=lambda result: -result.ratio)
    estimates = [advice.predicted(result.candidate, check.concurrency) for result in ranked]
    told = [
        f"{one.candidate.label}: {times(one)}{beside(one, estimate)}"
        for one, estimate in zip(ranked, estimates, strict=True)
    ]
    kind = "held-out prompts" if check.held_out else "prompts, the same as for the prediction"
    said = f"Measured at concurrency {check.concurrency} on {check.texts} {kind}: {'; '.join(told)}; "
    said += f"plain decoding against itself {check.again:.2f}x."
    wrong = [
        one.candidate.label
        for one, estimate in zip(ranked, estimates, strict=True)
        if not agrees(one, estimate)
    ]
    if wrong:
        said += f" PREDICTION AND MEASUREMENT DISAGREE for {listed(wrong)}: the measurement counts."
    if abs(check.again - 1) > NOISY:
        said += " The machine was not quiet: measure again."
    return said


def beside(result: Result, estimate: Estimate | None) -> str:
    """The prediction, and what it would have been at the tokens per call of these prompts: the rest is the
    costs' error.
    """
    if estimate is None:
        return ""
    share = result.tokens_per_call / estimate.speed.tokens_per_call
    more = (
        f" ({estimate.ratio * share:.2f}x at the tokens per call of these prompts)"
        if abs(share - 1) > NOISY
        else ""
    )
    return f", predicted {estimate.ratio:.2f}x{more}"


def agrees(result: Result, estimate: Estimate | None) -> bool:
    """Whether prediction and measurement could be the same number, or are close."""
    if estimate is None or result.low <= estimate.high and estimate.low <= result.high:
        return True
    return abs(estimate.ratio / result.ratio - 1) <= STRONG


def why(advice: Advice) -> str:
    one, now = advice.forecast, advice.forecast.speed
    edge = f" K = {one.k} is the largest that was looked at: try --num-speculative-tokens {2 * one.k}." * (
        one.k == advice.wish.k
    )
    return (
        f"By the cost model, a target call with {setting(one)} yields {now.tokens_per_call:.2f} tokens and takes "
        f"{now.round_ms / now.plain_ms:.2f} plain steps: {now.verify_ms:.1f} ms to verify, {now.draft_ms + now.read_ms:.1f} ms "
        f"to draft; a plain step takes {now.plain_ms:.1f} ms.{edge}"
    )


def other_concurrency(advice: Advice) -> list[str]:
    """The chosen setting at each other concurrency, and what is predicted to be faster there."""
    parts = [at_concurrency(advice, batch) for batch in advice.wish.batches if batch != advice.wish.at_once]
    if not parts:
        return []
    paying = [batch for batch in advice.wish.batches if advice.wish.at_once <= batch <= (advice.up_to or 0)]
    some = (
        ""
        if all(map(advice.check_at, paying))
        else ", in part by prediction"
        if advice.checks
        else ", by prediction"
    )
    upto = f" It pays up to concurrency {advice.up_to}{some}." if advice.helps else ""
    return [f"{advice.chosen.label} at other concurrency: {'; '.join(parts)}.{upto}"]


def at_concurrency(advice: Advice, batch: int) -> str:
    found, live = advice.outcome(advice.chosen, batch), advice.check_at(batch)
    verdict = (
        "pays" if found and found.pays else "does not pay" if found and found.high < 1 else "may not pay"
    )
    said = f"{batch}: {f'{speed(found)}, {verdict}' if found else 'neither measured nor predicted'}"
    if live:
        fastest = live.fastest
        return (
            said
            if fastest.candidate == advice.chosen
            else f"{said} ({fastest.candidate.label}: measured {times(fastest)})"
        )
    other = best(advice.at(batch))
    better = other.low > 1 and (found is None or other.ratio > found.ratio)
    return f"{said} ({setting(other)}: predicted {times(other)})" if better else said


def thresholds(advice: Advice) -> list[str]:
    """From which acceptance rate on each method is predicted to pay, and up to which cost of a draft."""
    return [threshold(advice, way) for way in advice.ways if len(way.chain) == 1]


def threshold(advice: Advice, way: Way) -> str:
    batch, estimates = advice.wish.at_once, advice.at(advice.wish.at_once, way.name)
    one, needed, most = best(estimates), break_even(advice.round_costs(way, batch)), dearest_draft(estimates)
    rate = one.acceptance.rate()
    if rate is None:
        return f"`{way.name}` never had a draft in these texts."
    found = f"found: {rate:.0%}"
    if needed is None:
        return (
            f"By the cost model `{way.name}` could not pay even if every draft were accepted ({found}): a draft costs "
            f"{one.draft_cost:.2f} of a plain step, and verification has its cost, too. A much smaller drafter is needed."
        )
    rate_needed = (
        f"from an acceptance rate of {needed[0]:.0%} on" if needed[0] >= 0.005 else "at any acceptance rate"
    )
    begins = f"By the cost model `{way.name}` pays {rate_needed} (K = {needed[1]}); {found}"
    if way.name in LOOKED_UP:
        return f"{begins}."
    if most <= 0:
        return f"{begins}. At that rate not even a free draft pays: verification costs more than these drafts gain."
    return (
        f"{begins}. At that rate a draft may cost {most:.2f} of a plain step; it costs {one.draft_cost:.2f}."
    )


def where(advice: Advice) -> list[str]:
    """The forecast by where the prompts come from."""
    groups = advice.groups
    if len(groups) < 2:
        return []
    said = listed(f"{name} {times(one)}" for name, one in groups.items())
    losing = [name for name, one in groups.items() if one.high < 1]
    more = f" Turn it off in requests of {listed(losing)}." if losing and advice.helps else ""
    return [f"Predicted by prompt group, with {setting(advice.forecast)}: {said}.{more}"]


def doubts(advice: Advice) -> list[str]:
    """What the figures do not rest on, or should not."""
    said, loops = [], [one for one in advice.written if one.loops]
    if alone := advice.among(loops):
        left_out = f"; they are left out. Over them alone {times(alone)} is predicted."
        more = ", and too few do not: these figures are too high." if advice.rests_on_loops else left_out
        said.append(
            f"{len(loops)} of {len(advice.written)} texts end repeating themselves, which is easily drafted{more}"
        )
    if len(advice.written) < 4:
        said.append(
            f"{len(advice.written)} text{'s' * (len(advice.written) > 1)} measured: the interval knows little of others."
        )
    if (misfit := advice.worlds[0].misfit(advice.timed)) > MISFIT:
        said.append(f"The cost model is off by {misfit:.0%} for half of the steps: predictions are rough.")
    said += [f"`{method}` was not looked at: {reason}." for method, reason in advice.lacking.items()]
    return said


def setting(one: Estimate) -> str:
    return Candidate(one.way, one.k).label


def times(one: Any) -> str:
    return f"{one.ratio:.2f}x ({one.low:.2f} to {one.high:.2f})"


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


# tables


def rows(advice: Advice, batch: int) -> list[tuple[str, ...]]:
    """In the order of `COLUMNS`: each way at the K that was measured fastest, else at its best K by
    prediction.
    """
    found = [row(advice, shown(advice, way, batch)) for way in advice.ways]
    live, one = advice.check_at(batch), advice.by_policy
    result = live.of(one) if live else None
    if result:
        blank = ("-",) * (len(COLUMNS) - 6)
        found.append(
            (*label_of(one), f"{result.ratio:.2f}x", "-", "-", f"{result.tokens_per_call:.2f}", *blank)
        )
    return found


def label_of(one: Candidate) -> tuple[str, str]:
    """The first two columns."""
    return (f"{one.way.name}+{one.policy}", "-") if one.k is None else (one.way.name, str(one.k))


def shown(advice: Advice, way: Way, batch: int) -> Estimate:
    """The estimate for the K that was measured fastest, else the best one."""
    live = advice.check_at(batch)
    measured = (
        [result for result in live.results if result.candidate.way == way and result.candidate.k]
        if live
        else []
    )
    k = max(measured, key=lambda result: result.ratio).candidate.k if measured else None
    return best(advice.at(batch, way.name, k))


def row(advice: Advice, one: Estimate) -> tuple[str, ...]:
    single = len(one.way.chain) == 1
    needed = break_even(advice.round_costs(one.way, one.batch)) if single else None
    candidate = Candidate(one.way, one.k)
    found = advice.outcome(candidate, one.batch)
    return (
        *label_of(candidate),
        f"{found.ratio:.2f}x" if found and found.measured else "-",
        f"{one.ratio:.2f}x",
        f"{one.low:.2f}-{one.high:.2f}",
        f"{one.speed.tokens_per_call:.2f}",
        number(one.acceptance.rate(), ".0%"),
        f"{needed[0]:.0%}" if needed else "never" if single else "-",
        f"{one.draft_cost:.2f}",
        f"{max(0.0, dearest_draft(advice.at(one.batch, one.way.name))):.2f}" if single else "-",
    )


def markdown(advice: Advice) -> str:
    """Every concurrency in one table."""
    body = [(str(batch), *cells) for batch in advice.wish.batches for cells in rows(advice, batch)]
    return grid(("concurrency", *COLUMNS), body)


def acceptance_markdown(advice: Advice) -> str:
    """Position by position."""
    ways = [way for way in advice.ways if len(way.chain) == 1]
    deepest = advice.wish.k
    found = [
        (way.name, by_position(advice.at(advice.wish.at_once, way.name, deepest)[0].acceptance))
        for way in ways
    ]
    most = max((len(rates) for _, rates in found), default=0)
    body = [(name, *(f"{rate:.0%}" for rate in rates), *["-"] * (most - len(rates))) for name, rates in found]
    return grid(("position", *(str(i + 1) for i in range(most))), body)


def costs_markdown(advice: Advice) -> str:
    """A row for the target and for each method at each concurrency."""
    costs, batches, ks = advice.worlds[0].costs, advice.wish.batches, measured_ks(advice.wish.k)
    methods = dict.fromkeys(method for way in advice.ways for method in way.chain)
    body = [
        ("target", str(b), f"{costs.step(b):.2f}", *(f"{costs.step(b, b, b * k):.2f}" for k in ks))
        for b in batches
    ]
    body += [
        (name, str(b), "-", *(f"{costs.proposal(name, b, k):.2f}" for k in ks))
        for name in methods
        for b in batches
    ]
    return grid(("ms", "concurrency", *(f"K = {k}" for k in (0, *ks))), body)
