"""Chains and trees of the same number of drafts: tokens per target call, and what a round takes.

    python -m recipes.trees.measure smollm2 '{"eagle3": "smollm2-eagle3"}' spec_bench.jsonl --out FILE

K drafts are verified in each round under policy `fixed`, eight requests at once. Every text is compared with
the plain one. The last lines are of policy `goodput`, which chooses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from speculon import LLM, SamplingParams
from speculon.measure.bench.data import encode, read_prompts
from speculon.measure.bench.provenance import cpu_name

SHAPES = ((3, 0), (3, 2), (5, 0), (5, 3), (7, 0), (7, 3), (11, 0), (11, 4), (15, 0), (15, 4))  # K, depth
COLUMNS = "sampling drafts depth differ accepted tokens/call draft-ms round-ms tokens/s".split()
LENGTH = 400  # tokens of a prompt at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("draft", type=json.loads, metavar="JSON", help="drafters by method")
    parser.add_argument("data", type=Path, help="prompts of a file, as chats")
    parser.add_argument("--each", type=int, default=1, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    speculation = {"draft": arguments.draft}
    llm = LLM(arguments.model, max_num_seqs=8, threads=arguments.threads, speculation=speculation)
    lines = [f"{cpu_name()}, {date.today()}", "", row(*COLUMNS), "|---" * len(COLUMNS) + "|"]
    for line in table(llm, arguments):
        tqdm.write(line)
        lines.append(line)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(llm: LLM, arguments: argparse.Namespace) -> Iterator[str]:
    by_category = read_prompts(arguments.data).prompts
    every = {name: [encode(one, llm.tokenizer) for one in some] for name, some in by_category.items()}
    short = {name: [ids for ids in some if len(ids) <= LENGTH] for name, some in every.items()}
    prompts = [ids for some in short.values() for ids in some[: arguments.each]]
    for name, sampling in {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 3}}.items():
        params = SamplingParams(**sampling, max_tokens=arguments.tokens, ignore_eos=True)
        plain = [out.token_ids for out in llm.generate(prompts, params, speculation={"method": "off"})]
        (method,) = llm.config.speculation.drafts
        for k, depth in tqdm(SHAPES, name):
            fixed = {"policy": "fixed", "num_speculative_tokens": k, "draft_depth": depth}
            yield measured(llm, name, prompts, params, plain, {"method": method, "pool": "", **fixed})
        for depth in (0, None):
            yield measured(llm, name, prompts, params, plain, {"method": method, "draft_depth": depth})


def measured(
    llm: LLM,
    name: str,
    prompts: list[list[int]],
    params: SamplingParams,
    plain: list[list[int]],
    speculation: dict[str, Any],
) -> str:
    outs = llm.generate(prompts, params, speculation=speculation)
    stats = [out.speculation for out in outs]
    calls, emitted = sum(s.target_calls for s in stats), sum(s.emitted for s in stats)
    draft_ms, verify_ms = sum(s.draft_ms for s in stats), sum(s.verify_ms for s in stats)
    differ = sum(out.token_ids != tokens for out, tokens in zip(outs, plain, strict=True))
    k, depth = speculation.get("num_speculative_tokens", "goodput"), speculation["draft_depth"]
    shape = "chain" if depth == 0 else "its choice" if depth is None else depth
    accepted = f"{sum(s.accepted for s in stats)} of {sum(s.drafted for s in stats)}"
    each = (f"{ms / calls:.1f}" for ms in (draft_ms, draft_ms + verify_ms))
    rate = f"{1e3 * emitted / (draft_ms + verify_ms):.1f}"
    return row(name, k, shape, differ, accepted, f"{emitted / calls:.3f}", *each, rate)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
