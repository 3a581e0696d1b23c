"""A checkpoint's own defaults of sampling, in `LLM` and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.checkpoints.generation import FILE
from speculon.cli import app
from tests.tiny.checkpoint import write_checkpoint

PROMPT = "def add(first, second):\n    return first"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its texts are greedy ones of 12 tokens, unless something else is set."""
    folder = write_checkpoint(tmp_path_factory.mktemp("generation") / "model")
    written = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**written, "do_sample": True, "top_k": 1, "max_new_tokens": 12}))
    return folder


def test_calls_without_parameters_have_the_checkpoints(folder: Path) -> None:
    llm = LLM(str(folder))
    assert llm.default_params == SamplingParams(top_k=1)
    texts = {llm.generate(PROMPT)[0].text for _ in range(5)}
    assert texts == {llm.generate(PROMPT, SamplingParams(temperature=0))[0].text}
    assert {"".join(llm.stream(PROMPT)), llm.session(raw=True).send(PROMPT).text} == texts
    given = {tuple(llm.generate(PROMPT, SamplingParams(max_tokens=12))[0].token_ids) for _ in range(5)}
    assert len(given) > 1, "given parameters are complete"


def test_they_can_be_left_out(folder: Path) -> None:
    assert LLM(str(folder), generation_config=False).default_params == SamplingParams()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), "from the model's generation_config.json: top_k 1\n"),
        (("--max-tokens", "5"), "from the model's generation_config.json: top_k 1\n"),
        (("--max-tokens", "5", "--no-generation-config"), ""),
    ],
    ids=str,
)
def test_a_command_shows_what_it_takes_of_them(folder: Path, flags: tuple[str, ...], shown: str) -> None:
    call = ["generate", "--model", str(folder), "-p", PROMPT, *flags]
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert shown in result.stderr and ("generation_config" in result.stderr) == bool(shown)
