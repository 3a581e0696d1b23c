"""A checkpoint without a tokenizer: token ids in and out; what reads texts is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.cli import app
from speculon.cli.screen import EXIT_REFUSED
from speculon.core.errors import ConfigError, InvalidParameter, ModelError
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import tiny_model

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transformers would make a tokenizer of one special token for it."""
    path = tmp_path_factory.mktemp("bare") / "model"
    tiny_model("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), tokenizer=None, block_size=4)


def test_token_ids_are_continued_as_by_generate(llm: LLM) -> None:
    ids = torch.tensor([PROMPT])
    limit: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    stock = tiny_model("qwen3").generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limit)
    for method in ("off", "ngram"):
        (out,) = llm.generate([PROMPT], GREEDY, speculation={"method": method})
        assert out.token_ids == stock[0, len(PROMPT) :].tolist()
        assert out.text == ""


def test_the_other_ways_to_ask_take_token_ids(llm: LLM) -> None:
    (true,) = llm.generate([PROMPT], GREEDY)
    assert asyncio.run(llm.agenerate([PROMPT], GREEDY))[0].token_ids == true.token_ids
    events = llm.events(PROMPT, GREEDY)
    assert [token for event in events for token in event.tokens] == true.token_ids
    (out,) = llm.generate([PROMPT], GREEDY, speculation={"prediction": true.token_ids})
    assert out.token_ids == true.token_ids


def asked(**fields: Any) -> Callable[[LLM], Any]:
    return lambda llm: llm.generate([PROMPT], SamplingParams(max_tokens=4, **fields))


async def pieces(llm: LLM) -> list[str]:
    return [piece async for piece in llm.astream(PROMPT)]


REFUSED: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "a text": (lambda llm: llm.generate(["def"]), "prompt"),
    "one text of two": (lambda llm: llm.generate([PROMPT, "def"]), "prompt"),
    "a stop string": (asked(stop="a"), "stop"),
    "bad words": (asked(bad_words=["a"]), "bad_words"),
    "a grammar": (asked(structured={"json_object": True}), "structured"),
    "a chat": (lambda llm: llm.chat([{"role": "user", "content": "def"}]), "tokenizer"),
    "a session": (lambda llm: llm.session(), "tokenizer"),
    "a stream": (lambda llm: list(llm.stream(PROMPT)), "tokenizer"),
    "an asynchronous stream": (lambda llm: asyncio.run(pieces(llm)), "tokenizer"),
    "a predicted text": (lambda llm: llm.generate([PROMPT], speculation={"prediction": "a"}), "prediction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_reads_texts_is_refused_by_name(llm: LLM, case: str) -> None:
    ask, name = REFUSED[case]
    with pytest.raises(InvalidParameter, match="tokenizer") as refused:
        ask(llm)
    assert refused.value.name == name
    assert llm.generate([PROMPT], GREEDY)[0].finish_reason == "length"


def test_without_being_told_so_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=f"{folder}: no usable tokenizer .*has no vocabulary.*tokenizer=None"
    ):
        LLM(str(folder))


def test_a_wrong_config_is_not_the_tokenizers_fault(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layer_types": ["foo"]}))
    with pytest.raises(ModelError, match="config.json: .*layer_type.*: ValueError: ") as refused:
        LLM(str(folder))
    assert "tokenizer" not in str(refused.value)


def test_a_tokenizer_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    llm = LLM(str(write_checkpoint(tmp_path)), tokenizer=None)
    with pytest.raises(InvalidParameter, match="a text needs a tokenizer"):
        llm.generate(["def"])


def test_a_tokenizer_of_another_name_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer = 'gpt2'"):
        LLM(str(folder), tokenizer="gpt2")  # type: ignore[arg-type]


def test_the_command_line_refuses_the_folder_by_name(folder: Path) -> None:
    done = CliRunner().invoke(app, ["generate", "--model", str(folder), "-p", "def"])
    assert done.exit_code == EXIT_REFUSED
    assert f"ModelError: {folder}: no usable tokenizer" in done.stderr.replace("\n", "")
