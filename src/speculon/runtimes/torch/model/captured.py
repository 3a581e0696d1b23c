"""The loop as CUDA graphs, for devices where launching an operation costs more than its work on a few rows.

Between two attentions a layer depends on its rows alone, not on spans or pages. Each such piece is captured
for a few numbers of rows, on static buffers, and replayed; attention runs as before, on the step's own rows.
Rows up to the next captured number hold old values; their results are ignored.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.budget import inner_size, width_of_states
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.block import CannotReplace, Loop, RotaryTables, Stock
from speculon.runtimes.torch.model.compare import Same, alike
from speculon.runtimes.torch.model.taps import EMBEDDINGS, Taps
from speculon.runtimes.torch.model.trial import Trial, compare_steps, layer_states, refused
from speculon.runtimes.torch.needs import LayerSpec

if TYPE_CHECKING:
    from speculon.runtimes.torch.model.target import Target

Lengths = tuple[int, ...]  # rows of each sequence of a step
CapturedPiece = Callable[[], None]  # reads and writes static buffers only
Recorder = Callable[[CapturedPiece], CapturedPiece]  # from a piece to its replay

# guess: rows of a captured step; 128 are 16 sequences with 7 drafts each
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
GRAPH = 128 << 10  # guess: bytes of a CUDA graph besides its results


class CudaGraphRecorder:
    """Captures pieces as CUDA graphs in one memory pool; results lie outside it, so order is free."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, piece: CapturedPiece) -> CapturedPiece:
        with torch.cuda.device(self.device):
            self.warm_up(piece)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                piece()
        return graph.replay

    def warm_up(self, piece: CapturedPiece) -> None:
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


class Layer(Protocol):
    """A layer in parts; of these, only attention reads spans and pages."""

    def begin(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, ...]:
        """[T, D] -> the arguments of `attend`, [T, any, Dh] each."""
        ...

    @property
    def attend(self) -> Callable[..., Tensor]:
        """Those and a view -> [T, H, Dh]."""
        ...

    def end(self, x: Tensor, seen: Tensor) -> Tensor:
        """[T, D], [T, H, Dh] -> [T, D']."""
        ...


class CapturedPieces:
    """The pieces of some layers, captured on static buffers."""

    def __init__(self, blocks: Sequence[Layer], heads: int, inputs: tuple[Tensor, ...]):
        """`inputs` are the buffers that `start` reads, for the most rows."""
        self.blocks, self.inputs, rows = blocks, inputs, BUCKETS[-1]
        self.first, self.tables = self.start(rows)
        parts = blocks[0].begin(self.first, self.tables)
        self.sizes = [part.shape[1] for part in parts]
        self.heads = torch.cat(parts, 1)  # [rows, H + 2 Hkv, Dh]
        self.attended = self.first.new_zeros(rows, heads, parts[0].shape[-1])
        after = blocks[0].end(self.first, self.attended)
        self.x = self.first if after.shape == self.first.shape else after
        self.pieces: dict[int, list[CapturedPiece]] = {}

    def start(self, rows: int) -> tuple[Tensor, RotaryTables]:
        """What the first layer reads, and the rotary tables of all, for the first rows of the inputs."""
        raise NotImplementedError

    def finish(self, x: Tensor) -> Tensor:
        """What is left to do after the last layer."""
        return x

    def record(self, record: Recorder) -> None:
        """Captures every piece, the largest first: the others reuse its memory."""
        for size in reversed(BUCKETS):
            self.record_size(size, record)

    def record_size(self, size: int, record: Recorder) -> None:
        numbers = range(len(self.blocks) + 1)
        self.pieces[size] = [record(partial(self.piece, number, size)) for number in numbers]

    def piece(self, number: int, rows: int) -> None:
        """The end of layer `number` - 1, or the start, and the beginning of layer `number`, or the finish."""
        last, x = number == len(self.blocks), self.read_by(number)[:rows]
        if number:
            after = self.blocks[number - 1].end(self.read_by(number - 1)[:rows], self.attended[:rows])
            x.copy_(self.finish(after) if last else after)
        else:
            first, tables = self.start(rows)
            for buffer, new in zip((x, *self.tables), (first, *tables), strict=True):
                buffer[:rows].copy_(new)
        if not last:
            cos, sin = self.tables
            torch.cat(self.blocks[number].begin(x, (cos[:rows], sin[:rows])), 1, out=self.heads[:rows])

    def read_by(self, number: int) -> Tensor:
        """The buffer that a layer reads."""
        return self.x if number else self.first

    def replay(self, rows: int, view: View) -> Iterator[Tensor]:
        """Runs the captured pieces and attention between them; yields what each layer reads, then the end."""
        parts = self.heads[:rows].split(self.sizes, 1)
        for number, replay in enumerate(self.pieces[bucket_for(rows)]):
            replay()
            yield self.read_by(number)[:rows]
            if number < len(self.blocks):
                self.attended[:rows].copy_(self.blocks[number].attend(*parts, view))


