"""What the ingress costs, and prefix hits of two real replicas, beside `speculon serve`.

All servers run all the time, and take turns. Needs the extra `ray`; README.md has the commands.

python -m recipes.cluster.measure --out build/cluster     # minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx2 as httpx
from recipes.serving.server import Server

from speculon.measure.bench.provenance import commit, machine

FLAGS = ("--model demo --threads 1 --method off --no-warmup --num-blocks 2048").split()
SINGLE, CLUSTER, TWO = (
    "speculon serve",
    "speculon serve --replicas 1",
    "speculon serve --replicas 2",
)
FAST = f"{CLUSTER}, faster paths"  # of Ray, which are off by default
FASTER = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
COMMAND = "python -m recipes.cluster.measure"
REQUESTS, TOKENS = 30, 150
USERS, TURNS, TURN, ANSWER = 20, 10, 64, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/cluster"))
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken, in turns")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"command": COMMAND, "commit": commit(), "machine": machine()}
    compared = (SINGLE, CLUSTER, FAST)
    with servers(*compared) as made:
        found["overhead"] = overhead(dict(zip(compared, made, strict=True)), args.rounds)
    print(json.dumps(found["overhead"]), flush=True)
    found["hits"] = hits()
    (args.out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "measured.md").write_text(report := as_text(found))
    print(report)


@contextmanager
def servers(*commands: str) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = []
        for i, command in enumerate(commands):
            flags = FLAGS + command.partition(",")[0].split()[2:]
            env = os.environ | (FASTER if command == FAST else {})
            made.append(stack.enter_context(Server(*flags, log=logs / f"{i}.log", env=env)))
        yield made


def overhead(servers: dict[str, Server], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, in ms: a request for one token, and from chunk to chunk of streams; then the
    processor time that all processes but the engine took for each.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    idle = {name: idle_share(server) for name, server in servers.items()}
    for turn in range(rounds + 1):
        for name in servers if turn % 2 else reversed(servers):
            server, figures = servers[name], dict[str, float]()
            with processor_time(server, idle[name], REQUESTS) as cpu:
                figures["request"] = one_token(server.url)
            figures["request: cpu"] = cpu[0]
            for streams in (1, 8):
                with processor_time(server, idle[name], streams * TOKENS) as cpu:
                    figures[f"chunk at {streams}"] = asyncio.run(between_chunks(server.url, streams))
                figures[f"chunk at {streams}: cpu"] = cpu[0]
            if turn:  # the first one warms up
                runs[name].append(figures)
    return {name: {key: median(run[key] for run in all_) for key in all_[0]} for name, all_ in runs.items()}


@contextmanager
def processor_time(server: Server, idle: float, count: int) -> Iterator[list[float]]:
    """ms for each of `count`, beyond the share of a core that the processes take when nobody asks."""
    found: list[float] = []
    began, before = perf_counter(), used_ms(server)
    yield found
    found.append((used_ms(server) - before - idle * (perf_counter() - began) * 1e3) / count)


def idle_share(server: Server, seconds: float = 10.0) -> float:
    before = used_ms(server)
    sleep(seconds)
    return (used_ms(server) - before) / seconds / 1e3


def used_ms(server: Server) -> float:
    """Processor time of the server's processes so far, without the engines'."""
    below, ticks = {server.process.pid}, 0
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(path.name) in below or int(fields[1]) in below:
                below.add(int(path.name))
                if b"spawn_main" not in (path / "cmdline").read_bytes():
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") * 1e3


def one_token(url: str) -> float:
    times = []
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        for i in range(REQUESTS):
            began = perf_counter()
            body = {"prompt": [i + 5, 6, 7], "max_tokens": 1, "temperature": 0}
            client.post("/v1/completions", json=body).raise_for_status()
            times.append((perf_counter() - began) * 1e3)
    return median(times)


async def between_chunks(url: str, streams: int) -> float:
    """ms from chunk to chunk, over whole streams: a chunk is a token."""

    async def one(client: httpx.AsyncClient, number: int) -> float:
        body = {"prompt": [number + 5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "stream": True}
        times = []
        async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(perf_counter())
        assert len(times) == TOKENS, len(times)
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
        return median(await asyncio.gather(*(one(client, i) for i in range(streams))))


def hits() -> dict[str, float]:
    """Share of prompt tokens found in prefix caches: users of ten turns each, four at a time."""
    with servers(SINGLE) as (one,):
        alone = conversations(lambda: one.url)
    with servers(TWO) as (one,):
        routed = conversations(lambda: one.url)
    with servers(SINGLE, SINGLE) as pair:
        by_chance = conversations(lambda: Random(perf_counter()).choice(pair).url)
    return {"one engine": alone, "two replicas": routed, "two engines at random": by_chance}


def conversations(url: Callable[[], str]) -> float:
    async def user(client: httpx.AsyncClient, number: int, limit: asyncio.Semaphore) -> tuple[int, int]:
        rng, tokens, cached, read = Random(number), [], 0, 0
        for _ in range(TURNS):
            tokens += [rng.randrange(5, 2000) for _ in range(TURN)]
            body = {"prompt": tokens, "max_tokens": ANSWER, "temperature": 0, "user": f"u{number}"}
            async with limit:
                reply = await client.post(url() + "/v1/completions", json=body)
            answer = reply.raise_for_status().json()
            usage = answer["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            read += usage["prompt_tokens"]
            tokens += [rng.randrange(5, 2000) for _ in range(ANSWER)]
        return cached, read

    async def run() -> float:
        limit = asyncio.Semaphore(4)
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            counts = await asyncio.gather(*(user(client, i, limit) for i in range(USERS)))
        return sum(cached for cached, _ in counts) / sum(read for _, read in counts)

    return asyncio.run(run())


def as_text(found: dict[str, Any]) -> str:
    costs, shares = found["overhead"], found["hits"]
    lines = ["| ms | " + " | ".join(costs[SINGLE]) + " |", "| --- |" + " --- |" * len(costs[SINGLE])]
    lines += [
        f"| {name} | " + " | ".join(f"{ms:.2f}" for ms in row.values()) + " |" for name, row in costs.items()
    ]
    for name in (CLUSTER, FAST):
        more = [costs[name][key] - costs[SINGLE][key] for key in costs[SINGLE]]
        lines += [f"| {name}: more | " + " | ".join(f"{ms:.2f}" for ms in more) + " |"]
    lines += [""]
    lines += ["| | prefix hits |", "| --- | --- |"]
    lines += [f"| {name} | {share:.1%} |" for name, share in shares.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
