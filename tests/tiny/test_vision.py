"""Prompts with images: texts and rows of the stock models, alone, in a batch, in chunks and found again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from speculon import SamplingParams
from speculon.core.errors import InvalidParameter, NeverFits
from speculon.core.images import ImageInput
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.runtimes.torch.batch import Batch, PlacedSpan
from speculon.runtimes.torch.kv.store import PageStore, View
from speculon.runtimes.torch.loading.load import load_target, make_target, wrap_model
from speculon.runtimes.torch.loading.load_check import ImageSample
from speculon.runtimes.torch.loading.memory import model_needs
from speculon.runtimes.torch.model import vision
from speculon.runtimes.torch.model.quantized import layers_of
from speculon.runtimes.torch.model.target import Target, TargetOutput
from tests.tiny.requests import scored_spans
from tests.tiny.scripted import Key, Result, drain, make_engine, script, texts_of
from tests.tiny.vision_models import (
    FAMILIES,
    IMAGE,
    image_prompt,
    pixels,
    stock_arguments,
    vision_model,
    write_vision,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)


@cache
def stock(family: str) -> PreTrainedModel:
    return vision_model(family)


@cache
def target_of(family: str) -> Target:
    return wrap_model(stock(family))


@dataclass
class ImageRequest:
    """A request by name, with its images by their seeds."""

    id: str
    images: tuple[int, ...] = ()
    lead: int = 7
    params: SamplingParams = GREEDY
    speculation: dict[str, Any] = field(default_factory=dict)
    more: tuple[int, ...] = ()  # tokens after all

    def add(self, engine: Engine, family: str) -> None:
        ids, images = image_prompt(family, self.images, self.lead)
        prompt = [*ids, *self.more]
        engine.add_request(prompt, self.params, self.speculation, self.id, images=images)


REQUESTS = (
    ImageRequest("one", (1,)),
    ImageRequest("two", (1, 2)),
    ImageRequest("text", lead=19),
    ImageRequest("other", (3,), lead=30),
    ImageRequest("seeded", (2,), params=SEEDED),
    ImageRequest("long", lead=45, params=SEEDED),
)


def texts(family: str, requests: Iterable[ImageRequest], **settings: Any) -> dict[Key, Result]:
    engine = make_engine(target_of(family), **settings)
    for request in requests:
        request.add(engine, family)
    return drain(engine)


@cache
def alone(family: str) -> dict[Key, list[int]]:
    """Each text of the batch, written alone and plainly."""
    results: dict[Key, Result] = {}
    for request in REQUESTS:
        results |= texts(family, (replace(request, speculation={"method": "off"}),))
    return texts_of(results)


def drafting(k: int) -> tuple[ImageRequest, ...]:
    scripted = {"method": "scripted", "num_speculative_tokens": k}
    return tuple(replace(request, speculation=scripted) for request in REQUESTS)


@pytest.mark.parametrize(
    ("family", "images"), [*((family, (1, 2)) for family in FAMILIES), ("llava", ()), ("gemma3", (2, 2))]
)
def test_the_text_is_that_of_generate(family: str, images: tuple[int, ...]) -> None:
    ids, inputs = image_prompt(family, images)
    prompt = torch.tensor([ids])
    expected = stock(family).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **stock_arguments(family, ids, inputs),
    )
    ours = texts(family, (ImageRequest("r", images),))["r", 0].tokens
    assert ours == expected[0, len(ids) :].tolist()


def row_error(family: str, engine: Engine, requests: tuple[ImageRequest, ...]) -> float:
    """The largest difference of a scored row from the stock model's forward over the same tokens."""
    forward, worst = engine.runtime.target.forward, 0.0

    def checked(batch: Batch, view: View) -> TargetOutput:
        nonlocal worst
        out = forward(batch, view)
        for one, rows in scored_spans(batch):
            images = list(one.seq.request.images.images)
            text = [*one.seq.tokens[: one.span.end], *one.draft.tokens]
            if text.count(IMAGE) != sum(len(image.within(0, one.span.end)) for image in images):
                continue  # a draft, which the stock model takes for an image
            more = stock_arguments(family, text, images)
            expected = stock(family)(torch.tensor([text]), **more).logits[0, -len(rows) :]
            error = (out.logits[rows] - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error))
        return out

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(engine.runtime.target, "forward", checked)
        for request in requests:
            request.add(engine, family)
        drain(engine)
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_stock_model(family: str) -> None:
    script(alone(family))
    engine = make_engine(target_of(family), max_batch_tokens=24, max_num_seqs=4)
    assert row_error(family, engine, drafting(4)) < 1e-4


def on_one_axis(*_: Any) -> None:
    return None


def one_direction(*_: Any) -> Iterator[range]:
    yield from ()


def features_of_another(model: Any, image: ImageInput) -> torch.Tensor:
    values, _ = pixels("llava", 9)
    return right_features(model, replace(image, digest="9", inputs=values))


right_features = vision.Vision.features

