"""`speculon demo`: the shipped model edits and continues held-out code, with and without speculation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from statistics import median, median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import counting, loading, output, print_json
from speculon.commands.side_by_side import ACCEPTED, Piece, Run, replay
from speculon.config import EngineConfig, SamplingParams
from speculon.errors import BenchError
from speculon.proposers.registry import AUTO, OFF

if TYPE_CHECKING:
    from speculon.bench.measure import Measurement
    from speculon.bench.workloads import Case, Size
    from speculon.llm import LLM
    from speculon.sequence import Event

MAX_TOKENS = 192
TEMPERATURE = 0.9  # of the continuation
SHOWN_LINES = 12  # of a file that is continued
GRAM = 8  # tokens of the pieces that a text is compared by
DISTINCT = 0.9  # share of distinct pieces, below which a text counts as repetitive
JUDGED_FROM = 48  # tokens, from which on a text is judged
CANDIDATES = 12  # files that are tried for a continuation that does not repeat itself
SEARCH_SECONDS = 15.0  # after which the best one so far is taken

# for a Python without the sources of its standard library
FALLBACK = '''def moving_average(values, size):
    """Averages of every `size` neighbours."""
    if size < 1:
        raise ValueError("size must be positive")
    total = sum(values[:size])
    averages = [total / size]
    for old, new in zip(values, values[size:]):
        total += new - old
        averages.append(total / size)
    return averages'''
OLD, NEW = "total", "running_sum"


@dataclass(frozen=True, slots=True)
class Task:
    title: str
    case: Case
    chat: bool  # through the chat template; else the prompt is continued


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
    why: str
    exact: bool | None  # equal to the only right answer, where there is one


@dataclass(frozen=True, slots=True)
class Recorded:
    """One measured run, and the times of its pieces."""

    measurement: Measurement
    pieces: tuple[Piece, ...]


def run(k: int | None, rounds: int, number: int | None, given: Given, as_json: bool) -> None:
    # without the caches a run could use results of another
    settings = {"prefix_cache": False, **engine_settings(given), "state": None}
    EngineConfig(**settings)
    with loading(as_json) as tell:
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
        tell("choosing held-out code")
        tasks = choose(llm, number)
    console = output(quiet=as_json)
    console.print(introduction(llm))
    label = AUTO if k is None else f"{AUTO}:{k}"
    outcomes = [perform(llm, task, label, rounds, console) for task in tasks]
    if as_json:
        print_json({"model": llm.config.model, "tasks": [asdict(outcome) for outcome in outcomes]})


def introduction(llm: LLM) -> Text:
    target = llm.engine.target
    size = f"{target.num_parameters / 1e6:.1f} M parameters, {len(target.layers)} layers, {target.device}"
    return Text.assemble(
        f"{llm.config.model}: {size}.\n",
        ("Green", ACCEPTED),
        " tokens are accepted drafts: a lookup or a small draft model proposed them, and the target verified"
        " several in one call.",
    )


def choose(llm: LLM, number: int | None) -> list[Task]:
    """An edit and a continuation from files that the demo model was not trained on."""
    from speculon.bench.workloads import Size, build

    most = min(MAX_TOKENS, llm.engine.max_context // 2)
    size = Size(number or 1, most, llm.engine.max_context)
    try:
        edit, code = (build(name, llm.tokenizer, size)[-1] for name in ("edit", "code"))
    except BenchError:
        edit, code = written_here(llm, size.max_tokens)
        code = sampled(code, number or 1)
    else:
        found = continuations(llm, replace(size, cases=CANDIDATES))
        code = sampled(code, number) if number else least_repetitive(llm, found)
    return [
        Task(f"An edit: {edit.name}", edit, True),
        Task(f"A continuation: {code.name}, temperature {TEMPERATURE}", code, False),
    ]


def sampled(case: Case, seed: int) -> Case:
    """Greedy texts of small models repeat themselves."""
    return replace(case, params=case.params.model_copy(update={"temperature": TEMPERATURE, "seed": seed}))


def continuations(llm: LLM, size: Size) -> Iterator[Case]:
    from speculon.bench.workloads import code

    return (
        sampled(case, i) for i, case in zip(range(1, size.cases + 1), code(llm.tokenizer, size), strict=False)
    )


def least_repetitive(llm: LLM, cases: Iterator[Case], clock: Callable[[], float] = perf_counter) -> Case:
    """The first case whose text does not repeat itself; after `SEARCH_SECONDS`, the best one so far."""
    began, best = clock(), (0, next(cases))
    for case in chain([best[1]], cases):
        best = max(best, (tokens_before_repetition(llm, case), case), key=lambda pair: pair[0])
        if best[0] == case.params.max_tokens or clock() - began > SEARCH_SECONDS:
            break
    return best[1]


def tokens_before_repetition(llm: LLM, case: Case) -> int:
    """The number of tokens until too many runs of tokens occur twice; a whole text counts as `max_tokens`."""
    tokens: list[int] = []
    with closing(llm.events(case.prompt, case.params, speculation={"pool": ""})) as events:
        for event in events:
            tokens += event.tokens
            if len(tokens) >= JUDGED_FROM and distinct(tokens) < DISTINCT:
                return len(tokens)
    return case.params.max_tokens or len(tokens)


def distinct(token_ids: list[int]) -> float:
    """The share of distinct runs of tokens: 1 where nothing occurs twice."""
    runs = [tuple(token_ids[i : i + GRAM]) for i in range(len(token_ids) - GRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 0.0


def written_here(llm: LLM, max_tokens: int) -> tuple[Case, Case]:
    from speculon.bench.workloads import Case, ask
    from speculon.demo import corpus

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompt = ask(llm.tokenizer, corpus.edit_prompt(FALLBACK, OLD, NEW))
    edit = Case(f"moving_average, {OLD} -> {NEW}", prompt, params, corpus.edit_answer(FALLBACK, OLD, NEW))
    start = FALLBACK + "\n\n\ndef moving_average_of_squares(values, size):\n"
    return edit, Case("moving_average", llm.tokenizer.encode(start), params)


def perform(llm: LLM, task: Task, label: str, rounds: int, console: Console) -> Outcome:
    """Runs a task in both modes and shows it. `label` is the benchmark's name of the speculative one."""
    from speculon.bench.plan import parse_mode

    modes: dict[str, dict[str, Any]] = {
        "plain": {**parse_mode(OFF).speculation},
        # no pool: else the text of the last round would be drafted from
        "fast": {**parse_mode(label).speculation, "pool": ""},
    }
    console.print("", Text(task.title, style="bold underline"), sep="\n")
    show_prompt(llm, task, console)
    warm = record(llm, task.case, modes["fast"])
    if not console.is_terminal:
        show_text(warm, console)
    recorded: dict[str, list[Recorded]] = {"plain": [], "fast": []}
    with counting(console.quiet, "measuring", 2 * rounds, still=True) as advance:
        for i in range(rounds):
            for name in ("plain", "fast") if i % 2 == 0 else ("fast", "plain"):
                recorded[name].append(record(llm, task.case, modes[name]))
                advance(1)
    if console.is_terminal and not console.quiet:
        replay(typical(recorded["plain"], recorded["fast"]), console)
    measured = {name: [one.measurement for one in runs] for name, runs in recorded.items()}
    outcome = compare(llm, task, label, **measured)
    console.print("", as_table(outcome), "", sep="\n")
    console.print(Text(outcome.why), "", sep="\n")
    return outcome


