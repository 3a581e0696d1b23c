"""Chat templates of checkpoints: one, several by name, or none, with which a chat is refused before the
weights are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.checkpoints.headers import lacks_chat_template
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.cli import app
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.tokenizer import Tokenizer

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
    named = [{"name": "tool_use", "template": TEMPLATE}]
    for template in (TEMPLATE, named, None):
        path = tmp_path / f"{type(template).__name__}.gguf"
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


# several templates by name

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
WITH_TOOLS = "{{ tools | tojson }} <tool_call>" + PLAIN
WITH_DOCUMENTS = "{% for d in documents %}[{{ d.text }}]{% endfor %}" + PLAIN
SOURCES = {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": WITH_DOCUMENTS}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def named_in(base: Path, folder: Path, kind: str) -> Tokenizer:
    """The tokenizer of a folder that has these templates in files of some kind."""
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "tokenizer_config.json"
    config, files = json.loads(path.read_text()), dict(SOURCES)
    if kind == "a list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in files.items()]
        files = {}
    elif kind == "the default in the config":
        config["chat_template"] = files.pop("default")
    path.write_text(json.dumps(config))
    for name, text in files.items():
        named = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / named).parent.mkdir(exist_ok=True)
        (folder / named).write_text(text)
    return Tokenizer(load_tokenizer(folder))


@pytest.mark.parametrize("kind", ["a list", "files", "the default in the config"])
def test_a_chat_is_written_by_the_template_that_is_made_for_it(base: Path, tmp_path: Path, kind: str) -> None:
    tokenizer, messages = named_in(base, tmp_path / "named", kind), CHAT["messages"]
    assert tokenizer.inner.chat_template == SOURCES
    assert tokenizer.render_chat(messages) == "<user>Hello<assistant>"
    with_tools = tokenizer.render_chat(messages, [TOOL])
    assert with_tools == json.dumps([TOOL]) + " <tool_call><user>Hello<assistant>"
    reference = tokenizer.inner.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert with_tools == reference, "as transformers chooses"
    documents = [{"title": "t", "text": "x"}]
    assert tokenizer.render_chat(messages, documents=documents) == "[x]<user>Hello<assistant>"


# over the library


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", warmup=False)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_llm_chat_goes_on_from_the_last_message(llm: LLM) -> None:
    begun = {"role": "assistant", "content": "The number is"}
    (asked,) = CHAT["messages"]
    whole = llm.tokenizer.render_chat([asked]) + "The number is"
    ids = llm.tokenizer.encode(whole, add_special_tokens=False)
    expected = llm.generate([ids], GREEDY)[0]
    one = llm.chat([asked, begun], GREEDY, continue_final_message=True)
    two = llm.chat([[asked, begun]], GREEDY, continue_final_message=True, add_generation_prompt=False)
    assert one.prompt_token_ids == ids and one.token_ids == two[0].token_ids == expected.token_ids
    assert one.text == expected.text and not one.text.startswith("The number")
    streamed = llm.stream({"messages": [asked, begun], "continue_final_message": True}, GREEDY)
    assert "".join(streamed) == one.text
    assert llm.chat([asked, begun], GREEDY).prompt_token_ids != ids, "a whole message, and another answer"


def test_llm_chat_refuses_what_contradicts_itself(llm: LLM) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidParameter, match="add_generation_prompt = True"):
        llm.chat(messages, GREEDY, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidParameter, match="must be the assistant's"):
        llm.chat(CHAT["messages"], GREEDY, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="reasoning_content"):
        llm.chat(messages, GREEDY, continue_final_message="thoughts")
    with pytest.raises(InvalidParameter, match=r"messages\.\d+\.content = 5: must be a string"):
        llm.chat([*messages[:-1], {**messages[-1], "content": 5}], GREEDY, continue_final_message=True)
