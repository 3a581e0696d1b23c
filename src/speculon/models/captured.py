"""The loop as CUDA graphs, for devices where launching an operation costs more than its work on a few rows.

Between two attentions a layer depends on its rows alone, not on spans or pages. Each such piece is captured
for a few numbers of rows, on static buffers, and replayed; attention runs as before, on the step's own rows.
Rows up to the next captured number hold old values; their results are ignored.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from speculon.batch import Batch
from speculon.core import LayerSpec
from speculon.kv.store import View
from speculon.models.block import CannotReplace, Stock
from speculon.models.compare import close
from speculon.models.loop import Loop
from speculon.models.taps import Taps
from speculon.models.target import STATES_OF_ROW, Target

# guess: rows of a step; 128 are 16 sequences with 7 drafts each
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# of a row's norm, below fp32: other numbers of rows take other kernels; an unrelated row differs by 1.4
TOLERANCE = 0.3
GRAPH = 128 << 10  # guess: bytes of a graph besides its results

Piece = Callable[[], None]  # reads and writes static buffers only
Recorder = Callable[[Piece], Piece]  # from a piece to its replay


class CudaGraphRecorder:
    """Captures pieces as CUDA graphs in one memory pool; results lie outside it, so order is free."""

    def __init__(self, device: torch.device):
        self.device, self.stream, self.pool = (
            device,
            torch.cuda.Stream(device),
            torch.cuda.graph_pool_handle(),
        )

    def __call__(self, piece: Piece) -> Piece:
        with torch.cuda.device(self.device):
            self.warm_up(piece)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                piece()
        return graph.replay

    def warm_up(self, piece: Piece) -> None:
        """Runs it once: handles, kernels and workspaces may not be created during a capture."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream), synchronising_refused():
            piece()
        here.wait_stream(self.stream)


