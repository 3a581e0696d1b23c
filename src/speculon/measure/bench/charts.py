"""Charts of reports. That of a benchmark: speeds over plain decoding, with the range of the noise."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure

from speculon.measure.bench.cell import Cell
from speculon.measure.bench.plan import AGAIN
from speculon.speculation.proposers.registry import OFF

COLOURS = (
    *("#2f6f9f", "#e08a2e", "#4c9a5f", "#b5495b", "#7a68a6"),
    *("#8c6d46", "#5fb0b7", "#d58fb5", "#9aa33b", "#6b6b6b"),
)
HIGH, LINE = 4.9, 0.17  # inches: of a chart, and of each line of its title
PANEL, BAR = 4.4, 0.36  # inches: the narrowest panel, and a bar with its number above it
BESIDE = 30  # inches: beyond, panels are stacked
LEGEND_CHAR, TITLE_CHAR, HANDLE = 0.085, 0.078, 0.55  # inches, at the sizes used
WIDTH = 0.8  # of all bars of a workload together


def new_figure(wide: float, high: float, title: str) -> Figure:
    """In inches; the lines of the title add to the height."""
    lines = textwrap.wrap(title, int(wide / TITLE_CHAR))
    figure = Figure(figsize=(wide, high + LINE * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure


def name_panel(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def chart_of(cells: list[Cell], title: str) -> Figure:
    """One panel per concurrency, one group of bars per workload, one bar per mode; wide panels one above the
    other.
    """
    by_count = {
        count: [cell for cell in cells if cell.concurrency == count]
        for count in sorted({cell.concurrency for cell in cells})
    }
    bars = max(len({(cell.workload, cell.mode) for cell in some}) for some in by_count.values())
    wide = max(PANEL, BAR * bars)
    beside = len(by_count) if wide * len(by_count) <= BESIDE else 1
    rows, wide = len(by_count) // beside, 1.6 + wide * beside
    figure = new_figure(wide, HIGH * rows, title)
    panels = list(figure.subplots(rows, beside, sharey=True, squeeze=False).flat)
    for panel, (count, some) in zip(panels, by_count.items(), strict=True):
        draw_panel(panel, some)
        name_panel(panel, f"concurrency {count}")
    panels[0].set_ylabel("speed relative to plain decoding (median, quartiles)")
    legends = [panel.get_legend_handles_labels() for panel in panels]
    handles, labels = max(legends, key=lambda entries: len(entries[1]))
    columns = max(1, min(len(labels), int(wide / (HANDLE + LEGEND_CHAR * max(map(len, labels))))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def draw_panel(panel: Any, cells: list[Cell]) -> None:
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    modes = list(dict.fromkeys(cell.mode for cell in cells if cell.mode not in (OFF, AGAIN)))
    panel.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    for i, mode in enumerate(modes):
        shown = [cell for cell in cells if cell.mode == mode]
        width = WIDTH / len(modes)
        at = [workloads.index(cell.workload) + (i - (len(modes) - 1) / 2) * width for cell in shown]
        spread = [[abs(cell.ratio_quartiles[side] - cell.ratio) for cell in shown] for side in (0, 1)]
        bars = panel.bar(
            at,
            [cell.ratio for cell in shown],
            width * 0.92,
            yerr=spread,
            color=COLOURS[i % len(COLOURS)],
            error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            label=mode,
        )
        over = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}
        numbers = [f"{cell.ratio:.2f}x" for cell in shown]
        panel.bar_label(bars, numbers, padding=2, fontsize=7, bbox=over, zorder=4)
    for cell in cells:
        if cell.mode == AGAIN:
            x = workloads.index(cell.workload)
            low, high = min(1.0, cell.ratio_quartiles[0]), max(1.0, cell.ratio_quartiles[1])
            band = "plain decoding measured twice" if x == 0 else None
            shade = {"color": "#999999", "alpha": 0.35, "linewidth": 0, "zorder": 3}
            panel.fill_between([x - 0.48, x + 0.48], low, high, label=band, **shade)
    panel.set_xticks(range(len(workloads)), workloads)
    panel.set_xlim(-0.6, len(workloads) - 0.4)