class Captured(CapturedPieces):
    """A loop whose pieces are captured. Steps of more rows than any captured one take the loop.

    So do steps with prompts where these take other products, and steps with images or rows of adapters.
    """

    def __init__(self, loop: Loop, device: torch.device, record: Recorder):
        if any(isinstance(block.mlp, Stock) for block in loop.blocks):
            raise CannotReplace("not captured: it has experts, or another MLP that is not fused")
        attentions = [block.attention for block in loop.blocks]
        shapes = {(one.heads, one.kv_heads, one.head_dim) for one in attentions}
        if len(shapes) > 1:
            raise CannotReplace("not captured: its layers have different numbers of heads")
        self.loop, self.prompts_in_loop = loop, False  # whether prompts take other products
        self.ids, self.positions, rows = torch.zeros(3, 1, BUCKETS[-1], dtype=torch.long, device=device)
        self.score_rows = rows[0]
        super().__init__(loop.blocks, shapes.pop()[0], (self.ids, self.positions))
        self.logits = loop.end(self.x, self.score_rows)
        self.scores: dict[int, CapturedPiece] = {}
        self.record(record)

    def start(self, rows: int) -> tuple[Tensor, RotaryTables]:
        return self.loop.begin(self.ids[:, :rows], self.positions[:, :rows])

    def record_size(self, size: int, record: Recorder) -> None:
        self.scores[size] = record(partial(self.score, size))
        super().record_size(size, record)

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        rows, scored = batch.input_ids.shape[1], batch.score_rows.numel()
        alone = batch.sees_images or batch.adapters.runs
        if rows > BUCKETS[-1] or self.prompts_in_loop and batch.prompts or alone:
            return self.loop(batch, view, taps)
        self.fill(batch, rows, scored)
        for layer, states in enumerate(self.replay(rows, view), EMBEDDINGS):
            if taps is not None and layer in taps.layers:
                taps.keep(layer, copied(states))
        if not scored:
            return None
        self.scores[bucket_for(scored)]()
        return copied(self.logits[:scored])

    def fill(self, batch: Batch, rows: int, scored: int) -> None:
        """Copies a step to the buffers. Later rows hold zeros or an earlier step: valid tokens, too."""
        self.ids[:, :rows].copy_(batch.input_ids)
        self.positions[:, :rows].copy_(batch.position_ids)
        self.score_rows[:scored].copy_(batch.score_rows)

    def score(self, rows: int) -> None:
        self.logits[:rows].copy_(self.loop.end(self.x, self.score_rows[:rows]))


def bucket_for(rows: int) -> int:
    """The smallest captured number of rows that is large enough."""
    return BUCKETS[bisect_left(BUCKETS, rows)]


def sizes() -> Iterator[int]:
    """For each capture the fewest and the most rows of a step that use it."""
    for low, high in pairwise((0, *BUCKETS)):
        yield from sorted({low + 1, high})


def copied(part: Tensor) -> Tensor:
    """A result of a step: the next step overwrites the buffer."""
    return part.clone()


def captured_loop(loop: Loop, target: Target, same: Same = alike) -> Captured:
    """The loop captured, and compared with it in every bucket by `same`. Raises `CannotReplace`."""
    # for example a synchronising operation, or too little memory
    with refused("captured", RuntimeError):
        record = RECORDERS[target.device.type](target.device)
        made, layers = Captured(loop, target.device, record), len(loop.blocks)
        trials = (Trial.of(target, lengths) for lengths in of_buckets())
        steps = (((trial.batch,), trial.view) for trial in trials)
        run, expected = (partial(layer_states, form, layers) for form in (made, loop))
        compare_steps(run, expected, steps, "captured", same=same)
    return made


def of_buckets() -> list[Lengths]:
    """For each capture the fewest and the most rows, in one or two sequences."""
    return [(rows - rows // 2, rows // 2) if rows > 1 else (1,) for rows in sizes()]


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Sizes of a network that is captured as CUDA graphs."""

    hidden: int  # D of all inputs and of the residual
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int = 0  # V of a target; a drafter's logits are not captured
    numbers: int = 2  # integers of a row

    @classmethod
    def of_target(cls, config: Any, layers: tuple[LayerSpec, ...]) -> CaptureSizes:
        heads, spec = config.num_attention_heads, layers[0]
        inner, vocab = inner_size(config), config.vocab_size
        return cls(config.hidden_size, inner, heads, spec.heads, spec.k_dim, len(layers), vocab, 3)

    @classmethod
    def of_drafter(cls, config: Any, layers: int, more: int = 0, numbers: int = 2) -> CaptureSizes:
        """`more` is the width of what buffers hold besides a state, in states; `numbers` are the integers."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden = (1 + more) * config.hidden_size
        return cls(hidden, config.intermediate_size, heads, kv_heads, config.head_dim, layers, 0, numbers)

    def static_bytes(self, dtype: torch.dtype) -> int:
        """Ids, positions and other integers, states, logits, rotary tables, heads, attention outputs."""
        row = self.hidden + self.vocab + 2 * (1 + self.heads + self.kv_heads) * self.head_dim
        return BUCKETS[-1] * (self.numbers * torch.long.itemsize + row * dtype.itemsize)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The buffers, the shared intermediate results of the largest piece, and the graphs."""
        shared = width_of_states(self.hidden, self.inner)
        if self.vocab:
            shared = max(shared, self.hidden + self.vocab)
        graphs = len(BUCKETS) * (self.layers + (2 if self.vocab else 1))
        return self.static_bytes(dtype) + BUCKETS[-1] * shared * dtype.itemsize + graphs * GRAPH