def record(llm: LLM, case: Case, speculation: dict[str, Any]) -> Recorded:
    """One run, with the time at which each of its tokens arrived."""
    from speculon.bench.measure import Measurement, recording
    from speculon.outputs import Completion, RequestOutput, absorb
    from speculon.text import final_text

    result = RequestOutput([], [Completion()])
    arrivals: list[tuple[float, Event]] = []
    with recording(llm.engine) as steps:
        began = perf_counter()
        for event in llm.events(case.prompt, case.params, speculation=speculation):
            arrivals.append((perf_counter() - began, event))
        seconds = perf_counter() - began
    for _, event in arrivals:
        absorb(result, event)
    one = result.outputs[0]
    whole = final_text(llm.tokenizer, one.token_ids, one.stop, case.params)
    measurement = Measurement(seconds, [one.token_ids], [whole], one.stats, steps)
    return Recorded(measurement, tuple(as_pieces(llm, case, arrivals)))


def as_pieces(llm: LLM, case: Case, arrivals: list[tuple[float, Event]]) -> Iterator[Piece]:
    """The text of each event, accepted drafts marked."""
    from speculon.text import Stream

    text = Stream.of(llm.tokenizer, case.params)
    for seconds, event in arrivals:
        tokens = zip_longest(event.tokens, event.sources)
        parts = [(text.push([token]), source is not None) for token, source in tokens]
        if event.finish:
            parts.append((text.flush(event.finish.matched), False))
        yield Piece(seconds, tuple(parts), len(event.tokens))


def show_prompt(llm: LLM, task: Task, console: Console) -> None:
    prompt = llm.tokenizer.decode(task.case.prompt)
    shown = prompt if task.chat else "\n".join(prompt.split("\n")[-SHOWN_LINES:])
    console.print(Text(shown, style="dim"), end="\n" if console.is_terminal else "")