@contextmanager
def synchronising_refused() -> Iterator[None]:
    """Synchronising operations raise `RuntimeError`: within a capture one would break the allocator."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraphRecorder}  # by type of device


class Captured:
    """A loop whose pieces are captured. A step of more rows than any captured one takes the loop."""

    def __init__(self, loop: Loop, device: torch.device, record: Recorder):
        self.loop, self.blocks, most = loop, loop.blocks, BUCKETS[-1]
        if any(isinstance(block.mlp, Stock) for block in self.blocks):
            raise CannotReplace("not captured: it has experts, or another MLP that is not fused")
        shapes = {
            (block.attention.heads, block.attention.kv_heads, block.attention.head_dim)
            for block in self.blocks
        }
        if len(shapes) > 1:
            raise CannotReplace("not captured: its layers have different numbers of heads")
        heads, kv_heads, head_dim = shapes.pop()
        self.both = heads + kv_heads
        self.ids, self.positions, rows = torch.zeros(3, 1, most, dtype=torch.long, device=device)
        self.score_rows = rows[0]
        self.x, self.tables = loop.begin(self.ids, self.positions)
        self.heads = torch.cat(self.blocks[0].begin(self.x, self.tables), 1)  # [rows, H + 2 Hkv, Dh]
        self.attended = self.x.new_zeros(most, heads, head_dim)
        self.logits = loop.end(self.x, self.score_rows)
        self.pieces: dict[int, list[Piece]] = {}
        self.scores: dict[int, Piece] = {}
        for size in reversed(BUCKETS):  # the largest first: the others reuse its memory
            self.scores[size] = record(partial(self.score, size))
            self.pieces[size] = [
                record(partial(self.piece, number, size)) for number in range(len(self.blocks) + 1)
            ]

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        rows, scored = batch.input_ids.shape[1], batch.score_rows.numel()
        if rows > BUCKETS[-1]:
            return self.loop(batch, view, taps)
        self.fill(batch, rows, scored)
        rotated, value = self.heads[:rows, : self.both], self.heads[:rows, self.both :]
        for number, replay in enumerate(self.pieces[bucket_of(rows)]):
            replay()
            if taps is not None and number - 1 in taps.layers:  # -1: the embeddings
                taps.keep(number - 1, copied(self.x[:rows]))
            if number < len(self.blocks):
                self.attended[:rows].copy_(self.blocks[number].attention.attend(rotated, value, view))
        if not scored:
            return None
        self.scores[bucket_of(scored)]()
        return copied(self.logits[:scored])

    def fill(self, batch: Batch, rows: int, scored: int) -> None:
        """Copies a step to the buffers. Later rows hold zeros or an earlier step: valid tokens, too."""
        self.ids[:, :rows].copy_(batch.input_ids)
        self.positions[:, :rows].copy_(batch.position_ids)
        self.score_rows[:scored].copy_(batch.score_rows)

    def piece(self, number: int, rows: int) -> None:
        """The end of layer `number` - 1 (or the embedding), and the beginning of layer `number` (if any)."""
        x = self.x[:rows]
        if number:
            x.copy_(self.blocks[number - 1].end(x, self.attended[:rows]))
        else:
            found, tables = self.loop.begin(self.ids[:, :rows], self.positions[:, :rows])
            for kept, new in zip((self.x, *self.tables), (found, *tables), strict=True):
                kept[:rows].copy_(new)
        if number < len(self.blocks):
            cos, sin = self.tables
            torch.cat(self.blocks[number].begin(x, (cos[:rows], sin[:rows])), 1, out=self.heads[:rows])

    def score(self, rows: int) -> None:
        self.logits[:rows].copy_(self.loop.end(self.x, self.score_rows[:rows]))


def bucket_of(rows: int) -> int:
    """The smallest captured number of rows that is large enough."""
    return BUCKETS[bisect_left(BUCKETS, rows)]


def sizes() -> Iterator[int]:
    """For each capture the fewest and the most rows of a step that use it."""
    for low, high in pairwise((0, *BUCKETS)):
        yield from sorted({low + 1, high})


def copied(part: Tensor) -> Tensor:
    """A result of a step: the next step overwrites the buffer."""
    return part.clone()


def captured(loop: Loop, target: Target, batches: Iterable[tuple[Batch, View]], record: Recorder) -> Captured:
    """The loop captured, and compared with it on every batch. Raises `CannotReplace` where that fails."""
    try:
        made = Captured(loop, target.device, record)
        for batch, view in batches:
            expected, found = loop(batch, view), made(batch, view)
            if expected is None or found is None or not alike(found, expected):
                raise CannotReplace("not captured: it computes something else")
    except RuntimeError as error:  # for example a synchronising operation, or too little memory
        line = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        raise CannotReplace(f"not captured: {line}") from error
    return made


def alike(found: Tensor, expected: Tensor) -> bool:  # [R, V] each
    """Whether two computations of the same logits agree, within what other kernels change."""
    if expected.dtype is torch.float32:
        return close(found, expected)
    found, expected = found.float(), expected.float()
    return bool(((found - expected).norm(dim=-1) <= TOLERANCE * expected.norm(dim=-1)).all())


def capture_bytes(config: PreTrainedConfig, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
    """Memory of a capture: buffers, the shared intermediate results of the largest piece, and graphs."""
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    shared = max(hidden + config.vocab_size, STATES_OF_ROW * hidden + 3 * inner) * dtype.itemsize
    graphs = len(BUCKETS) * (len(layers) + 2)
    return static_bytes(config, layers, dtype) + BUCKETS[-1] * shared + graphs * GRAPH


def static_bytes(config: PreTrainedConfig, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
    """The buffers: ids, positions, scored rows, residual, logits, rotary tables, heads, attention outputs."""
    heads, kv_heads, head_dim = config.num_attention_heads, layers[0].heads, layers[0].k_dim
    row = config.hidden_size + config.vocab_size + 2 * head_dim + 2 * (heads + kv_heads) * head_dim
    return BUCKETS[-1] * (3 * torch.long.itemsize + row * dtype.itemsize)
