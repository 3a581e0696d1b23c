"""Speed of recurrent hybrids with random weights: rejected rounds, lookups, and transformers' generate.

    python -m recipes.recurrent.bench --out docs/benchmarks/recurrent

All sides of a comparison take turns in one process. Ratios are medians of the ratios within one turn.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from statistics import median

import torch
from recipes.recurrent.forms import FORMS, VOCABULARY, model_of
from recipes.recurrent.rejected import tables
from transformers import PreTrainedModel

from speculon import SamplingParams
from speculon.core.config import EngineConfig
from speculon.engine.engine import Engine
from speculon.measure.bench.provenance import commit, cpu_name
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.runtime import TorchRuntime

PROMPT, COUNTS = 32, (1, 8)
ACCEPTANCES, DRAFTS = (0.0, 0.8, 1.0), 4
GENERATE = "transformers' generate"
SPLIT = ("propose", "forward", "verify", "repair")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a case."""

    seconds: float
    tokens: int
    rounds: int = 0
    per_call: float = 0.0  # tokens of a sequence per target call
    ms: tuple[float, ...] = ()  # of SPLIT, per round

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Case:
    """An engine over the target that plays the same requests again and again."""

    def __init__(self, target: Target, count: int, tokens: int, acceptance: float | None):
        self.count, self.tokens, self.drafts = count, tokens, acceptance is not None
        speculation = {
            "method": "synthetic",
            "policy": "fixed",
            "num_speculative_tokens": DRAFTS,
            "synthetic_acceptance": acceptance or 0.0,
        }
        config = EngineConfig(
            num_blocks=count * 32, max_num_seqs=count, prefix_cache=False, speculation=speculation
        )
        self.engine = Engine(TorchRuntime(target, None, config), None, config)
        self.run()  # the drafter learns the texts
        self.run()

    def run(self) -> Run:
        engine, counters = self.engine, self.engine.counters
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        method = "synthetic" if self.drafts else "off"
        for prompt in prompts()[: self.count]:
            engine.add_request(prompt, params, {"method": method})
        before, repair, calls = dict(counters.profile), counters.repair_ms, counters.totals.target_calls
        began, rounds = time.perf_counter(), 0
        while engine.has_work:
            engine.step()
            rounds += 1
        seconds = time.perf_counter() - began
        spent = {part: ms - before[part] for part, ms in counters.profile.items()}
        spent["repair"] = counters.repair_ms - repair
        per_call = self.count * self.tokens / (counters.totals.target_calls - calls)
        ms = tuple(spent[part] / rounds for part in SPLIT)
        return Run(seconds, self.count * self.tokens, rounds, per_call, ms)


class Generate:
    """The same prompt in the stock model."""

    def __init__(self, model: PreTrainedModel, tokens: int):
        self.model, self.tokens = model, tokens

    def run(self) -> Run:
        ids = torch.tensor([prompts()[0]])
        limit = {"max_new_tokens": self.tokens, "eos_token_id": None, "pad_token_id": 0}
        began = time.perf_counter()
        self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limit)
        return Run(time.perf_counter() - began, self.tokens)


def prompts() -> list[list[int]]:
    chance = Random(0)
    return [[chance.randrange(3, VOCABULARY) for _ in range(PROMPT)] for _ in range(max(COUNTS))]


def speeds(model: PreTrainedModel, target: Target, tokens: int, repeats: int) -> Iterator[str]:
    """Lines of the table of plain decoding, lookups and generate."""
    cases: dict[tuple[str, int], Case | Generate] = {(GENERATE, 1): Generate(model, tokens)}
    for count in COUNTS:
        cases["plain", count] = Case(target, count, tokens, None)
        for acceptance in ACCEPTANCES:
            name = f"drafts, K = {DRAFTS}, acceptance {acceptance}"
            cases[name, count] = Case(target, count, tokens, acceptance)
    turns = [{key: case.run() for key, case in cases.items()} for _ in range(repeats + 1)][1:]
    titles = " | ".join(f"{part} ms" for part in SPLIT)
    yield f"| what | sequences | tokens/s | over plain | tokens per call | {titles} |"
    yield "|---" * (5 + len(SPLIT)) + "|"
    for key in cases:
        runs, name, count = [turn[key] for turn in turns], *key
        ratio = median(turn[key].speed / turn["plain", count].speed for turn in turns)
        split = [f"{median(part):.2f}" for part in zip(*(run.ms for run in runs), strict=True)]
        cells = [f"{runs[0].per_call:.2f}", *split] if split else [""] * (1 + len(SPLIT))
        speed = median(run.speed for run in runs)
        yield f"| {name} | {count} | {speed:.0f} | {ratio:.2f} | {' | '.join(cells)} |"
    many = median(turn["plain", max(COUNTS)].speed / turn["plain", 1].speed for turn in turns)
    yield ""
    yield f"Plain at {max(COUNTS)} is {many:.2f} times plain at 1."


def section(form: str, arguments: argparse.Namespace) -> Iterator[str]:
    """All figures of one form."""
    model = model_of(form)
    target = wrap_model(model, name=form, share=False)
    mixer = target.mixers[0]
    yield f"## {form}"
    yield ""
    yield (
        f"{target.num_parameters / 1e6:.1f} M weights; {len(target.mixers)} of {len(target.layers)} layers "
        "are recurrent."
    )
    yield f"States take {2 * target.state_bytes / 1e6:.2f} MB per sequence, in two slots."
    yield f"Up to {mixer.by_row} rows of several sequences, or {mixer.alone} of one, are one call each."
    yield ""
    yield from speeds(model, target, arguments.tokens, arguments.repeats)
    for count in COUNTS:
        yield ""
        yield f"A round of K = {DRAFTS} at {count}: ms of the verify forward, and then by accepted drafts."
        yield ""
        yield from tables(target, count, DRAFTS, arguments.repeats)
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# Recurrent hybrids", ""]
    settings = f"--forms {arguments.forms} --tokens {arguments.tokens} --repeats {arguments.repeats}"
    lines += [f"`python -m recipes.recurrent.bench {settings}`"]
    lines += [f"at {commit()}, {date.today()}, one thread of an {cpu_name()}."]
    lines += [f"The load average was {os.getloadavg()[2]:.1f} at the start, of {os.cpu_count()} cores."]
    lines += [
        "All cases of a table take turns, and figures are medians of the turns; compare within a table."
    ]
    lines += ["Weights are random; drafts are the true text with errors (method `synthetic`).", ""]
    for form in arguments.forms.split(","):
        for line in section(form, arguments):
            print(line, flush=True)
            lines.append(line)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
