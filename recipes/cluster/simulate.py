"""A cluster in virtual time: how throughput, waiting times and prefix hits go with the number of replicas.

The router is `speculon.operations.cluster.routing`; replicas are batches whose steps take what `costs.py`
measured. The time of the ingress is not simulated: the table says how much of it there would be.

python -m recipes.cluster.simulate --out build/cluster     # minutes
"""

from __future__ import annotations

import argparse
import heapq
import json
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from speculon.operations.cluster.routing import Routing

COSTS = Path(__file__).with_name("costs.json")
SYSTEM, TURN, ANSWER = 64, 64, 96  # tokens: of every prompt's beginning, of a user's turn, of an answer
TURNS = 10  # of a conversation; then its user begins another
THINK_MS = 500.0  # mean time between an answer and the user's next turn
USERS = 24  # per replica
RANDOM, BUSY, ROUTED = "random", "less busy of two", "prefix and pool"


@dataclass(frozen=True)
class Costs:
    """Of one replica, in ms."""

    steps: dict[int, float]  # sequences -> a plain step
    prompt_token: float
    max_num_seqs: int = 32
    cache_tokens: int = 60_000  # that its prefix cache holds

    @classmethod
    def read(cls, path: Path = COSTS) -> Costs:
        found = json.loads(path.read_text())
        steps = {int(size): ms for size, ms in found["step_ms"].items()}
        return cls(steps, found["prompt_token_ms"])

    def step(self, sequences: int) -> float:
        """Between two measured sizes, on the line between them."""
        sizes = sorted(self.steps)
        at = min(max(1, bisect_left(sizes, sequences)), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        share = (sequences - low) / (high - low)
        return self.steps[low] + share * (self.steps[high] - self.steps[low])


@dataclass(eq=False)
class User:
    name: str
    tokens: list[int] = field(default_factory=list)  # of the conversation so far
    turns: int = 0
    talks: int = 0
    routing: Routing | None = None  # of the ingress that has the latest turn

    def speak(self, system: list[int], rng: Random) -> list[int]:
        if not self.turns % TURNS:
            self.tokens, self.talks = list(system), self.talks + 1
        self.turns += 1
        self.tokens += new_tokens(TURN, rng)
        return self.tokens


@dataclass(eq=False)
class Running:
    user: User
    talk: tuple[str, int]
    prompt: int
    sent: float
    left: int = ANSWER
    first: float = 0.0


class Replica:
    """Continuous batching: each step gives every sequence a token, and computes the prompts that came."""

    def __init__(self, name: str, costs: Costs):
        self.name, self.costs = name, costs
        self.waiting: deque[Running] = deque()
        self.batch: list[tuple[int, int, Running]] = []  # (its last step, order, sequence)
        self.steps, self.order = 0, count()
        self.busy = False
        self.cache: OrderedDict[tuple[str, int], int] = OrderedDict()  # conversation -> tokens
        self.cached = 0
        self.hits = self.read = 0

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.batch)

    def begin_step(self, now: float) -> float:
        """Admits what fits; returns when the step ends."""
        rows = 0
        while self.waiting and len(self.batch) < self.costs.max_num_seqs:
            new = self.waiting.popleft()
            rows += new.prompt - self._hit(new)
            heapq.heappush(self.batch, (self.steps + new.left, next(self.order), new))
            new.first = -1.0
        return now + self.costs.step(len(self.batch)) + rows * self.costs.prompt_token

    def end_step(self, now: float) -> list[Running]:
        self.steps += 1
        for _, _, one in self.batch:
            if one.first < 0:
                one.first = now
        done = []
        while self.batch and self.batch[0][0] <= self.steps:
            one = heapq.heappop(self.batch)[2]
            self._keep(one.talk, one.prompt + ANSWER)
            done.append(one)
        return done

    def _hit(self, new: Running) -> int:
        known = self.cache.get(new.talk, SYSTEM if self.cache else 0)
        hit = min(known, new.prompt - 1)
        self.hits, self.read = self.hits + hit, self.read + new.prompt
        self._keep(new.talk, new.prompt)
        return hit

    def _keep(self, talk: tuple[str, int], tokens: int) -> None:
        self.cached += tokens - self.cache.pop(talk, 0)
        self.cache[talk] = tokens
        while self.cached > self.costs.cache_tokens:
            self.cached -= self.cache.popitem(last=False)[1]


