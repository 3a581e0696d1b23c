"""`speculon demo`: the shipped model edits and continues code it has never seen, with and without
speculation.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import counting, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.errors import BenchError
from speculon.proposers.registry import AUTO, OFF

if TYPE_CHECKING:
    from speculon.bench.measure import Measurement
    from speculon.bench.workloads import Case
    from speculon.llm import LLM
    from speculon.sequence import Event

MAX_TOKENS = 192
TEMPERATURE = 0.9  # of the continuation
SHOWN_LINES = 12  # of a file that is continued
ACCEPTED = "bold green"

# For a Python without the sources of its standard library.
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
    asks: bool  # through the chat template; else the prompt is continued


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
    mode: str  # as the benchmark names it
    speculative: Side
    times_faster: float
    same_text: bool
    why: str
    exact: bool | None  # equal to the one right answer, where there is one


def run(k: int | None, rounds: int, number: int, given: Given, as_json: bool) -> None:
    # else a run would find what another left
    settings = {"prefix_cache": False, **engine_settings(given), "state": None}
    EngineConfig(**settings)
    with loading(as_json) as tell:
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
        tell("looking for code the model has never seen")
        tasks = choose(llm, number)
    console = Console(highlight=False, quiet=as_json, soft_wrap=True)
    console.print(introduction(llm))
    label = AUTO if k is None else f"{AUTO}:{k}"
    outcomes = [perform(llm, task, label, rounds, console) for task in tasks]
    if as_json:
        print_json({"model": llm.config.model, "tasks": [asdict(outcome) for outcome in outcomes]})


def introduction(llm: LLM) -> Text:
    target = llm.engine.target
    return Text.assemble(
        f"{llm.config.model}: {target.num_parameters / 1e6:.1f} M parameters, {len(target.layers)} layers, {target.device}.\n",
        ("Green", ACCEPTED),
        " was drafted, by looking up what followed the same words before or by a small draft model,"
        " and accepted by the model, several tokens per call.",
    )


def choose(llm: LLM, number: int) -> list[Task]:
    """An edit and a continuation from files that the demo model was not trained on."""
    from speculon.bench.workloads import Size, build

    size = Size(number, min(MAX_TOKENS, llm.engine.max_context // 2), llm.engine.max_context)
    try:
        edit, code = (build(name, llm.tokenizer, size)[number - 1] for name in ("edit", "code"))
    except BenchError:
        edit, code = written_here(llm, size.max_tokens)
    # greedily, small models go in circles
    sampled = code.params.model_copy(update={"temperature": TEMPERATURE, "seed": number})
    return [
        Task(f"An edit: {edit.name}", edit, True),
        Task(f"A continuation: {code.name}, temperature {TEMPERATURE}", replace(code, params=sampled), False),
    ]


def written_here(llm: LLM, max_tokens: int) -> tuple[Case, Case]:
    from speculon.bench.workloads import Case, ask
    from speculon.demo import corpus

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompt = ask(llm.tokenizer, corpus.edit_prompt(FALLBACK, OLD, NEW))
    edit = Case(f"moving_average, {OLD} -> {NEW}", prompt, params, corpus.edit_answer(FALLBACK, OLD, NEW))
    start = FALLBACK + "\n\n\ndef moving_average_of_squares(values, size):\n"
    return edit, Case("moving_average", llm.tokenizer.encode(start), params)


def perform(llm: LLM, task: Task, label: str, rounds: int, console: Console) -> Outcome:
    """`label` is a mode as the benchmark names it: without K it runs under the policy that the engine is set
    to.
    """
    from speculon.bench.measure import measure
    from speculon.bench.plan import parse_mode

    modes: dict[str, dict[str, Any]] = {
        "plain": {**parse_mode(OFF).speculation},
        # else the last round's text would be drafted from
        "fast": {**parse_mode(label).speculation, "pool": ""},
    }
    console.print("", Text(task.title, style="bold underline"), sep="\n")
    write_live(llm, task, modes["fast"], console)
    measured: dict[str, list[Measurement]] = {"plain": [], "fast": []}
    with counting(console.quiet, "measuring", 2 * rounds, still=True) as advance:
        for i in range(rounds):
            for name in ("plain", "fast") if i % 2 == 0 else ("fast", "plain"):
                measured[name].append(measure(llm, [task.case], modes[name]))
                advance(1)
    outcome = compare(llm, task, label, **measured)
    console.print(as_table(outcome), "", sep="\n")
    console.print(Text(outcome.why), "", sep="\n")
    return outcome


def write_live(llm: LLM, task: Task, speculation: dict[str, Any], console: Console) -> None:
    """Shows the text as it is written; this run is not measured."""
    from speculon.text import Stream

    prompt = llm.tokenizer.decode(task.case.prompt)
    console.print(
        Text(prompt if task.asks else "\n".join(prompt.split("\n")[-SHOWN_LINES:]), style="dim"), end=""
    )
    text = Stream(llm.tokenizer)
    for event in llm.events(task.case.prompt, task.case.params, speculation=speculation):
        confirmed = accepted_drafts(event)
        for i, token in enumerate(event.tokens):
            console.print(Text(text.push([token]), style=ACCEPTED if i < confirmed else ""), end="")
        sys.stdout.flush()
    console.print(Text(text.flush()), "", sep="\n")


def accepted_drafts(event: Event) -> int:
    """A round brings accepted drafts and one token of the model's own, which is not in the text when it ends
    the text.
    """
    ended = event.finish is not None and event.finish.reason == "stop"
    return len(event.tokens) if ended else max(0, len(event.tokens) - 1)


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
        why += "\nThe edit is right, to the letter."
    elif loops(plain[0].token_ids[0]):
        why += (
            "\nThis text repeats itself, as small models do, and drafts of a repetition are mostly accepted."
        )
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
        f"{quick.target_calls} calls of the model instead of {slow.target_calls}, "
        f"because a call yielded {quick.tokens_per_call:.1f} tokens on average"
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
    return f"Same text: no; where they part, the model's two candidates are {gap:.1e} nat apart: {verdict}."


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
