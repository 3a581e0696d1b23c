"""What a new user meets before the first token: the settings file, a wrong pair of models, a slow dtype."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from speculon import LLM
from speculon.cli import app
from speculon.cli.screen import LogLines, streaming
from speculon.core.errors import WrongPair
from tests.tiny.checkpoint import write_stranger
from tests.tiny.conftest import build
from tests.tiny.folders import make_folder

TEXT = ["-p", "def add(", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a smaller draft model with its tokenizer, and one with another tokenizer."""
    root = tmp_path_factory.mktemp("start")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_folder(root / "target"))
    tokenizer.save_pretrained(root / "draft")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 2}
    build("llama", vocab_size=len(tokenizer), max_position_embeddings=1024, **small).save_pretrained(
        root / "draft"
    )
    write_stranger(root / "other")
    return root


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, household: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in household.iterdir():
        (tmp_path / folder.name).symlink_to(folder)


def speculon(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


# the settings file


def test_the_file_that_is_read_is_named() -> None:
    Path("speculon.toml").write_text("model = 'target'\n[speculation]\nmethod = 'off'\n")
    done = speculon("generate", *TEXT)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (0, "settings from speculon.toml")
    assert "speculation is off in the settings" in done.stderr
    machine = speculon("generate", *TEXT, "--json")
    assert machine.stderr == "settings from speculon.toml\n" and len(machine.stdout.splitlines()) == 1


def test_another_file_by_its_name_and_only_for_this_command() -> None:
    Path("speculon.toml").write_text("model = 'nothing here'\n")
    Path("my.toml").write_text("model = 'target'\nblock_size = 8\n")
    done = speculon("generate", "--config", "my.toml", *TEXT)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (0, "settings from my.toml")
    assert "SPECULON_CONFIG" not in os.environ
    wrong = speculon("generate", *TEXT)
    assert wrong.exit_code == 2 and "nothing here" in wrong.stderr


def test_a_file_that_is_not_there() -> None:
    done = speculon("generate", "--config", "none.toml", *TEXT)
    assert (done.exit_code, done.stderr) == (2, "ConfigError: --config none.toml: no such file\n")


# pairs


def test_a_pair_that_fits() -> None:
    assert speculon("generate", "--model", "target", "--draft", "draft", *TEXT).exit_code == 0
    facts = json.loads(speculon("inspect", "target", "--draft", "draft", "--json").stdout)
    assert facts["supported"] and facts["draft_fits"] and facts["memory"]["fits"]


SWAPPED = "the draft model is larger than the target: target has "
OTHER = "different tokenizers: "


@pytest.mark.parametrize(
    ("model", "draft", "message"),
    [
        pytest.param("draft", "target", SWAPPED, id="swapped"),
        pytest.param("target", "other", OTHER, id="another tokenizer"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_before_anything_is_loaded(
    model: str, draft: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        loads = "speculon.runtimes.torch.loading.load.load_target"
        patched.setattr(loads, lambda *_, **__: pytest.fail("loaded"))
        done = speculon("generate", "--model", model, "--draft", draft, *TEXT)
        with pytest.raises(WrongPair, match=message):
            LLM(model, speculation={"draft": draft})
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.startswith(f"WrongPair: {message}")
    inspected = speculon("inspect", model, "--draft", draft, "--json")
    facts = json.loads(inspected.stdout)
    assert (inspected.exit_code, facts["supported"], facts["draft_fits"]) == (2, True, False)
    assert facts["error"]["type"] == "WrongPair" and facts["error"]["message"].startswith(message)
    shown = " ".join(speculon("inspect", model, "--draft", draft).stdout.split())
    assert "supported yes: equal to its stock forward" in shown
    assert "draft fits no: " in shown and message.strip() in shown


def test_packed_weights_are_not_compared_by_their_number(tmp_path: Path) -> None:
    """A quantized target has fewer numbers in its headers than it has parameters."""
    shutil.copytree("draft", tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())
    (tmp_path / "packed/config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    done = speculon("generate", "--model", "packed", "--draft", "target", *TEXT)
    assert done.exit_code == 2 and "larger than the target" not in done.stderr


def test_a_method_without_its_drafter_is_an_error() -> None:
    done = speculon("generate", "--model", "target", "--method", "eagle3", *TEXT)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "ConfigError: method = 'eagle3' needs a drafter: set draft (--draft FOLDER)\n"


# float16, and the log


def test_float16_on_a_cpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert speculon("generate", "--model", "target", "--dtype", "float16", *TEXT).exit_code == 0
    assert "dtype float16 on a CPU" in caplog.text
    caplog.clear()
    speculon("generate", "--model", "target", "--dtype", "float32", *TEXT)
    assert "float16" not in caplog.text


def test_a_log_line_waits_for_the_end_of_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    root, handler = logging.getLogger(), LogLines()
    root.addHandler(handler)
    try:
        with streaming():
            print("half a li", end="", file=sys.stderr)
            root.error("a request ended")
            print("ne", file=sys.stderr)
        root.error("later")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().err == "half a line\na request ended\nlater\n"


def test_with_v_the_text_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    flags = ["--model", "target", "--max-tokens", "8", "--ignore-eos", "--temperature", "0"]
    answer = speculon("generate", *flags, stdin="def add(\n").stdout.splitlines()[0]
    try:
        lines = speculon("-v", "generate", *flags, stdin="def add(\n").output.splitlines()
    finally:
        root.setLevel(logging.WARNING)
    assert answer and answer in lines
    assert any(line.startswith("r-0 8 tok") for line in lines)
