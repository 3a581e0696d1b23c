"""Requests that arrive at a rate, as at a server, instead of batches that begin and wait together.

A batch of a fixed size ends with its longest text, which runs alone at last: that share of the time depends
on the lengths of the texts more than on the mode. Here each request that ends makes room for the next one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from speculon.decoding.sequence import Event
from speculon.engine.outputs import Completion, RequestOutput, absorb, write_texts
from speculon.measure.bench.measure import Measurement, asked, recording, stats_of
from speculon.measure.bench.workloads import Case

if TYPE_CHECKING:
    from speculon.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When each request arrives, in seconds since the first one."""

    times: list[float]
    concurrency: int  # requests that run at a time at most; a later one waits, and its waiting counts


@dataclass(slots=True)
class ServedRequest:
    """When the tokens of a request came, in seconds since the first request arrived."""

    arrived: float
    tokens: list[tuple[float, int]] = field(default_factory=list)  # when, and how many

    @property
    def began(self) -> float:
        """When its first token came, or its end where it has none."""
        return self.tokens[0][0]

    @property
    def first_token_ms(self) -> float:
        """From its arrival, so with the time that it waited for others."""
        return 1e3 * (self.began - self.arrived)

    @property
    def per_token_ms(self) -> float | None:
        """From its first token to its last, for each token after the first; None where there is none."""
        after = sum(count for _, count in self.tokens) - 1
        return 1e3 * (self.tokens[-1][0] - self.began) / after if after > 0 else None

    def note(self, seconds: float, event: Event) -> None:
        if event.tokens or event.finish:
            self.tokens.append((seconds, len(event.tokens)))


def poisson_times(count: int, rate: float, seed: str) -> list[float]:
    """The times of `count` arrivals of a Poisson process with `rate` a second, the first at 0.

    The same for the same seed: so every mode meets the same requests at the same times.
    """
    rng = random.Random(f"speculon bench {seed}")
    return [*accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0)]


def steady(requests: list[ServedRequest]) -> tuple[int, float]:
    """Tokens and seconds from the first arrival until the last request has begun.

    After that nothing takes the place of what ends, so what is left is a batch that shrinks.
    """
    end = max(request.began for request in requests)
    return sum(count for request in requests for at, count in request.tokens if at <= end), end


def serve(
    llm: LLM, cases: list[Case], speculation: Mapping[str, Any], arrivals: Arrivals, time: str = ""
) -> Measurement:
    """Runs the cases in one mode, each from its arrival on; the outputs are in the order of the cases."""
    outputs = [RequestOutput(case.prompt, [Completion()]) for case in cases]
    requests, options = [ServedRequest(at) for at in arrivals.times], asked(cases, speculation, time)
    running, coming, engine = dict[str, int](), deque(range(len(cases))), llm.engine
    with recording(engine) as steps:
        start = perf_counter()
        try:
            while coming or running:
                now = perf_counter() - start
                while coming and len(running) < arrivals.concurrency and requests[coming[0]].arrived <= now:
                    i = coming.popleft()
                    running[engine.add_request(cases[i].prompt, cases[i].params, options[i])] = i
                if not running:
                    sleep(requests[coming[0]].arrived - now)
                    continue
                for event in engine.step():
                    i = running[event.request_id]
                    absorb(outputs[i], event)
                    requests[i].note(perf_counter() - start, event)
                    if event.finish:
                        del running[event.request_id]
        finally:
            for request_id in running:
                engine.abort(request_id)
    for output, case in zip(outputs, cases, strict=True):
        write_texts(output, engine.tokenizer, case.params)
    tokens, seconds = steady(requests)
    return Measurement(
        seconds,
        [output.token_ids for output in outputs],
        [output.text for output in outputs],
        stats_of(outputs),
        steps,
        counted=tokens,
        requests=requests,
    )
