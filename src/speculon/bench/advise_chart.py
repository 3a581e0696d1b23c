"""The chart of an advice: speed by K, acceptance beside what is needed, and speed by crowd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from speculon.bench.advise import Advice
from speculon.bench.advise_maths import best
from speculon.bench.chart import COLOURS
from speculon.bench.rounds import equal_acceptance

SIZE = (10.5, 3.6)  # inches
DPI = 110


def draw(advice: Advice, title: str, path: Path) -> Path:
    lay_out(advice, title).savefig(path, dpi=DPI)
    return path


def lay_out(advice: Advice, title: str) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    by_k, acceptance, by_crowd = figure.subplots(1, 3)
    draw_depths(by_k, advice)
    draw_acceptance(acceptance, advice)
    draw_crowds(by_crowd, advice)
    for panel in (by_k, acceptance, by_crowd):
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = by_k.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def draw_depths(panel: Any, advice: Advice) -> None:
    """Expected speed over K, with its interval, and what the live check found."""
    crowd = advice.wish.at_once
    panel.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    for colour, way in zip(COLOURS, advice.ways, strict=False):
        some = sorted(advice.at(crowd, way.name), key=lambda one: one.k)
        ks = [one.k for one in some]
        panel.plot(ks, [one.ratio for one in some], color=colour, marker="o", markersize=3, label=way.name)
        panel.fill_between(ks, [one.low for one in some], [one.high for one in some], color=colour, alpha=0.12, linewidth=0)
    if live := advice.live(crowd):
        spread = [[live.ratio - live.low], [live.high - live.ratio]]
        panel.errorbar([live.setting.k], [live.ratio], yerr=spread, fmt="kD", markersize=5, capsize=3, label="measured live")
    panel.set_xlabel("K, drafts per round")
    panel.set_ylabel("x plain decoding")
    panel.set_title("one at a time" if crowd == 1 else f"{crowd} at once", fontsize=9)


def draw_acceptance(panel: Any, advice: Advice) -> None:
    """By K: the acceptance found, and the equal acceptance from which on rounds with that many drafts pay."""
    crowd = advice.wish.at_once
    for colour, way in zip(COLOURS, advice.ways, strict=False):
        if len(way.chain) > 1:
            continue
        found = sorted((one.k, one.walk.acceptance) for one in advice.at(crowd, way.name) if one.walk.acceptance is not None)
        needed = [(k, equal_acceptance(cost, k)) for k, cost in enumerate(advice.round_costs(way, crowd), 1)]
        panel.plot([k for k, _ in found], [a for _, a in found], color=colour, marker="o", markersize=3)
        some = [(k, a) for k, a in needed if a is not None]
        panel.plot([k for k, _ in some], [a for _, a in some], color=colour, marker="x", markersize=4, linestyle=":")
    panel.set_ylim(0, 1.03)
    panel.set_xlabel("K, drafts per round")
    panel.set_ylabel("acceptance")
    panel.set_title("found (solid) and needed to pay (dotted)", fontsize=9)


def draw_crowds(panel: Any, advice: Advice) -> None:
    """The advised setting and the best of each crowd."""
    panel.axhline(1, color="black", linewidth=0.8)
    same = sorted(advice.at_all(advice.candidate), key=lambda one: one.texts)
    crowds = [str(one.texts) for one in same]
    panel.plot(crowds, [one.ratio for one in same], color="#333333", marker="o", markersize=3)
    panel.fill_between(crowds, [one.low for one in same], [one.high for one in same], color="#333333", alpha=0.12, linewidth=0)
    panel.plot(crowds, [best(advice.at(one.texts)).ratio for one in same], color="#999999", linestyle="--")
    for check in advice.checks:
        spread = [[check.ratio - check.low], [check.high - check.ratio]]
        panel.errorbar([str(check.setting.texts)], [check.ratio], yerr=spread, fmt="kD", markersize=5, capsize=3)
    one = advice.candidate
    panel.set_xlabel("texts at once")
    panel.set_title(f"{one.way.name}, K = {one.k} (dashed: best of each)", fontsize=9)
