"""What penalties cost: the speed of a batch of long contexts with all three, as a share of that without.

python -m recipes.serving.penalties      # prints a table; 2 minutes

The penalties are too small to change a token, so both write the same texts with the same drafts. Prompts
repeat a piece of code, so that lookups always find drafts; their pages are cached before anything is timed.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

from speculon import LLM, SamplingParams
from speculon.measure.bench.tables import markdown_table
from speculon.measure.bench.workloads import Size, build

HEAD = ["drafts", "tokens/s without", "tokens/s with", "with / without"]
TINY = 1e-6
PENALTIES = {"presence_penalty": TINY, "frequency_penalty": TINY, "repetition_penalty": 1 + TINY}
PIECE = 64  # tokens that are repeated


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--context", type=int, default=1800, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--drafts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7, help="of which medians are taken")
    given = parser.parse_args()
    llm = LLM(given.model, threads=1, max_num_seqs=given.sequences)
    size = Size(given.sequences, given.tokens, llm.engine.max_context)
    pieces = [case.prompt[:PIECE] for case in build("code", llm.tokenizer, size)]
    prompts = [list(islice(cycle(piece), given.context)) for piece in pieces]
    drafting = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": given.drafts}
    modes: list[dict[str, Any]] = [{"method": "off"}, drafting]
    rows = [measure(llm, prompts, one, given.tokens, given.repeats) for one in modes]
    print(markdown_table(HEAD, rows))


def measure(
    llm: LLM, prompts: list[list[int]], speculation: dict[str, Any], tokens: int, repeats: int
) -> list[str]:
    """Medians over pairs of runs, one soon after the other; the first pair is discarded."""
    pairs = list[tuple[float, float]]()
    for _ in range(1 + repeats):
        without, texts = timed(llm, prompts, {}, speculation, tokens)
        with_them, penalised = timed(llm, prompts, PENALTIES, speculation, tokens)
        assert texts == penalised, f"penalties of {TINY} changed a text"
        pairs.append((without, with_them))
    rates = [f"{len(prompts) * tokens / median(side):.0f}" for side in zip(*pairs[1:], strict=True)]
    ratio = median(without / with_them for without, with_them in pairs[1:])
    return [f"{speculation.get('num_speculative_tokens', 0)}", *rates, f"{ratio:.2f}"]


def timed(
    llm: LLM, prompts: list[list[int]], penalties: dict[str, float], speculation: dict[str, Any], tokens: int
) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **penalties)
    began = perf_counter()
    outputs = llm.generate(prompts, params, speculation=speculation)
    return perf_counter() - began, [list(output.token_ids) for output in outputs]


if __name__ == "__main__":
    main()
