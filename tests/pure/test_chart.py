"""The chart of a benchmark: nothing runs into anything."""

from __future__ import annotations

import pytest

from speculon.measure.bench.cell import Cell
from speculon.measure.bench.charts import chart_of
from speculon.measure.bench.plan import AGAIN, BenchPlan
from tests.pure.cells import make_cell


def overlaps(cells: list[Cell], title: str) -> list[str]:
    """What runs out of the figure, or into its neighbour."""
    figure = chart_of(cells, title)
    figure.draw_without_rendering()
    paper = figure.bbox
    found = []
    edges = {"legend": figure.legends[0], "title": figure.texts[0], "scale": figure.axes[0].yaxis.label}
    for name, box in ((name, edge.get_window_extent()) for name, edge in edges.items()):
        if not (paper.x0 <= box.x0 and box.x1 <= paper.x1 and paper.y0 <= box.y0 and box.y1 <= paper.y1):
            found.append(name)
    for panel in figure.axes:
        numbers = sorted((text.get_window_extent() for text in panel.texts), key=lambda box: box.x0)
        found += ["numbers" for left, right in zip(numbers, numbers[1:], strict=False) if left.x1 > right.x0]
    return found


MODES = [f"draft_model:{k}/{rule}" for k in (2, 4, 8) for rule in ("matching", "adaptive/rejection")]


def test_a_small_chart_with_a_long_title_is_readable() -> None:
    names, modes = ("code", "edit", "prose@0.7"), ("off", MODES[0], AGAIN)
    cells = [make_cell(mode, workload=name) for name in names for mode in modes]
    title = "demo, 10.9 M parameters, 12 layers, bfloat16, eagle3 demo-eagle3; a chip of 2 cores, 2 threads, "
    assert overlaps(cells, title + "and so on " * 2) == []


def test_panels_of_the_usual_grid_stand_one_above_the_other() -> None:
    plan = BenchPlan()
    cells = [
        make_cell(mode, workload=name, concurrency=count)
        for name in plan.workloads
        for count in plan.concurrency
        for mode in (*plan.modes, AGAIN)
    ]
    assert overlaps(cells, "demo, 10.9 M parameters") == []
    figure = chart_of(cells, "demo, 10.9 M parameters")
    assert [len({round(panel.get_position().x0, 2) for panel in figure.axes}), len(figure.axes)] == [1, 3]
    assert figure.get_figwidth() < 24


def test_a_planted_chart_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR", "LEGEND_CHAR", "TITLE_CHAR", "HANDLE"):
        monkeypatch.setattr(f"speculon.measure.bench.charts.{name}", 0.02)
    cells = [
        make_cell(mode, workload=name) for name in ("code", "edit", "prose@0.7") for mode in ("off", *MODES)
    ]
    assert set(overlaps(cells, "a long title " * 20)) == {"legend", "title", "numbers"}
