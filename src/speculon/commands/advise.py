"""`speculon advise`: does drafting help here, with which settings, and how sure is that?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from speculon.bench import advise_report, advise_settings, advise_words, workloads
from speculon.bench.advise import DEEPEST, Advice, Wish, advise, total
from speculon.bench.advise_prompts import Sample, Split, as_cases, own_cases, read_lines
from speculon.commands.generate import read_text
from speculon.commands.options import Given, engine_settings, pick
from speculon.commands.screen import counting, errors, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.errors import InvalidParameter

FOLDER = Path("speculon-advise")
PROMPTS, MAX_TOKENS = 8, 96  # per built-in workload, and written per prompt


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure on: prompts of one's own, or the benchmark's."""

    prompts: list[str]
    files: list[Path]
    chat: bool
    workloads: tuple[str, ...] | None

    def samples(self) -> list[Sample]:
        """Prompts first, then files; a name that ends with .jsonl has a prompt or a chat on every line."""
        found = [Sample("prompts", prompt) for prompt in self.prompts]
        for path in self.files:
            text = read_text(path)
            found += read_lines(path.name, text) if path.suffix == ".jsonl" else [Sample(path.name, text)]
            if not found:
                raise InvalidParameter("prompt-file", str(path), "has no line")
        if any(sample.content == "" for sample in found):
            raise InvalidParameter("prompt", "", "is empty")
        return found

    def own(self, model: str, samples: list[Sample], params: dict[str, Any]) -> tuple[str, ...]:
        """The built-in workloads to take where no prompt is given; none where some are."""
        if samples:
            if self.workloads:
                raise InvalidParameter(
                    "workloads", ",".join(self.workloads), "either these or prompts of your own"
                )
            return ()
        if not self.workloads and model != "demo":
            raise InvalidParameter(
                "prompt", None, "give some by --prompt or --prompt-file, as they will be used; or --workloads"
            )
        wrong = next((name for name in params if name != "max_tokens"), None)
        if wrong:
            raise InvalidParameter(
                wrong, params[wrong], "built-in workloads bring their own; NAME@T is one at temperature T"
            )
        for name in self.workloads or ():
            workloads.parse(name)
        return self.workloads or tuple(workloads.WORKLOADS)


def run(
    task: Task, asked: dict[str, Any], path: Path | None, out: Path | None, given: Given, as_json: bool
) -> None:
    settings = {**engine_settings(given), "prefix_cache": False, "state": None}
    settings["speculation"] = {"num_speculative_tokens": DEEPEST, **settings.get("speculation", {})}
    config = EngineConfig(**settings)  # what is wrong is told before torch is imported
    wish = Wish(k=config.speculation.most(), method=config.speculation.method, **asked)
    said_params = pick(SamplingParams, given)
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, **said_params})
    samples = task.samples()
    own = task.own(config.model, samples, said_params)
    if path:
        advise_settings.check_writable(path)
    with loading(as_json) as tell:
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
    if own:
        cases = own_cases(
            own, llm.tokenizer, params.max_tokens or MAX_TOKENS, PROMPTS, llm.engine.max_context
        )
    else:
        cases = as_cases(samples, llm.tokenizer, params, task.chat)
    split = Split.of(cases)
    with counting(as_json, "measuring", total(split, wish), still=True) as advance:
        advice = advise(llm, split, wish, advance)
    out = out or (None if as_json else FOLDER)
    said = advise_report.to_dict(advice, sys.argv[1:], llm, path or (out and out / advise_report.FILE))
    files = advise_report.write(advice, said, out) if out else []
    if path:
        advise_settings.write(path, advise_settings.whole(llm.config, advice.settings))
    if as_json:
        return print_json(said)
    show(advice, said, [*files, *([path] if path else [])])
    if out and len(files) < 4:
        errors().print(
            "no chart: matplotlib is missing (pip install 'speculon[bench]')", style="yellow", markup=False
        )


def show(advice: Advice, said: dict[str, Any], files: list[Path]) -> None:
    console = Console(highlight=False)
    first, *rest = said["answer"]
    console.print(first, style="bold green" if advice.helps else "bold yellow", markup=False)
    for line in rest:
        console.print(f"- {line}", markup=False)
    for batch in advice.wish.batches:
        console.print("", as_table(advice, batch), sep="\n")
    console.print(f"\n{advise_words.LEGEND}.", style="dim", markup=False)
    console.print(f"\nspeculon.toml:\n\n{said['toml']}\nor: {said['flags']}\n", markup=False, soft_wrap=True)
    console.print(f"next: {said['next']}\n", style="bold", markup=False, soft_wrap=True)
    console.print(advise_report.title(said), style="dim", markup=False, soft_wrap=True)
    for file in files:
        errors().print(f"wrote {file}", style="dim", markup=False)


def as_table(advice: Advice, batch: int) -> Table:
    style: dict[str, Any] = {
        "title_justify": "left",
        "title_style": "bold",
        "header_style": "dim",
        "box": None,
    }
    table = Table(title=f"concurrency {batch}", **style, pad_edge=False, collapse_padding=True)
    for name in advise_words.COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    chosen = advise_words.label_of(advice.chosen)
    for row in advise_words.rows(advice, batch):
        table.add_row(*row, style="green" if advice.helps and row[:2] == chosen else "")
    return table
