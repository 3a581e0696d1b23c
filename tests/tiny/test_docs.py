"""Python and commands that the documents show run, on the toy model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.config import MODELS
from speculon.engine import warm_up
from tests.documents import GUIDES, ROOT, blocks, calls_in, commands

# What a document takes for granted.
BEFORE = {
    "README.md": "",
    "docs/guide.md": (
        "from pathlib import Path\n"
        "from transformers import AutoModelForCausalLM\n"
        "from tests.tiny.adapter_files import write_adapter\n"
        "model = AutoModelForCausalLM.from_pretrained('tests/models/demo')\n"
        "for name in ('sql', 'law'):\n"
        "    write_adapter(Path('adapters', name), model)\n"
    ),
    "docs/policies.md": (
        "from transformers import AutoModelForCausalLM\n"
        "from speculon import SpeculativeDecoder\n"
        "model = AutoModelForCausalLM.from_pretrained('tests/models/demo', dtype='float32')\n"
        "ids = [5, 6, 7, 5, 6]\n"
    ),
    "docs/proposers.md": (
        "from pathlib import Path\n"
        "import torch\n"
        "from safetensors.torch import save_file\n"
        "from transformers import AutoConfig\n"
        "width = AutoConfig.from_pretrained('tests/models/demo').hidden_size\n"
        "Path('state-cell').mkdir()\n"
        "save_file({'weight': torch.zeros(width, 2 * width)}, 'state-cell/model.safetensors')\n"
    ),
}
# Not run: serving.md needs a server, training.md a target of your own. tests/pure/test_docs.py checks names.
SLOW = {"bench", "chat", "check", "demo", "pull", "serve", "train"}  # parsed only
ELSEWHERE = ("...", "auto", "bigram", ".gguf")  # a placeholder; a search for drafters; a plug-in; a file
RUN_BY_THE_BUILD = "tutorial.md"  # with the model that it is written for
FILES = {
    "area.py": "def area(width, height):\n    return width * height\n",
    "ask.txt": "Write a function that adds two numbers.",
    "old.py": "def add(a, b):\n    return a + b\n",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_up, "SECONDS", 0.1)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "smollm2").symlink_to(ROOT / "tests" / "models" / "demo")
    monkeypatch.setenv(MODELS, os.pathsep.join([os.environ[MODELS], str(tmp_path)]))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


def run_python(document: Path, before: str) -> dict[str, Any]:
    """Its blocks one after another, in one namespace."""
    names: dict[str, Any] = {}
    exec(compile(before, "before", "exec"), names)
    for source in blocks(document, "python"):
        exec(compile(source, str(document), "exec"), names)
    return names


@pytest.mark.parametrize(
    "name", [name if name == "README.md" else pytest.param(name, marks=pytest.mark.soak) for name in BEFORE]
)
def test_python_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python(ROOT / name, BEFORE[name])
    assert names["out"].token_ids and capsys.readouterr().out


def test_a_planted_wrong_keyword_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nfrom speculon import LLM\n```\n\n```python\nLLM('demo', modell='x')\n```\n")
    with pytest.raises(Exception, match="modell"):
        run_python(page, "")


def runnable() -> list[list[str]]:
    """Commands of seconds, whose models and files are here."""
    found: dict[str, list[str]] = {}
    for document in GUIDES:
        if document.name == RUN_BY_THE_BUILD:
            continue
        for command in commands(document):
            for call in calls_in(command.replace('"$(cat ask.txt)"', "'Write a function.'")):
                words = call[1:]
                strange = any("/" in word or word.isupper() or word.endswith(ELSEWHERE) for word in words)
                whole = len(words) > 1 and (words[0] != "generate" or {"-p", "--prompt"} & set(words))
                if call[0] == "speculon" and whole and words[0] not in SLOW and not strange:
                    found.setdefault(command, words)
    return list(found.values())


def run_command(words: list[str]) -> int:
    given = list(words)
    if given[0] == "generate" and "--max-tokens" not in given:
        given += ["--max-tokens", "16"]
    return CliRunner().invoke(app, given, catch_exceptions=False).exit_code


@pytest.mark.soak
def test_commands_run() -> None:
    """In the order of the documents."""
    shown = runnable()
    assert len(shown) >= 6 and {words[0] for words in shown} >= {"generate", "inspect"}
    assert [words for words in shown if run_command(words) != 0] == []


def test_a_planted_wrong_command_fails() -> None:
    assert run_command(["generate", "--model", "nowhere", "--prompt", "x"]) != 0
