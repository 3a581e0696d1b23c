"""The load check of images: paged logits of a prompt with one against those of the stock model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculon.core.errors import ModelError, SpeculonError, UnsupportedModel
from speculon.core.images import ImageInput
from speculon.core.media.files import ImageLimits
from speculon.core.media.parts import Source
from speculon.core.media.prompts import Images
from speculon.decoding.batch import Batch, ImageRows
from speculon.decoding.kv.store import PageStore, SpanView
from speculon.loading.load_check import COARSE, LOOSE, TOLERANCE, InFp32, nearly, relative
from speculon.loading.locate import first_line
from speculon.loading.probe import stock_attention
from speculon.loading.processors import load_processor
from speculon.target.block import UNKNOWN
from speculon.target.remembered import passed, passes
from speculon.target.target import Target
from speculon.target.vision import Vision

CHECK = "images"  # as earlier loads remember it
SIDE = 64  # pixels of a sample
BEFORE, AFTER = "What is here: ", " A picture of noise."  # its text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are of images


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
    source = Source("images", Image.fromarray(noise))
    images = Images(lambda: processor, ImageLimits(1, 0, SIDE * SIDE))
    text, encode = f"{BEFORE}{processor.placeholder}{AFTER}", processor.inner.tokenizer.encode
    ids, (image,) = images.prompt(text, [source], encode)
    return ImageSample(ids, image)


def stock_image_logits(target: Target, make: Callable[[], ImageSample | None] | None) -> StockLogits | None:
    """None where there is nothing to check, or an earlier load has passed. A target whose model does not take
    the sample loses its vision tower.
    """
    if target.vision is None or make is None or passed(CHECK):
        return None
    try:
        sample = make()
        return None if sample is None else stock_forwards(target, target.vision, sample)
    except (SpeculonError, *UNKNOWN) as error:
        refuse(target, first_line(error))
        return None


def refuse(target: Target, why: str) -> None:
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
        refuse(target, first_line(error))
    else:
        passes(CHECK)


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
