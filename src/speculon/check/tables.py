"""The tables of a check: one per question, for the terminal; all figures for Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from speculon.bench.render import markdown_table, terminal_table
from speculon.check.exact import ExactResult, Margin
from speculon.check.plan import OVERALL, Q
from speculon.check.run import Findings
from speculon.check.sampled import Comparison

VERDICTS = {
    "passed": (
        "passed: no text differs from the target's by more than plain decoding's own differences, "
        "and the planted errors were found"
    ),
    "failed": "failed: texts differ from the target's by more than rounding or chance",
    "inconclusive": (
        "inconclusive: nothing speaks against speculation, but this check would not have found an error"
    ),
}
EXACT = ("token for token", "texts", "tokens", "same", "near-ties", "failed", "worst regret")
EXACT_LEGEND = (
    "against plain decoding; where a text first differs, one fresh forward over the common part is the "
    "judge; "
    "regret: log p of the best token less that of the one taken, in nat (of the same seed: with its noise)"
)
SAMPLED = ("in distribution", "cells", "rejected", "least p", "p of all")
SAMPLED_LEGEND = (
    "against plain decoding, each arm with seeds of its own; cells: prompt x sampler x position, rejected by "
    f"Benjamini and Hochberg at q = {Q:g}; p of all: every cell together, rejected at {OVERALL:g}. What is "
    "rejected "
    "once is repeated with fresh seeds, and fails when it is rejected again"
)
WORK = ("speculation", "rounds", "accepted", "by q", "wrong", "planted")
WORK_LEGEND = (
    "rounds with drafts, and drafts accepted; by q: rounds judged with the drafter's q; wrong: "
    "rounds "
    "that ended at a wrong draft; planted: of these, rounds in which it was kept on purpose"
)

Row = tuple[str, ...]


def exact_rows(findings: Findings) -> Iterator[Row]:
    """In the order of `EXACT`."""
    for one in findings.exact:
        counts = (one.texts, one.tokens, one.identical, len(one.ties), len(one.failures))
        yield one.label, *map(str, counts), worst(one)


def worst(one: ExactResult) -> str:
    regrets = [found.regret for found in one.divergences if found.regret is not None]
    return f"{max(regrets):.1e}" if regrets else "-"


def comparisons(findings: Findings) -> Iterator[Comparison]:
    """Each, with its repetition below it."""
    return (one for first in findings.sampled for one in (first, first.again) if one)


def sampled_rows(findings: Findings) -> Iterator[Row]:
    """In the order of `SAMPLED`."""
    for one in comparisons(findings):
        counts = (str(one.cells), str(len(one.rejected)))
        yield one.label, *counts, f"{min(one.p):.1e}", f"{one.overall:.1e}"


def work_arms(findings: Findings) -> list[ExactResult | Comparison]:
    """Those that speculated."""
    arms: list[ExactResult | Comparison] = [*findings.exact, *comparisons(findings)]
    return [one for one in arms if one.role != "plain"]


def work_rows(findings: Findings) -> Iterator[Row]:
    """In the order of `WORK`."""
    for one in work_arms(findings):
        work = one.work
        counts = (work.rounds, work.accepted, work.by_q, work.wrong, work.planted)
        yield one.label, *map(str, counts)


def margin_line(margin: Margin) -> str:
    rule = "the limit" if margin.half else f"the limit in fp32 is {margin.limit:g}"
    rule = "the model is batch-invariant, so no text may differ" if margin.invariant else rule
    return (
        "plain decoding under other batch shapes: the gap of the two best tokens changes by up to "
        f"{margin.largest:.1e} nat over {len(margin.moved)} positions; {rule}"
    )


def terminal(findings: Findings) -> list[tuple[Table, str]]:
    """Tables with their legends; controls are dim."""
    exact = ["" if one.role == "speculation" else "dim" for one in findings.exact]
    sampled = ["" if one.role == "speculation" else "dim" for one in comparisons(findings)]
    work = ["" if one.role == "speculation" else "dim" for one in work_arms(findings)]
    return [
        (
            terminal_table("the same texts", EXACT, exact_rows(findings), exact),
            f"{EXACT_LEGEND}. {margin_line(findings.margin)}",
        ),
        (terminal_table("sampled texts", SAMPLED, sampled_rows(findings), sampled), SAMPLED_LEGEND),
        (terminal_table("what was speculated", WORK, work_rows(findings), work), WORK_LEGEND),
    ]


def markdown(findings: Findings) -> str:
    parts = [
        markdown_table(EXACT, exact_rows(findings)),
        f"{EXACT_LEGEND}. {margin_line(findings.margin)}.",
        markdown_table(SAMPLED, sampled_rows(findings)),
        f"{SAMPLED_LEGEND}.",
        markdown_table(WORK, work_rows(findings)),
        f"{WORK_LEGEND}.",
    ]
    return "\n\n".join(parts)
