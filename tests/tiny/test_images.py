"""Images through `LLM` and the server, over whole small models, with the texts of the stock ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText

from speculon import LLM, SamplingParams
from speculon.checkpoints.processors import images_of, load_processor
from speculon.core.config import EngineConfig
from speculon.core.errors import InvalidParameter
from speculon.core.media.prompts import Images
from speculon.runtimes.torch.model.vision import Vision
from speculon.server.pool.catalogue import Catalogue
from tests.images import data_url, file_of, pixels
from tests.server.inside import ScriptedLoader, serving
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.processors import PROCESSORS, write_seeing

A, B = pixels(40, 60, 1), pixels(30, 30, 2)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"threads": 1, "warmup": False, "num_blocks": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: write_seeing(tmp_path_factory.mktemp(form), form) for form in PROCESSORS}


def message(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def stock_text(folder: Path, messages: list[dict[str, Any]], *images: Any) -> list[int]:
    """What transformers writes, with its own processor."""
    inner = load_processor(folder).inner
    options: dict[str, Any] = {"chat_template": inner.chat_template, "tokenize": False}
    text = inner.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    inputs = inner(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    out = model.generate(**inputs, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("form", PROCESSORS)
def test_chats_with_images_have_the_texts_of_the_stock_model(form: str, folders: dict[str, Path]) -> None:
    with LLM(str(folders[form]), **SETTINGS) as llm:
        messages = message("What is ", A, " beside ", B, "?")
        out = llm.chat(messages, GREEDY)
        assert out.token_ids == stock_text(folders[form], messages, A, B)
        other = llm.chat(message("What is ", B, " beside ", A, "?"), GREEDY)
        assert other.token_ids != out.token_ids, "the model sees them"


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(folders["qwen2_5_vl"]), **SETTINGS) as llm:
        yield llm


def test_every_call_takes_the_same_prompts(llm: LLM) -> None:
    chat = {"messages": message("What is ", file_of(A), "?")}
    prompt = {"prompt": "<|vision_start|><|image_pad|><|vision_end|> is", "images": [data_url(file_of(A))]}
    many = [chat, "a text alone", prompt, chat]
    outs = llm.generate(many, GREEDY)
    assert [out.text for out in outs] == [llm.generate([one], GREEDY)[0].text for one in many], "in a batch"
    assert outs[0].text == llm.chat(chat["messages"], GREEDY).text
    assert outs[0].text == llm.chat([chat["messages"]], GREEDY)[0].text

    async def at_once() -> tuple[str, str]:
        whole = (await llm.agenerate(chat, GREEDY))[0].text
        return whole, "".join([piece async for piece in llm.astream(prompt, GREEDY)])

    assert asyncio.run(at_once()) == (outs[0].text, outs[2].text)
    assert "".join(llm.stream(chat, GREEDY)) == outs[0].text
    assert [token for event in llm.events(prompt, GREEDY) for token in event.tokens] == outs[2].token_ids


def test_a_model_of_text_alone_refuses_images(tmp_path: Path) -> None:
    with LLM(str(write_checkpoint(tmp_path)), **SETTINGS) as llm:
        for call in (lambda: llm.chat(message("x", A)), lambda: llm.generate({"prompt": "x", "images": [A]})):
            with pytest.raises(InvalidParameter, match="this model takes no images: ") as caught:
                call()
            assert caught.value.feature == "images"
        parts = [{"role": "user", "content": [{"type": "text", "text": "Add two"}]}]
        assert llm.chat(parts, GREEDY).text == llm.chat([{"role": "user", "content": "Add two"}], GREEDY).text


def test_a_model_that_sees_otherwise_reads_text_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load, by the processor of its folder."""
    monkeypatch.setenv("SPECULON_CACHE", "")  # nothing is remembered of earlier loads
    right = Vision.features
    monkeypatch.setattr(Vision, "features", lambda tower, image: right(tower, image).flip(0))
    with LLM(str(folders["qwen2_5_vl"]), **SETTINGS) as llm:
        with pytest.raises(InvalidParameter, match="the check of images failed: .* after an image differ"):
            llm.chat(message("x", A), GREEDY)
        assert llm.chat(message("x"), GREEDY).token_ids


# over HTTP


class SeeingLoader(ScriptedLoader):
    """Over an engine with a model."""

    def __init__(self, llm: LLM):
        super().__init__(over=llm.engine)
        self.config = llm.config

    def images(self, config: EngineConfig) -> Images:
        return images_of(self.config, files=False)


def test_the_official_client_sends_a_png_to_a_real_model(llm: LLM) -> None:
    with serving(Catalogue.of_one({"model": "seeing", "serve": {}}), SeeingLoader(llm)) as inside:
        url = {"url": data_url(file_of(A))}
        parts: Any = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": url}]
        options: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=inside.url + "/v1", api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            messages: Any = [{"role": "user", "content": parts}]
            answer = create(model="seeing", messages=messages, **options)
            stream = create(model="seeing", messages=messages, stream=True, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    expected = llm.chat(message("What is ", A), GREEDY)
    assert answer.choices[0].message.content == text == expected.text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
