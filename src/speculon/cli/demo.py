"""`speculon demo`: a model answers questions and edits code, with and without speculation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from speculon.cli.app import Json, command
from speculon.cli.drafts import ACCEPTED, DraftStream, in_green
from speculon.cli.options import NO_REQUESTS, Flags, engine_settings, settings_from
from speculon.cli.pull import offer_to_pull
from speculon.cli.screen import counting, load_llm, output, print_json
from speculon.core.config import MAX_DRAFTS, EngineConfig, SamplingParams
from speculon.speculation.proposers.registry import AUTO, OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM
    from speculon.measure.bench.measure import Measurement
    from speculon.measure.bench.workloads import Case

EXPLANATION = (
    " tokens are accepted drafts: a lookup or a drafter proposed them, and the target verified several in "
    "one call."
)
DIFFERENT = {  # by whether the target is batch-invariant
    True: "Same text: NO, although the model is batch-invariant: this is an error.",
    False: "Same text: no. The model is not batch-invariant here, so two tokens of nearly equal probability "
    "may change places; `speculon check` says whether this was such a tie.",
}


class DemoPrompt(NamedTuple):
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
    DemoPrompt("A question", "Why is the sky blue? Explain it to a ten-year-old.", 96),
    DemoPrompt(
        "A story", "Write a short story about a lighthouse keeper who finds a letter in a bottle.", 96
    ),
    DemoPrompt(
        "An edit",
        f"Write the same class with the name Wallet. Show the whole code again.\n\n```python\n{FILE}\n```",
        160,
    ),
)


@dataclass(frozen=True, slots=True)
class ModeTiming:
    """One mode of a task; medians over the rounds."""

    tokens_per_second: float
    ms: float
    target_calls: int
    tokens_per_call: float
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    task: str
    text: str
    plain: ModeTiming
    mode: str  # the benchmark's name of it
    speculative: ModeTiming
    times_faster: float
    same_text: bool
    failed: bool  # a text differs, although the target is batch-invariant
    why: str


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
    offer_to_pull(EngineConfig(**settings).model, as_json)  # wrong settings are refused before that
    llm = load_llm(settings, as_json)
    console = output(quiet=as_json)
    facts = llm.engine.runtime.facts
    size = f"{facts.parameters / 1e6:.1f} M parameters, {facts.layers} layers, {facts.form['device']}"
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


def perform(llm: LLM, prompt: DemoPrompt, mode: str, rounds: int, console: Console) -> TaskOutcome:
    """Answers a prompt greedily, plainly and in a mode of the benchmark, and shows both."""
    from speculon.measure.bench.measure import measure
    from speculon.measure.bench.plan import parse_mode
    from speculon.measure.bench.workloads import Case, ask

    length = min(prompt.max_tokens, llm.engine.max_context // 2)
    params = SamplingParams(temperature=0, max_tokens=length)
    case = Case(prompt.title, ask(llm.tokenizer, prompt.text), params)
    # no pool: else the text of the last round would be drafted from
    plain, fast = parse_mode(OFF).speculation, {**parse_mode(mode).speculation, "pool": ""}
    console.print(
        "", Text(prompt.title, style="bold underline"), Text(prompt.text, style="dim"), "", sep="\n"
    )
    answer = llm.generate([case.prompt], params, speculation=fast)[0].outputs[0]
    console.print(in_green(DraftStream(llm.tokenizer, params, case.prompt).finish(answer)))
    runs: tuple[list[Measurement], list[Measurement]] = ([], [])
    with counting(console.quiet, "measuring", 2 * rounds, still=True) as advance:
        for i in range(rounds):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                runs[side].append(measure(llm, [case], (plain, fast)[side]))
                advance(1)
    outcome = compare(llm, case, mode, *runs)
    console.print("", as_table(outcome), "", Text(outcome.why), "", sep="\n")
    return outcome


def compare(
    llm: LLM, case: Case, mode: str, plain: list[Measurement], fast: list[Measurement]
) -> TaskOutcome:
    from speculon.measure.bench.measure import loops

    pairs = zip(fast, plain, strict=True)
    ratios = [quick.tokens_per_second / slow.tokens_per_second for quick, slow in pairs]
    text = plain[0].token_ids[0]
    same = all(run.token_ids[0] == text for run in (*fast, *plain))
    sides = side_of(plain), side_of(fast)
    sentences = [
        f"{faster(ratios)}: {sides[1].target_calls} target calls instead of {sides[0].target_calls}, because "
        f"a call yielded {sides[1].tokens_per_call:.1f} tokens on average.",
        "Same text: yes, token for token." if same else DIFFERENT[llm.engine.runtime.facts.batch_invariant],
    ]
    if loops(text):
        sentences.append("This text repeats itself: most drafts of a repetition are accepted.")
    return TaskOutcome(
        task=case.name,
        text=fast[0].texts[0],
        plain=sides[0],
        mode=mode,
        speculative=sides[1],
        times_faster=median(ratios),
        same_text=same,
        failed=not same and llm.engine.runtime.facts.batch_invariant,
        why="\n".join(sentences),
    )


def side_of(measurements: list[Measurement]) -> ModeTiming:
    stats = measurements[0].stats
    done = stats.speculation()
    return ModeTiming(
        tokens_per_second=median(run.tokens_per_second for run in measurements),
        ms=median(run.seconds for run in measurements) * 1e3,
        target_calls=stats.target_calls,
        tokens_per_call=stats.tokens_per_target_call,
        acceptance=done.acceptance_rate if done.rounds else None,
    )


def faster(ratios: list[float]) -> str:
    """By the median; no faster and no slower where the ratios are on both sides of 1."""
    ratio = median(ratios)
    if ratio > 1.05 and min(ratios) > 1:
        return f"{ratio:.1f} times as fast"
    if ratio < 0.95 and max(ratios) < 1:
        return f"Slower, {ratio:.2f} times as fast"
    return "No faster"


def as_table(outcome: TaskOutcome) -> Table:
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
