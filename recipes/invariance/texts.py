"""How many texts in bf16 differ from those written alone and plainly, with `batch_invariant` and without.

    python -m recipes.invariance.texts --prompts 500 --out docs/benchmarks/invariance
    python -m recipes.invariance.widened FOLDER && python -m recipes.invariance.texts --model FOLDER
    python -m recipes.invariance.texts --model smollm2 --draft '{"eagle3": "smollm2-eagle3"}' \\
        --data spec_bench.jsonl --prompts 120 --tokens 48

With as few pages as the default, 32 sequences at once are preempted, and no prompt is cached when it comes
again. With `--num-blocks 4000` each prompt is in the prefix cache from its second time on. No text enters a
pool, so a lookup reads its own sequence only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from speculon import LLM, SamplingParams
from speculon.measure.bench.data import encode, read_prompts
from speculon.measure.bench.provenance import cpu_name
from speculon.measure.bench.workloads import Size, build

WORKLOADS, CASES = ("code", "prose"), 40
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "seed": 5},
}
# concurrency, method, K in every round; None: as many as the default policy drafts
MODES = (
    (8, "off", 0), (32, "off", 0), (1, "suffix", 16), (3, "suffix", 6), (32, "suffix", 4),
    (1, "draft_model", 4), (8, "draft_model", 1), (2, "draft_model", 16), (1, "eagle3", 3), (8, "eagle3", 5),
    (1, "auto", 8), (8, "auto", 4), (32, "auto", 4),
)  # fmt: skip
MODES_ON_DATA = (
    (8, "off", 0), (1, "suffix", 16), (8, "suffix", 16), (1, "eagle3", 3), (8, "eagle3", 3),
    (1, "auto", None), (8, "auto", None), (32, "auto", None),
)  # fmt: skip
COLUMNS = "sampling method K concurrency texts differ drafts accepted preempted cached".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="prompts that are left out before those")
    add_draft(parser)
    parser.add_argument("--data", type=Path, help="prompts of a file, evenly taken, as chats")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-blocks", type=int, help="220, or with --data the engine's own number")
    parser.add_argument("--without", action="store_true", help="also without batch_invariant")
    parser.add_argument("--out", type=Path, help="folder for the table, named after the chip and the model")
    arguments = parser.parse_args()
    lines = [f"# Texts in bf16 on {cpu_name()}", "", f"`python -m {' '.join(command())}`, {date.today()}."]
    for invariant in (False, True) if arguments.without else (True,):
        for line in table(arguments, invariant):
            tqdm.write(line)
            lines.append(line)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        chip = cpu_name().lower().replace("(r)", "").replace(" ", "-")
        part = (
            f"-{arguments.data.stem}" if arguments.data else f"-{arguments.first}" if arguments.first else ""
        )
        path = arguments.out / f"texts-{chip}-{Path(arguments.model).name}{part}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_draft(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        type=json.loads,
        default={"draft_model": "demo-draft", "eagle3": "demo-eagle3"},
        metavar="JSON",
        help="drafters by method; {}: none",
    )


def command() -> list[str]:
    return ["recipes.invariance.texts", *sys.argv[1:]]


def table(arguments: argparse.Namespace, invariant: bool) -> Iterator[str]:
    title = f"## batch_invariant = {str(invariant).lower()}"
    yield from ("", title, "", row(*COLUMNS), "|---" * len(COLUMNS) + "|")
    began, total, differ = time.perf_counter(), 0, 0
    llm = LLM(
        arguments.model,
        dtype="bfloat16",
        threads=arguments.threads,
        warmup=False,
        batch_invariant=invariant,
        num_blocks=arguments.num_blocks or (None if arguments.data else 220),
        speculation={"draft": arguments.draft},
    )
    prompts = [*chosen(llm, arguments)]
    methods = {"off", "suffix", "auto", *llm.config.speculation.drafts}
    modes = [mode for mode in (MODES_ON_DATA if arguments.data else MODES) if mode[1] in methods]
    for name, sampling in SAMPLINGS.items():
        params = SamplingParams(**sampling, max_tokens=arguments.tokens, ignore_eos=not arguments.data)
        alone = [write(llm, [prompt], params, "off", 0)[0] for prompt in tqdm(prompts, f"{name}, plain")]
        for concurrency, method, k in modes:
            before = counted(llm)
            texts = [
                text
                for i in tqdm(range(0, len(prompts), concurrency), f"{name}, {method}:{k} at {concurrency}")
                for text in write(llm, prompts[i : i + concurrency], params, method, k)
            ]
            count = sum(a != b for a, b in zip(texts, alone, strict=True))
            total, differ = total + len(texts), differ + count
            since = [now - then for now, then in zip(counted(llm), before, strict=True)]
            yield row(name, method, "default" if k is None else k, concurrency, len(texts), count, *since)
    seconds = time.perf_counter() - began
    invariance = llm.engine.runtime.describe()["batch_invariant"]
    yield from ("", f"**{differ} of {total} texts differ**; {invariance}; {seconds:.0f} s.")


def chosen(llm: LLM, arguments: argparse.Namespace) -> Iterator[list[int]]:
    if arguments.data is None:
        yield from islice(
            prompts_of(llm, arguments.tokens), arguments.first, arguments.first + arguments.prompts
        )
        return
    every = [one for some in read_prompts(arguments.data).prompts.values() for one in some if not one.follows]
    prompts = [
        prompt for prompt in (encode(one, llm.tokenizer) for one in every) if fits(llm, prompt, arguments)
    ]
    count = min(arguments.prompts, len(prompts))
    yield from (prompts[i * len(prompts) // count] for i in range(count))


def fits(llm: LLM, prompt: list[int], arguments: argparse.Namespace) -> bool:
    return len(prompt) <= llm.engine.max_context - arguments.tokens


def prompts_of(llm: LLM, tokens: int) -> Iterator[list[int]]:
    """The prompts of the workloads, then shorter and shorter beginnings of them."""
    size = Size(CASES, tokens, llm.engine.max_context)
    cases = [case.prompt for name in WORKLOADS for case in build(name, llm.tokenizer, size)]
    for part in range(16, 0, -1):
        yield from (prompt[: max(1, len(prompt) * part // 16)] for prompt in cases)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def counted(llm: LLM) -> tuple[int, ...]:
    """Drafts, accepted drafts, preemptions, and prompt tokens from the prefix cache so far."""
    totals = llm.engine.counters.totals
    return sum(totals.drafted_at.values()), totals.accepted, totals.preemptions, totals.cached_tokens


def write(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, method: str, k: int | None
) -> list[list[int]]:
    fixed = {} if k is None else {"policy": "fixed", "num_speculative_tokens": k}
    speculation: dict[str, Any] = {"method": method, "pool": "", **fixed}
    return [out.token_ids for out in llm.generate(prompts, params, speculation=speculation)]


if __name__ == "__main__":
    main()
