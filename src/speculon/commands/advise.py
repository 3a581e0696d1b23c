"""`speculon advise`: does drafting help here, with which settings, and how sure is that?"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from speculon.advise import report, tables
from speculon.advise import settings as settings_file
from speculon.advise.advice import Advice
from speculon.advise.answer import warnings
from speculon.advise.plan import MAX_K, AdvisePlan
from speculon.advise.prompts import Samples, Split, as_cases, workload_cases
from speculon.advise.run import advise, count_measurements
from speculon.bench import workloads
from speculon.bench.data import Prompt, read_prompts
from speculon.commands.bench import refuse_chats, show_files
from speculon.commands.generate import read_text
from speculon.commands.options import Given, engine_settings, pick
from speculon.commands.screen import counting, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.errors import InvalidParameter

FOLDER = Path("speculon-advise")
DEFAULT_MODEL = EngineConfig.model_fields["model"].default
PROMPTS, MAX_TOKENS = 8, 96  # per built-in workload, and written per prompt


@dataclass(frozen=True, slots=True)
class Prompts:
    """What to measure on: the user's prompts, or the benchmark's."""

    prompts: list[str]
    files: list[Path]
    data: list[Path]
    chat: bool
    workloads: tuple[str, ...] | None

    def samples(self) -> dict[str, list[Prompt]]:
        """Prompts first, then files with one each, then files with one on every line."""
        texts = [("prompts", prompt) for prompt in self.prompts]
        texts += [(path.name, read_text(path)) for path in self.files]
        found: dict[str, list[Prompt]] = {}
        for number, (group, text) in enumerate(texts, 1):
            if group.endswith(".jsonl"):
                raise InvalidParameter("prompt-file", group, "prompts on lines are for --data")
            if not text:
                raise InvalidParameter("prompt", "", "is empty")
            content = [{"role": "user", "content": text}] if self.chat else text
            found.setdefault(group, []).append(Prompt(group, f"{group} {number}", content))
        for path in self.data:
            for group, prompts in read_prompts(path).prompts.items():
                named = [replace(one, name=f"{group} {one.name}") for one in prompts if not one.follows]
                found.setdefault(group, []).extend(named)
        return found

    def builtin(self, model: str, samples: Samples, params: dict[str, Any]) -> tuple[str, ...]:
        """The benchmark's workloads to use where no prompt is given; none where some are."""
        if samples and self.workloads:
            reason = "either these or prompts of your own"
            raise InvalidParameter("workloads", ",".join(self.workloads), reason)
        if samples:
            return ()
        if not self.workloads and model != DEFAULT_MODEL:
            reason = "give some by --prompt, --prompt-file or --data, as they will be used; or --workloads"
            raise InvalidParameter("prompt", None, reason)
        wrong = next((name for name in params if name != "max_tokens"), None)
        if wrong:
            reason = "built-in workloads bring their own; NAME@T is one at temperature T"
            raise InvalidParameter(wrong, params[wrong], reason)
        for name in self.workloads or ():
            workloads.parse(name)
        return self.workloads or tuple(workloads.WORKLOADS)


def run(
    prompts: Prompts,
    options: dict[str, Any],
    path: Path | None,
    out: Path | None,
    given: Given,
    as_json: bool,
) -> None:
    settings = {**engine_settings(given), "prefix_cache": False, "state": None}
    settings["speculation"] = {"num_speculative_tokens": MAX_K, **settings.get("speculation", {})}
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    plan = AdvisePlan(k=config.speculation.most(), method=config.speculation.method, **options)
    sampling = pick(SamplingParams, given)
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, **sampling})
    samples = prompts.samples()
    builtin = prompts.builtin(config.model, samples, sampling)
    if path:
        settings_file.check_writable(path)
    refuse_chats(config, chain(*samples.values()))
    with loading(as_json) as stage:
        stage("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=stage, **settings)
    if builtin:
        size = workloads.Size(PROMPTS, params.max_tokens or MAX_TOKENS, llm.engine.max_context)
        cases = workload_cases(builtin, llm.tokenizer, size)
    else:
        cases = as_cases(samples, llm.tokenizer, params)
    split = Split.of(cases)
    with counting(as_json, "measuring", count_measurements(split, plan), still=True) as advance:
        advice = advise(llm, split, plan, advance)
    out = out or (None if as_json else FOLDER)
    record = report.to_dict(advice, sys.argv[1:], llm, path or (out and out / report.FILE))
    files = report.write(advice, record, out) if out else []
    if path:
        settings_file.write(path, settings_file.whole(llm.config, advice.settings))
    if as_json:
        return print_json(record)
    show(advice, record)
    show_files(files, with_chart=4)
    show_files([path] if path else [], with_chart=0)


def show(advice: Advice, record: dict[str, Any]) -> None:
    """The verdict, the tables, what speaks against them, and the settings. The file has every sentence."""
    console = Console(highlight=False)
    verdict = record["answer"][0]
    console.print(verdict, style="bold green" if advice.helps else "bold", markup=False)
    for line in warnings(advice):
        console.print(f"- {line}", markup=False)
    console.print("", tables.speed_table(advice), sep="\n")
    console.print(f"{tables.SPEED_LEGEND}.\n", style="dim", markup=False)
    console.print(tables.threshold_table(advice))
    console.print(f"{tables.THRESHOLD_LEGEND}.\n", style="dim", markup=False)
    console.print(f"speculon.toml:\n\n{record['toml']}", markup=False, soft_wrap=True)
    console.print(f"or: {record['flags']}\n", markup=False, soft_wrap=True)
    console.print(f"next: {record['next']}\n", style="bold", markup=False, soft_wrap=True)
    console.print(report.title(record), style="dim", markup=False, soft_wrap=True)
