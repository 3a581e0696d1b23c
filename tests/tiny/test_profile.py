"""Where a step's time goes: every boundary is booked, on a clock that moves only inside known calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from speculon.core import telemetry
from speculon.core.config import SamplingParams
from speculon.core.telemetry import PARTS, Stopwatch
from speculon.decoding.sequence import Sequence
from speculon.engine import engine as engine_module
from speculon.engine.engine import Engine
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.step import TorchStep
from speculon.speculation.drafting import Drafting
from tests.tiny.conftest import tiny_model
from tests.tiny.scripted import drain, make_engine, store_of

SECONDS = {  # powers of two: any sum identifies its parts
    "plan": ("prepare", 1),
    "reserve": ("prepare", 2),
    "decide": ("decide", 4),
    "ask_lookups": ("propose", 8),
    "ask_models": ("propose", 16),
    "pack": ("prepare", 32),
    "view": ("prepare", 64),
    "forward": ("forward", 128),
    "verify": ("verify", 256),
    "commit": ("commit", 512),
    "advance": ("commit", 1024),
    "__exit__": ("commit", 2048),
    "observe": ("settle", 4096),
    "account": ("settle", 8192),
    "free_ended": ("settle", 16384),
    "_forget": ("settle", 32768),
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += SECONDS[name][1]
            result = call(*args, **kwargs)
            # a forward is timed where it runs
            return replace(result, ms=SECONDS[name][1] * 1e3) if name == "forward" else result

        return timed


def stepped(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, float]:
    """An engine after one step, and what the clock says it took, in ms."""
    engine, clock = make_engine(wrap_model(tiny_model("llama"), name="llama")), Clock()
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=2), {"method": "ngram"})
    with monkeypatch.context() as patch:
        patch.setattr(telemetry, "perf_counter", clock)
        owners: dict[object, tuple[str, ...]] = {
            engine.scheduler: ("plan", "free_ended"),
            engine.policy: ("decide",),
            engine.runtime: ("reserve",),
            Drafting: ("ask_lookups", "ask_models"),
            engine.proposers: ("observe",),
            Batch: ("pack",),
            store_of(engine): ("view",),
            engine.runtime.target: ("forward",),
            engine_module: ("verify", "account"),
            TorchStep: ("commit", "__exit__"),
            Sequence: ("advance",),
            engine: ("_forget",),
        }
        for owner, names in owners.items():
            for name in names:
                patch.setattr(owner, name, clock.around(getattr(owner, name), name))
        engine.step()
    return engine, clock.now * 1e3


def check(engine: Engine, wall_ms: float) -> None:
    expected = dict.fromkeys(PARTS, 0.0)
    for part, seconds in SECONDS.values():
        expected[part] += seconds * 1e3
    assert engine.counters.profile == expected
    assert engine.counters.step_ms == wall_ms


def test_the_parts_of_a_step_add_up_to_its_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wall_ms = stepped(monkeypatch)
    check(engine, wall_ms)
    drain(engine)


@pytest.mark.parametrize("part", PARTS)
def test_a_boundary_that_is_not_booked_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted omission."""
    lap = Stopwatch.lap
    monkeypatch.setattr(Stopwatch, "lap", lambda watch, name: 0.0 if name == part else lap(watch, name))
    with pytest.raises(AssertionError):
        check(*stepped(monkeypatch))


def test_a_step_without_work_takes_no_time() -> None:
    engine = make_engine(wrap_model(tiny_model("llama"), name="llama"))
    assert engine.step() == [] and engine.counters.step_ms == 0