PLANTED = {
    "qwen2_5_vl": (vision.Vision, "_positions", on_one_axis),
    "gemma3": (vision, "runs_of", one_direction),
    "llava": (vision.Vision, "features", features_of_another),
}


@pytest.mark.parametrize("family", PLANTED)
def test_a_planted_error_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One axis for three, attention in one direction, another image."""
    monkeypatch.setattr(*PLANTED[family])
    engine = make_engine(wrap_model(stock(family)))
    assert row_error(family, engine, (ImageRequest("one", (1,)),)) > 1e-3


def sample_of(family: str) -> ImageSample:
    ids, images = image_prompt(family, (5,))
    return ImageSample(ids, images[0])


def checked(family: str, dtype: torch.dtype) -> Target:
    """As it is loaded, with the check of images."""
    model = copy.deepcopy(stock(family)).to(dtype)
    return make_target(model, family, None, fused=True, share=True, sample=lambda: sample_of(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_checked_at_load(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that fails reads text alone, and says why."""
    assert checked(family, dtype).vision is not None
    if family in PLANTED:
        monkeypatch.setattr(*PLANTED[family])
        target = checked(family, dtype)
        assert target.vision is None and "the check of images failed" in target.no_images


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_finds_the_image_in_pages(family: str) -> None:
    engine = make_engine(target_of(family))
    first = ImageRequest("first", (1,))
    first.add(engine, family)
    text = drain(engine)["first", 0].tokens
    ids, images = image_prompt(family, (1,))
    prompt = [*ids, *(token for token in text if token != IMAGE), 5, 6, 7]
    engine.add_request(prompt, GREEDY, {"method": "off"}, "second", images=images)
    second = drain(engine)["second", 0]
    assert second.stats.cached_tokens > images[0].rows[-1]
    fresh = make_engine(target_of(family), prefix_cache=False)
    fresh.add_request(prompt, GREEDY, {"method": "off"}, "second", images=images)
    assert drain(fresh)["second", 0].tokens == second.tokens


