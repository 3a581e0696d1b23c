"""`speculon replay`: the speed of a record of rounds, and of other policies on the same requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console

from speculon.bench.render import terminal_table
from speculon.bench.replay import BEYOND, OTHERS, Replay
from speculon.bench.simulate import simulate
from speculon.commands.screen import print_json
from speculon.config import MAX_DRAFTS, SpeculationConfig
from speculon.control.policies import POLICIES, Policies
from speculon.errors import InvalidParameter
from speculon.events import Recording, read

PLAIN = "plain"
FITTED = "at fitted costs"
FIXED = "fixed"
SEVERAL = (1, 2, 4, 8, 16)  # K of `fixed` alone
ALWAYS = (
    "Prompts are left out on both sides; the time in which a policy decides is the record's. Sequences begin "
    "after as much work as in the record. Free pages, and what a drafter learns from other drafts, are not "
    "replayed."
)
LEGEND = (
    "others': share of the proposals taken from other sequences, since this one was not asked at that time; "
    "beyond: share of those longer than what the record verified, where acceptance is the mean of the "
    "position."
)
COLUMNS = ("policy", "tok/s", "tokens", "rounds", "drafts", "accepted", "others'", "beyond")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy, or the record itself."""

    policy: str
    tokens_per_second: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    others: float | None = None  # share of its proposals that come from other sequences
    beyond: float | None = None  # share that is longer than what was verified
    seconds: float = 0.0  # of the simulation

    def cells(self) -> tuple[str, ...]:
        shares = (self.accepted / self.drafted, self.others, self.beyond) if self.drafted else (None,) * 3
        counts = (f"{self.tokens_per_second:.1f}", self.tokens, self.rounds, self.drafted)
        return (self.policy, *map(str, counts), *("-" if one is None else f"{one:.0%}" for one in shares))


def run(file: Path, policies: str, seed: int, as_json: bool) -> None:
    named = list(read_policies(policies))
    recording = read(file)
    recorded = Replay(recording)
    total = recorded.totals
    counts = (total.tokens, total.rounds, total.drafted, total.accepted)
    times = (("as recorded", total.ms), (FITTED, total.fitted_ms))
    rows = [PolicyRow(name, 1e3 * total.tokens / ms, *counts) for name, ms in times]
    rows += [replay(recording, name, k, seed) for name, k in named]
    if as_json:
        record = recording.header.model_dump()
        return print_json({"record": record, "policies": list(map(asdict, rows)), "notes": recorded.notes})
    show(rows, [*recorded.notes, ALWAYS])


def replay(recording: Recording, name: str, k: int | None, seed: int) -> PolicyRow:
    began, environment = perf_counter(), Replay(recording, k)
    own = Policies(SpeculationConfig())
    policy = own.of(FIXED if name == PLAIN else name)
    found = simulate(policy, environment, seed=seed, costs=own.costs)
    proposals = max(1, environment.sources.total())
    return PolicyRow(
        name if k in (0, None) else f"{name}:{k}",
        1e3 * found.tokens / found.ms,
        found.tokens,
        len(found.rates),
        sum(drafted.total() for drafted in found.drafted),
        found.accepted,
        environment.sources[OTHERS] / proposals,
        environment.sources[BEYOND] / proposals,
        perf_counter() - began,
    )


def read_policies(text: str) -> Iterator[tuple[str, int | None]]:
    """(name, K) of each, plain decoding first."""
    yield PLAIN, 0
    for name, colon, k in (part.strip().partition(":") for part in text.split(",")):
        if name not in POLICIES:
            raise InvalidParameter("policy", name, f"known are {', '.join(POLICIES)}")
        if colon and not (k.isdecimal() and 0 < int(k) <= MAX_DRAFTS):
            raise InvalidParameter("policy", f"{name}:{k}", f"K is a number from 1 to {MAX_DRAFTS}")
        if name == FIXED and not colon:
            yield from ((name, several) for several in SEVERAL)
        else:
            yield name, int(k) if colon else None


def show(rows: list[PolicyRow], notes: list[str]) -> None:
    console = Console(highlight=False)
    console.print(verdict(rows), style="bold", markup=False)
    console.print("", terminal_table("", COLUMNS, [row.cells() for row in rows]), sep="\n")
    for line in (LEGEND, *notes):
        console.print(line, style="dim", markup=False)


def verdict(rows: list[PolicyRow]) -> str:
    """The fastest policy, over plain decoding; both at fitted costs."""
    plain = next(row for row in rows if row.policy == PLAIN)
    best = max((row for row in rows[2:]), key=lambda row: row.tokens_per_second)
    if best is plain:
        return "No policy is faster than plain decoding in this record."
    ratio = best.tokens_per_second / plain.tokens_per_second
    return f"Fastest policy: {best.policy}, {ratio:.2f}x plain decoding."
