"""Prompts of text and images, over small processors of four models: placeholders, rows, digests, refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speculon.checkpoints.processors import images_of, load_processor
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import EngineConfig, ServeConfig
from speculon.core.errors import InvalidParameter, InvalidRequest, ModelError, QueueFull, TooLong
from speculon.core.images import ImageInput
from speculon.core.media import prompts
from speculon.core.media.files import ImageLimits
from speculon.core.media.parts import IMAGE, ImageSource, read_messages
from speculon.core.media.prompts import Images, Processor
from speculon.decoding.text.tokenizer import Tokenizer
from tests.images import data_url, file_of, pixels
from tests.tiny.processors import PROCESSORS, write_processor

FORMS = list(PROCESSORS)
A, B = pixels(40, 60, 1), pixels(30, 30, 2)
# placeholder tokens of A and of B, by each model's own arithmetic
ROWS = {"llava": (16, 16), "idefics3": (20, 20), "smolvlm": (20, 20), "qwen2_5_vl": (12, 4), "gemma3": (4, 4)}
# what the model's vision tower is given
INPUTS = {
    "llava": {"pixel_values"},
    "idefics3": {"pixel_values", "pixel_attention_mask"},
    "smolvlm": {"pixel_values", "pixel_attention_mask"},
    "qwen2_5_vl": {"pixel_values", "image_grid_thw"},
    "gemma3": {"pixel_values"},
}


class Model:
    """A processor, and the tokenizer of the same folder."""

    def __init__(self, folder: Path):
        self.processor = load_processor(folder)
        self.tokenizer = Tokenizer(load_tokenizer(folder))
        self.images = Images(lambda: self.processor, ImageLimits.of(ServeConfig()))

    def read(self, prompt: dict[str, Any], **more: Any) -> tuple[list[int], tuple[ImageInput, ...]]:
        return self.images.read(prompt, self.tokenizer, **more)

    def refusal(self, prompt: dict[str, Any]) -> InvalidParameter:
        with pytest.raises(InvalidParameter) as caught:
            self.read(prompt)
        return caught.value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(form: str) -> Model:
        if form not in made:
            made[form] = Model(write_processor(tmp_path_factory.mktemp(form), form, config={}))
        return made[form]

    return get


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def check_rows(form: str, model: Model) -> None:
    """Two images, one of them twice, with text between."""
    messages = [user(text("What is"), part(A), text(" beside"), part(B), part(A), text("?"))]
    ids, images = model.read({"messages": messages})
    a, b = ROWS[form]
    assert [len(image.rows) for image in images] == [a, b, a]
    placeholders = [i for i, token in enumerate(ids) if token == model.processor.image_id]
    assert [row for image in images for row in image.rows] == placeholders
    first, other, again = images
    assert first.digest == again.digest != other.digest and first.inputs is again.inputs
    # as the stock processor writes the same conversation
    stock = [user(text("What is"), {"type": "image"}, text(" beside"), {"type": "image"}, {"type": "image"})]
    stock[0]["content"].append(text("?"))
    inner = model.processor.inner
    written = model.tokenizer.inner.apply_chat_template(stock, tokenize=False, add_generation_prompt=True)
    made = inner(text=[written], images=[A, B, A], add_special_tokens=False, return_tensors="np")
    assert ids == made["input_ids"][0].tolist()
    for name in INPUTS[form]:
        joined = np.concatenate(
            [image.inputs[name] for image in images], int(form in ("idefics3", "smolvlm"))
        )
        assert np.array_equal(made[name], joined)


@pytest.mark.parametrize("form", FORMS)
def test_placeholders_are_those_of_the_stock_processor(form: str, models: Callable[[str], Model]) -> None:
    model = models(form)
    check_rows(form, model)
    assert model.processor.prepared == 2, "an image that is known is not prepared again"
    check_rows(form, model)
    assert model.processor.prepared == 2
    _, (image,) = model.read({"messages": [user(part(file_of(A)))]})
    assert set(image.inputs) == INPUTS[form]
    assert all(isinstance(array, np.ndarray) for array in image.inputs.values())
    assert model.processor.prepared == 2, "the same pixels in a file are the same image"


def test_rows_in_the_wrong_order_are_found_out(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "read_image", lambda *given: backwards(*given))
    given = [A, B, B]

    def backwards(image: Any, name: str, limits: ImageLimits) -> Any:
        return vision_read(given.pop(), name, limits)

    with pytest.raises(AssertionError):
        check_rows("qwen2_5_vl", models("qwen2_5_vl"))


vision_read = prompts.read_image


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_has_its_own_placeholders(form: str, models: Callable[[str], Model]) -> None:
    model = models(form)
    mark = model.processor.placeholder
    ids, images = model.read({"prompt": f"See {mark} and {mark}.", "images": [A, file_of(B)]})
    assert [len(image.rows) for image in images] == list(ROWS[form])
    made = model.processor.inner(text=[f"See {mark} and {mark}."], images=[A, B])
    assert ids == list(made["input_ids"][0])
    alone = model.read({"prompt": mark, "images": A})  # one need not be in a list
    assert len(alone[1]) == 1 and len(alone[1][0].rows) == ROWS[form][0]
    assert model.read({"prompt": "no image", "images": []}) == (model.tokenizer.encode("no image"), ())


def test_texts_need_no_processor(tmp_path: Path) -> None:
    write_processor(tmp_path, "llava", config={})
    tokenizer, images = Tokenizer(load_tokenizer(tmp_path)), Images.none()
    plain = [{"role": "user", "content": "hello"}]
    assert images.read({"messages": plain}, tokenizer) == (tokenizer.apply_chat(plain), ())
    assert images.read({"messages": [user(text("hel"), text("lo"))]}, tokenizer)[0] == tokenizer.apply_chat(
        plain
    )
    assert images.read({"prompt": "hello"}, tokenizer) == (tokenizer.encode("hello"), ())


# refused

URL = data_url(file_of(A))


def of_openai(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


@pytest.mark.parametrize(
    ("prompt", "name", "limit"),
    [
        ({"prompt": "x", "images": [A]}, "prompt", "is 0 times in the text; it must be there once"),
        ({"prompt": "<image>", "images": [A, B]}, "prompt", "is 1 times in the text; it must be there once"),
        ({"prompt": "<image>" * 17, "images": [A] * 17}, "images", "a request may have at most 16"),
        ({"prompt": [1, 2], "images": [A]}, "prompt", "must be a string"),
        ({"prompt": "<image>", "images": [5]}, "images.0", "must be a URL, a path, bytes"),
        ({"prompt": "<image>", "pictures": [A]}, "prompt", "give prompt and images, or messages"),
        ({"messages": [user(part(A))], "images": [A]}, "prompt", "give prompt and images, or messages"),
        ({"messages": "hello"}, "messages", "a list of"),
        ({"messages": [user(text("<image>"), part(A))]}, "messages", "is 2 times in the text"),
        ({"messages": [user(text(IMAGE), part(A))]}, "messages", "must not have U+10FFFF"),
        ({"messages": [user(part(A))] * 17}, "messages", "a request may have at most 16"),
        ({"messages": [user({"type": "image_url"})]}, "messages.0.content.0.image_url", "is needed"),
        ({"messages": [user(of_openai({}))]}, "messages.0.content.0.image_url.url", "is needed"),
        ({"messages": [user({"type": "smell"})]}, "messages.0.content.0.type", "must be text or image_url"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text", "must be a string"),
        ({"messages": [{"type": "input_image", "file_id": "f"}]}, "messages.0", "with a role"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused_by_name(
    models: Callable[[str], Model], prompt: dict[str, Any], name: str, limit: str
) -> None:
    error = models("llava").refusal(prompt)
    assert error.name == name and limit in error.limit, error


def test_the_ways_of_clients_to_name_a_url(models: Callable[[str], Model]) -> None:
    model = models("llava")
    ways = (
        of_openai(URL),
        of_openai({"url": URL, "detail": "low"}),
        {"type": "input_image", "image_url": URL},
    )
    digests = {model.read({"messages": [user(way)]})[1][0].digest for way in (*ways, part(A))}
    assert len(digests) == 1


def test_a_placeholder_token_that_no_image_brings_is_refused(models: Callable[[str], Model]) -> None:
    """Gemma 3 writes other tokens into the text than its template does."""
    error = models("gemma3").refusal({"messages": [user(text("<image_soft_token>"), part(A))]})
    assert error.feature == "images" and "is 5 times in the prompt, but the images have 4 rows" in error.limit


def test_a_template_without_images_is_told(tmp_path: Path) -> None:
    model = Model(write_processor(tmp_path, "llava", config={}))
    model.tokenizer.inner.chat_template = model.processor.chat_template = (
        "{{ messages[0]['content'][0]['type'] }}"
    )
    assert (
        "is 0 times in the text; it must be there once for each of 1 images"
        in model.refusal({"messages": [user(part(A))]}).limit
    )
    model.processor.chat_template = "{{ undefined.name }}"
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        model.read({"messages": [user(part(A))]})


def test_the_template_of_a_processor_is_used(tmp_path: Path) -> None:
    """Older checkpoints have one beside that of the tokenizer, or none there."""
    model = Model(write_processor(tmp_path, "llava", config={}))
    model.processor.chat_template, model.tokenizer.inner.chat_template = "see <image>", None
    ids, images = model.read({"messages": [user(part(A))]})
    assert model.tokenizer.decode(ids[:3], False) == "see" and len(images) == 1


def test_more_images_than_the_context_holds_are_not_all_prepared(models: Callable[[str], Model]) -> None:
    model = models("llava")
    before = model.processor.prepared
    many = [user(*(part(pixels(28, 28, seed)) for seed in range(100, 116)))]
    with pytest.raises(TooLong, match="4 images of 64 tokens > context 50 tokens"):
        model.read({"messages": many}, max_context=50)
    assert model.processor.prepared == before + 4


def test_the_cache_is_bounded_by_bytes(models: Callable[[str], Model]) -> None:
    model = models("qwen2_5_vl")
    size = model.processor.prepare(vision_read(A, "x", ImageLimits.of(ServeConfig())), "x").bytes
    small = Processor(model.processor.inner, model.processor.image_id, cache_bytes=2 * size + 10)
    limits = ImageLimits.of(ServeConfig())
    pictures = [vision_read(pixels(40, 60, seed), "x", limits) for seed in range(3)]
    for at, prepared in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4), (2, 5)):
        small.prepare(pictures[at], "x")
        assert small.prepared == prepared, "the image that was not used for longest has gone"
    tiny = Processor(model.processor.inner, model.processor.image_id, cache_bytes=10)
    for _ in range(2):
        tiny.prepare(pictures[0], "x")
    assert tiny.prepared == 2, "what is larger than the cache is not kept"


def test_an_image_that_the_processor_refuses(models: Callable[[str], Model]) -> None:
    """Qwen's does so at a ratio above 200."""
    error = models("qwen2_5_vl").refusal({"messages": [user(part(pixels(1000, 1)))]})
    assert (
        error.name == "messages.0.content.0.image" and "the model's image processor rejects it" in error.limit
    )
    assert error.value == "1000 x 1 pixels"