Choose = Callable[[Routing, Random, list[int], str, dict[str, int], int], str]


def by_routing(
    routing: Routing, rng: Random, prompt: list[int], pool: str, load: dict[str, int], limit: int
) -> str:
    return routing.choose(prompt, pool, load, limit)


def by_load(
    routing: Routing, rng: Random, prompt: list[int], pool: str, load: dict[str, int], limit: int
) -> str:
    return min(rng.sample(list(load), min(2, len(load))), key=load.__getitem__)


def by_chance(
    routing: Routing, rng: Random, prompt: list[int], pool: str, load: dict[str, int], limit: int
) -> str:
    return rng.choice(list(load))


ROUTERS: dict[str, Choose] = {ROUTED: by_routing, BUSY: by_load, RANDOM: by_chance}


class Cluster:
    """Users talk with replicas through ingresses, each of which routes by what it has seen itself."""

    def __init__(
        self, costs: Costs, replicas: int, users: int, choose: Choose, ingresses: int = 1, seed: int = 0
    ):
        self.costs, self.choose, self.rng = costs, choose, Random(seed)
        self.replicas = {f"r{i}": Replica(f"r{i}", costs) for i in range(replicas)}
        self.routings = [Routing(rng=Random(seed + i)) for i in range(ingresses)]
        self.users = [User(f"u{i}") for i in range(users)]
        self.system = new_tokens(SYSTEM, self.rng)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.done: list[tuple[float, Running]] = []
        self.turns: int | None = None
        self.route_seconds = 0.0

    def run(self, ms: float = float("inf"), turns: int | None = None) -> Cluster:
        """For so long, or until each user has had so many turns."""
        self.turns = turns  # of each user
        for user in self.users:
            self._at(self.rng.uniform(0, 2 * THINK_MS), self._speaks(user))
        while self.events and self.events[0][0] <= ms:
            now, _, action = heapq.heappop(self.events)
            action(now)
        return self

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), action))

    def _speaks(self, user: User) -> Callable[[float], None]:
        def speak(now: float) -> None:
            prompt = user.speak(self.system, self.rng)
            routing = self.rng.choice(self.routings)
            load = {name: replica.open for name, replica in self.replicas.items()}
            began = perf_counter()
            name = self.choose(routing, self.rng, prompt, user.name, load, self.costs.max_num_seqs)
            routing.sent(name, prompt, user.name)
            self.route_seconds += perf_counter() - began
            replica = self.replicas[name]
            replica.waiting.append(Running(user, (user.name, user.talks), len(prompt), now))
            if not replica.busy:
                self._step(replica, now)
            user.routing = routing

        return speak

    def _step(self, replica: Replica, now: float) -> None:
        replica.busy = bool(replica.open)
        if replica.busy:
            self._at(replica.begin_step(now), lambda when: self._stepped(replica, when))

    def _stepped(self, replica: Replica, now: float) -> None:
        for one in replica.end_step(now):
            self.done.append((now, one))
            one.user.tokens += new_tokens(ANSWER, self.rng)
            assert one.user.routing is not None
            one.user.routing.wrote(replica.name, one.user.tokens, one.user.name)
            if self.turns is None or one.user.turns < self.turns:
                self._at(now + self.rng.expovariate(1 / THINK_MS), self._speaks(one.user))
        self._step(replica, now)

    @property
    def hit_share(self) -> float:
        read = sum(replica.read for replica in self.replicas.values())
        return sum(replica.hits for replica in self.replicas.values()) / read


def new_tokens(n: int, rng: Random) -> list[int]:
    return [rng.randrange(50_000) for _ in range(n)]


