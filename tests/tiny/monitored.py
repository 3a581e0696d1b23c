"""Engines with a monitor, requests for them, and their replays."""

from __future__ import annotations

from typing import Any

from speculon.core.config import SamplingParams
from speculon.core.telemetry import MonitorCounts
from speculon.engine.engine import Engine
from speculon.engine.monitor import FinishedSequence
from speculon.target.target import Target
from tests.tiny.conftest import tiny_target
from tests.tiny.scripted import drain, make_engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "ignore_eos": True}
PROMPT = [5, 9, 14, 5, 9, 14, 5, 9]


def engine_of(name: str = "llama", target: Target | None = None, **settings: Any) -> Engine:
    return make_engine(target or tiny_target(name), **{"monitor_share": 1.0, **settings})


def ask(engine: Engine, name: str = "a", prompt: list[int] = PROMPT, **given: Any) -> None:
    speculation = given.pop("speculation", None)
    params = SamplingParams(**{"max_tokens": 24, **GREEDY, **given})
    engine.add_request(prompt, params, speculation, name)


def replayed(engine: Engine, most: int = 5000) -> MonitorCounts:
    """The counts after all replays; every page of the monitor is free again."""
    for _ in range(most):
        if not engine.has_replays:
            break
        engine.replay()
    assert not engine.has_replays
    engine.check_integrity()
    assert engine.monitor is not None
    pool = engine.monitor.lane.pool
    assert pool.available == pool.num_blocks
    return engine.counters.monitor


def results_of(counts: MonitorCounts) -> tuple[int, int, int, int, int]:
    return counts.replayed, counts.equal, counts.ties, counts.faults, counts.dropped


def write(engine: Engine, mode: dict[str, Any], many: int = 4, **given: Any) -> None:
    for i in range(many):
        ask(engine, f"q{i}", [*PROMPT, 20 + i % 2], seed=7 + i, **{**mode, **given})
    drain(engine)


def last(engine: Engine) -> FinishedSequence:
    """The answer that waits for its replay, and was taken last."""
    assert engine.monitor is not None
    return engine.monitor.waiting[-1]
