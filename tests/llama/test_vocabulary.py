"""Texts by llama.cpp's vocabulary are those of the tokenizer that transformers makes of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes.gguf.vocabularies import recorded, sentence_piece, write

from speculon import LLM, SamplingParams
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import EngineConfig
from speculon.decoding.text.grammar import Grammars
from speculon.decoding.text.tokenizer import Stream, Tokenizer
from speculon.runtimes.llama.templates import render
from speculon.runtimes.llama.vocabulary import Vocabulary

TEXTS = (
    "",
    "Hello world",
    "  two spaces\n\n\tand tabs  ",
    "def add(a, b):\n    return a + b\n",
    "1234567890 3.14159",
    "Grüße, 世界! 🌍 naïve ﬁ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<s>old price 10$</s> <b>new</b>",  # words of Gemma 3
    "e\u0301 and \u00e9",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And é?"},
]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def both(request: pytest.FixtureRequest, files: dict[str, Path]) -> tuple[Tokenizer, Tokenizer]:
    file = files[request.param]
    own = Vocabulary(file, EngineConfig(model=str(file), runtime="llama"))
    return Tokenizer(own), Tokenizer(load_tokenizer(file))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts(both: tuple[Tokenizer, Tokenizer], text: str) -> None:
    own, other = both
    for add in (True, False):
        ids = own.encode(text, add_special_tokens=add)
        assert ids == other.encode(text, add_special_tokens=add)
        for skip in (True, False):
            assert own.decode(ids, skip) == other.decode(ids, skip)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_the_space_before_a_text_of_sentence_piece(prefix: bool | None, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", sentence_piece(recorded()["pieces"]), add_space_prefix=prefix)
    own = Tokenizer(Vocabulary(file, EngineConfig(model=str(file), runtime="llama")))
    other = Tokenizer(load_tokenizer(file))
    for text in ("hello", " hello", "a\nb", "Grüße, 世界!", *TEXTS):
        ids = own.encode(text, add_special_tokens=False)
        assert ids == other.encode(text, add_special_tokens=False)
        assert own.decode(ids) == other.decode(ids)
        assert [own.decode([token]) for token in ids] == [other.decode([token]) for token in ids]


def test_this_repository(both: tuple[Tokenizer, Tokenizer]) -> None:
    own, other = both
    files = [
        *Path(__file__).parents[2].glob("docs/*.md"),
        *Path(__file__).parents[2].glob("src/speculon/*/*.py"),
    ]
    differ = [file.name for file in files if own.encode(file.read_text()) != other.encode(file.read_text())]
    assert len(files) > 60 and not differ


def test_special_tokens_and_ends(both: tuple[Tokenizer, Tokenizer]) -> None:
    own, other = both
    assert own.vocab_size == other.vocab_size
    assert own.end_ids == other.end_ids
    assert own.special_ids == other.special_ids, "</s> of HTML is a word of Gemma 3"
    ids = range(0, own.vocab_size, 97)
    assert [own.token_bytes(token) for token in ids] == [other.token_bytes(token) for token in ids]


def test_a_word_that_looks_like_an_end_is_none(files: dict[str, Path]) -> None:
    own = {"runtime": "llama", "warmup": False, "max_context": 256, "max_num_seqs": 1, "repack": False}
    with LLM(str(files["gemma3"]), **own) as llm:
        (word,) = llm.tokenizer.encode("</s>", add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=2, logit_bias={word: 100.0})
        (out,) = llm.generate(["a"], params, speculation={"method": "off"})
        assert (out.text, out.finish_reason) == ("</s></s>", "length")
        (out,) = llm.generate(["a"], params.model_copy(update={"logit_bias": {1: 100.0}}))
        assert out.finish_reason == "stop", "<eos>"


def test_streams_show_no_half_characters(both: tuple[Tokenizer, Tokenizer]) -> None:
    own, _ = both
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False)
        stream = Stream(own, skip_special_tokens=False)
        pieces = [stream.push([token]) for token in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == own.decode(ids, False)


def test_chats(both: tuple[Tokenizer, Tokenizer]) -> None:
    own, other = both
    assert own.chat_template == other.chat_template
    if not own.has_chat_template:
        pytest.skip("a base model has no chat template")
    for messages in (CHAT, CHAT[:1], CHAT[1:2]):
        assert own.render_chat(messages) == other.render_chat(messages)
    for text in ("4, because", " spaced "):
        goes_on = [*CHAT[:2], {"role": "assistant", "content": text}]
        assert own.render_chat(goes_on, continues=True) == other.render_chat(goes_on, continues=True)
    assert own.apply_chat(CHAT) == other.apply_chat(CHAT)


TEMPLATES = {
    "{% for m in messages %}{{ m.content | tojson }}{% endfor %}": {},
    "{%- for m in messages -%}\n {%- if loop.index > 2 %}{% break %}{% endif %}{{ m }}\n{% endfor %}": {},
    "{% generation %}{{ messages[2].content }}{% endgeneration %}": {},
    "{{ tools | tojson(indent=2) }}": {"tools": [{"a": "é<"}]},
    "{{ bos_token }}{{ strftime_now('%Y') }}{{ namespace(a=1).a }}{{ dict(b=2) }}": {"bos_token": "<s>"},
    "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}": {},
}


@pytest.mark.parametrize(("source", "variables"), TEMPLATES.items())
def test_templates_are_written_as_transformers_writes_them(source: str, variables: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*CHAT, {"role": "assistant", "content": "x", "reasoning": "because"}]
    (expected,), _ = render_jinja_template([messages], chat_template=source, **variables)
    assert render(source, messages, "", {"tools": None, **variables}) == expected


def test_grammars_are_followed(both: tuple[Tokenizer, Tokenizer]) -> None:
    from speculon.core.config import SamplingParams

    own, _ = both
    grammars = Grammars(own, own.vocab_size, own.end_ids)
    matcher = grammars.matcher(SamplingParams(structured={"choice": ["yes please", "no"]}))
    assert matcher is not None and not grammars.refusal()
    assert matcher.consume(tuple(own.encode("yes please", add_special_tokens=False)))
    other = grammars.matcher(SamplingParams(structured={"choice": ["yes please", "no"]}))
    assert other is not None and not other.consume(tuple(own.encode("maybe", add_special_tokens=False)))