def show_text(recorded: Recorded, console: Console) -> None:
    """The whole text, accepted drafts marked."""
    for piece in recorded.pieces:
        for part, accepted in piece.parts:
            console.print(Text(part, style=ACCEPTED if accepted else ""), end="")
    console.print()
    sys.stdout.flush()


def typical(plain: list[Recorded], fast: list[Recorded]) -> tuple[Run, Run]:
    """The round of the median speed-up, whose two runs are shown."""
    ratios = [
        slow.measurement.seconds / quick.measurement.seconds for slow, quick in zip(plain, fast, strict=True)
    ]
    at = ratios.index(median_low(ratios))
    names = ("plain", "speculative")
    runs = [
        Run(name, one[at].pieces, one[at].measurement.seconds)
        for name, one in zip(names, (plain, fast), strict=True)
    ]
    return runs[0], runs[1]


def compare(llm: LLM, task: Task, label: str, plain: list[Measurement], fast: list[Measurement]) -> Outcome:
    from speculon.bench.measure import loops

    ratio = median(
        quick.tokens_per_second / slow.tokens_per_second for quick, slow in zip(fast, plain, strict=True)
    )
    same = all(one.token_ids == plain[0].token_ids for one in (*plain, *fast))
    text, right = fast[0].texts[0], task.case.reference
    sides = side(plain), side(fast)
    why = f"{faster(ratio)}: {reason(*sides, plain, fast)}\n{sameness(llm, task.case, same, plain, fast)}"
    exact = None if right is None else text.strip() == right
    if exact:
        why += "\nThe edit is exactly right."
    elif loops(plain[0].token_ids[0]):
        why += "\nThis text repeats itself: most drafts of a repetition are accepted."
    return Outcome(task.title, text, sides[0], label, sides[1], ratio, same, why, exact)


def side(measurements: list[Measurement]) -> Side:
    stats = measurements[0].stats
    done = stats.speculation()
    return Side(
        tokens_per_second=median(one.tokens_per_second for one in measurements),
        ms=median(one.seconds for one in measurements) * 1e3,
        target_calls=stats.target_calls,
        tokens_per_call=stats.emitted / stats.target_calls,
        acceptance=done.acceptance_rate if done else None,
    )


def faster(ratio: float) -> str:
    if ratio > 1.05:
        return f"{ratio:.1f} times as fast"
    return "No faster" if ratio > 0.95 else f"Slower, {ratio:.2f} times as fast"


def reason(slow: Side, quick: Side, plain: list[Measurement], fast: list[Measurement]) -> str:
    from speculon.bench.cell import ms_by_rows

    words = (
        f"{quick.target_calls} target calls instead of {slow.target_calls}, "
        f"because a call brought {quick.tokens_per_call:.1f} tokens on average"
    )
    one = ms_by_rows(plain).get(1)
    checks = {rows: cost for rows, cost in ms_by_rows(fast).items() if rows > 1}
    if one is None or not checks:
        return words + "."
    rows = max(checks, key=lambda rows: checks[rows][1])  # the most frequent size
    ms, plain_ms = checks[rows][0], one[0]
    return (
        f"{words}; a call that verifies {rows - 1} drafts ({rows} rows, {ms:.1f} ms) "
        f"costs {ms / plain_ms:.1f} times a plain one ({plain_ms:.1f} ms)."
    )


def sameness(llm: LLM, case: Case, same: bool, plain: list[Measurement], fast: list[Measurement]) -> str:
    from speculon.bench.cell import tie_gap

    if same:
        return "Same text: yes, token for token."
    base = plain[0].token_ids[0]
    other = next(one.token_ids[0] for one in (*fast, *plain) if one.token_ids[0] != base)
    gap = tie_gap(llm, case, other, base)
    if gap is None:
        return "Same text: NO."
    verdict = "a numeric tie" if gap < 1e-4 else "more than a numeric tie"
    return (
        f"Same text: no; where they differ, the target's two candidates are {gap:.1e} nat apart: {verdict}."
    )


def as_table(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("tokens/s", "ms", "target calls", "tokens per call", "drafts accepted"):
        table.add_column(name, justify="right")
    for name, one in (("plain", outcome.plain), (outcome.mode, outcome.speculative)):
        share = "-" if one.acceptance is None else f"{one.acceptance:.0%}"
        figures = (
            f"{one.tokens_per_second:.0f}",
            f"{one.ms:.0f}",
            str(one.target_calls),
            f"{one.tokens_per_call:.2f}",
            share,
        )
        table.add_row(name, *figures, style="" if name == "plain" else "bold")
    return table
