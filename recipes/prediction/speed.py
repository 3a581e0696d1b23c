"""How much a prediction saves on the demo model: equal to the answer, edited in the middle, and wrong, at
several K.

    python recipes/prediction/speed.py --cases 6 --repeats 3

Texts of 200 tokens and more that do not loop (the `edit` workload). A ratio is thread time without
speculation / thread time with the prediction alone, prompts included, one soon after the other on the same
text; shown is the median.
"""

from __future__ import annotations

import argparse
import platform
from statistics import median
from time import thread_time
from typing import Any

import torch

from speculon import LLM
from speculon.measure.bench import workloads
from speculon.measure.bench.measure import loops

OFF = {"method": "off", "policy": "fixed"}
LINE = "    # a line that the model does not write\n"


def predictions(text: str, other: str) -> dict[str, str]:
    lines = text.splitlines(keepends=True)
    half = len(lines) // 2
    return {
        "equal": text,
        "a line inserted": "".join([*lines[:half], LINE, *lines[half:]]),
        "two lines missing": "".join([*lines[:half], *lines[half + 2 :]]),
        "another text": other,
    }


def timed(llm: LLM, case: workloads.Case, speculation: dict[str, Any]) -> tuple[float, Any]:
    began = thread_time()
    (out,) = llm.generate([case.prompt], case.params, speculation=speculation)
    return thread_time() - began, out.outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int, nargs="+", default=[8, 16, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM("demo", dtype="float32", device="cpu", prefix_cache=False, speculation={"policy": "fixed"})
    size = workloads.Size(args.cases * 10, 512, llm.engine.max_context)
    cases = [
        c
        for c in workloads.build("edit", llm.tokenizer, size)
        if len(llm.tokenizer.encode(c.reference or "")) > 210
    ]
    texts = [
        (case, out)
        for case in cases[: 2 * args.cases]
        if not loops((out := timed(llm, case, OFF)[1]).token_ids)
    ]
    texts = [(case, out) for case, out in texts if len(out.token_ids) >= 200][: args.cases]
    lengths = [len(out.token_ids) for _, out in texts]
    print(
        f"{len(texts)} texts of {lengths} tokens; torch {torch.__version__}, {platform.machine()}", flush=True
    )
    print("| prediction | K | times plain | accepted of drafted | tokens per call |\n|---|---|---|---|---|")
    found: dict[tuple[str, int], list[tuple[float, Any]]] = {}
    for _ in range(args.repeats):
        for i, (case, truth) in enumerate(texts):
            for name, prediction in predictions(truth.text, texts[i - 1][1].text).items():
                plain, _ = timed(llm, case, OFF)
                for k in args.drafts:
                    speculation = {
                        "method": "prediction",
                        "prediction": prediction,
                        "num_speculative_tokens": k,
                        "policy": "fixed",
                    }
                    seconds, out = timed(llm, case, speculation)
                    found.setdefault((name, k), []).append((plain / seconds, out.stats))
    for (name, k), runs in found.items():
        all_stats = [stats for _, stats in runs]
        accepted, drafted = (
            sum(getattr(s, f)["prediction"] for s in all_stats) for f in ("accepted_from", "drafted_from")
        )
        per_call = sum(s.emitted for s in all_stats) / sum(s.target_calls for s in all_stats)
        share = f"{accepted / max(1, drafted):.0%}"
        print(f"| {name} | {k} | {median(ratio for ratio, _ in runs):.2f} | {share} | {per_call:.1f} |")


if __name__ == "__main__":
    main()
