"""Requests that arrive at a rate: each mode meets the same ones, none begins early, texts stay the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM
from speculon.measure.bench.arrivals import Arrivals, serve
from speculon.measure.bench.measure import Measurement, measure
from speculon.measure.bench.plan import AGAIN, BenchPlan, parse_mode
from speculon.measure.bench.run import run
from speculon.measure.bench.workloads import Case, build
from tests.tiny.bench.plans import bench, sizes, small
from tests.tiny.folders import CONTEXT

MET = list[tuple[str, list[Case], Arrivals]]  # mode and repeat, what arrived, and when


def met_in_a_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> MET:
    met: MET = []

    def watched(
        llm: LLM, cases: list[Case], speculation: Mapping[str, Any], arrivals: Arrivals, time: str
    ) -> Measurement:
        met.append((time, cases, arrivals))
        return serve(llm, cases, speculation, arrivals, time)

    monkeypatch.setattr("speculon.measure.bench.run.serve", watched)
    cells, _ = run(llm, small(modes=("ngram:4",), prompts=4, request_rate=200, repeats=3, max_tokens=24))
    assert all(cell.different == 0 and cell.texts == 4 for cell in cells)
    return met


def unlike(met: MET) -> list[str]:
    """Repeats in which modes met other requests or other times, and pairs of repeats with the same times."""
    by_repeat: dict[str, list[tuple[list[Case], Arrivals]]] = {}
    for time, cases, arrivals in met:
        by_repeat.setdefault(time.partition(", ")[2], []).append((cases, arrivals))
    apart = [name for name, some in by_repeat.items() if any(one != some[0] for one in some)]
    times = [some[0][1].times for some in by_repeat.values()]
    return apart + ["the same in all repeats"] * (times[0] in times[1:])


def test_every_mode_meets_the_same_requests_at_the_same_times(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = met_in_a_run(llm, monkeypatch)
    assert len(met) == 3 * len(("off", "ngram:4", AGAIN)) and unlike(met) == []
    order = [time.partition(", ")[0] for time, _, _ in met]
    assert {mode: order.count(mode) for mode in order} == {"off": 3, "ngram:4": 3, AGAIN: 3}
    assert order[:3] != order[3:6]  # alternated


def test_planted_times_of_each_measurements_own_are_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def drawn_anew(cases: int, rate: float, seed: str) -> list[float]:
        first = next(calls) * 1e-4
        return [first + i / rate for i in range(cases)]

    monkeypatch.setattr("speculon.measure.bench.run.poisson_times", drawn_anew)
    assert len(unlike(met_in_a_run(llm, monkeypatch))) == 3


def test_planted_times_that_no_repeat_changes_are_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "speculon.measure.bench.run.poisson_times",
        lambda cases, rate, seed: [i / rate for i in range(cases)],
    )
    assert unlike(met_in_a_run(llm, monkeypatch)) == ["the same in all repeats"]


def cases_of(llm: LLM, plan: BenchPlan) -> list[Case]:
    return build("code", llm.tokenizer, plan.size(CONTEXT, "code"))


@pytest.mark.parametrize("mode", ["off", "ngram:4"])
def test_texts_are_those_of_a_batch_and_nothing_begins_early(
    llm: LLM, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = cases_of(llm, small(prompts=5, max_tokens=24))
    admit, most, speculation = llm.engine.add_request, 0, parse_mode(mode).speculation

    def admitting(*args: Any) -> str:
        nonlocal most
        request_id = admit(*args)
        most = max(most, len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
        return request_id

    batch = measure(llm, cases, speculation)
    monkeypatch.setattr(llm.engine, "add_request", admitting)
    times = [0.0, 0.01, 0.011, 0.3, 0.6]  # three at nearly the same time, of which two may run
    done = serve(llm, cases, speculation, Arrivals(times, 2))
    assert (done.token_ids, done.texts) == (batch.token_ids, batch.texts)
    assert [one.arrived for one in done.requests] == times and most <= 2
    assert all(one.first_token_ms > 0 for one in done.requests)
    assert [sum(n for _, n in one.tokens) for one in done.requests] == [*map(len, done.token_ids)]
    assert done.seconds == done.requests[-1].began > times[-1] and done.tokens < sum(map(len, done.token_ids))
    assert done.stats.target_calls == batch.stats.target_calls and done.steps
    assert not llm.engine.has_work


def test_requests_that_run_are_ended_where_a_step_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = cases_of(llm, small(prompts=2, max_tokens=24))

    def failing() -> list[Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(llm.engine, "step", failing)
    with pytest.raises(ZeroDivisionError):
        serve(llm, cases, parse_mode("off").speculation, Arrivals([0.0, 0.0], 2))
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_the_command_shows_latencies(folder: Path, tmp_path: Path) -> None:
    few = [*sizes(4, 24), "--modes", "ngram:4", "--request-rate", "50", "--out", str(tmp_path / "new")]
    code, out, _ = bench(folder, *few)
    assert code == 0 and "first token" in out and "arrive as a Poisson process of 50 a second" in out
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert report["plan"]["request_rate"] == 50
    for cell in report["cells"]:
        assert 0 < cell["first_token_ms"][0] <= cell["first_token_ms"][1]
        assert 0 < cell["per_token_ms"][0] <= cell["per_token_ms"][1]
    assert "| first token | per token |" in (tmp_path / "new" / "bench.md").read_text()
