"""`speculon replay`: what a record of rounds reached, and what other policies would have made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from speculon.bench.replay import BEYOND, OTHERS, Replay
from speculon.bench.simulate import play
from speculon.commands.screen import print_json
from speculon.config import MAX_DRAFTS, SpeculationConfig
from speculon.control.policies import POLICIES, Policies
from speculon.errors import InvalidParameter
from speculon.events import read

PLAIN = "plain"
FITTED = "at fitted costs"
FIXED = "fixed"
SEVERAL = (1, 2, 4, 8, 16)  # K of `fixed` alone
ALWAYS = (
    "Prompts are left out on both sides; what a policy takes to decide is the record's own. Texts begin after as much work as "
    "in the record. Free pages, and what a drafter learns from other drafts, are not replayed."
)


@dataclass(frozen=True, slots=True)
class Line:
    """One policy, or the record itself."""

    policy: str
    tokens_per_second: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    others: float = 0.0  # share of its proposals that were taken from other texts
    beyond: float = 0.0  # share that goes beyond what was verified
    seconds: float = 0.0  # that the simulation took

    @property
    def acceptance(self) -> str:
        return f"{self.accepted / self.drafted:.0%}" if self.drafted else "-"


def run(file: Path, policies: str, seed: int, as_json: bool) -> None:
    asked = list(read_policies(policies))
    recording = read(file)
    scene = Replay(recording)
    done = scene.reached
    counts = (done.tokens, done.rounds, done.drafted, done.accepted)
    lines = [
        Line(name, 1e3 * done.tokens / ms, *counts)
        for name, ms in (("as recorded", done.ms), (FITTED, done.fitted_ms))
    ]
    for name, k in asked:
        began, scene = perf_counter(), Replay(recording, k)
        own = Policies(SpeculationConfig())
        played = play(own.of(FIXED if name == PLAIN else name), scene, seed=seed, costs=own.costs)
        proposals = max(1, scene.sources.total())
        shares = {"others": scene.sources[OTHERS] / proposals, "beyond": scene.sources[BEYOND] / proposals}
        drafted = sum(drafted.total() for drafted in played.drafted)
        label = name if k in (0, None) else f"{name}:{k}"
        rate, rounds = 1e3 * played.tokens / played.ms, len(played.rates)
        lines.append(
            Line(
                label,
                rate,
                played.tokens,
                rounds,
                drafted,
                played.accepted,
                **shares,
                seconds=perf_counter() - began,
            )
        )
    if as_json:
        return print_json(
            {
                "record": recording.header.model_dump(),
                "policies": [asdict(one) for one in lines],
                "notes": scene.notes,
            }
        )
    show(lines, [*scene.notes, ALWAYS])


def read_policies(text: str) -> Iterator[tuple[str, int | None]]:
    """(name, K) of each, plain decoding first."""
    yield PLAIN, 0
    for name, colon, k in (part.strip().partition(":") for part in text.split(",")):
        if name not in POLICIES:
            raise InvalidParameter("policy", name, f"known are {', '.join(POLICIES)}")
        if colon and not (k.isdecimal() and 0 < int(k) <= MAX_DRAFTS):
            raise InvalidParameter("policy", f"{name}:{k}", f"K is a number from 1 to {MAX_DRAFTS}")
        yield from (
            ((name, several) for several in SEVERAL)
            if name == FIXED and not colon
            else [(name, int(k) if colon else None)]
        )


def show(lines: list[Line], notes: list[str]) -> None:
    table = Table("policy", box=None, header_style="bold")
    for column in ("tok/s", "tokens", "rounds", "drafts", "accepted", "others'", "beyond"):
        table.add_column(column, justify="right")
    for one in lines:
        shares = (
            (f"{one.others:.0%}", f"{one.beyond:.0%}") if one.drafted and one not in lines[:2] else ("-", "-")
        )
        cells = (
            f"{one.tokens_per_second:.1f}",
            str(one.tokens),
            str(one.rounds),
            str(one.drafted),
            one.acceptance,
        )
        table.add_row(one.policy, *cells, *shares)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "others': share of the proposals taken from other texts, as the text itself was never asked then; beyond: share of those "
        "that go further than the record verified, where acceptance is that of the position everywhere.",
        style="dim",
    )
    for note in notes:
        console.print(note, style="dim", markup=False)
