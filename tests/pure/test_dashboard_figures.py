"""The charts' figures: differences of counters, one snapshot for all pages, none across a pause."""

from __future__ import annotations

import pytest

from speculon.core.telemetry import EngineCounters
from speculon.operations.admin.figures import MOST_PAUSE, Figures, sum_counts
from speculon.operations.admin.schemas import ModelOverview, Overview


class Server:
    """An overview of two engines, one of which works."""

    def __init__(self) -> None:
        self.counters, self.at = EngineCounters(), 100.0

    def look(self) -> Overview:
        model = ModelOverview.model_construct(tokens=self.counters.totals.emitted)
        totals = sum_counts([self.counters, EngineCounters()])
        return Overview.model_construct(time=self.at, models=[model], totals=totals)

    def work(self, tokens: int) -> None:
        totals = self.counters.totals
        totals.emitted += tokens
        totals.target_calls += tokens // 2
        totals.rounds += 5
        totals.drafted_at.update({0: 5, 1: 5})
        totals.drafted_from["suffix"] += 10
        totals.accepted_from["suffix"] += 4
        totals.rounds_from["suffix"] += 5
        totals.generated_from["suffix"] += 15


def test_points_are_differences_and_a_pause_begins_anew() -> None:
    server = Server()
    figures = Figures(server.look, lambda: server.at)
    server.work(1000)
    assert figures.refresh().totals.emitted == 1000 and not figures.points
    server.work(20)
    server.at += 0.5
    assert figures.refresh().totals.emitted == 1000, "another page within the interval takes no snapshot"
    server.at += 1.5
    figures.refresh()
    (point,) = figures.points
    assert point.tokens_per_s == pytest.approx(10) and point.per_call == 2 and point.drafts == 2
    assert point.acceptance == {"suffix": pytest.approx(0.4)} and point.per_call_of == {"suffix": 3}
    server.at += MOST_PAUSE + 1
    server.work(500)
    figures.refresh()
    assert not figures.points


def test_counters_that_fall_give_no_figure() -> None:
    server = Server()
    figures = Figures(server.look, lambda: server.at)
    server.work(1000)
    figures.refresh()
    server.at += 1
    server.counters = EngineCounters()  # of a process that was started again
    server.work(20)
    figures.refresh()
    (point,) = figures.points
    assert (point.tokens_per_s, point.per_call) == (0, None)
