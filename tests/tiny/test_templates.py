"""Without a chat template a chat is refused before the weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.loading.headers import lacks_chat_template
from speculon.loading.locate import locate

TEMPLATE = "{{ messages }}"
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def folder_with(folder: Path, config: dict[str, Any] | None, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEMPLATE)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "files", "lacks"),
    [
        ({}, (), True),
        ({"chat_template": None}, (), True),
        ({"chat_template": TEMPLATE}, (), False),
        ({"chat_template": [{"name": "default", "template": TEMPLATE}]}, (), False),
        ({}, ("chat_template.jinja",), False),
        ({}, ("additional_chat_templates/tool_use.jinja",), False),
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, (), False),
        (None, (), False),
    ],
    ids=str,
)
def test_what_files_say_of_a_template(
    tmp_path: Path, config: dict[str, Any] | None, files: tuple[str, ...], lacks: bool
) -> None:
    assert lacks_chat_template(folder_with(tmp_path, config, *files)) == lacks


def test_a_gguf_file_says_it_in_its_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for template in (TEMPLATE, None):
        path = tmp_path / f"{template is None}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if template:
            writer.add_chat_template(template)
        writer.add_tensor("x", numpy.zeros(32, "float32"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert lacks_chat_template(path) == (template is None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which nothing but its tokenizer could be read."""
    folder = tmp_path_factory.mktemp("templates") / "base"
    folder.mkdir()
    source = locate("demo")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    return folder_with(folder, config)


@pytest.mark.parametrize(
    "call",
    [
        ("generate", "--system", "Be brief.", "-p", "Hello"),
        ("chat",),
        ("check", "--data", "chats.jsonl"),
        ("bench", "--data", "chats.jsonl"),
    ],
    ids=" ".join,
)
def test_a_chat_is_refused_before_the_weights_are_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    result = CliRunner().invoke(app, [*call, "--model", str(base)], input="hi\n", catch_exceptions=False)
    assert result.exit_code == 2 and "has no chat template" in result.stderr, result.stderr
