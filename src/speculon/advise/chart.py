"""The chart of an advice: speed by K, acceptance beside what is needed, and speed by concurrency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from speculon.advise.advice import Advice
from speculon.advise.maths import best
from speculon.advise.trial import Result
from speculon.bench.chart import COLOURS
from speculon.bench.rounds import equal_acceptance

SIZE = (10.5, 3.6)  # inches
DPI = 110


def draw(advice: Advice, title: str, path: Path) -> Path:
    figure = Figure(figsize=SIZE, layout="constrained")
    by_k, acceptance, by_concurrency = figure.subplots(1, 3)
    draw_speeds(by_k, advice)
    draw_acceptance(acceptance, advice)
    draw_concurrency(by_concurrency, advice)
    for panel in (by_k, acceptance, by_concurrency):
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = by_k.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=DPI)
    return path


def draw_speeds(panel: Any, advice: Advice) -> None:
    """Expected speed over K, with its interval, and what was measured live."""
    batch = advice.plan.at_once
    panel.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    for colour, cascade in zip(COLOURS, advice.cascades, strict=False):
        some = sorted(advice.at(batch, cascade.name), key=lambda one: one.k)
        ks = [one.k for one in some]
        panel.plot(
            ks, [one.ratio for one in some], color=colour, marker="o", markersize=3, label=cascade.name
        )
        panel.fill_between(
            ks, [one.low for one in some], [one.high for one in some], color=colour, alpha=0.12, linewidth=0
        )
    colours = dict(zip(advice.cascades, COLOURS, strict=False))
    for result in live.results if (live := advice.trial_at(batch)) else ():
        mark(
            panel,
            result.candidate.k or 0,
            result,
            colours[result.candidate.cascade] if result.candidate.k else "black",
        )
    panel.set_xlabel("K, drafts per round (0: set by policy goodput)")
    panel.set_ylabel("x plain decoding (diamonds: measured)")
    panel.set_title(f"predicted at concurrency {batch}", fontsize=9)


def mark(panel: Any, place: Any, result: Result, colour: str) -> None:
    """A measured speed with its interval."""
    spread = [[result.ratio - result.low], [result.high - result.ratio]]
    panel.errorbar([place], [result.ratio], yerr=spread, fmt="D", color=colour, markersize=5, capsize=3)


def draw_acceptance(panel: Any, advice: Advice) -> None:
    """By K: the acceptance found, and the equal acceptance from which on rounds with that many drafts pay."""
    batch = advice.plan.at_once
    for colour, cascade in zip(COLOURS, advice.cascades, strict=False):
        if len(cascade.methods) > 1:
            continue
        found = sorted(
            (one.k, rate)
            for one in advice.at(batch, cascade.name)
            if (rate := one.acceptance.rate()) is not None
        )
        needed = [
            (k, equal_acceptance(cost, k)) for k, cost in enumerate(advice.round_costs(cascade, batch), 1)
        ]
        panel.plot([k for k, _ in found], [a for _, a in found], color=colour, marker="o", markersize=3)
        some = [(k, a) for k, a in needed if a is not None]
        panel.plot(
            [k for k, _ in some], [a for _, a in some], color=colour, marker="x", markersize=4, linestyle=":"
        )
    panel.set_ylim(0, 1.03)
    panel.set_xlabel("K, drafts per round")
    panel.set_ylabel("acceptance")
    panel.set_title("found (solid) and needed to pay (dotted)", fontsize=9)


def draw_concurrency(panel: Any, advice: Advice) -> None:
    """The forecast and the best prediction at each concurrency, and what was measured there."""
    one, batches = advice.forecast, advice.plan.batches
    panel.axhline(1, color="black", linewidth=0.8)
    same = [advice.at(batch, one.cascade.name, one.k)[0] for batch in batches]
    names = [str(batch) for batch in batches]
    panel.plot(names, [each.ratio for each in same], color="#333333", marker="o", markersize=3)
    panel.fill_between(
        names,
        [each.low for each in same],
        [each.high for each in same],
        color="#333333",
        alpha=0.12,
        linewidth=0,
    )
    panel.plot(names, [best(advice.at(batch)).ratio for batch in batches], color="#999999", linestyle="--")
    for trial in advice.trials:
        if result := trial.of(advice.chosen):
            mark(panel, str(trial.concurrency), result, "black")
    panel.set_xlabel("concurrency")
    panel.set_title(f"{one.cascade.name}, K = {one.k} (dashed: best of each)", fontsize=9)
