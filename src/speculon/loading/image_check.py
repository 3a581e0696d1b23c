"""The load check of images: paged logits of a prompt with one against those of the stock model."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from speculon.core.errors import UnsupportedModel
from speculon.core.images import ImageInput
from speculon.decoding.batch import Batch, ImageRows
from speculon.decoding.kv.store import PageStore, SpanView
from speculon.loading.load_check import COARSE, LOOSE, TOLERANCE, InFp32, nearly, relative
from speculon.loading.locate import first_line
from speculon.loading.probe import stock_attention
from speculon.target.block import UNKNOWN
from speculon.target.remembered import passed, passes
from speculon.target.target import Target
from speculon.target.vision import Vision

CHECK = "images"  # as earlier loads remember it
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are of images


class ImageSample(NamedTuple):
    """A prompt with one image, as its processor makes it."""

    ids: list[int]
    image: ImageInput


class StockLogits(NamedTuple):
    """Of all rows of a sample [n, V], in the model's dtype, and in fp32 where that is another one."""

    own: Tensor
    truth: Tensor | None


def stock_image_logits(target: Target, sample: ImageSample | None) -> StockLogits | None:
    """None where there is nothing to check, or an earlier load has passed. A target whose model does not take
    the sample loses its vision tower.
    """
    if target.vision is None or sample is None or passed(CHECK):
        return None
    try:
        return stock_forwards(target, target.vision, sample)
    except UNKNOWN as error:
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
            return StockLogits(own, None)
        with InFp32():
            return StockLogits(own, logits())


def check_images(target: Target, sample: ImageSample | None, stock: StockLogits | None) -> None:
    """Takes the vision tower from a target whose logits after an image are not those of the stock model."""
    vision = target.vision
    if vision is None or sample is None or stock is None:
        return
    try:
        ours = image_logits(target, vision, sample)
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
