"""What a step of one replica costs, measured here: plain steps by batch size, and a token of a prompt.

python -m recipes.cluster.costs recipes/cluster/costs.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

from speculon import LLM, SamplingParams
from speculon.measure.bench.provenance import commit, machine

SIZES = (1, 2, 4, 8, 16, 24, 32)
STEPS = 40
PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with LLM(args.model, threads=1, speculation={"method": "off"}, prefix_cache=False) as llm:
        engine = llm.engine
        vocabulary = engine.facts().vocab_size

        def timed(prompts: int, length: int, tokens: int) -> list[float]:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            for i in range(prompts):
                engine.add_request([(7 * i + j) % vocabulary for j in range(length)], params)
            times = []
            while engine.has_work:
                began = perf_counter()
                engine.step()
                times.append((perf_counter() - began) * 1e3)
            return times

        timed(4, 64, 8)
        steps = {size: median(timed(size, 8, STEPS)[2:-2]) for size in SIZES}
        prompt = median(timed(1, PROMPT, 1)[0] for _ in range(5)) / PROMPT
    found = {
        "model": args.model,
        "step_ms": {size: round(ms, 3) for size, ms in steps.items()},
        "prompt_token_ms": round(prompt, 4),
        "machine": machine(),
        "commit": commit(),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
