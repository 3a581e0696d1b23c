"""Which kernels of this machine give a row the same bits in every batch.

    python -m recipes.invariance.measure --out docs/benchmarks/invariance

Writes a table of products (by weight layout and dtype) and one of attention (by padding of the keys).
Products are sampled with inputs whose sums nearly cancel, so that another order of addition changes most
results.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.measure.bench.provenance import cpu_name
from speculon.runtimes.torch.model.linear import packable, packed
from speculon.runtimes.torch.model.pieces import cancelling

COMMAND = "python -m recipes.invariance.measure --out docs/benchmarks/invariance"

Rows = Callable[[Tensor], Tensor]  # [n, D] -> [n, O]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((256, 1024), (1024, 1024), (3072, 1024), (1024, 2816), (5632, 1024), (32768, 1024), (2048, 11008))
COUNTS = (*range(1, 18), 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 128, 160, 200, 224, 256)
HEADS = ((4, 2, 64), (8, 8, 64), (14, 2, 64), (16, 4, 128))  # query heads, key-value heads, width
CONTEXTS = (*range(1, 70, 7), *range(100, 700, 61), 505, 510, 511, 512, 513, 1000, 1020, 1023, 1024, 1500)
# (multiple that the number of keys is padded to, fewest folded rows); the first is no padding
PADDINGS = ((1, 1), (16, 4), (32, 4), (64, 4), (128, 4), (512, 1), (512, 4))
# (rows of the span, place of the compared row, spans of the call, keys of the longest span beyond this one's)
COMPANIES = (
    (2, 0, 1, 0), (2, 1, 1, 0), (5, 0, 1, 0), (5, 4, 1, 0), (9, 3, 1, 0), (17, 0, 1, 0), (17, 9, 1, 0),
    (1, 0, 2, 0), (1, 0, 3, 100), (1, 0, 8, 300), (5, 2, 4, 77), (17, 16, 3, 200),
)  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="folder for the table, named after the chip")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chip = cpu_name()
    how = f"torch {torch.__version__}, {arguments.threads} threads, {platform.machine()}"
    lines = [f"# What is bitwise equal on {chip}", "", f"`{COMMAND}`, {date.today()},", f"{how}.", ""]
    for line in [*product_lines(), "", *attention_lines()]:
        print(line, flush=True)
        lines.append(line)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{slug(chip)}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def product_lines() -> Iterator[str]:
    yield "## Products\n"
    yield "Numbers of rows between which the first rows' results are equal bit for bit; groups by `|`.\n"
    yield "| dtype | weights | shape [O, D] | groups of row counts |"
    yield "|---|---|---|---|"
    for dtype in DTYPES:
        for out, width in SHAPES:
            weight, _, inputs = cancelling(out, width, dtype)
            layouts: dict[str, Rows] = {"rows": partial(F.linear, weight=weight)}
            if packable(dtype, weight.device):
                layouts["packed"] = packed(weight, None)
            for name, product in layouts.items():
                groups = " \\| ".join(map(ranges, row_groups(product, inputs)))
                yield f"| {str(dtype).removeprefix('torch.')} | {name} | {out} x {width} | {groups} |"


def row_groups(product: Rows, inputs: Tensor) -> list[list[int]]:
    """Row counts whose common first rows are equal."""
    groups: list[tuple[Tensor, list[int]]] = []
    for count in COUNTS:
        found = product(inputs[:count].contiguous())
        for known, counts in groups:
            common = min(len(known), count)
            if torch.equal(known[:common], found[:common]):
                counts.append(count)
                break
        else:
            groups.append((found, [count]))
    return [counts for _, counts in groups]


def ranges(counts: list[int]) -> str:
    """1, 2, 3, 5 as "1-3, 5", where neighbours are neighbours among `COUNTS`."""
    parts: list[list[int]] = []
    for count in counts:
        if parts and COUNTS.index(count) == COUNTS.index(parts[-1][-1]) + 1:
            parts[-1].append(count)
        else:
            parts.append([count])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def attention_lines() -> Iterator[str]:
    yield "## Attention\n"
    yield (
        "`scaled_dot_product_attention` with an additive mask and the head group folded into rows. Contexts, "
        f"of {len(CONTEXTS)},\nin which a row differs from the same row alone in one of {len(COMPANIES)} "
        "companies.\n"
    )
    yield (
        "| dtype | heads, kv heads, width | "
        + " | ".join(f"keys x{u}, rows >= {r}" for u, r in PADDINGS)
        + " |"
    )
    yield "|---|---|" + "---|" * len(PADDINGS)
    for dtype in DTYPES:
        for heads in HEADS:
            cells = " | ".join(str(differing(*heads, dtype, *padding)) for padding in PADDINGS)
            yield f"| {str(dtype).removeprefix('torch.')} | {', '.join(map(str, heads))} | {cells} |"


def differing(heads: int, kv_heads: int, width: int, dtype: torch.dtype, unit: int, fewest: int) -> int:
    generator, longest = torch.Generator().manual_seed(0), 2048
    key, value = (torch.randn(1, kv_heads, longest, width, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(longest, heads, width, generator=generator).to(dtype)

    def row(start: int, place: int, rows: int, spans: int, beyond: int) -> Tensor:
        """Row `place` of a span of so many rows; position p sees the keys up to p."""
        keys = -(-(start + rows + beyond) // unit) * unit
        group = heads // kv_heads
        padded = max(rows, -(-fewest // group))
        at = torch.arange(start, start + padded).clamp(max=start + rows - 1)
        folded = (
            query[at].view(1, padded, kv_heads, group, width).transpose(1, 2).reshape(1, kv_heads, -1, width)
        )
        hidden = torch.arange(keys) > at.repeat_interleave(group)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[None, None]
        parts = (folded, key[:, :, :keys], value[:, :, :keys])
        q, k, v = parts if spans == 1 else (part.repeat(spans, 1, 1, 1) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(spans, -1, -1, -1))
        return out[-1].view(kv_heads, padded, group, width)[:, place]

    def differs(context: int) -> bool:
        alone = row(context, 0, 1, 1, 0)
        return any(
            not torch.equal(row(context - place, place, rows, spans, beyond), alone)
            for rows, place, spans, beyond in COMPANIES
            if context >= place
        )

    return sum(map(differs, CONTEXTS))


def slug(chip: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in chip.lower()).split())


if __name__ == "__main__":
    main()
