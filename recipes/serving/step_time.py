"""What HTTP costs the engine: the step time of 32 plain streams through the server and through
`LLM.generate`, alternated.

python -m recipes.serving.step_time            # one thread for each engine; needs two cores that do nothing
else
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from recipes.serving.server import Server, chunks

from speculon import LLM, SamplingParams
from speculon.measure.bench.provenance import commit, machine
from speculon.measure.bench.workloads import Size, build

OFF = {"method": "off"}
METRICS_DELAY = 0.3  # seconds until /metrics knows what has just happened
COUNTERS = ("speculon_steps_total", "speculon_step_rows_total", "speculon_step_seconds_total")

Clock = tuple[float, float, float]  # steps, rows, seconds


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds per step while every stream runs."""

    inside: float  # by the engine's own clock
    between: float  # from the tokens of one step to those of the next, as the reader of a stream sees it


def through_llm(llm: LLM, prompts: list[list[int]], tokens: int) -> Steps:
    arrivals: list[list[float]] = [[] for _ in prompts]
    clock: list[Clock] = []
    counters = llm.engine.counters

    def hear(prompt: int, new: int) -> None:
        arrivals[prompt].append(perf_counter())
        if prompt == 0 and all(arrivals):
            clock.append((counters.steps, counters.rows, counters.step_ms / 1e3))

    llm.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        speculation=OFF,
        on_token=hear,
    )
    return Steps(inside(clock[0], clock[-1], len(prompts)), between(arrivals))


async def through_server(server: Server, prompts: list[list[int]], tokens: int) -> Steps:
    arrivals: list[list[float]] = [[] for _ in prompts]
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "speculation": OFF}

    async def read(at: int) -> None:
        async for _ in chunks(server.port, "/v1/completions", {**body, "prompt": prompts[at]}):
            arrivals[at].append(perf_counter())

    async def clock() -> Clock:
        found = await asyncio.to_thread(server.metrics)
        steps, rows, seconds = (found[name] for name in COUNTERS)
        return steps, rows, seconds

    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(read(at)) for at in range(len(prompts))]
        while not all(arrivals):
            await asyncio.sleep(0.01)
        await asyncio.sleep(METRICS_DELAY)
        first = await clock()
        while all(len(times) < tokens - 20 for times in arrivals):  # /metrics is never ahead of the streams
            await asyncio.sleep(0.01)
        last = await clock()
        await asyncio.wait(reading)
    return Steps(inside(first, last, len(prompts)), between(arrivals))


def inside(first: Clock, last: Clock, streams: int) -> float:
    steps, rows, seconds = (b - a for a, b in zip(first, last, strict=True))
    assert rows == steps * streams, f"{rows} rows in {steps} steps of {streams} plain streams"
    return seconds / steps * 1e3


def between(arrivals: list[list[float]]) -> float:
    """From the last stream's first token to the first stream's last."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return (end - begin) / median(sum(begin < at <= end for at in times) for times in arrivals) * 1e3


def compare(
    server: Server, llm: LLM, *, streams: int = 32, tokens: int = 256, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Medians of `rounds` turns each, and the ratios of the turns' pairs; a first turn is discarded."""
    prompts = [
        case.prompt[:64]
        for case in build("code", llm.tokenizer, Size(streams, tokens, llm.engine.max_context))
    ]
    turns = [
        (through_llm(llm, prompts, tokens), asyncio.run(through_server(server, prompts, tokens)))
        for _ in range(1 + rounds)
    ]
    found: dict[str, dict[str, float]] = {}
    for name in ("inside", "between"):
        pairs = [(getattr(alone, name), getattr(served, name)) for alone, served in turns[1:]]
        alone, served = (median(side) for side in zip(*pairs, strict=True))
        found[name] = {"llm_ms": alone, "server_ms": served, "ratio": median(b / a for a, b in pairs)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with Server("--model", args.model, "--threads", "1", log=Path(folder, "log")) as server:
            llm = LLM(args.model, threads=1, speculation={"policy": "fixed"})
            found = compare(server, llm, streams=args.streams, tokens=args.tokens, rounds=args.rounds)
    print(json.dumps({**vars(args), **found, "machine": machine(), "commit": commit()}, indent=1))


if __name__ == "__main__":
    main()
