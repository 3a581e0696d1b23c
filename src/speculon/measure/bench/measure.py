"""One measurement: a group of cases in one batch, and what the engine did step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Event
from speculon.measure.bench.workloads import Case

if TYPE_CHECKING:
    from speculon.engine.engine import Engine
    from speculon.engine.llm import LLM
    from speculon.engine.outputs import RequestOutput
    from speculon.measure.bench.arrivals import ServedRequest

GRAM, WINDOW = 16, 64  # tokens


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One target call."""

    rows: int
    spans: int  # sequences in it
    tokens: int  # committed
    decoding: bool  # no prompt tokens in it
    profile: Mapping[str, float]  # part of the step -> ms

    @property
    def forward_ms(self) -> float:
        return self.profile["forward"]

    @property
    def step_ms(self) -> float:
        return sum(self.profile.values())


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was written, and the time from submission to the last token, prompts included.

    Of requests that arrive at a rate: the time until the last one has begun (`arrivals.steady`).
    """

    seconds: float
    token_ids: list[list[int]]
    texts: list[str]
    stats: RequestStats = field(default_factory=RequestStats)
    steps: list[MeasuredStep] = field(default_factory=list)
    counted: int | None = None  # tokens written within `seconds`; None: all
    requests: list[ServedRequest] = field(default_factory=list)  # those that arrived at a rate

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids)) if self.counted is None else self.counted

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Over the steps that had no prompt tokens; None when there were none."""
        steps = decoding([self])
        ms = sum(step.step_ms for step in steps)
        return sum(step.tokens for step in steps) / ms * 1e3 if ms else None


def decoding(measurements: Iterable[Measurement]) -> list[MeasuredStep]:
    """The steps without prompt tokens."""
    return [step for measurement in measurements for step in measurement.steps if step.decoding]


def measure(llm: LLM, cases: list[Case], speculation: Mapping[str, Any], time: str = "") -> Measurement:
    """Runs all cases in one batch, in one mode.

    Pools are named after `time`: each case runs many times, and no run may draft from an earlier one.
    """
    with recording(llm.engine) as steps:
        began = perf_counter()
        prompts, params = [case.prompt for case in cases], [case.params for case in cases]
        outputs = llm.generate(prompts, params, speculation=asked(cases, speculation, time))
        seconds = perf_counter() - began
    texts = [output.text for output in outputs]
    return Measurement(seconds, [output.token_ids for output in outputs], texts, stats_of(outputs), steps)


def asked(cases: list[Case], speculation: Mapping[str, Any], time: str) -> list[dict[str, Any]]:
    """The speculation that each case asks for, with its pool."""
    return [{**speculation, "pool": case.user and f"{case.user}, {time}"} for case in cases]


def stats_of(outputs: Iterable[RequestOutput]) -> RequestStats:
    """Of all outputs together."""
    stats = RequestStats()
    for output in outputs:
        stats.add(output.outputs[0].stats)
    return stats


@contextmanager
def recording(engine: Engine) -> Iterator[list[MeasuredStep]]:
    """Records every step by the engine's counters, which only grow; the engine is not changed."""
    steps: list[MeasuredStep] = []
    stepped, scheduler, counters = engine.step, engine.scheduler, engine.counters

    def step() -> list[Event]:
        decoding = not scheduler.waiting and all(seq.pending == 1 for seq in scheduler.running)
        calls, rows, before = counters.steps, counters.rows, dict(counters.profile)
        events = stepped()
        if counters.steps > calls:
            tokens = sum(len(event.tokens) for event in events)
            profile = {part: ms - before[part] for part, ms in counters.profile.items()}
            steps.append(MeasuredStep(counters.rows - rows, len(events), tokens, decoding, profile))
        return events

    with in_place(engine, step=step):
        yield steps


@contextmanager
def in_place(engine: Engine, **parts: Any) -> Iterator[None]:
    """Other objects and methods in the place of an engine's own, while something is measured."""
    own = vars(engine)
    before = {name: own[name] for name in parts if name in own}
    own.update(parts)
    try:
        yield
    finally:
        for name in parts:
            del own[name]
        own.update(before)


def loops(token_ids: list[int]) -> bool:
    """Whether some 16 tokens in a row come twice within the last 64."""
    tail = token_ids[-WINDOW:]
    grams = [tuple(tail[i : i + GRAM]) for i in range(len(tail) - GRAM + 1)]
    return len(set(grams)) < len(grams)
