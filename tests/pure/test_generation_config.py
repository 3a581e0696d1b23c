"""Defaults of sampling in a checkpoint's `generation_config.json`: what is read, and what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from speculon.checkpoints.generation import FILE, sampling_defaults
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import ModelError


def defaults(folder: Path, written: Any, **settings: Any) -> dict[str, Any]:
    (folder / FILE).write_text(written if isinstance(written, str) else json.dumps(written))
    return sampling_defaults(EngineConfig(model=str(folder), **settings))


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"top_k": 1, "eos_token_id": 2}, {"top_k": 1}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "min_p": None},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 7, "max_length": 20, "num_beams": 4}, {"max_tokens": 7}),
        ({"eos_token_id": [2, 0], "pad_token_id": 0}, {}),
    ],
    ids=str,
)
def test_what_vllm_takes_is_taken(tmp_path: Path, written: dict[str, Any], found: dict[str, Any]) -> None:
    assert defaults(tmp_path, written) == found
    assert defaults(tmp_path, written, generation_config=False) == {}


def test_it_is_said_once_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speculon"):
        defaults(tmp_path, {"top_k": 1, "temperature": 0.6})
        defaults(tmp_path, {"eos_token_id": 2})
    (line,) = caplog.messages
    assert "temperature = 0.6, top_k = 1, from its generation_config.json" in line


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_k": "many"},
        {"max_new_tokens": 0},
        {"max_new_tokens": "2048"},
        {"top_k": True},
    ],
    ids=str,
)
def test_a_value_that_no_request_may_have_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    assert defaults(tmp_path, {"min_p": 0.1, **wrong}) == {"min_p": 0.1}
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert next(iter(wrong)) in warning and "is ignored" in warning


def test_files_without_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(EngineConfig(model=str(tmp_path))) == {}
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert sampling_defaults(EngineConfig(model=str(tmp_path / "m.gguf"))) == {}
    with pytest.raises(ModelError, match="not readable as JSON"):
        defaults(tmp_path, "{")
    with pytest.raises(ModelError, match="not a JSON object"):
        defaults(tmp_path, [1])


def test_what_is_set_goes_over_the_defaults() -> None:
    found = SamplingParams(top_k=0, seed=5).over(SamplingParams(top_k=1, temperature=0.6))
    assert (found.top_k, found.temperature, found.seed, found.top_p) == (0, 0.6, 5, 1.0)
    assert SamplingParams(seed=-1).over(SamplingParams(seed=3)).seed is None
