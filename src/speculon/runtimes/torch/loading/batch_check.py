"""Compares a row's results between batches, bit for bit: the attention of one layer, and the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.core.types import ceil_div
from speculon.runtimes.torch.kv.store import PageStore, end_to_end
from speculon.runtimes.torch.loading.load_check import CheckedRows, run_pieces
from speculon.runtimes.torch.model.attention import attend_written, eager_attention
from speculon.runtimes.torch.model.grouping import KEY_BLOCK
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import LayerSpec, Padding

PAGE = 16
LONGEST = 1200  # keys of the compared attention; SDPA reads them in blocks of 512
CONTEXTS = (*range(1, 70, 7), *range(100, 600, 61), 505, 510, 511, 512, 513, 700, 1000, 1023, 1024, 1100)
BEYOND = (1, 63, 64, 130, 300, 511, 513, 600)  # a window
# rows before the compared one in its span, rows after it, keys of a sequence beside it (0: none)
BESIDE = ((1, 0, 0), (0, 1, 90), (0, 0, 1100), (3, 1, 600), (16, 3, 0), (0, 8, 0), (40, 3, 30))
LONG = 170  # rows of the longest spans, each of which has several compared rows
# at one place, spans of each number of rows up to this; the kernel's blocks of queries have 32 or fewer
ALL_ROWS, ALL_ROWS_AT = 67, 150
LENGTH = 150  # tokens of the sequence whose logits are compared; its keys cross two steps of padding
PROMPT = 100  # of them, which run as a prompt
AT = (64, 1, 129, 15, 2, 16)  # compared positions: each takes eight forwards
COMPUTED = max(AT) + 9  # positions of the first sequence that any of them reads
# rows before the compared one in its span, rows after it, whether another sequence is beside it
COMPANIES = (
    (0, 0, True),
    (0, 1, False),
    (1, 0, True),
    (0, 8, True),
    (3, 4, False),
    (16, 0, True),
    (40, 3, False),
)

# of the compared numbers of keys: rows of a call, of all heads and calls, and the step between lengths
KEY_ROWS, ALL_KEY_ROWS, KEY_STEP = 32, 640, 9


class Attending(NamedTuple):
    """How a layer attends."""

    spec: LayerSpec
    group: int  # queries for each key
    plain: bool  # neither soft cap nor sinks


@torch.inference_mode()
def uneven_keys(layer: Attending, step: int, device: torch.device) -> tuple[int, ...]:
    """Keys in the last block, multiples of `step`, with which rows differ from those of full blocks.

    About one row in a thousand did with 256 or 320 keys (AMD EPYC, bf16), so many rows are compared.
    """
    if step >= KEY_BLOCK:  # then each block is full
        return ()
    # without blocks of keys, a row over one block need not be that over two
    whole = KEY_BLOCK if layer.plain and device.type == "cpu" else 2 * KEY_BLOCK
    generator, (spec, group, plain) = torch.Generator().manual_seed(0), layer
    rows = group * ceil_div(KEY_ROWS, group)
    calls = ceil_div(ALL_KEY_ROWS, rows * spec.heads)
    sinks = None if plain else torch.randn(spec.heads * group, generator=generator).to(device, spec.dtype)

    def random(length: int, width: int) -> Tensor:
        made = torch.randn(calls, spec.heads, length, width, generator=generator)
        return made.to(device, spec.dtype)

    keys, values = random(whole, spec.k_dim), random(whole, spec.v_dim)

    def attended(queries: Tensor, seen: int, read: int) -> Tensor:
        hidden = torch.arange(read, device=device)[None] >= seen
        mask = torch.zeros(1, read, dtype=spec.dtype, device=device).masked_fill_(hidden, -torch.inf)
        k, v = keys[:, :, :read], values[:, :, :read]
        if plain:
            return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
        return eager_attention(queries, k, v, mask, group, None, 20.0, sinks)

    uneven = set()
    for seen in range(1, KEY_BLOCK, KEY_STEP):
        queries = random(rows, spec.k_dim)
        expected = attended(queries, seen, whole)
        for read in range(step * ceil_div(seen, step), KEY_BLOCK, step):
            if read not in uneven and not torch.equal(attended(queries, seen, read), expected):
                uneven.add(read)
    return tuple(sorted(uneven))


@dataclass(slots=True)
class RandomLayer:
    """Two sequences of random queries, keys and values: one in consecutive pages, the other from the last."""

    spec: LayerSpec
    store: PageStore
    queries: Tensor  # [2, S, H, Dk]
    tables: tuple[list[int], list[int]]
    softcap: float | None
    sinks: Tensor | None  # [H]

    @classmethod
    def of(cls, layer: Attending, longest: int, padding: Padding, device: torch.device) -> RandomLayer:
        """One that is not plain has both a soft cap and sinks."""
        generator, (spec, group, plain) = torch.Generator().manual_seed(0), layer
        pages, heads = ceil_div(longest, PAGE), spec.heads * group
        store = PageStore((replace(spec, padding=padding),), 2 * pages, PAGE, device)
        for pool in (store.k[0], store.v[0]):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        queries = torch.randn(2, longest, heads, spec.k_dim, generator=generator).to(device, spec.dtype)
        tables = list(range(pages)), list(reversed(range(pages, 2 * pages)))
        sinks = None if plain else torch.randn(heads, generator=generator).to(device, spec.dtype)
        return cls(spec, store, queries, tables, None if plain else 20.0, sinks)

    def attend(self, *spans: tuple[int, int, int]) -> Tensor:  # [T, H, Dv]
        """One call for spans of (sequence, start, end)."""
        where = [self.store.where(self.tables[sequence], end) for sequence, _, end in spans]
        parts = ((end - start, at, end, 0) for (_, start, end), at in zip(spans, where, strict=True))
        query = torch.cat([self.queries[sequence, start:end] for sequence, start, end in spans])
        view = self.store.view_of(end_to_end(parts))
        return attend_written(view, 0, query, None, softcap=self.softcap, sinks=self.sinks)

    def differing(self) -> int | None:
        """The first compared position whose row depends on its batch."""
        longest, window = self.queries.shape[1], self.spec.window
        behind = [] if window is None else [window + beyond for beyond in BEYOND]  # keys leave the window
        compared = [at for at in (*CONTEXTS, *behind) if at < longest]

        @cache
        def alone(own: int, at: int) -> Tensor:
            return self.attend((own, at, at + 1))[0]

        # first, since they compare the most rows in a call
        for own, start in product((0, 1), range(0, longest, LONG)):
            outs = self.attend((own, start, min(longest, start + LONG)))
            for at in compared:
                if start <= at < start + LONG and not torch.equal(outs[at - start], alone(own, at)):
                    return at
        for own, at in product((0, 1), compared):
            for before, after, keys in BESIDE:
                span = own, max(0, at - before), min(longest, at + 1 + after)
                keys = min(keys, longest)
                outs = self.attend(span, *([(1 - own, keys - 1, keys)] if keys else []))
                if not torch.equal(outs[at - span[1]], alone(own, at)):
                    return at
        at = min(ALL_ROWS_AT, longest - 1)
        for rows in range(2, min(ALL_ROWS, at + 1)):
            if not torch.equal(self.attend((0, at + 1 - rows, at + 1))[-1], alone(0, at)):
                return at
        return None


@dataclass(slots=True)
class TwoSequences:
    """Two random sequences in the pages of a target, which alternate and have random keys and values."""

    target: Target
    length: int
    store: PageStore
    ids: Tensor  # [2, n]
    tables: tuple[list[int], list[int]]

    @classmethod
    def of(cls, target: Target, length: int) -> TwoSequences:
        pages, generator = ceil_div(length, PAGE), torch.Generator().manual_seed(0)
        store = PageStore(target.layers, 2 * pages, PAGE, target.device)
        for pool in (*store.k, *store.v):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        ids = torch.randint(target.embedding.shape[0], (2, length), generator=generator).to(target.device)
        tables = list(range(0, 2 * pages, 2)), list(range(1, 2 * pages, 2))
        return cls(target, length, store, ids, tables)

    def run(self, *spans: tuple[int, int, int], scored: int | None = None) -> list[Tensor]:  # [rows, V] each
        """One forward over spans of (sequence, start, end); if given, one row alone is scored."""
        pieces: list[CheckedRows] = [(self.ids[i], self.tables[i], start, end) for i, start, end in spans]
        return run_pieces(self.target, self.store, pieces, prompt_len=PROMPT, scored=scored)


@torch.inference_mode()
def differing(target: Target) -> int | None:
    """The first compared position whose logits differ between two batches."""
    two = TwoSequences.of(target, min(LENGTH, target.max_context))
    length = two.length
    two.run((0, 0, min(length, COMPUTED)), scored=0)  # the other sequence is only company
    # prompts that take other products, or not; rows of a step, and which of them is compared
    scored: set[tuple[bool, int, int]] = set()
    for at in (at for at in AT if at < length):
        alone = two.run((0, at, at + 1))[0][0]
        for before, after, beside in COMPANIES:
            start, end = max(0, at - before), min(length, at + 1 + after)
            first = min(length, before + 1) if beside else 0  # rows of the other sequence
            others = [(1, length - first, length)] if beside else []
            row = first + at - start
            shape = target.prompts_apart and at < PROMPT, first + end - start, row
            # the head is slow: all rows of a step take it once for each shape
            logits = two.run(*others, (0, start, end), scored=row if shape in scored else None)[-1]
            if not torch.equal(logits[0 if shape in scored else at - start], alone):
                return at
            scored.add(shape)
    return None
