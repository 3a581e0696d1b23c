"""`speculon demo`: a model answers questions and edits code, with and without speculation."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from statistics import median, median_low
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from speculon.cli.app import Json, command
from speculon.cli.drafts import ACCEPTED, DraftStream, Piece, Replay, in_green, replay
from speculon.cli.options import NO_REQUESTS, Flags, engine_settings, settings_from
from speculon.cli.screen import counting, load_llm, output, print_json
from speculon.core.config import MAX_DRAFTS, EngineConfig, SamplingParams
from speculon.speculation.proposers.registry import AUTO, OFF

if TYPE_CHECKING:
    from speculon.decoding.sequence import Event
    from speculon.engine.llm import LLM
    from speculon.measure.bench.measure import Measurement
    from speculon.measure.bench.workloads import Case

EXPLANATION = (
    " tokens are accepted drafts: a lookup or a drafter proposed them, and the target verified several in "
    "one call."
)
TIE = 1e-4  # nat between two tokens that are equally likely but for rounding


class Prompt(NamedTuple):
    title: str
    text: str
    max_tokens: int


FILE: Final = '''class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def __repr__(self):
        return f"Account({self.owner!r}, {self.balance})"'''

PROMPTS: Final = (
    Prompt("A question", "Why is the sky blue? Explain it to a ten-year-old.", 96),
    Prompt("A story", "Write a short story about a lighthouse keeper who finds a letter in a bottle.", 96),
    Prompt(
        "An edit",
        f"Write the same class with the name Wallet. Show the whole code again.\n\n```python\n{FILE}\n```",
        160,
    ),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One mode of a task; medians over the rounds."""

    tokens_per_second: float
    ms: float
    target_calls: int
    tokens_per_call: float
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    task: str
    text: str
    plain: Side
    mode: str  # the benchmark's name of it
    speculative: Side
    times_faster: float
    same_text: bool
    failed: bool  # a text differs, though the target is batch-invariant, or by more than a numeric tie
    why: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """One measured run, and the times of its pieces."""

    measurement: Measurement
    pieces: tuple[Piece, ...]


