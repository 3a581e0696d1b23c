"""Which answers the monitor takes, and that its replays change nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon import LLM, SpeculativeDecoder
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import ConfigError
from speculon.core.telemetry import MonitorCounts
from speculon.engine import monitor as monitoring
from speculon.engine.engine import Engine
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.folders import make_folder
from tests.tiny.monitored import GREEDY, SEEDED, ask, engine_of, replayed, results_of, write
from tests.tiny.scripted import drain, store_of

# which are taken


@pytest.mark.parametrize(("share", "many"), [(0.25, 10), (0.1, 4), (0.5, 20), (1.0, 40), (0.01, 0)])
def test_the_share_is_evenly_spread(share: float, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MAX_WAITING", 40)
    engine = engine_of(monitor_share=share, speculation={"method": "off"})
    for i in range(40):
        ask(engine, f"q{i}", max_tokens=2)
    drain(engine)
    assert engine.monitor is not None
    numbers = [int(answer.request.id[1:]) for answer in engine.monitor.waiting]
    assert numbers == [i for i in range(40) if (i + 1) % round(1 / share) == 0]
    assert results_of(replayed(engine)) == (many, many, 0, 0, 0)


EXCLUDED: dict[str, dict[str, Any]] = {
    "sampled without a seed": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "seed": 3, "speculation": {"acceptance": "rejection"}},
    "block verification": {"temperature": 1.0, "seed": 3, "speculation": {"acceptance": "block"}},
    "too long": {"max_tokens": 40},
    "empty": {"max_tokens": 0},
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_what_cannot_be_replayed_exactly_is_not_taken(why: str) -> None:
    engine = engine_of(monitor_max_tokens=47)
    ask(engine, **EXCLUDED[why])
    drain(engine)
    assert engine.counters.finished.total() == 1 and not engine.has_replays
    ask(engine, "b", max_tokens=39, temperature=1.0, seed=3)  # and one that can
    drain(engine)
    assert results_of(replayed(engine)) == (1, 1, 0, 0, 0)


def test_an_aborted_answer_is_not_taken() -> None:
    engine = engine_of()
    ask(engine)
    engine.step()
    engine.abort("a")
    assert engine.counters.finished == {"abort": 1} and not engine.has_replays


def test_by_default_nothing_is_taken_and_nothing_reserved() -> None:
    engine = engine_of(monitor_share=0.0)
    ask(engine)
    drain(engine)
    assert engine.monitor is None and not engine.has_replays
    engine.replay()
    assert engine.counters.monitor == MonitorCounts()


def test_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MAX_WAITING", 3)
    engine = engine_of()
    for i in range(5):
        ask(engine, f"q{i}", max_tokens=4)
        drain(engine)
    counts = engine.counters.monitor
    assert (counts.dropped, counts.waiting) == (2, 3)
    assert results_of(replayed(engine)) == (3, 3, 0, 0, 2) and counts.waiting == 0


def test_a_replay_that_fails_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    write(engine, GREEDY, many=2)
    assert engine.monitor is not None
    lane, calls = engine.monitor.lane, iter(range(100))
    ask_target = lane._ask_target

    def failing(*given: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("a planted fault")
        return ask_target(*given)

    monkeypatch.setattr(lane, "_ask_target", failing)
    assert results_of(replayed(engine)) == (1, 1, 0, 0, 1)


# nothing else changes


def state_of(engine: Engine) -> Any:
    """All that a replay must leave alone."""
    counters = copy.deepcopy(engine.counters)
    counters.monitor = MonitorCounts()
    pool, policy = engine.pool, engine.policy
    pages = {name: part for name, part in vars(pool).items() if name not in ("slots", "draft_slots")}
    suffix: Any = engine.proposers.find("suffix")
    return (
        counters,
        (copy.deepcopy(pages), pool.available),
        policy.state(),
        [(key, tokens) for key, _, tokens in suffix.pools.state()],
        engine.proposers.remembered,
        [store.clone() for store in store_of(engine).k],
    )


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_a_replay_leaves_everything_as_it_was(num_blocks: int, tmp_path: Path) -> None:
    """Also where cached pages fill the whole pool."""
    events = tmp_path / "rounds.jsonl"
    engine = engine_of(
        speculation={"method": "suffix", "policy": "goodput"}, num_blocks=num_blocks, events=events
    )
    write(engine, SEEDED, many=6)
    assert num_blocks > 100 or len(engine.pool._cached) == 24
    before = state_of(engine)
    assert results_of(replayed(engine)) == (6, 6, 0, 0, 0)
    *after, pages = state_of(engine)
    *others, pages_before = before
    assert after == others
    assert all(torch.equal(a, b) for a, b in zip(pages, pages_before, strict=True))
    ids = {line.split('"id":"')[1][:2] for line in closed(engine, events) if '"id":"' in line}
    assert ids <= {f"q{i}" for i in range(6)}


def closed(engine: Engine, events: Path) -> list[str]:
    engine.close()
    return events.read_text().splitlines()


def test_a_request_during_a_replay_runs_as_without_one() -> None:
    engine, untouched = engine_of(monitor_share=1.0), engine_of(monitor_share=0.0)
    for one in (engine, untouched):
        ask(one, "first")
        drain(one)
    for _ in range(9):  # into the middle of the replay
        engine.replay()
    assert engine.has_replays and engine.counters.monitor.replayed == 0
    results = []
    for one in (engine, untouched):
        ask(one, "second", [7, 8, 9], temperature=1.0, seed=5)
        results.append(drain(one)["second", 0])
    mine, theirs = results
    assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish)
    assert mine.stats.accepted == theirs.stats.accepted and engine.counters.monitor.replayed == 0
    assert results_of(replayed(engine)) == (2, 2, 0, 0, 0)


# for callers


def test_an_llm_replays_when_it_is_asked_to(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with LLM(str(folder), monitor_share=0.5, speculation={"method": "ngram", "policy": "fixed"}) as llm:
        prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8]]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, n=2))
        assert llm.engine.counters.monitor.waiting == 2
        counts = llm.replay()
        assert results_of(counts) == (2, 2, 0, 0, 0) and counts.limit == 1e-4
        assert llm.replay() == counts and counts is not llm.engine.counters.monitor
        assert llm.engine.counters.monitor.equal == 2


def test_memory_of_the_monitor_is_part_of_the_estimate() -> None:
    off, on, longer = (
        engine_of(**given).memory
        for given in ({"monitor_share": 0.0}, {"monitor_max_tokens": 40}, {"monitor_max_tokens": 4096})
    )
    page = 4 * sum(layer.bytes_per_token for layer in tiny_target("llama").layers)
    assert on.pages - off.pages == 10 * page and longer.pages - off.pages == 32 * page


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_beyond_the_limits_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="monitor_share"):
        EngineConfig(monitor_share=share)


def test_a_decoder_has_no_monitor() -> None:
    with pytest.raises(ConfigError, match="monitor_share"):
        SpeculativeDecoder(tiny_model("llama"), method="ngram", monitor_share=0.5)
