"""The target's answers to the prompts of a file, as documents to train on, cut where they begin to loop.

python -m recipes.smollm2.answers smollm2 prompts.jsonl answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from speculon import LLM, SamplingParams
from speculon.bench.data import encode, read_prompts
from speculon.train.record import whole_lines
from speculon.train.regenerate import without_loop

BATCH = 192  # between two writes to the file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.8, 1.0))
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=64, speculation={"method": "off"})
    groups = read_prompts(given.prompts).prompts.values()
    prompts = [encode(one, llm.tokenizer) for some in groups for one in some if not one.follows]
    fitting = [prompt for prompt in prompts if len(prompt) <= llm.engine.max_context - given.tokens]
    tasks = [(prompt, temperature) for temperature in given.temperatures for prompt in fitting]
    done = len(list(whole_lines(given.out)))
    with given.out.open("a") as file:
        for first in range(done, len(tasks), BATCH):
            batch = tasks[first : first + BATCH]
            params = [
                SamplingParams(temperature=temperature, seed=first + i, max_tokens=given.tokens)
                for i, (_, temperature) in enumerate(batch)
            ]
            outputs = llm.generate([prompt for prompt, _ in batch], params)
            for (prompt, _), output in zip(batch, outputs, strict=True):
                tokens = [*prompt, *without_loop(list(output.token_ids))]
                file.write(json.dumps({"tokens": tokens, "prompt_tokens": len(prompt)}) + "\n")
            file.flush()
            print(f"\r{first + len(batch)} of {len(tasks)}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
