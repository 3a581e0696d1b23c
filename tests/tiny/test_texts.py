"""Texts of models with each sort of tokenizer: from prompt to answer, with drafts and without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.config import EngineConfig
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.tokenizer import final_text
from speculon.engine.engine import Engine
from speculon.runtimes.torch.loading.load import wrap_model
from tests.engines import engine_on
from tests.tiny.conftest import build
from tests.tiny.demo_texts import DEMO, MISSING
from tests.tiny.scripted import drain
from tests.vocabularies import SENTENCEPIECE, tokenizer_of

DRAFTED = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 4}
WAYS = [{"method": "off"}, DRAFTED]


@cache
def engine_of(vocabulary: str) -> Engine:
    read = tokenizer_of(vocabulary)
    model = build("llama", vocab_size=read.vocab_size + 5, eos_token_id=2)
    return engine_on(wrap_model(model), read, EngineConfig(block_size=4))


def written(vocabulary: str, prompt: str, speculation: dict[str, Any], **params: Any) -> tuple[str, Any]:
    """The text, and how it ended."""
    engine, read = engine_of(vocabulary), tokenizer_of(vocabulary)
    given = SamplingParams(**{"seed": 1, "max_tokens": 20, **params})
    ids = read.encode(prompt)
    engine.add_request(ids, given, speculation, "r")
    result = drain(engine)["r", 0]
    assert result.finish is not None
    return final_text(read, result.tokens, result.finish.matched, given, ids), result.finish.reason


@pytest.mark.parametrize("speculation", WAYS, ids=["plain", "drafts"])
@pytest.mark.parametrize("vocabulary", SENTENCEPIECE)
class TestSentencePiece:
    def test_a_text_begins_with_its_first_words_space(
        self, vocabulary: str, speculation: dict[str, Any]
    ) -> None:
        world = tokenizer_of(vocabulary).token_id("▁world")
        assert world is not None
        bias = {"temperature": 0, "max_tokens": 2, "logit_bias": {world: 1000.0}}
        assert written(vocabulary, "Hello", speculation, **bias) == (" world world", "length")

    @pytest.mark.parametrize("prompt", ["Hello", ""])
    @pytest.mark.parametrize("choice", ["yes", "  yes", "\n no"])
    def test_a_choice_is_written_exactly(
        self, vocabulary: str, speculation: dict[str, Any], choice: str, prompt: str
    ) -> None:
        if vocabulary == "metaspace" and "\n" in choice:
            pytest.skip("this vocabulary has no token for a new line")
        form = {"choice": [choice]}
        assert written(vocabulary, prompt, speculation, structured=form) == (choice, "stop")

    def test_a_stop_string_may_begin_with_the_first_space(
        self, vocabulary: str, speculation: dict[str, Any]
    ) -> None:
        world = tokenizer_of(vocabulary).token_id("▁world")
        bias = {"temperature": 0, "logit_bias": {world: 1000.0}, "stop": (" world",)}
        assert written(vocabulary, "Hello", speculation, **bias) == ("", "stop")

    def test_a_bad_word_is_not_written_in_other_tokens(
        self, vocabulary: str, speculation: dict[str, Any]
    ) -> None:
        for seed in range(4):
            text, _ = written(
                vocabulary, "Hello", speculation, bad_words=("a", "re", " "), seed=seed, max_tokens=40
            )
            assert not any(word in text for word in ("a", "re", " "))


@pytest.mark.parametrize(
    ("name", "value"), [("choice", ("yes",)), ("regex", "a+"), ("json_object", True)], ids=str
)
def test_a_tokenizer_that_grammars_cannot_read_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="WordPiece") as caught:
        written("wordpiece", "hello", DRAFTED, structured={name: value})
    assert (caught.value.name, caught.value.value) == (f"structured.{name}", value)


def test_what_an_llm_streams_continues_the_prompt(tmp_path: Path) -> None:
    read = tokenizer_of("llama")
    build("llama", vocab_size=read.vocab_size, eos_token_id=2).save_pretrained(tmp_path)
    read.inner.save_pretrained(tmp_path)
    llm, world = LLM(str(tmp_path), warmup=False), read.token_id("▁world")
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={world or 0: 1000.0})
    (out,) = llm.generate(["Hello"], params)
    assert out.text == "".join(llm.stream("Hello", params)) == " world world world"


# the demo model's tokens


@cache
def demo() -> LLM:
    return LLM(str(DEMO), dtype="float32", device="cpu", warmup=False)


def forced(token: int, speculation: dict[str, Any], **params: Any) -> tuple[str, str | None, int]:
    """A text of one token, how it ends, and its tokens."""
    given = SamplingParams(**{"temperature": 0, "max_tokens": 20, "logit_bias": {token: 100.0}, **params})
    (out,) = demo().generate(["def add(a, b):\n    "], given, speculation=speculation)
    return out.text, out.outputs[0].finish_reason, len(out.token_ids)


@pytest.mark.skipif(MISSING, reason="the demo model is not there")
@pytest.mark.parametrize("speculation", WAYS, ids=["plain", "drafts"])
class TestDemo:
    @pytest.mark.parametrize("word", ["turn", " ret", "urn ", "    return"])
    def test_a_bad_word_is_not_written_by_a_token_that_has_it(
        self, speculation: dict[str, Any], word: str
    ) -> None:
        """Nor by one that begins in the prompt, or in an earlier token."""
        text, _, tokens = forced(395, speculation, bad_words=[word])
        assert tokens == 20 and word not in "def add(a, b):\n    " + text

    def test_a_longer_word_may_be_bad(self, speculation: dict[str, Any]) -> None:
        text, _, _ = forced(395, speculation, bad_words=["return return return"])
        assert text.startswith("return return ") and "return return return" not in text

    @pytest.mark.parametrize("more", [{}, {"stop": ["xyz", "<|im_start|>"]}, {"min_tokens": 3}], ids=str)
    def test_a_special_token_is_a_stop_string(
        self, speculation: dict[str, Any], more: dict[str, Any]
    ) -> None:
        tokens = max(1, more.get("min_tokens", 0))
        assert forced(1, speculation, **{"stop": ["<|im_start|>"], **more}) == ("", "stop", tokens)

    def test_a_special_stop_string_is_shown_where_it_is_asked_for(self, speculation: dict[str, Any]) -> None:
        shown = {"stop": ["<|im_start|>"], "include_stop_str_in_output": True}
        assert forced(1, speculation, **shown) == ("<|im_start|>", "stop", 1)
        assert forced(1, speculation, skip_special_tokens=False, **shown) == ("<|im_start|>", "stop", 1)