@command("demo")
@settings_from(EngineConfig, without=("state", *NO_REQUESTS))
def demo(
    *,
    num_speculative_tokens: Annotated[
        int | None,
        Option(min=1, max=MAX_DRAFTS, help="K drafts in every round (default: set by the policy)"),
    ] = None,
    rounds: Annotated[int, Option(min=1, help="measurements of each mode, alternated")] = 2,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """A model answers questions and edits code, with and without speculation, and both texts are compared."""
    # without the caches a run could use results of another
    settings = {"prefix_cache": False, **engine_settings(flags), "state": None}
    EngineConfig(**settings)  # refuses wrong settings before torch is imported
    llm = load_llm(settings, as_json)
    console = output(quiet=as_json)
    target = llm.engine.target
    size = f"{target.num_parameters / 1e6:.1f} M parameters, {len(target.layers)} layers, {target.device}"
    green = Text("Green", ACCEPTED)
    console.print(Text.assemble(f"{llm.config.model}: {size}.\n", green, EXPLANATION))
    mode = AUTO if num_speculative_tokens is None else f"{AUTO}:{num_speculative_tokens}"
    outcomes = [perform(llm, prompt, mode, rounds, console) for prompt in PROMPTS]
    same = sum(outcome.same_text for outcome in outcomes)
    console.print(f"Plain and speculative texts are equal for {same} of {len(outcomes)} prompts.")
    if as_json:
        print_json({"model": llm.config.model, "tasks": [asdict(outcome) for outcome in outcomes]})
    if any(outcome.failed for outcome in outcomes):
        raise SystemExit(1)


def perform(llm: LLM, prompt: Prompt, mode: str, rounds: int, console: Console) -> Outcome:
    """Answers a prompt greedily, plainly and in a mode of the benchmark, and shows both."""
    from speculon.measure.bench.plan import parse_mode
    from speculon.measure.bench.workloads import Case, ask

    length = min(prompt.max_tokens, llm.engine.max_context // 2)
    params = SamplingParams(temperature=0, max_tokens=length)
    case = Case(prompt.title, ask(llm.tokenizer, prompt.text), params)
    options: dict[str, dict[str, Any]] = {
        "plain": {**parse_mode(OFF).speculation},
        # no pool: else the text of the last round would be drafted from
        "fast": {**parse_mode(mode).speculation, "pool": ""},
    }
    console.print("", Text(prompt.title, style="bold underline"), sep="\n")
    console.print(Text(prompt.text, style="dim"), "", sep="\n")
    warm_up = record(llm, case, options["fast"])
    if not console.is_terminal:
        for piece in warm_up.pieces:
            console.print(in_green(piece.runs), end="")
        console.print()
        sys.stdout.flush()
    runs: dict[str, list[Recorded]] = {"plain": [], "fast": []}
    with counting(console.quiet, "measuring", 2 * rounds, still=True) as advance:
        for i in range(rounds):
            for name in ("plain", "fast") if i % 2 == 0 else ("fast", "plain"):
                runs[name].append(record(llm, case, options[name]))
                advance(1)
    if console.is_terminal and not console.quiet:
        replay(typical(runs["plain"], runs["fast"]), console)
    measured = {name: [run.measurement for run in some] for name, some in runs.items()}
    outcome = compare(llm, case, mode, **measured)
    console.print("", as_table(outcome), "", sep="\n")
    console.print(Text(outcome.why), "", sep="\n")
    return outcome


def record(llm: LLM, case: Case, speculation: dict[str, Any]) -> Recorded:
    """One run, with the time at which each of its tokens arrived."""
    from speculon.decoding.text.tokenizer import final_text
    from speculon.engine.outputs import Completion, RequestOutput, absorb
    from speculon.measure.bench.measure import Measurement, recording

    answer = Completion()
    arrivals: list[tuple[float, Event]] = []
    with recording(llm.engine) as steps:
        began = perf_counter()
        for event in llm.events(case.prompt, case.params, speculation=speculation):
            arrivals.append((perf_counter() - began, event))
        seconds = perf_counter() - began
    for _, event in arrivals:
        absorb(RequestOutput([], [answer]), event)
    answer.text = final_text(llm.tokenizer, answer.token_ids, answer.stop, case.params, case.prompt)
    stream, pieces = DraftStream(llm.tokenizer, case.params, case.prompt), list[Piece]()
    for arrived, event in arrivals:
        runs = [*stream.push(event.tokens, event.sources), *(stream.finish(answer) if event.finish else ())]
        pieces.append(Piece(arrived, tuple(runs), len(event.tokens)))
    measurement = Measurement(seconds, [answer.token_ids], [answer.text], answer.stats, steps)
    return Recorded(measurement, tuple(pieces))


def typical(plain: list[Recorded], fast: list[Recorded]) -> tuple[Replay, Replay]:
    """The round of the median speed-up, whose two runs are shown."""
    pairs = list(zip(plain, fast, strict=True))
    ratios = [slow.measurement.seconds / quick.measurement.seconds for slow, quick in pairs]
    slow, quick = pairs[ratios.index(median_low(ratios))]
    return (
        Replay("plain", slow.pieces, slow.measurement.seconds),
        Replay("speculative", quick.pieces, quick.measurement.seconds),
    )


def compare(llm: LLM, case: Case, mode: str, plain: list[Measurement], fast: list[Measurement]) -> Outcome:
    from torch import float32

    from speculon.measure.bench.cell import tie_gap
    from speculon.measure.bench.measure import loops

    pairs = zip(fast, plain, strict=True)
    ratios = [quick.tokens_per_second / slow.tokens_per_second for quick, slow in pairs]
    text = plain[0].token_ids[0]
    others = [run.token_ids[0] for run in (*fast, *plain) if run.token_ids[0] != text]
    gaps = [tie_gap(llm, case, other, text) for other in others]
    gap = None if None in gaps else max((nats for nats in gaps if nats is not None), default=0.0)
    sides = side_of(plain), side_of(fast)
    same = sameness(gap) if others else "Same text: yes, token for token."
    target = llm.engine.target
    failed = bool(others) and (target.batch_invariant or (target.dtype is float32 and not tied(gap)))
    why = f"{faster(ratios)}: {reason(*sides, plain, fast)}\n{same}"
    if loops(text):
        why += "\nThis text repeats itself: most drafts of a repetition are accepted."
    return Outcome(
        task=case.name,
        text=fast[0].texts[0],
        plain=sides[0],
        mode=mode,
        speculative=sides[1],
        times_faster=median(ratios),
        same_text=not others,
        failed=failed,
        why=why,
    )


def side_of(measurements: list[Measurement]) -> Side:
    stats = measurements[0].stats
    done = stats.speculation()
    return Side(
        tokens_per_second=median(run.tokens_per_second for run in measurements),
        ms=median(run.seconds for run in measurements) * 1e3,
        target_calls=stats.target_calls,
        tokens_per_call=stats.tokens_per_target_call,
        acceptance=done.acceptance_rate if done else None,
    )


def faster(ratios: list[float]) -> str:
    """By the median; no faster and no slower where the ratios are on both sides of 1."""
    ratio = median(ratios)
    if ratio > 1.05 and min(ratios) > 1:
        return f"{ratio:.1f} times as fast"
    if ratio < 0.95 and max(ratios) < 1:
        return f"Slower, {ratio:.2f} times as fast"
    return "No faster"


def reason(slow: Side, quick: Side, plain: list[Measurement], fast: list[Measurement]) -> str:
    from speculon.measure.bench.cell import ms_by_rows

    calls = (
        f"{quick.target_calls} target calls instead of {slow.target_calls}, "
        f"because a call yielded {quick.tokens_per_call:.1f} tokens on average"
    )
    plain_call = ms_by_rows(plain).get(1)
    checks = {rows: cost for rows, cost in ms_by_rows(fast).items() if rows > 1}
    if plain_call is None or not checks:
        return calls + "."
    rows = max(checks, key=lambda rows: checks[rows][1])  # the most frequent size
    ms, plain_ms = checks[rows][0], plain_call[0]
    return (
        f"{calls}; a call that verifies {rows - 1} drafts ({rows} rows, {ms:.1f} ms) "
        f"costs {ms / plain_ms:.1f} times a plain one ({plain_ms:.1f} ms)."
    )


def tied(gap: float | None) -> bool:
    return gap is not None and gap < TIE


def sameness(gap: float | None) -> str:
    """Of texts that differ, by the `gap` between the target's two candidates there (None: not comparable)."""
    if gap is None:
        return "Same text: NO."
    verdict = "a numeric tie" if tied(gap) else "more than a numeric tie"
    return (
        f"Same text: no; where they differ, the target's two candidates are {gap:.1e} nat apart: {verdict}."
    )


def as_table(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("tokens/s", "ms", "target calls", "tokens per call", "drafts accepted"):
        table.add_column(name, justify="right")
    for name, side in (("plain", outcome.plain), (outcome.mode, outcome.speculative)):
        table.add_row(
            name,
            f"{side.tokens_per_second:.0f}",
            f"{side.ms:.0f}",
            str(side.target_calls),
            f"{side.tokens_per_call:.2f}",
            "-" if side.acceptance is None else f"{side.acceptance:.0%}",
            style="" if name == "plain" else "bold",
        )
    return table
