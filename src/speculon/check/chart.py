"""The chart of a check: p-values beside those of chance, and regrets beside plain decoding's."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from speculon.check.run import Findings

COLOURS = {
    "plain": ("#6b6b6b",),
    "speculation": ("#2f6f9f", "#4c9a5f", "#7b5ea7"),
    "control": ("#b5495b", "#e08a2e", "#8c5a3c"),
}
FLOOR = 1e-9  # nat: where what did not move at all is drawn
WIDE, HIGH, TITLE_CHAR = 10.5, 4.6, 0.078  # inches


def draw(findings: Findings, title: str, path: Path) -> Path:
    lay_out(findings, title).savefig(path, dpi=150)
    return path


def lay_out(findings: Findings, title: str) -> Figure:
    figure = Figure(figsize=(WIDE, HIGH), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_p(left, findings)
    draw_regrets(right, findings)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "\n".join(textwrap.wrap(f"{findings.outcome}: {title}", int(WIDE / TITLE_CHAR))), fontsize=9
    )
    return figure


def draw_p(panel: Any, findings: Findings) -> None:
    """The share of cells below each p: the diagonal where two arms have one distribution."""
    panel.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="chance")
    for role, colours in COLOURS.items():
        for one, colour in zip([one for one in findings.sampled if one.role == role], colours, strict=True):
            p = sorted(one.p)
            share = [(i + 1) / len(p) for i in range(len(p))]
            panel.step([0, *p, 1], [0, *share, 1], where="post", color=colour, linewidth=1.4, label=one.label)
    panel.set_xlabel("p of a cell (prompt x sampler x position)")
    panel.set_ylabel("share of the cells at or below")
    panel.set_title("sampled texts, against plain decoding", fontsize=10)
    panel.legend(frameon=False, fontsize=8, loc="lower right")


def draw_regrets(panel: Any, findings: Findings) -> None:
    """How far plain decoding differs from itself, the regrets of texts that differ, and the limit."""
    margin = findings.margin
    moved = sorted(max(nats, FLOOR) for nats in margin.moved)
    share = [1 - i / len(moved) for i in range(len(moved))]
    panel.plot(moved, share, color=COLOURS["plain"][0], label="plain, other batch shapes")
    panel.axvline(
        margin.limit, color="black", linewidth=0.8, linestyle="--", label=f"limit {margin.limit:.1e} nat"
    )
    for height, role in ((0.35, "speculation"), (0.65, "control")):
        divergences = [
            divergence for one in findings.exact if one.role == role for divergence in one.divergences
        ]
        regrets = [
            max(divergence.regret, FLOOR) for divergence in divergences if divergence.regret is not None
        ]
        label = f"{'texts that differ' if role == 'speculation' else 'planted errors'}: {len(regrets)}"
        panel.scatter(regrets, [height] * len(regrets), s=18, alpha=0.6, color=COLOURS[role][0], label=label)
    panel.set_xscale("log")
    panel.set_xlabel("nat")
    panel.set_ylabel("share of positions that changed by at least so much")
    panel.set_title("same texts: change of the gap of the two best tokens, and regrets", fontsize=10)
    panel.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.95))
