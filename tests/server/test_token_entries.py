"""Texts, tokens, bytes and offsets of one answer are the same text, with each sort of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speculon.core.config.serve import ServeConfig
from speculon.core.types import Finish, TokenLogprobs
from speculon.decoding.sequence import Event
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.answer import Answer
from speculon.server.completions import read_chat, read_completion
from speculon.server.model import ServedModel
from speculon.server.schemas import ChatRequest, CompletionRequest
from tests.pure.test_text import byte_level, cuts
from tests.pure.test_text_fuzz import PARTS, TEXTS, VOCABULARIES, WHERE, tokens_of
from tests.pure.test_text_fuzz import tokenizer as tokenizer_of


def served(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel("m", tokenizer, 4096, tokenizer.vocab_size, "off", ServeConfig())


def logprobs_of(tokens: list[int], top: int, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    """Each token behind as many others."""
    return tuple(
        TokenLogprobs(t, -9.0, top + 1, tuple(((t + 1 + i) % vocab_size, -0.1 * i) for i in range(top)))
        for t in tokens
    )


def answered(request: Any, model: ServedModel, parts: list[list[int]], top: int = 2) -> dict[str, Any]:
    """The whole answer of one choice whose tokens come in these parts."""
    answer, size = Answer("a", request, model), model.vocab_size
    (add,) = answer.adds()
    deltas = []
    if request.params.prompt_logprobs is not None:
        answer.push(Event("a-0", 0, (), prompt_logprobs=logprobs_of(add.prompt[1:], top, size)))
    for i, part in enumerate(parts):
        finish = Finish("length") if i + 1 == len(parts) else None
        deltas.append(answer.push(Event("a-0", 0, tuple(part), logprobs_of(part, top, size), finish)))
    return dict(answer.whole([delta for delta in deltas if delta is not None])["choices"][0])


def bytes_of(name: str) -> bytes:
    """What a token with this name writes."""
    marks = name.removeprefix("bytes:")
    return name.encode() if marks == name else bytes(int(mark, 16) for mark in marks.split("\\x")[1:])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=60)
@given(prompt=TEXTS, parts=PARTS, where=WHERE, echo=st.booleans(), skip=st.booleans())
@example(prompt="Hello", parts=[" world world"], where=[1], echo=True, skip=True)
@example(prompt="", parts=[" world", " world"], where=[], echo=True, skip=True)
@example(prompt="  Hello\n", parts=[b"\xe5\xa5\xbd", [3]], where=[1], echo=True, skip=True)
def test_tokens_of_a_completion_join_to_its_text(
    vocabulary: str,
    prompt: str,
    parts: list[str | bytes | list[int]],
    where: list[int],
    echo: bool,
    skip: bool,
) -> None:
    read = tokenizer_of(vocabulary)
    model, ids = served(read), tokens_of(read, parts)
    if not read.encode(prompt):
        prompt = "Hello"
    body = CompletionRequest(
        prompt=prompt, echo=echo, logprobs=2, max_tokens=len(ids), skip_special_tokens=skip
    )
    choice = answered(read_completion(body, model), model, cuts(ids, where))
    text, table = choice["text"], choice["logprobs"]
    shown = [*(read.encode(prompt) if echo else ()), *ids]
    assert len(table["tokens"]) == len(table["text_offset"]) == len(shown)
    lossless = read.decode(read.as_sent(read.encode(prompt)), skip_special_tokens=False) == prompt
    if echo:
        assert text.startswith(prompt)
    if "\ufffd" in text or (echo and not lossless):
        return
    sent = read.encode(prompt) if echo else []
    hidden = [True] * (len(sent) - len(read.as_sent(sent))) + [False] * len(read.as_sent(sent))
    hidden += [token in read.hidden(skip) for token in ids]
    places = zip(table["tokens"], table["text_offset"], hidden, strict=True)
    visible = [(name, at) for name, at, out in places if not out]
    assert b"".join(bytes_of(name) for name, _ in visible).decode() == text
    ends = [at for _, at in visible[1:]] + [len(text)] * bool(visible)
    for (name, at), end in zip(visible, ends, strict=True):
        assert name.startswith("bytes:") or text[at:end] == name, (name, at)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=30)
@given(parts=PARTS, where=WHERE)
@example(parts=[" world world", b"\xe5\xa5\xbd"], where=[1])
def test_bytes_of_a_chat_join_to_its_text(
    vocabulary: str, parts: list[str | bytes | list[int]], where: list[int]
) -> None:
    read = tokenizer_of(vocabulary)
    model, ids = served(read), tokens_of(read, parts)
    fields = {"prompt_token_ids": read.encode("Hello"), "logprobs": True, "top_logprobs": 2}
    request = read_chat(ChatRequest.model_validate(fields), model)
    choice = answered(request, model, cuts(ids, where))
    entries = zip(choice["logprobs"]["content"], ids, strict=True)
    data = [one["bytes"] for one, token in entries if token not in read.hidden(True)]
    if "\ufffd" not in choice["message"]["content"]:
        assert bytes(b for one in data for b in one).decode() == choice["message"]["content"]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_token_has_an_entry_whatever_their_number(vocabulary: str) -> None:
    """Values of N are those of more, without the last."""
    read = tokenizer_of(vocabulary)
    size = read.vocab_size
    model = ServedModel("m", read, 4096, size + 9, "off", ServeConfig())  # with ids that have no text
    tables = {}
    for top in (5, 10, 20):
        body = CompletionRequest(prompt="Hello", logprobs=top, max_tokens=size)
        choice = answered(read_completion(body, model), model, [list(range(size))], top)
        tables[top] = choice["logprobs"]["top_logprobs"]
        assert all(len(table) == top + 1 for table in tables[top])
    for few, many in ((5, 10), (10, 20)):
        for token, (table, more) in enumerate(zip(tables[few], tables[many], strict=True)):
            best = sorted(table.items(), key=lambda pair: -pair[1])[:few]
            assert best == sorted(more.items(), key=lambda pair: -pair[1])[:few], token


@pytest.mark.parametrize(
    "prompt", ["Hello", "<s>Hello", "a<|im_end|>b", "", [1, 300, 278], [300, 278, 4]], ids=str
)
def test_an_echo_is_the_prompt_as_sent(prompt: str | list[int]) -> None:
    read = tokenizer_of("gemma")
    model = served(read)
    body = CompletionRequest(prompt=prompt, echo=True, max_tokens=1)
    text = answered(read_completion(body, model), model, [read.encode(" world", add_special_tokens=False)])[
        "text"
    ]
    sent = {"[1, 300, 278]": "He", "[300, 278, 4]": "He<|im_end|>"}.get(str(prompt), prompt)
    assert text == f"{sent} world"


def test_an_echo_is_as_sent_where_the_tokenizer_changes_it() -> None:
    read = tokenizer_of("wordpiece")
    model = served(read)
    body = CompletionRequest(prompt="HELLO  World", echo=True, max_tokens=1, logprobs=0)
    choice = answered(read_completion(body, model), model, [read.encode("yes", add_special_tokens=False)], 0)
    assert choice["text"] == "HELLO  World yes"
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 12]


def test_a_token_of_bytes_is_named_by_them() -> None:
    sentencepiece, bytes_ = tokenizer_of("llama"), byte_level()
    names = {
        name: sentencepiece.token_name(sentencepiece.token_id(name) or 0)
        for name in ("<0xA9>", "<0x0A>", "<0x61>")
    }
    assert names == {"<0xA9>": "bytes:\\xa9", "<0x0A>": "\n", "<0x61>": "bytes:\\x61"}
    assert bytes_.token_name(bytes_.token_id("©") or 0) == "bytes:\\xa9"
    assert sentencepiece.token_name(sentencepiece.token_id("a") or 0) == "a"
