"""The cost of a draft model of random weights under the policy `goodput`: shares of decoding steps.

python -m recipes.control.random_draft               # prose with the demo model, concurrency 1 and 8
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speculon import LLM
from speculon.loading.locate import locate
from speculon.measure.bench.measure import Step, measure
from speculon.measure.bench.workloads import Size, build

LEARNING = 200  # rounds that are left out


def random_draft(seed: int = 0) -> Any:
    """The demo's draft model, before it was trained."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(locate("demo-draft"))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def shares(steps: list[Step]) -> dict[str, float]:
    """Of the time of these steps. A rejected draft is charged the mean time of a row: more than it added."""
    total = sum(step.step_ms for step in steps)
    drafting = sum(step.profile["propose"] for step in steps)
    control = sum(step.profile["decide"] for step in steps)
    wasted = sum(
        (step.rows - step.tokens) / step.rows * (step.forward_ms + step.profile["verify"]) for step in steps
    )
    parts = {
        "drafting": drafting,
        "wasted_rows": wasted,
        "control": control,
        "together": drafting + wasted + control,
    }
    return {name: round(ms / total, 4) for name, ms in parts.items()}


def run(method: str, texts: int, prompts: int, max_tokens: int, threads: int | None) -> dict[str, Any]:
    speculation = {"draft": random_draft(), "policy": "goodput", "method": method}
    llm = LLM("demo", speculation=speculation, max_num_seqs=texts, prefix_cache=False, threads=threads)
    cases = build("prose", llm.tokenizer, Size(prompts, max_tokens, llm.engine.max_context))
    measure(llm, cases[:texts], {"method": "off"})  # warm-up
    groups = [cases[i : i + texts] for i in range(0, prompts, texts)]
    steps = [step for group in groups for step in measure(llm, group, {"pool": ""}).steps]
    llm.close()
    decoding = [step for step in steps[LEARNING:] if step.decoding]
    return {"texts": texts, "method": method, "rounds": len(decoding), "shares": shares(decoding)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--rounds", type=int, default=1000, help="about so many rounds after those it learns in"
    )
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    for texts in args.texts:
        groups = -(-(LEARNING + args.rounds) // args.max_tokens)
        print(json.dumps(run(args.method, texts, texts * groups, args.max_tokens, args.threads)))


if __name__ == "__main__":
    main()