# models that take none

IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"


def without(folder: Path, name: str, instead: str = "", other: str = "") -> None:
    write_processor(folder, "llava", config={})
    for file in (name, other):
        (folder / file).unlink() if file else None
    if instead:
        (folder / name).write_text(instead)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda folder: None, "its config cannot be read"),
        (
            lambda folder: without(folder, "config.json", '{"model_type": "llama"}'),
            "llama is a model of text",
        ),
        (lambda folder: without(folder, "preprocessor_config.json"), "its processor cannot be loaded"),
        (lambda folder: without(folder, "processor_config.json", "{"), "its processor cannot be loaded"),
        (
            lambda folder: without(folder, "preprocessor_config.json", "", "processor_config.json"),
            "no processor_",
        ),
        (
            lambda folder: without(folder, "processor_config.json", '{"processor_class": "X"}'),
            "no processor X",
        ),
    ],
)
def test_a_model_without_a_processor(tmp_path: Path, prepare: Callable[[Path], Any], why: str) -> None:
    prepare(tmp_path)
    images = Images(partial(load_processor, tmp_path), ImageLimits.of(ServeConfig()))
    messages, sources = read_messages([user(part(A))])
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="this model takes no images: ") as caught:
            images.template(sources)
        assert caught.value.feature == "images" and caught.value.name == "messages.0.content.0.image"
        assert why in caught.value.limit and str(tmp_path.parent) not in caught.value.limit


def test_a_gguf_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    images = images_of(EngineConfig(model=str(tmp_path / "model.gguf")), files=True)
    with pytest.raises(InvalidParameter, match="a GGUF file has no image processor"):
        images.processor([ImageSource("images.0", A)])


def test_a_processor_without_a_placeholder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_processor(tmp_path, "llava", config={})
    monkeypatch.setattr("speculon.checkpoints.processors.build", lambda *_: object())
    with pytest.raises(ModelError, match="has no placeholder of an image"):
        load_processor(tmp_path)


def test_images_of_open_requests_are_bounded(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has any more counts no longer."""
    known = models("llava").processor
    processor = Processor(known.inner, known.image_id, 0)  # it keeps none
    a, b = (prompts.read_image(file_of(image), "x", ImageLimits.of(ServeConfig())) for image in (A, B))
    monkeypatch.setattr(prompts, "USED_BYTES", 0)
    held = processor.prepare(a, "x")
    with pytest.raises(QueueFull, match="images of open requests take"):
        processor.prepare(b, "x")
    del held
    gc.collect()
    assert processor.prepare(b, "x").rows == 16
