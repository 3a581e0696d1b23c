"""`auto` against plain decoding in virtual time, on prompts of a file, where several sequences run.

Texts, drafts and decisions are real; times are those of a formula with noise. So differences of 1 % are seen,
whatever else runs on the machine.

python -m recipes.control.at_load --data spec-bench.jsonl    # four minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.control.virtual_time import Clock, timed_proposer

from speculon import LLM, SamplingParams
from speculon.core import telemetry
from speculon.engine import warm_up
from speculon.measure.bench.data import answered, encode, read_prompts
from speculon.speculation.control.policies import Policies
from speculon.speculation.proposers import compose

TOKENS = 64
PROMPT_MS = 0.75  # of a row
MODES = ("off", "auto")


def step_ms(sequences: int, drafting: int, drafts: int) -> float:
    """Fitted to SmolLM2 in Q4_1, two threads of an AMD EPYC (Zen 5)."""
    most = 0.15 * max(0, sequences + drafts - 16)
    return 4.5 + 1.8 * sequences + 0.6 * bool(drafting) + 1.1 * drafts + most


def timed(llm: LLM, clock: Clock) -> None:
    """Steps and proposals take the clock's time."""
    target, find = llm.engine.runtime.target, llm.engine.proposers.find
    forward = target.forward

    def stepping(batch: Any, view: Any) -> Any:
        drafts = [len(place.drafted.draft.tokens) for place in batch.placed]
        prompts = sum(place.drafted.span.length - 1 for place in batch.placed)
        clock.spend(step_ms(len(drafts), sum(map(bool, drafts)), sum(drafts)) + PROMPT_MS * prompts)
        return forward(batch, view)

    target.forward = stepping
    timed_proposer(find("suffix"), clock, call=0.04, draft=0.0, text=0.013)
    timed_proposer(find("eagle3"), clock, call=0.3, draft=0.9, text=0.2, read=0.05)


def speedups(llm: LLM, clock: Clock, prompts: list[list[int]], seed: int, policies: Any) -> Iterator[float]:
    """Of eight prompts that begin together, and of all in one queue for eight places."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    for some in (prompts[:8], prompts):
        ms = {}
        for mode in MODES:
            clock.noise.seed(seed)
            llm.engine.policy, began = policies[mode], clock.ms
            llm.generate(some, params, speculation={"method": mode, "pool": f"{began}"})
            ms[mode] = clock.ms - began
        yield ms["off"] / ms["auto"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    chains = {"draft_depth": 0}  # trees have a call of their own, which `timed` does not replace
    llm = LLM(
        "smollm2", max_num_seqs=8, warmup=False, prefix_cache=False, runtime="torch", speculation=chains
    )
    data, room = answered(read_prompts(args.data).prompts, llm, TOKENS), llm.engine.max_context - TOKENS
    clock = Clock(telemetry, compose, warm_up)
    llm.engine.proposers.lacking("auto")
    timed(llm, clock)
    for seed in args.seeds:
        clock.noise.seed(seed)
        llm.engine.policy = Policies(llm.config.speculation)
        warm_up.warm_up(llm.engine)
        policies = {mode: llm.engine.policy.with_costs_alone() for mode in MODES}
        found = []
        for name, some in data.items():
            prompts = [tokens for one in some if len(tokens := encode(one, llm.tokenizer)) <= room]
            found.append([*speedups(llm, clock, prompts[: args.prompts], seed, policies)])
            print(seed, name, *(f"{speedup:.3f}" for speedup in found[-1]), flush=True)
        for kind, column in zip(("begin together", "in a queue"), zip(*found, strict=True), strict=True):
            print(f"{seed} {kind}: mean {exp(mean(map(log, column))):.3f}, least {min(column):.3f}")
    llm.close()


if __name__ == "__main__":
    main()
