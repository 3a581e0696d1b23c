"""The target's answers to prompts, as documents to train on, cut where they begin to loop.

python -m recipes.smollm2.answers smollm2 prompts.jsonl answers.jsonl --own 4096

The prompts are those of a file and, with `--own`, as many as the target writes itself: it continues its chat
template where a user's text would stand (Magpie, Xu et al. 2024).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from speculon import LLM, SamplingParams
from speculon.measure.bench.data import encode, read_prompts
from speculon.train.record import whole_lines
from speculon.train.regenerate import without_loop

BATCH = 192  # between two writes to the file
PLACE = "\x00"  # of the user's text in a rendered chat
LONGEST = 96  # tokens of a prompt of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.8, 1.0))
    parser.add_argument("--own", type=int, default=0, help="prompts that the target writes itself")
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=64, speculation={"method": "off"})
    groups = read_prompts(given.prompts).prompts.values()
    prompts = [encode(one, llm.tokenizer) for some in groups for one in some if not one.follows]
    prompts += own_prompts(llm, given.own)
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


def own_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Prompts whose user's text the target has sampled; seeded, so that a resumed run has the same."""
    rendered = llm.tokenizer.render_chat([{"role": "user", "content": PLACE}])
    before, after = (
        llm.tokenizer.encode(part, add_special_tokens=False) for part in rendered.split(PLACE, 1)
    )
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=LONGEST) for seed in range(count)]
    outputs = llm.generate([before] * count, params) if count else []
    texts = {tuple(output.token_ids) for output in outputs if output.finish_reason == "stop"}
    return [[*before, *text, *after] for text in sorted(texts)]


if __name__ == "__main__":
    main()
