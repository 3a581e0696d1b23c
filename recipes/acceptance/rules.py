"""Tokens per target call and time of each rule of acceptance, on the demo model and its drafters.

    python -m recipes.acceptance.rules --out docs/benchmarks/acceptance

Every rule continues the same prompts (workload `prose`), one soon after the other. The time is that of the
engine's thread, so other work on the machine hardly counts. Intervals are from bootstraps over the prompts'
groups.

Outputs differ between rules, and so do their drafts. So a second table compares rejection and block
verification on the same drafts, those of the runs by `block`: p and q say how many each accepts on average.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import thread_time
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm import tqdm

from speculon import LLM
from speculon.core.telemetry import RequestStats
from speculon.decoding import verify
from speculon.measure.bench import workloads
from speculon.measure.bench.plan import RULES
from speculon.measure.bench.provenance import machine, versions

DRAFTERS = {"draft_model": "demo-draft", "eagle3": "demo-eagle3", "dflash": "demo-dflash"}
LIMITS = {"dflash": 6}  # most drafts of its block
BASE = "rejection"
SAME = "| method | K | by rejection | by block | tokens per call, ratio |"
HEAD = "| method | K | rule | accepted per round | tokens per call | ratio | time per token, ratio |"


@dataclass(frozen=True, slots=True)
class Sample:
    """One group of prompts under one rule."""

    emitted: int
    calls: int
    accepted: int
    rounds: int
    seconds: float
    by_rejection: float  # drafts of runs by block that each rule accepts on average
    by_block: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, help="folder for the table")
    arguments = parser.parse_args()
    name = f"t{arguments.temperature:g}-concurrency-{arguments.concurrency}"
    found, command = machine(), "python -m recipes.acceptance.rules"
    options = ("prompts", "concurrency", "max_tokens", "temperature")
    command += "".join(f" --{key.replace('_', '-')} {getattr(arguments, key):g}" for key in options)
    command += f" --drafts {' '.join(map(str, arguments.drafts))} --out docs/benchmarks/acceptance"
    lines = [f"# Rules of acceptance at temperature {arguments.temperature:g}", ""]
    lines += [
        f"`{command}`, {date.today()},",
        f"{found['cpu']}, torch {versions()['torch']}, one thread.",
        "",
    ]
    lines += ["Ratios are to rejection, with 90 % intervals from bootstraps over groups of prompts.", ""]
    lines += [HEAD, "|---|---|---|---|---|---|---|"]
    same = ["", "Drafts that are accepted on average, of the same drafts:", "", SAME, "|---|---|---|---|---|"]
    for line, on_same in measure(arguments):
        tqdm.write(line)
        lines.append(line)
        same += on_same
    lines += same
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Lines of the first table, each with those of the second."""
    speculation = {"policy": "fixed", "draft": DRAFTERS}
    llm = LLM("demo", dtype="float32", device="cpu", threads=1, prefix_cache=False, speculation=speculation)
    size = workloads.Size(arguments.prompts, arguments.max_tokens, llm.engine.max_context)
    cases = workloads.build("prose", llm.tokenizer, size)
    groups = workloads.groups_of(cases, arguments.concurrency)
    settings = [(method, min(k, LIMITS.get(method, k))) for method in DRAFTERS for k in arguments.drafts]
    for method, k in tqdm(settings):
        runs: dict[str, list[Sample]] = {rule: [] for rule in RULES}
        for i, group in enumerate([groups[0], *groups]):
            for rule in RULES[i % len(RULES) :] + RULES[: i % len(RULES)]:
                runs[rule].append(run(llm, group, arguments, method, k, rule))
        for rule in RULES:
            del runs[rule][0]  # it warms
        *first, last = table(method, k, runs)
        yield from ((line, []) for line in first)
        yield last, [on_same_drafts(method, k, runs["block"])]


def run(
    llm: LLM, group: list[workloads.Case], arguments: argparse.Namespace, method: str, k: int, rule: str
) -> Sample:
    fixed = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "ignore_eos": True}
    params = [case.params.model_copy(update=fixed) for case in group]
    speculation = {"method": method, "num_speculative_tokens": k, "acceptance": rule, "pool": ""}
    began = thread_time()
    with noted() as calls:
        outputs = llm.generate([case.prompt for case in group], params, speculation=speculation)
    seconds, stats = thread_time() - began, RequestStats()
    for output in outputs:
        stats.add(output.outputs[0].stats)
    return Sample(stats.emitted, stats.target_calls, stats.accepted, stats.rounds, seconds, *expected(calls))


Call = tuple[Tensor, Tensor, list[int]]  # p and q of the drafted tokens, and K of each sequence


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Notes what block verification judges by."""
    calls: list[Call] = []
    ratios = verify.joint_ratios

    def note(p: Tensor, q: Tensor, lengths: list[int]) -> Tensor:
        calls.append((p, q, lengths))
        return ratios(p, q, lengths)

    with patch.object(verify, "joint_ratios", note):
        yield calls


def expected(calls: list[Call]) -> tuple[float, float]:
    """Drafts that are accepted on average by rejection, and by block verification."""
    by_rejection = by_block = 0.0
    for p, q, lengths in calls:
        split = torch.split((p / q).clamp(max=1), lengths)
        by_rejection += sum(float(chances.cumprod(0).sum()) for chances in split)
        by_block += float(verify.joint_ratios(p, q, lengths).sum()) - len(lengths)  # w_0 = 1 is no draft
    return by_rejection, by_block


def table(method: str, k: int, runs: dict[str, list[Sample]]) -> Iterator[str]:
    for rule, samples in runs.items():
        accepted = total(samples, "accepted") / total(samples, "rounds")
        calls = interval(samples, runs[BASE], per_call) if rule != BASE else "1"
        times = interval(samples, runs[BASE], per_token) if rule != BASE else "1"
        yield f"| {method} | {k} | {rule} | {accepted:.2f} | {per_call(samples):.2f} | {calls} | {times} |"


def on_same_drafts(method: str, k: int, samples: list[Sample]) -> str:
    rounds = total(samples, "rounds")
    rejection, block = (total(samples, name) / rounds for name in ("by_rejection", "by_block"))
    ratio = (1 + block) / (1 + rejection)
    return f"| {method} | {k} | {rejection:.3f} | {block:.3f} | {ratio:.3f} |"


def total(samples: list[Sample], name: str) -> float:
    return float(sum(getattr(sample, name) for sample in samples))


def per_call(samples: list[Sample]) -> float:
    return total(samples, "emitted") / total(samples, "calls")


def per_token(samples: list[Sample]) -> float:
    return total(samples, "seconds") / total(samples, "emitted")


def interval(samples: list[Sample], base: list[Sample], figure: Callable[[list[Sample]], float]) -> str:
    """The ratio of a figure to that of `base`, with its 90 % interval."""
    chance, places = random.Random(0), range(len(samples))
    draws = [chance.choices(places, k=len(samples)) for _ in range(2000)]
    ratios = sorted(figure([samples[i] for i in some]) / figure([base[i] for i in some]) for some in draws)
    return f"{figure(samples) / figure(base):.3f} ({ratios[100]:.3f} to {ratios[-101]:.3f})"


if __name__ == "__main__":
    main()
