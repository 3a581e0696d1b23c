"""How many texts in bf16 differ from those written alone and plainly, with `batch_invariant` and without.

python -m recipes.invariance.texts
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from speculon import LLM, SamplingParams
from speculon.bench.workloads import Size, build

TOKENS = 64
SAMPLINGS = (
    SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=TOKENS, ignore_eos=True),
)
# concurrency, speculation
MODES: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {"method": "off"}),
    (1, {"method": "draft_model", "num_speculative_tokens": 4}),
    (8, {"method": "draft_model", "num_speculative_tokens": 4}),
    (1, {"method": "ngram", "num_speculative_tokens": 8}),
    (3, {"method": "suffix", "num_speculative_tokens": 6}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for invariant in (False, True):
        llm = LLM(
            "demo",
            dtype="bfloat16",
            threads=arguments.threads,
            warmup=False,
            batch_invariant=invariant,
            speculation={"policy": "fixed", "draft": "auto"},
        )
        size = Size(arguments.prompts // 2, TOKENS, llm.engine.max_context)
        prompts = [case.prompt for name in ("code", "prose") for case in build(name, llm.tokenizer, size)]
        counts = [*differing(llm, prompts)]
        total = len(counts) * len(prompts)
        print(f"batch_invariant={invariant}: {sum(counts)} of {total} texts differ", flush=True)


def differing(llm: LLM, prompts: list[list[int]]) -> Iterator[int]:
    """Differing texts of each mode; the plain ones are written one at a time."""
    for params in SAMPLINGS:
        began = time.perf_counter()
        alone = [write(llm, [prompt], params, {"method": "off"})[0] for prompt in prompts]
        print(f"  plain, one at a time: {time.perf_counter() - began:.1f} s")
        for concurrency, speculation in MODES:
            began, count = time.perf_counter(), 0
            for i in range(0, len(prompts), concurrency):
                texts = write(llm, prompts[i : i + concurrency], params, speculation)
                count += sum(a != b for a, b in zip(texts, alone[i : i + concurrency], strict=True))
            seconds = time.perf_counter() - began
            print(f"  {speculation['method']} at {concurrency}: {count} differ, {seconds:.1f} s", flush=True)
            yield count


def write(llm: LLM, prompts: list[list[int]], params: SamplingParams, speculation: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts, params, speculation=speculation)]


if __name__ == "__main__":
    main()
