"""The load check: paged logits against those of the stock model, of two packed sequences, and of a prompt
with an image where the model reads images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from speculon.checkpoints.locate import first_line
from speculon.checkpoints.processors import load_processor
from speculon.core.errors import ModelError, SpeculonError, UnsupportedModel
from speculon.core.images import ImageInput
from speculon.core.media.files import ImageLimits
from speculon.core.media.parts import ImageSource
from speculon.core.media.prompts import Images
from speculon.runtimes.torch.batch import Batch, ImageRows, joined
from speculon.runtimes.torch.kv.states import StateSpan, StateStep, StateStore
from speculon.runtimes.torch.kv.store import PageStore, SpanView, end_to_end
from speculon.runtimes.torch.loading.probe import stock_attention
from speculon.runtimes.torch.model.block import UNKNOWN
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.model.remembered import passed, passes
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.vision import Vision

TOLERANCE = {torch.float32: 1e-4}  # of the largest logit
# in bf16 random models gave 0.01 to 0.12, and 0.20 where an MoE chose another expert at a near-tie; x1.5
LOOSE = 0.3
# in 14 small architectures, SmolLM2 and Gemma 3 it was 0.6 to 1.2; where 14 norms of Gemma 3 were wrong, 3.9
FURTHER = 1.5
COARSE = (torch.bfloat16, torch.float16)
SPREAD = 2  # times the stock model's own distance to fp32: as far as two results of its precision are apart
BLOCK = 4
LENGTHS, FIRST = (11, 6), (8, 5)  # the second forward continues with 3 rows and with 1
DRAFTED = 6  # rows of a span with drafts, each number of which is rejected once
TABLES = ([5, 2, 7], [3, 4])  # scattered pages, and consecutive ones

IMAGES = "images"  # as earlier loads remember the check of images
SIDE = 64  # pixels of a sample
BEFORE, AFTER = "What is here: ", " A picture of noise."  # its text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are of images

CheckedRows = tuple[
    Tensor, list[int], int, int
]  # a sequence [n], its pages, and the part [start, end) to run


class InFp32(TorchFunctionMode):
    """Within it, operations take tensors of bf16 and fp16 in fp32; one weight at a time is converted."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__":  # shape, dtype: nothing is computed
            value = func(*args)
            return torch.float32 if value in COARSE else value
        if func in (F.embedding, Tensor.__getitem__):  # a few rows of a large tensor
            return in_fp32(func(*args, **(kwargs or {})))
        return func(*tree_map(in_fp32, args), **tree_map(in_fp32, kwargs or {}))


def in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in COARSE else value


@torch.inference_mode()
def check_logits(target: Target, stock: Tensor, truth: Tensor | None = None) -> float:
    """The largest difference of a logit from `stock_logits`, relative to the largest logit.

    Raises `UnsupportedModel` where it exceeds the tolerance, or where the logits are further than stock ones
    from `truth`, those in fp32.
    """
    ours, limit = paged_logits(target), TOLERANCE.get(target.dtype, LOOSE)
    if truth is not None:
        limit = max(limit, SPREAD * difference(stock, truth))
    error = relative(target, ours, stock, limit, "logits over pages")
    if truth is not None:
        nearly(target, ours, stock, truth)
    if target.mixers:
        for accepted, after in enumerate(logits_after_rejection(target)):
            rejected = f"{DRAFTED - 1 - accepted} rejected drafts"
            expected = stock[LENGTHS[0] - len(after) : LENGTHS[0]]
            relative(target, after, expected, limit, f"logits after {rejected}")
    return error


def relative(target: Target, ours: Tensor, stock: Tensor, limit: float, what: str) -> float:
    error = difference(ours, stock)
    if not error <= limit:  # a NaN is refused too
        raise UnsupportedModel(
            f"{target.name} ({type(target.model).__name__}, {target.dtype}): {what} differ from "
            f"the stock model by {error:.2g} of the largest logit, allowed is {limit:.2g}"
        )
    return error


def nearly(target: Target, ours: Tensor, stock: Tensor, truth: Tensor) -> None:
    """Raises `UnsupportedModel` where rows are further from `truth` than those of the stock model.

    In the median. Of quantised models also in the mean: some have rows whose median is 1.5 by chance.
    """
    ours_off, stock_off = (row_errors(logits, truth) for logits in (ours, stock))
    least = TOLERANCE[torch.float32]
    statistics = (torch.median, torch.mean) if target.packed else (torch.median,)
    ratio = min(float(f(ours_off) / f(stock_off).clamp(min=least)) for f in statistics)
    if not ratio <= FURTHER:
        raise UnsupportedModel(
            f"{target.name} ({type(target.model).__name__}, {target.dtype}): log-probabilities are "
            f"{ratio:.2g} times as far from those in fp32 as the stock model's, allowed is {FURTHER:g}"
        )