def scaled(costs: Costs, replicas: int, choose: Choose, ms: float, ingresses: int = 1) -> dict[str, Any]:
    """Figures of a cluster whose users grow with it, without the first fifth of the time."""
    cluster = Cluster(costs, replicas, USERS * replicas, choose, ingresses).run(ms)
    late = [(now, one) for now, one in cluster.done if one.sent > ms / 5]
    whole, first = (
        sorted(now - one.sent for now, one in late),
        sorted(one.first - one.sent for _, one in late),
    )
    counted = sum(now > ms / 5 for now, _ in cluster.done)
    return {
        "replicas": replicas,
        "tokens_per_second": counted * ANSWER / (0.8 * ms) * 1e3,
        "first_p50": quantile(first, 0.5),
        "first_p99": quantile(first, 0.99),
        "whole_p50": quantile(whole, 0.5),
        "whole_p99": quantile(whole, 0.99),
        "hit_share": cluster.hit_share,
        "blocks": max(routing.blocks for routing in cluster.routings),
        "pools": max(routing.pools for routing in cluster.routings),
        "route_us": cluster.route_seconds / max(1, sum(user.turns for user in cluster.users)) * 1e6,
    }


def quantile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))]


def conversations(costs: Costs, replicas: int, choose: Choose, users: int = 20, ingresses: int = 1) -> float:
    """Share of prompt tokens found in the prefix cache: users of ten turns each."""
    return Cluster(costs, replicas, users, choose, ingresses).run(turns=TURNS).hit_share


def linear(rows: list[dict[str, Any]], within: float = 0.1) -> bool:
    """Whether throughput per replica, and p99, stay within a share of what one replica has."""
    one = rows[0]
    return all(
        row["tokens_per_second"] / row["replicas"] >= (1 - within) * one["tokens_per_second"]
        and row["whole_p99"] <= (1 + within) * one["whole_p99"]
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/cluster"))
    parser.add_argument("--costs", type=Path, default=COSTS, help="what costs.py has measured")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time")
    args = parser.parse_args()
    costs = Costs.read(args.costs)
    rows = [scaled(costs, n, by_routing, args.seconds * 1e3) for n in args.replicas]
    shares = {
        (n, name): conversations(costs, n, choose) for n in (2, 4, 8) for name, choose in ROUTERS.items()
    }
    alone = conversations(costs, 1, by_routing)
    report = as_table(rows) + "\n" + as_shares(alone, shares)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "simulation.md").write_text(report)
    print(report)
    if not linear(rows):
        raise SystemExit("not linear within 10 %")


def as_table(rows: list[dict[str, Any]]) -> str:
    head = ["replicas", "tokens/s", "per replica", "first token p50", "p99", "answer p50", "p99"]
    head += ["prefix hits", "router: blocks", "pools", "us per request"]
    lines = [line(head), line(["---"] * len(head))]
    for row in rows:
        each = row["tokens_per_second"] / row["replicas"]
        times = [f"{row[name]:.0f}" for name in ("first_p50", "first_p99", "whole_p50", "whole_p99")]
        lines.append(
            line(
                [
                    str(row["replicas"]),
                    f"{row['tokens_per_second']:.0f}",
                    f"{each:.0f}",
                    *times,
                    f"{row['hit_share']:.1%}",
                    str(row["blocks"]),
                    str(row["pools"]),
                    f"{row['route_us']:.0f}",
                ]
            )
        )
    return "\n".join(lines) + "\n"


def as_shares(alone: float, shares: dict[tuple[int, str], float]) -> str:
    lines = [line(["replicas", *ROUTERS]), line(["---"] * (1 + len(ROUTERS)))]
    lines.append(line(["1", *[f"{alone:.1%}"] * len(ROUTERS)]))
    for n in sorted({n for n, _ in shares}):
        cells = [f"{shares[n, name]:.1%} ({shares[n, name] / alone:.0%})" for name in ROUTERS]
        lines.append(line([str(n), *cells]))
    return "\n".join(lines) + "\n"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
