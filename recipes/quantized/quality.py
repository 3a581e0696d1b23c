"""What quantisation does to a model: perplexity, and the distance of log-probabilities to fp32.

    python -m recipes.quantized.quality --model smollm2 --data FILE.jsonl --out docs/benchmarks/quantized

The texts are the longest questions of Spec-Bench, up to 450 tokens each. The first row is the reference.
"""

from __future__ import annotations

import argparse
import json
import math
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config.speculation import Quantization
from speculon.measure.bench.provenance import cpu_name
from speculon.runtimes.torch.kv.store import PageStore
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.model.target import Target

ROWS: tuple[tuple[Quantization, str], ...] = (
    ("none", "float32"),
    ("none", "bfloat16"),
    ("auto", "bfloat16"),
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
)
TOKENS, PAGE = 450, 16
TABLE = ("quantization", "dtype", "MB", "perplexity", "distance", "other first token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    settings = parser.parse_args()
    texts = longest(settings.model, settings.data, settings.texts)
    rows, truth = [], None
    for quantization, dtype in ROWS:
        target = load_target(settings.model, quantization=quantization, dtype=dtype)
        scores = [log_probabilities(target, ids) for ids in texts]
        losses = [-row[:-1].gather(1, ids[1:, None]) for row, ids in zip(scores, texts, strict=True)]
        found = torch.cat(scores)
        truth = found if truth is None else truth
        others = (found.argmax(-1) != truth.argmax(-1)).float().mean()
        perplexity = math.exp(torch.cat(losses).mean())
        off = float((found - truth).abs().mean())
        rows.append((quantization, dtype, target.num_bytes / 1e6, perplexity, off, float(others)))
        print(*rows[-1], flush=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    name = Path(settings.model).stem
    (settings.out / f"{name}.md").write_text(report(name, settings.data.name, sum(map(len, texts)), rows))


def longest(model: str, data: Path, count: int) -> list[Tensor]:
    tokenizer = load_tokenizer(model)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    texts = [tokenizer(line["turns"][0]).input_ids[:TOKENS] for line in lines]
    return [torch.tensor(ids) for ids in sorted(texts, key=len)[-count:]]


@torch.inference_mode()
def log_probabilities(target: Target, ids: Tensor) -> Tensor:  # [n, V]
    store = PageStore(target.layers, -(-len(ids) // PAGE), PAGE, target.device)
    return target.tapped(ids, store, (0,))[0].float().log_softmax(-1)


def report(name: str, data: str, tokens: int, rows: list[tuple[str, str, float, float, float, float]]) -> str:
    lines = [" | ".join(TABLE), " | ".join("---" for _ in TABLE)]
    for quantization, dtype, size, perplexity, off, others in rows:
        lines.append(f"{quantization} | {dtype} | {size:.0f} | {perplexity:.3f} | {off:.3f} | {others:.1%}")
    table = "\n".join(f"| {line} |" for line in lines)
    return f"""# {name}, quantised

`python -m recipes.quantized.quality --model {name} --data {data} --out docs/benchmarks/quantized`

{tokens:,} tokens of the longest questions; {cpu_name()}, {date.today()}.

{table}

Distance: mean difference of log-probabilities from the first row, in nat, over all tokens of the vocabulary.
"""


if __name__ == "__main__":
    main()
