"""What the shipped EAGLE-3 head brings, beside plain decoding and the shipped draft model, and where the time
goes.

    python recipes/eagle3/figures.py --cases 12 --repeats 3

Greedy continuations of held-out files that do not run in circles (the `code` workload), one at a time. Every
mode writes every text; a ratio is thread time of plain decoding / thread time of the mode on the same text,
one soon after the other, prompts included; shown is the median. A target of another depth is calculated, not
run: a step's forward grows with the layers, and all else of a round (drafting, choosing, bookkeeping) stays
as it was measured.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from time import thread_time
from typing import Any

import torch

from speculon import LLM
from speculon.core.telemetry import RequestStats
from speculon.measure.bench import workloads
from speculon.measure.bench.measure import loops

OFF = "off"
DEPTHS = range(1, 129)


@dataclass
class Mode:
    """What one mode measured over all texts."""

    ratios: list[float] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # part of a step -> ms
    steps: int = 0

    def per_step(self, part: str) -> float:
        return self.parts[part] / self.steps

    @property
    def tokens(self) -> float:
        """Per target call that decodes."""
        return self.stats.emitted / self.stats.target_calls

    def rate(self, depth: int, of: int) -> float:
        """Tokens per ms, if the target had `depth` layers instead of `of`."""
        forward = self.per_step("forward") * depth / of
        rest = sum(self.parts.values()) / self.steps - self.per_step("forward")
        return self.tokens / (forward + rest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", default="demo-eagle3", help="the head's folder")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7])
    args = parser.parse_args()
    torch.set_num_threads(1)
    draft = {"draft_model": "demo-draft", "eagle3": args.head}
    speculation = {"method": OFF, "policy": "fixed", "draft": draft}
    llm = LLM("demo", dtype="float32", device="cpu", prefix_cache=False, speculation=speculation)
    find, temperature = workloads.parse("code")
    found = find(llm.tokenizer, workloads.Size(0, args.tokens, llm.engine.max_context))
    cases: list[workloads.Case] = []
    for case in (workloads.at(temperature, case, i) for i, case in enumerate(found)):
        if not loops(llm.generate([case.prompt], case.params, speculation={"method": OFF})[0].token_ids):
            cases.append(case)
        if len(cases) == args.cases:
            break
    asks = [(OFF, 0), *((method, k) for method in draft for k in args.drafts)]
    modes = {ask: Mode() for ask in asks}
    for _ in range(args.repeats):
        for case in cases:
            plain = measure(llm, case, modes[asks[0]], OFF, 0)
            for method, k in asks[1:]:
                modes[method, k].ratios.append(plain / measure(llm, case, modes[method, k], method, k))
    report(modes, len(cases), args, llm)


def measure(llm: LLM, case: workloads.Case, mode: Mode, method: str, k: int) -> float:
    """Thread seconds of one text; its statistics are added to `mode`."""
    counters = llm.engine.counters
    before, steps = dict(counters.profile), counters.steps
    options: dict[str, Any] = {
        "method": method,
        "policy": "fixed",
        **({"num_speculative_tokens": k} if k else {}),
    }
    began = thread_time()
    (out,) = llm.generate([case.prompt], case.params, speculation=options)
    took = thread_time() - began
    mode.stats.add(out.outputs[0].stats)
    mode.steps += counters.steps - steps
    for part, ms in counters.profile.items():
        mode.parts[part] += ms - before[part]
    return took


def report(modes: dict[tuple[str, int], Mode], cases: int, args: argparse.Namespace, llm: LLM) -> None:
    layers = len(llm.engine.runtime.target.layers)
    threads = f"{platform.machine()}, {os.cpu_count()} cores, one thread; torch {torch.__version__}"
    print(f"{cases} texts of up to {args.tokens} tokens, {args.repeats} times; {threads}\n")
    print(
        "| method | K | tokens per target call | accepted, by position | x plain "
        "| ms a step: forward | draft | rest |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (method, k), mode in modes.items():
        speculation = mode.stats.speculation()
        positions = " ".join(f"{share:.0%}" for share in speculation.per_position) or "-"
        ratio = f"{median(mode.ratios):.2f}" if mode.ratios else "1"
        forward, draft = mode.per_step("forward"), mode.per_step("propose")
        rest = sum(mode.parts.values()) / mode.steps - forward - draft
        numbers = f"{mode.tokens:.2f} | {positions} | {ratio} | {forward:.2f} | {draft:.2f} | {rest:.2f}"
        print(f"| {method} | {k or '-'} | {numbers} |")
    print()
    pairs = [("draft_model", OFF), ("eagle3", OFF), ("eagle3", "draft_model")]
    for method, rival in pairs:
        ours, theirs = ([mode for (name, _), mode in modes.items() if name == one] for one in (method, rival))
        depths = [depth for depth in DEPTHS if best(ours, depth, layers) > best(theirs, depth, layers)]
        print(
            f"- `{method}` at its best K is faster than `{rival}` {ranges(depths)} (the target has {layers})."
        )


def ranges(depths: list[int]) -> str:
    """Depths as runs of numbers."""
    ends = [d for d in depths if d + 1 not in depths]
    starts = [d for d in depths if d - 1 not in depths]
    runs = [f"{a} to {b}" if b < DEPTHS[-1] else f"{a} and more" for a, b in zip(starts, ends, strict=True)]
    return f"at depths {', '.join(runs)}" if runs else f"at no depth up to {DEPTHS[-1]}"


def best(modes: list[Mode], depth: int, of: int) -> float:
    return max(mode.rate(depth, of) for mode in modes)


if __name__ == "__main__":
    main()
