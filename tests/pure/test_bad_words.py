"""A bad word is never completed, whatever tokens write it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculon.core.config import SamplingParams
from speculon.decoding.text.bad_words import BadWords
from speculon.decoding.text.tokenizer import final_text
from tests.pure.test_text import END, byte_level
from tests.pure.test_text_fuzz import VOCABULARIES, tokenizer

WORDS = st.lists(
    st.text(st.sampled_from("hello retunwd.你🙂é"), min_size=1, max_size=6), min_size=1, max_size=4
)


def forbidden(found: BadWords, tokens: list[int], drafts: tuple[int, ...] = ()) -> set[int]:
    return {token for one in found.completing(tokens, drafts) for token in one.ids}


def count(word: bytes, text: bytes) -> int:
    return sum(text.startswith(word, at) for at in range(len(text)))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=40)
@given(words=WORDS, seed=st.integers(0, 2**32), skip=st.booleans())
def test_a_token_is_forbidden_where_it_completes_a_word(
    vocabulary: str, words: list[str], seed: int, skip: bool
) -> None:
    """Whether what stands before it is written, or drafted."""
    read, chance = tokenizer(vocabulary), Random(seed)
    found, tokens = read.bad_words(words, skip), read.encode("hello re")
    prompt = len(tokens)
    hidden = read.hidden(skip)
    likely = [i for word in words for i in read.encode(word, add_special_tokens=False)] or [0]

    def written(ids: list[int]) -> bytes:
        return b"".join(bytes(read.token_bytes(token) or b"") for token in ids if token not in hidden)

    for _ in range(12):
        banned = forbidden(found, tokens)
        split = chance.randint(prompt, len(tokens))
        assert banned == forbidden(found, tokens[:split], tuple(tokens[split:]))
        for token in (*likely, *chance.sample(range(read.vocab_size), 8)):
            if token not in hidden:
                more = (count(word.encode(), written([*tokens, token])) for word in words)
                before = (count(word.encode(), written(tokens)) for word in words)
                assert (token in banned) == any(a > b for a, b in zip(more, before, strict=True))
        chosen = chance.choice(likely) if chance.random() < 0.7 else chance.randrange(read.vocab_size)
        if chosen not in banned:
            tokens.append(chosen)
    params = SamplingParams(skip_special_tokens=skip)
    text = final_text(read, tokens[prompt:], None, params, tokens[:prompt])
    assert not any(word in text for word in words)


def test_a_hidden_token_does_not_part_a_word() -> None:
    (end,), (o,) = byte_level().encode(END), byte_level().encode("o")
    before = [*byte_level().encode("hell"), end]
    assert o in forbidden(byte_level().bad_words(["hello"]), before)
    assert o not in forbidden(byte_level().bad_words(["hello"], skip_special_tokens=False), before)


@pytest.mark.parametrize("skip", [True, False])
def test_the_name_of_a_special_token_is_a_word(skip: bool) -> None:
    (end,) = byte_level().encode(END)
    assert end in forbidden(byte_level().bad_words([END], skip), [])
    assert end in forbidden(byte_level().bad_words(["end"], skip), [])


def test_the_work_of_a_step_does_not_grow_with_the_text() -> None:
    found = byte_level().bad_words(["hello"])

    class Text(list[int]):
        read = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for token in list.__reversed__(self):
                self.read += 1
                yield token

    text = Text(byte_level().encode("the end of it " * 100))
    found.completing(text)
    assert text.read <= len("hello")
