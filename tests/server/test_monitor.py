"""The worker replays answers while it is idle, and lets every message go first; `/metrics` has the counts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from speculon.core.config import EngineConfig
from tests.server.inside import served, wait_until
from tests.server.scripted import ScriptedEngine
from tests.tiny.conftest import tiny_target
from tests.tiny.forms import engine_of

pytestmark = pytest.mark.timeout(60)
COUNTS = ("replayed", "equal", "ties", "faults", "dropped")


class Replaying(ScriptedEngine):
    """Has so many forwards of replays to make, of 5 ms each."""

    forwards = 0

    @property
    def has_replays(self) -> bool:  # type: ignore[override]
        return self.forwards > 0

    def replay(self) -> None:
        assert not self.has_work, "a replay beside a request"
        time.sleep(0.005)
        self.forwards -= 1
        self.counters.monitor.replayed += 1


def test_an_idle_engine_replays_and_messages_go_first() -> None:
    engine = Replaying(EngineConfig(model="scripted"))
    with served(over=engine) as server:
        engine.forwards = 10**6
        answers = [server.post("completions", prompt=f"say:answer {i}", max_tokens=20) for i in range(5)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [
            f"answer {i}" for i in range(5)
        ]
        wait_until(lambda: engine.forwards < 10**6 - 10)
        assert server.post("completions", prompt="say:late", max_tokens=20).is_success
        # without a message the counts come by themselves
        wait_until(lambda: server.metric("speculon_monitor_replayed_total") > 20)
        assert engine.forwards > 0
        engine.forwards = 1


def test_after_the_replays_the_pages_are_checked() -> None:
    engine = Replaying(EngineConfig(model="scripted"))
    with served(over=engine) as server:
        engine.forwards = 3
        assert server.post("completions", prompt="say:x", max_tokens=20).is_success
        wait_until(lambda: server.metric("speculon_integrity_checks_total") > 0)
        assert engine.forwards == 0 and server.metric("speculon_monitor_replayed_total") == 3


def test_served_answers_are_replayed_and_counted() -> None:
    speculation: dict[str, Any] = {"method": "ngram"}
    engine = engine_of(tiny_target("llama"), speculation=speculation, monitor_share=0.5)
    bodies: list[dict[str, Any]] = [
        {"temperature": 0, "prompt": "ab ab ab a"},
        {"temperature": 1.0, "seed": 4, "prompt": "ab ab ab a", "n": 2, "top_p": 0.9},
        {"temperature": 1.0, "prompt": "ab ab ab a"},  # not: without a seed
        {"temperature": 0, "prompt": "x y x y", "logprobs": 2, "stop": ["e", "t"]},
    ]
    with served(over=engine) as server:
        for body in bodies:
            answer = server.post("completions", model="scripted", max_tokens=16, **body)
            assert answer.is_success, answer.text
        wait_until(lambda: server.metric("speculon_monitor_replayed_total") == 2)
        found = {name: server.metric(f"speculon_monitor_{name}_total") for name in COUNTS}
        assert found == {"replayed": 2, "equal": 2, "ties": 0, "faults": 0, "dropped": 0}
        assert server.metric("speculon_monitor_seconds_total") > 0
        assert server.metric("speculon_monitor_waiting") == 0
        assert server.metric("speculon_monitor_tie_limit_nats") == 1e-4
