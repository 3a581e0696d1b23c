"""What `batch_invariant` costs: one engine with it and one without take turns on the same prompts.

python -m recipes.invariance.cost --out docs/benchmarks/invariance
python -m recipes.invariance.cost --model smollm2 --draft '{"eagle3": "smollm2-eagle3"}'
python -m recipes.invariance.widened FOLDER && python -m recipes.invariance.cost --model FOLDER
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import median

from recipes.invariance.texts import add_draft, prompts_of
from tqdm import tqdm

from speculon import LLM, SamplingParams
from speculon.measure.bench.provenance import cpu_name

# what, method, concurrency, tokens of each text
CASES = (
    ("plain", "off", 1, 64),
    ("plain", "off", 8, 64),
    ("auto", "auto", 1, 64),
    ("auto", "auto", 8, 64),
    ("prompts", "off", 8, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    add_draft(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for the table, named after the chip and the model")
    arguments = parser.parse_args()
    name, chip = Path(arguments.model).name, cpu_name()
    lines = [f"# Cost of batch_invariant for {name} on {chip}", ""]
    lines += [
        f"`python -m recipes.invariance.cost --model {name} --threads {arguments.threads}`, {date.today()}."
    ]
    lines += ["Seconds are medians of the repeats; the ratio is the median of each pair's.", ""]
    lines += ["| what | concurrency | without, s | with, s | ratio |", "|---|---|---|---|---|"]
    for line in tqdm(rows(arguments), total=len(CASES)):
        tqdm.write(line)
        lines.append(line)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        slug = chip.lower().replace("(r)", "").replace(" ", "-")
        path = arguments.out / f"request-cost-{slug}-{name}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    without, invariant = (
        LLM(
            arguments.model,
            dtype="bfloat16",
            threads=arguments.threads,
            batch_invariant=on,
            prefix_cache=False,
            num_blocks=1000,
            speculation={"draft": arguments.draft},
        )
        for on in (False, True)
    )
    prompts = [*islice(prompts_of(without, max(tokens for *_, tokens in CASES)), 8)]
    for what, method, concurrency, tokens in CASES:
        case = prompts, method, concurrency, tokens
        pairs = [(seconds(without, *case), seconds(invariant, *case)) for _ in range(arguments.repeats + 1)]
        del pairs[0]  # it warms
        ratio = median(after / before for before, after in pairs)
        before, after = (f"{median(times):.2f}" for times in zip(*pairs, strict=True))
        yield f"| {what} | {concurrency} | {before} | {after} | {ratio:.2f} |"


def seconds(llm: LLM, prompts: list[list[int]], method: str, concurrency: int, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    for i in range(0, len(prompts), concurrency):
        llm.generate(prompts[i : i + concurrency], params, speculation={"method": method, "pool": ""})
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