@pytest.mark.parametrize("planted", [False, True])
def test_two_images_share_no_page(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts differ in the image alone; the planted error leaves it out of the content of pages."""
    family, requests = "llava", [ImageRequest("first", (1,)), ImageRequest("second", (2,))]
    separate = texts(family, requests[1:])["second", 0].tokens
    if planted:
        monkeypatch.setattr(Sequence, "contents", lambda seq, a, b: tuple(seq.tokens[a:b]))
    engine = make_engine(target_of(family))
    for request in requests:
        request.add(engine, family)
        result = drain(engine)[request.id, 0]
    assert (result.stats.cached_tokens > 8) == planted  # what is before the image
    assert (result.tokens == separate) != planted


def test_blocks_are_never_cut() -> None:
    """Of Gemma 3: a chunk ends before an image or after it, also where pages have its beginning."""
    family, cut = "gemma3", []
    engine = make_engine(target_of(family), max_batch_tokens=9, max_num_seqs=2)
    view = PageStore.view

    def watched(store: PageStore, placed: list[PlacedSpan], *others: Any) -> View:
        cut.extend(
            one for one, _ in placed if one.seq.request.images.whole_blocks(0, one.span.end) != one.span.end
        )
        return view(store, placed, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageStore, "view", watched)
        for request in REQUESTS:
            request.add(engine, family)
        results = drain(engine)
    assert not cut and texts_of(results) == alone(family)
    with pytest.raises(NeverFits, match="an image of 4 tokens is one chunk of the prompt, of at most 3"):
        ImageRequest("r", (1,)).add(
            make_engine(target_of(family), max_batch_tokens=5, max_num_seqs=2), family
        )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_rounded_model(family: str, tmp_path: Path) -> None:
    """Its vision tower stays numbers, its memory is estimated, and the batch changes no text."""
    path = write_vision(tmp_path, family)
    target = load_target(path, dtype="bfloat16", quantization="int8", batch_invariant=None)
    assert target.packed and target.vision is not None
    tower = {id(x) for x in target.vision.base.modules()} - {
        id(x) for x in target.model.get_decoder().modules()
    }
    assert not any(id(layer) in tower for _, layer in layers_of(target.model))
    expected = model_needs(path, torch.bfloat16, torch.device("cpu"), 1, 1, quantization="int8").bytes_fixed
    assert target.num_bytes == pytest.approx(expected, rel=0.1)
    separate: dict[Key, list[int]] = {}
    for request in REQUESTS[:3]:
        engine = make_engine(target)
        request.add(engine, family)
        separate |= texts_of(drain(engine))
    engine = make_engine(target, max_batch_tokens=24, max_num_seqs=4)
    for request in REQUESTS[:3]:
        request.add(engine, family)
    assert texts_of(drain(engine)) == separate


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_images_do(family: str) -> None:
    row = make_engine(target_of(family), max_batch_tokens=64, max_num_seqs=4).capabilities()["images"]
    assert row.status == "on" and ("three axes" in row.reason) == (family == "qwen2_5_vl")
    assert row.limits == ({"tokens_of_one": 60} if family == "gemma3" else {})


def test_images_that_do_not_fit_the_prompt_are_refused() -> None:
    engine = make_engine(target_of("llava"))
    ids, images = image_prompt("llava", (1,))
    wrong = {
        "16 rows of images, and 15 placeholder tokens": ([x for i, x in enumerate(ids) if i != 8], images),
        "are no inputs of this vision tower": (ids, [replace(images[0], inputs={"audio": np.array(ids)})]),
    }
    for why, (prompt, given) in wrong.items():
        with pytest.raises(InvalidParameter, match=why):
            engine.add_request(prompt, GREEDY, images=given)
    text = engine.add_request(ids, GREEDY)  # without images, placeholders are tokens as any other
    assert drain(engine)[text, 0].tokens and IMAGE in ids


def test_images_side_by_side_are_one_content() -> None:
    """Of Gemma 3: each sees the other, so the first is not found again before another second one."""
    family = "gemma3"

    def side_by_side(second: int) -> tuple[list[int], list[ImageInput]]:
        ids, (image, other) = [5, 6, 7, 8], (image_prompt(family, (seed,))[1][0] for seed in (1, second))
        pair = [replace(image, rows=(4, 5, 6, 7)), replace(other, rows=(8, 9, 10, 11))]
        return [*ids, *[IMAGE] * 8, 9, 10, 11, 12], pair

    texts = []
    for prefix_cache in (True, False):
        engine = make_engine(target_of(family), prefix_cache=prefix_cache)
        for second in (2, 3):
            prompt, images = side_by_side(second)
            engine.add_request(prompt, GREEDY, {"method": "off"}, f"r{second}", images=images)
            result = drain(engine)[f"r{second}", 0]
        texts.append(result.tokens)
        assert result.stats.cached_tokens == (4 if prefix_cache else 0)
    assert texts[0] == texts[1]


WRONG: dict[str, Any] = {
    "must be ImageInput": ("image",),
    "at least one": (ImageInput((), "0", {}),),
    "needs a digest": (ImageInput((8,), "", {}),),
    "positions in the prompt": (ImageInput((8.0,), "0", {}),),  # type: ignore[arg-type]
    "positions cannot be made": (ImageInput((8, 9, 10, 11, 12, 13), "0", {}),),
}


@pytest.mark.parametrize("why", WRONG)
def test_inputs_of_any_form_are_refused(why: str) -> None:
    engine = make_engine(target_of("qwen2_5_vl"))
    with pytest.raises(InvalidParameter, match=why):
        engine.add_request(image_prompt("qwen2_5_vl", (1,))[0], GREEDY, images=WRONG[why])


def test_a_known_digest_with_other_rows_ends_its_request() -> None:
    family, engine = "llava", make_engine(target_of("llava"))
    ids, images = image_prompt(family, (1,))
    engine.add_request(ids, GREEDY, request_id="right", images=images)
    fewer = replace(images[0], rows=images[0].rows[:-1])
    prompt = [x for i, x in enumerate(ids) if i != images[0].rows[-1]]
    engine.add_request(prompt, GREEDY, request_id="wrong", images=[fewer])
    results = drain(engine)
    assert results["wrong", 0].finish is not None and results["wrong", 0].finish.reason == "error"
    assert results["right", 0].tokens == alone(family)["one", 0]


@pytest.mark.parametrize(
    ("shape", "value"), [((1, 3, 28, 21), 1.0), ((2, 3, 28, 28), 1.0), ((1, 3, 28, 28), float("nan"))]
)
def test_an_image_without_features_ends_its_request_alone(shape: tuple[int, ...], value: float) -> None:
    """A size that the tower refuses, more features than placeholders, and features that are not finite."""
    family = "llava"
    engine = make_engine(target_of(family))
    ids, images = image_prompt(family, (1,))
    arrays = {"pixel_values": torch.full(shape, value).numpy()}
    wrong = replace(images[0], inputs=arrays, digest="0" * 64)
    for request in REQUESTS[:3]:
        request.add(engine, family)
    engine.add_request(ids, GREEDY.model_copy(update={"n": 2}), {}, "wrong", images=[wrong])
    results = drain(engine)
    ended = [results.pop(("wrong", sample)).finish for sample in range(2)]
    assert all(finish and finish.reason == "error" and finish.error for finish in ended)
    assert texts_of(results) == {key: alone(family)[key] for key in results} and len(results) == 3


def test_a_text_model_refuses_images() -> None:
    from tests.tiny.conftest import tiny_target

    ids, images = image_prompt("llava", (1,))
    with pytest.raises(InvalidParameter, match="a text model") as refused:
        make_engine(tiny_target("llama")).add_request(ids, GREEDY, images=images)
    assert refused.value.feature == "images"
    assert make_engine(tiny_target("llama")).capabilities()["images"].status == "refused"
