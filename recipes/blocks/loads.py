"""Which drafter pays at which load: a head that drafts token by token, and a block in one call.

    python -m recipes.blocks.loads --out docs/benchmarks/blocks

Modes take turns on the same prompts of a workload, in one engine per mode. The split of a round is that of
the engine's own profile. Loads may be measured in several runs: a later one adds its rows to the same file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from tqdm import tqdm

from speculon import LLM
from speculon.core.telemetry import RequestStats
from speculon.measure.bench import workloads
from speculon.measure.bench.provenance import commit, cpu_name

HEADS = {"eagle3": "demo-eagle3", "dflash": "demo-dflash"}
NO_LOOKUPS = {"suffix_min_hits": 16, "suffix_max_factor": 0.01}  # one token, where 16 places agree on it
# heads: `auto` with the two heads, where the policy chooses; both: with lookups as well
MODES: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "eagle3": {"method": "eagle3", "draft": {"eagle3": HEADS["eagle3"]}},
    "dflash": {"method": "dflash", "draft": {"dflash": HEADS["dflash"]}},
    "heads": {"method": "auto", "draft": HEADS, **NO_LOOKUPS},
    "both": {"method": "auto", "draft": HEADS},
}
SPLIT = ("propose", "forward", "verify")


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    stats: RequestStats
    steps: int
    ms: dict[str, float]  # of SPLIT, over all steps

    @property
    def speed(self) -> float:
        return self.stats.emitted / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--workload", default="code@0", help="of the bench, at a temperature")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--out", type=Path, help="folder for README.md")
    arguments = parser.parse_args()
    file = arguments.out / "README.md" if arguments.out else None
    lines = file.read_text().splitlines() if file and file.exists() else heading(arguments)
    for line in rows(arguments):
        tqdm.write(line)
        lines.append(line)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def heading(arguments: argparse.Namespace) -> list[str]:
    return [
        "# Block drafter and EAGLE-3 head by load",
        "",
        f"`python -m recipes.blocks.loads --repeats {arguments.repeats} --threads {arguments.threads}`",
        f"at {commit()}, {date.today()}, {cpu_name()}, policy `{arguments.policy}`, workload "
        f"`{arguments.workload}`;",
        f"the load average was {os.getloadavg()[2]:.1f} at the start, of {os.cpu_count()} cores.",
        "",
        "Medians of the repeats; speeds are relative to `off` in the same turn. Split: ms per step.",
        "",
        "| requests | mode | tokens/s | over off | tokens per call | drafts: eagle3, dflash, lookups "
        "| accepted | propose | forward | verify |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    engines = {
        mode: LLM(
            "demo",
            dtype="float32",
            device="cpu",
            threads=arguments.threads,
            prefix_cache=False,
            speculation={"policy": arguments.policy, **settings, "method": "auto"},
        )
        for mode, settings in MODES.items()
    }
    size = workloads.Size(max(arguments.loads), arguments.max_tokens, engines["off"].engine.max_context)
    cases = workloads.build(arguments.workload, engines["off"].tokenizer, size)
    for load in tqdm(arguments.loads):
        turns = [
            {mode: run(llm, cases[:load], arguments.max_tokens, mode) for mode, llm in engines.items()}
            for _ in range(arguments.repeats + 1)
        ][1:]  # the first one warms
        yield from (row(load, mode, turns) for mode in MODES)


def run(llm: LLM, cases: list[workloads.Case], max_tokens: int, mode: str) -> Run:
    fixed = {"max_tokens": max_tokens, "ignore_eos": True}
    params = [case.params.model_copy(update=fixed) for case in cases]
    counters = llm.engine.counters
    before, steps = dict(counters.profile), counters.steps
    began = perf_counter()
    outputs = llm.generate(
        [case.prompt for case in cases], params, speculation={"method": MODES[mode]["method"], "pool": ""}
    )
    seconds, stats = perf_counter() - began, RequestStats()
    for output in outputs:
        stats.add(output.outputs[0].stats)
    spent = {part: counters.profile[part] - before[part] for part in SPLIT}
    return Run(seconds, stats, counters.steps - steps, spent)


def row(load: int, mode: str, turns: list[dict[str, Run]]) -> str:
    runs = [turn[mode] for turn in turns]
    ratio = median(turn[mode].speed / turn["off"].speed for turn in turns)
    last = runs[-1].stats
    drafted = {
        name: sum(n for source, n in last.drafted_from.items() if source.startswith(name)) for name in HEADS
    }
    lookups = sum(last.drafted_from.values()) - sum(drafted.values())
    total = sum(last.drafted_from.values())
    accepted = f"{sum(last.accepted_from.values()) / total:.0%}" if total else ""
    split = " | ".join(f"{median(run.ms[part] / run.steps for run in runs):.1f}" for part in SPLIT)
    drafts = f"{drafted['eagle3']}, {drafted['dflash']}, {lookups}"
    speed, per_call = median(run.speed for run in runs), last.emitted / last.target_calls
    return (
        f"| {load} | {mode} | {speed:.0f} | {ratio:.2f} | {per_call:.2f} | {drafts} | {accepted} | {split} |"
    )


if __name__ == "__main__":
    main()
