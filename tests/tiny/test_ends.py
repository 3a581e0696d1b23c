"""The tokens that end a text: those of the configs, of the tokenizer, and of the turns of its template."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculon import LLM, SamplingParams
from speculon.core.errors import ModelError
from speculon.decoding.text.tokenizer import ends_of_turn
from speculon.engine.decoder import SpeculativeDecoder
from tests.tiny.checkpoint import SPECIALS, write_checkpoint

DOCUMENT, START, TURN = range(3)  # ids of SPECIALS
WORD = 70


def write(
    folder: Path, config: Any = 0, generation: Any = 0, eos: int | None = TURN, chat: bool = True
) -> Path:
    """A checkpoint whose parts name these ends."""
    write_checkpoint(folder)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        change(folder / name, eos_token_id=ids)
    change(folder / "tokenizer_config.json", eos_token=None if eos is None else SPECIALS[eos])
    if not chat:
        (folder / "chat_template.jinja").unlink()
    return folder


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def finish(llm: LLM, token: int) -> tuple[str | None, int]:
    """How a text ends that is made of one token."""
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={token: 100.0})
    (out,) = llm.generate(["def"], params, speculation={"method": "ngram", "policy": "fixed"})
    return out.outputs[0].finish_reason, len(out.token_ids)


STOP, ON = ("stop", 0), ("length", 20)


@pytest.mark.parametrize(
    ("parts", "expected", "warned"),
    [
        ({}, {DOCUMENT: STOP, TURN: STOP, START: ON, WORD: ON}, True),
        ({"eos": DOCUMENT}, {DOCUMENT: STOP, TURN: STOP, START: ON}, True),
        ({"eos": DOCUMENT, "chat": False}, {DOCUMENT: STOP, TURN: ON}, False),
        ({"chat": False}, {DOCUMENT: STOP, TURN: STOP}, True),
        ({"eos": None}, {DOCUMENT: STOP, TURN: STOP}, True),
        ({"config": START}, {DOCUMENT: STOP, TURN: STOP, START: STOP}, True),
        ({"config": WORD}, {DOCUMENT: STOP, TURN: STOP, WORD: ON}, True),
        ({"generation": [DOCUMENT, TURN]}, {DOCUMENT: STOP, TURN: STOP}, False),
        ({"config": None, "generation": None}, {TURN: STOP, DOCUMENT: ON}, True),
    ],
    ids=str,
)
def test_a_text_ends_at_every_end_that_is_named(
    parts: dict[str, Any],
    expected: dict[int, tuple[str, int]],
    warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write(tmp_path / "model", **parts)
    with caplog.at_level(logging.WARNING, "speculon"):
        llm = LLM(str(folder), warmup=False)
    assert {token: finish(llm, token) for token in expected} == expected
    warnings = [record.getMessage() for record in caplog.records if "end a text" in record.getMessage()]
    assert len(warnings) == warned and all("<|" in line for line in warnings)


@pytest.mark.parametrize("ids", ["x", True, 1.5, [[1]], [1, "x"]])
def test_what_is_no_token_id_is_refused(ids: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", generation=ids)
    with pytest.raises(ModelError, match=re.escape(f"eos_token_id = {ids!r} of the generation config")):
        LLM(str(folder), warmup=False)


def test_a_decoder_knows_the_ends_of_its_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={TURN: 100.0})
    for given, expected in ((tokenizer, STOP), (None, ON)):
        out = SpeculativeDecoder(model, tokenizer=given, warmup=False).generate([5, 6], params)
        assert (out.outputs[0].finish_reason, len(out.token_ids)) == expected


def test_a_turn_ends_where_the_template_says_so() -> None:
    ids = {"<|im_end|>": 7, "<end_of_turn>": 8}
    assert ends_of_turn(ids.get, "{{ m }}<|im_end|>") == {7}
    assert ends_of_turn(ids.get, "{{ m }}</s>") == ends_of_turn(ids.get, "") == set()
    assert ends_of_turn(ids.get, "<end_of_turn><|im_end|><|eot_id|>") == {7, 8}
