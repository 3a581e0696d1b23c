"""The overview's figures: differences of counters, one snapshot for all pages, none across a pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from speculon.core import Load
from speculon.server.admin.figures import MOST_PAUSE, Figures
from speculon.telemetry import EngineCounters


def model(counters: EngineCounters) -> Any:
    engine = SimpleNamespace(counters=counters, load=Load(2, 1, 0), facts=None, open_requests=3)
    return SimpleNamespace(state="loaded", held=10, engine=engine)


def add(counters: EngineCounters, tokens: int) -> None:
    totals = counters.totals
    totals.emitted += tokens
    totals.target_calls += tokens // 2
    totals.rounds += 5
    totals.drafted_at.update({0: 5, 1: 5})
    totals.drafted_from["suffix"] += 10
    totals.accepted_from["suffix"] += 4


def test_points_are_differences_and_a_pause_begins_anew() -> None:
    at, counters = [100.0], EngineCounters()
    figures = Figures({"a": model(counters), "b": model(EngineCounters())}, lambda: at[0])
    add(counters, 1000)
    figures.refresh()
    assert not figures.points and figures.totals.tokens == 1000
    assert (figures.now.running, figures.now.waiting, figures.now.open_requests) == (4, 2, 6)
    add(counters, 20)
    at[0] += 0.5
    figures.refresh()
    assert figures.totals.tokens == 1000, "another page within the interval takes no snapshot"
    at[0] += 1.5
    figures.refresh()
    (point,) = figures.points
    assert point.tokens_per_s == pytest.approx(10) and point.per_call == 2 and point.drafts == 2
    assert point.acceptance == {"suffix": pytest.approx(0.4)}
    at[0] += MOST_PAUSE + 1
    add(counters, 500)
    figures.refresh()
    assert not figures.points
