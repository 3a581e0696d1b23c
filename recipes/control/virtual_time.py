"""A policy against fixed modes in virtual time: real prompts and drafts, times by a formula with noise.

So two versions of a policy can be compared whose difference is below the noise of a shared machine.

python -m recipes.control.virtual_time --workload prose --texts 1 4 8 --seeds 1 2 3    # minutes
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from functools import partial
from statistics import geometric_mean
from types import ModuleType
from typing import Any

from speculon import LLM
from speculon.core import telemetry
from speculon.measure.bench.workloads import Case, Size, build
from speculon.speculation.control.policies import Policies
from speculon.speculation.proposers import compose
from speculon.speculation.proposers.base import Proposer, ReadsTokens

MODES: Mapping[str, Mapping[str, Any]] = {
    "off": {"method": "off"},
    "eagle3:2": {"method": "eagle3", "num_speculative_tokens": 2},
    "eagle3:3": {"method": "eagle3", "num_speculative_tokens": 3},
    "draft_model:3": {"method": "draft_model", "num_speculative_tokens": 3},
    "suffix:8": {"method": "suffix", "num_speculative_tokens": 8},
    "suffix:16": {"method": "suffix", "num_speculative_tokens": 16},
}
NOISE = 0.05  # standard deviation, relative
READ_MS = 0.02  # of a token that a drafter reads
# ms of a call for sequences of up to k drafts each, as in docs/benchmarks/2-cores
LOOKUPS = {"suffix": (0.02, 0.0, 0.04), "ngram": (0.01, 0.0, 0.015)}  # call, draft, text
DRAFTERS = {"draft_model": (0.2, 1.05, 0.13), "eagle3": (0.3, 0.62, 0.11)}  # call, draft, draft of a text


class Clock:
    """Replaces `perf_counter` where the engine measures itself."""

    def __init__(self, *modules: ModuleType):
        self.ms, self.noise = 0.0, random.Random(0)
        for module in modules:
            module.perf_counter = self

    def __call__(self) -> float:
        return self.ms / 1e3

    def spend(self, ms: float) -> None:
        self.ms += ms * max(0.7, self.noise.gauss(1, NOISE))


def timed_target(llm: LLM, clock: Clock) -> None:
    target, forward = llm.engine.runtime.target, llm.engine.runtime.target.forward

    def taking(batch: Any, view: Any) -> Any:
        drafts = [len(place.drafted.draft.tokens) for place in batch.placed]
        prompts = sum(place.drafted.span.length - 1 for place in batch.placed)
        clock.spend(
            4.2 + 0.55 * len(drafts) + 0.45 * sum(map(bool, drafts)) + 0.16 * sum(drafts) + 0.09 * prompts
        )
        return forward(batch, view)

    target.forward = taking


def timed_proposer(
    proposer: Proposer, clock: Clock, call: float, draft: float, text: float, read: float = READ_MS
) -> None:
    """Calls of a drafter take this time; a `draft` of 0 is that of a lookup, whose length costs nothing."""
    propose = proposer.propose

    def taking(seqs: Any, budgets: Any) -> Any:
        unread = sum(map(proposer.unread, seqs)) if isinstance(proposer, ReadsTokens) else 0
        found = propose(seqs, budgets)
        deepest = max((len(one.tokens) for one in found), default=1) if draft else 1
        clock.spend(call + max(1, deepest) * (draft + text * len(seqs)) + read * unread)
        return found

    proposer.propose = taking


def rate(llm: LLM, clock: Clock, cases: list[Case], texts: int, speculation: Mapping[str, Any]) -> float:
    """Tokens per virtual ms. Pools last for this call alone."""
    began, tokens = clock.ms, 0
    for i in range(0, len(cases), texts):
        group = cases[i : i + texts]
        each = [{**speculation, "pool": x.user and f"{x.user}, {began}"} for x in group]
        found = llm.generate([x.prompt for x in group], [x.params for x in group], speculation=each)
        tokens += sum(len(output.token_ids) for output in found)
    return tokens / (clock.ms - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="prose")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    speculation = {"draft": {"draft_model": "demo-draft", "eagle3": "demo-eagle3"}, "suffix_pools": 512}
    llm = LLM("demo", threads=1, prefix_cache=False, max_num_seqs=8, warmup=False, speculation=speculation)
    clock, proposers = Clock(telemetry, compose), llm.engine.proposers
    timed_target(llm, clock)
    proposers.lacking("auto")
    proposers.lacking("ngram")
    for name, costs in (LOOKUPS | DRAFTERS).items():
        if (found := proposers.find(name)) is not None:
            timed_proposer(found, clock, *costs)
    cases = build(args.workload, llm.tokenizer, Size(args.prompts + 8, 96, llm.engine.max_context))
    cases, others = cases[: args.prompts], cases[args.prompts :]
    write = partial(rate, llm, clock)
    policy = {"method": "auto", "policy": args.policy}
    fixed = {name: {**mode, "policy": "fixed"} for name, mode in MODES.items()}
    best = {n: max((write(cases, n, mode), name) for name, mode in fixed.items()) for n in args.texts}
    ratios = []
    for seed in args.seeds:
        clock.noise.seed(seed)
        llm.engine.policy = Policies(llm.config.speculation)
        for mode in ("off", "eagle3:3", "draft_model:3", "suffix:16"):  # as in the warm-up: costs alone stay
            write(others, 4, fixed[mode])
        llm.engine.policy = llm.engine.policy.with_costs_alone()
        for texts in args.texts:
            write(others[: max(texts, 2)], texts, policy)
            ratios.append(write(cases, texts, policy) / best[texts][0])
            print(
                json.dumps(
                    {
                        "seed": seed,
                        "texts": texts,
                        "policy_over_best": round(ratios[-1], 3),
                        "best": best[texts][1],
                    }
                ),
                flush=True,
            )
    print(json.dumps({"workload": args.workload, "geometric_mean": round(geometric_mean(ratios), 3)}))
    llm.close()


if __name__ == "__main__":
    main()
