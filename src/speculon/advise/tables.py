"""The tables of an advice. Every speed in them is marked: measured, or predicted."""

from __future__ import annotations

from rich.table import Table

from speculon.advise.advice import Advice
from speculon.advise.maths import Cascade, SpeedEstimate, best, break_even, by_position, dearest_draft
from speculon.advise.measure import ks_to_time
from speculon.advise.trial import Candidate
from speculon.bench.render import markdown_table, number, terminal_table

SPEED = ("measured", "predicted", "90 %", "tok/call")
THRESHOLDS = ("accepted", "needed", "cost", "max")
COLUMNS = ("method", "K", *SPEED, *THRESHOLDS)
SPEED_LEGEND = (
    "measured, predicted: decoding speed over plain; 90 %: interval of the prediction, from resampled texts "
    "and "
    "times; tok/call: tokens per target call"
)
THRESHOLD_LEGEND = (
    "accepted: share of judged drafts; needed: the acceptance rate from which on some K pays, by the cost "
    "model; "
    "cost: of a draft, as a share of a plain step; max: the cost that would still pay at that acceptance rate"
)
LEGEND = f"{SPEED_LEGEND}; {THRESHOLD_LEGEND}"
ACCEPTANCE_LEGEND = (
    "acceptance rate at each position of a draft, when those before it were accepted, at the largest K"
)
COSTS_LEGEND = (
    "ms by the fitted cost model: of a step of the target with K drafts of each sequence, and of a proposal"
)

Row = tuple[str, ...]


# rows


def rows(advice: Advice, batch: int) -> list[Row]:
    """In the order of `COLUMNS`: each cascade at the K measured fastest, else at its best K by prediction."""
    found = [row(advice, shown(advice, cascade, batch)) for cascade in advice.cascades]
    trial, policy = advice.trial_at(batch), advice.by_policy
    result = trial.of(policy) if trial else None
    if result:
        figures = (f"{result.ratio:.2f}x", "-", "-", f"{result.tokens_per_call:.2f}")
        found.append((*label_of(policy), *figures, *("-",) * len(THRESHOLDS)))
    return found


def label_of(one: Candidate) -> tuple[str, str]:
    """The first two columns."""
    return (f"{one.cascade.name}+{one.policy}", "-") if one.k is None else (one.cascade.name, str(one.k))


def shown(advice: Advice, cascade: Cascade, batch: int) -> SpeedEstimate:
    """The estimate for the K that was measured fastest, else the best one."""
    trial = advice.trial_at(batch)
    results = trial.results if trial else ()
    measured = [one for one in results if one.candidate.cascade == cascade and one.candidate.k]
    k = max(measured, key=lambda result: result.ratio).candidate.k if measured else None
    return best(advice.at(batch, cascade.name, k))


def row(advice: Advice, one: SpeedEstimate) -> Row:
    candidate = Candidate(one.cascade, one.k)
    found = advice.speedup(candidate, one.batch)
    return (
        *label_of(candidate),
        f"{found.ratio:.2f}x" if found and found.measured else "-",
        f"{one.ratio:.2f}x",
        f"{one.low:.2f}-{one.high:.2f}",
        f"{one.speed.tokens_per_call:.2f}",
        *thresholds_of(advice, one),
    )


def thresholds_of(advice: Advice, one: SpeedEstimate) -> Row:
    """In the order of `THRESHOLDS`; what is needed is known of single methods alone."""
    accepted, cost = number(one.acceptance.rate(), ".0%"), f"{one.draft_cost:.2f}"
    if len(one.cascade.methods) > 1:
        return accepted, "-", cost, "-"
    needed = break_even(advice.round_costs(one.cascade, one.batch))
    dearest = max(0.0, dearest_draft(advice.at(one.batch, one.cascade.name)))
    return accepted, f"{needed[0]:.0%}" if needed else "never", cost, f"{dearest:.2f}"


# for the terminal


def speed_table(advice: Advice) -> Table:
    """What is faster than plain decoding, at each concurrency."""
    chosen, body, styles = label_of(advice.chosen), list[Row](), list[str]()
    for batch in advice.plan.batches:
        for each in rows(advice, batch):
            body.append((each[0], str(batch), *each[1 : 2 + len(SPEED)]))
            styles.append("green" if advice.helps and each[:2] == chosen else "")
    return terminal_table("speed over plain decoding", ("method", "concurrency", "K", *SPEED), body, styles)


def threshold_table(advice: Advice) -> Table:
    """What drafts have to be for a method to pay, at the concurrency of the settings."""
    batch = advice.plan.at_once
    found = [(each[:2], each[-len(THRESHOLDS) :]) for each in rows(advice, batch)]
    body = [(*label, *figures) for label, figures in found if set(figures) != {"-"}]
    return terminal_table(f"drafts at concurrency {batch}", ("method", "K", *THRESHOLDS), body)


# for the file


def markdown(advice: Advice) -> str:
    """Every concurrency in one table."""
    body = [(str(batch), *cells) for batch in advice.plan.batches for cells in rows(advice, batch)]
    return markdown_table(("concurrency", *COLUMNS), body)


def acceptance_markdown(advice: Advice) -> str:
    """Position by position."""
    names = [cascade.name for cascade in advice.cascades if len(cascade.methods) == 1]
    estimates = [advice.at(advice.plan.at_once, name, advice.plan.k)[0] for name in names]
    found = [by_position(one.acceptance) for one in estimates]
    most = max(map(len, found), default=0)
    body = [
        (name, *(f"{rate:.0%}" for rate in rates), *["-"] * (most - len(rates)))
        for name, rates in zip(names, found, strict=True)
    ]
    return markdown_table(("position", *(str(i + 1) for i in range(most))), body)


def costs_markdown(advice: Advice) -> str:
    """A row for the target and for each method at each concurrency."""
    costs, batches, ks = advice.fits[0].costs, advice.plan.batches, ks_to_time(advice.plan.k)
    methods = dict.fromkeys(method for cascade in advice.cascades for method in cascade.methods)
    body = [
        ("target", str(b), f"{costs.step(b):.2f}", *(f"{costs.step(b, b, b * k):.2f}" for k in ks))
        for b in batches
    ]
    body += [
        (name, str(b), "-", *(f"{costs.proposal(name, b, k):.2f}" for k in ks))
        for name in methods
        for b in batches
    ]
    return markdown_table(("ms", "concurrency", *(f"K = {k}" for k in (0, *ks))), body)