def row_errors(logits: Tensor, truth: Tensor) -> Tensor:  # [R]
    """The mean distance of the log-probabilities of each row."""
    return (logits.log_softmax(-1) - truth.log_softmax(-1)).abs().mean(-1)


def logits_after_rejection(target: Target) -> list[Tensor]:
    """The first sequence once for each number of drafts accepted, with other tokens where they are rejected.

    Returns the logits of what follows the accepted rows: [DRAFTED - 1 - accepted, V] each.
    """
    text, start, end = random_sequences(target)[0], LENGTHS[0] - DRAFTED, LENGTHS[0]
    copies, pages = range(DRAFTED - 1), -(-LENGTHS[0] // BLOCK)
    tables = [[*range(pages * i, pages * (i + 1))] for i in copies]
    store = PageStore(target.layers, pages * len(copies), BLOCK, target.device)
    states = target.states(2 * len(copies))
    drafted = [text.clone() for _ in copies]
    for i in copies:
        drafted[i][start + 1 + i :] = (text[start + 1 + i :] + 1) % target.vocab_size
    run_pieces(target, store, [(text, tables[i], 0, start) for i in copies], states)
    spans = [(drafted[i], tables[i], start, end) for i in copies]
    run_pieces(target, store, spans, states, 1, [1 + i for i in copies])
    return run_pieces(target, store, [(text, tables[i], start + 1 + i, end) for i in copies], states, 2)


def random_sequences(target: Target) -> list[Tensor]:
    """Two sequences of random tokens: [11] and [6]."""
    generator = torch.Generator().manual_seed(0)
    size = min(target.vocab_size, target.model.get_input_embeddings().weight.shape[0])
    return [torch.randint(size, (n,), generator=generator).to(target.device) for n in LENGTHS]


@torch.inference_mode()
def stock_logits(target: Target) -> Tensor:  # [17, V]
    """Both sequences in one call; what follows the end of one changes nothing before it."""
    ids = nn.utils.rnn.pad_sequence(random_sequences(target), batch_first=True)
    with stock_attention(target.model):
        logits = target.model(input_ids=ids, use_cache=False).logits
    return torch.cat([rows[:n].float() for rows, n in zip(logits, LENGTHS, strict=True)])


@torch.inference_mode()
def logits_in_fp32(target: Target) -> Tensor | None:  # [17, V]
    """Those of the stock model computed in fp32; None where it is in fp32, or has kernels of its dtype."""
    if target.dtype not in COARSE:
        return None
    try:
        with InFp32():
            return stock_logits(target)
    except UNKNOWN:
        return None


def paged_logits(target: Target) -> Tensor:  # [17, V]
    store = PageStore(target.layers, 1 + max(map(max, TABLES)), BLOCK, target.device)
    states = target.states(2 * len(TABLES))
    steps = zip(((0, 0), FIRST), (FIRST, LENGTHS), strict=True)
    sequences = random_sequences(target)
    parts = [
        run_pieces(target, store, list(zip(sequences, TABLES, *bounds, strict=True)), states, turn)
        for turn, bounds in enumerate(steps)
    ]
    return torch.cat([rows for sequence in zip(*parts, strict=True) for rows in sequence])


def run_pieces(
    target: Target,
    store: PageStore,
    pieces: list[CheckedRows],
    states: StateStore | None = None,
    turn: int = 0,
    accepted: list[int] | None = None,
    prompt_len: int = 0,
    scored: int | None = None,
) -> list[Tensor]:
    """One forward over pieces of sequences; the logits [rows, V] of each, or only those [1, V] of one row.

    Piece i has the slots 2 i and 2 i + 1 of `states`, of which it reads one in even turns, the other in odd
    ones. What it writes are the states after all of its rows, or after the `accepted` ones. Positions below
    `prompt_len` are those of prompts.
    """
    spans = end_to_end((end - start, store.where(table, end), end, 0) for _, table, start, end in pieces)
    ids = torch.cat([sequence[start:end] for sequence, _, start, end in pieces])
    positions = torch.cat([torch.arange(start, end) for _, _, start, end in pieces]).to(target.device)
    prompts = [
        (span.first, min(span.last, span.first + prompt_len - start))
        for span, (_, _, start, _) in zip(spans, pieces, strict=True)
        if start < prompt_len
    ]
    rows = torch.arange(len(ids), device=target.device)
    if scored is not None:
        rows = rows[scored : scored + 1]
    batch = Batch([], ids[None], positions[None], rows, joined(prompts))
    view = store.view_of(spans)
    if states is not None:
        old = turn % 2
        view.states = StateStep(
            states,
            [
                StateSpan(span.first, span.last, 2 * i + old, 2 * i + 1 - old, not pieces[i][2], drafted=True)
                for i, span in enumerate(spans)
            ],
        )
    logits = target.forward(batch, view).logits
    if view.states is not None:
        view.states.roll_back(accepted or [span.rows for span in spans])
    return list(logits.split([span.rows for span in spans])) if scored is None else [logits]


# images


class ImageSample(NamedTuple):
    """A prompt with one image, as its processor makes it."""

    ids: list[int]
    image: ImageInput


class StockLogits(NamedTuple):
    """Of all rows of a sample [n, V], in the model's dtype, and in fp32 where that is another one."""

    sample: ImageSample
    own: Tensor
    truth: Tensor | None


def image_sample(path: Path, trust_remote_code: bool) -> ImageSample | None:
    """A prompt with noise as its image; None where the folder has no processor, so that no image comes."""
    try:
        processor = load_processor(path, trust_remote_code=trust_remote_code)
    except ModelError:
        return None
    from PIL import Image  # an extra, which processors need

    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    source = ImageSource("images", Image.fromarray(noise))
    images = Images(lambda: processor, ImageLimits(1, 0, SIDE * SIDE))
    text, encode = f"{BEFORE}{processor.placeholder}{AFTER}", processor.inner.tokenizer.encode
    ids, (image,) = images.prompt(text, [source], encode)
    return ImageSample(ids, image)


def stock_image_logits(target: Target, make: Callable[[], ImageSample | None] | None) -> StockLogits | None:
    """None where there is nothing to check, or an earlier load has passed. A target whose model does not take
    the sample loses its vision tower.
    """
    if target.vision is None or make is None or passed(IMAGES):
        return None
    try:
        sample = make()
        return None if sample is None else stock_forwards(target, target.vision, sample)
    except (SpeculonError, *UNKNOWN) as error:
        refuse_images(target, first_line(error))
        return None


def refuse_images(target: Target, why: str) -> None:
    target.vision, target.no_images = None, f"the check of images failed: {why}"


@torch.inference_mode()
def stock_forwards(target: Target, vision: Vision, sample: ImageSample) -> StockLogits:
    ids = torch.tensor([sample.ids], device=target.device)
    arguments = dict(vision.inputs(sample.image))
    accepted = inspect.signature(target.model.forward).parameters
    types = (ids == vision.token).int()
    arguments |= {name: types for name in TOKEN_TYPES if name in accepted}

    def logits() -> Tensor:
        return target.model(input_ids=ids, use_cache=False, **arguments).logits[0].float()

    with stock_attention(target.model):
        own = logits()
        if target.dtype not in COARSE:
            return StockLogits(sample, own, None)
        with InFp32():
            return StockLogits(sample, own, logits())


def check_images(target: Target, stock: StockLogits | None) -> None:
    """Takes the vision tower from a target whose logits after an image are not those of the stock model."""
    vision = target.vision
    if vision is None or stock is None:
        return
    try:
        ours = image_logits(target, vision, stock.sample)
        limit = TOLERANCE.get(target.dtype, LOOSE)
        relative(target, ours, stock.own, limit, "logits after an image")
        if stock.truth is not None:
            nearly(target, ours, stock.own, stock.truth)
    except (UnsupportedModel, *UNKNOWN) as error:
        refuse_images(target, first_line(error))
    else:
        passes(IMAGES)


@torch.inference_mode()
def image_logits(target: Target, vision: Vision, sample: ImageSample) -> Tensor:  # [n, V]
    """Of one forward over pages."""
    ids, image = sample
    images, count = vision.read(ids, [image]), len(ids)
    store = PageStore(target.layers, 1, count, target.device)
    spans = [
        SpanView(begin, stop, slice(0, seen or stop), seen or stop, both=bool(seen))
        for begin, stop, seen in images.runs(0, count)
    ]
    rows = torch.arange(count, device=target.device)
    positions = rows[None]
    if images.positions is not None:
        positions = torch.from_numpy(images.positions).to(target.device)[:, None]
    placed = (ImageRows(image, range(len(image.rows)), list(image.rows)),)
    tokens = torch.tensor([ids], device=target.device)
    batch = Batch([], tokens, positions, rows, ((0, count),), images=placed)
    return target.forward(batch, store.view_of(spans)).logits
