"""Any tokens after any prompt, in any pushes: what is streamed is the whole text, which is what decoding all
at once adds to the prompt; and a stop string ends it at the same token.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speculon.core.config import SamplingParams
from speculon.decoding.text.stop_strings import StopStrings
from speculon.decoding.text.tokenizer import Stream, Tokenizer, final_text, output_context, sure_text
from tests.pure.test_text import byte_level, cuts
from tests.vocabularies import SENTENCEPIECE, tokenizer_of

VOCABULARIES = ["byte level", *SENTENCEPIECE, "wordpiece"]
TEXTS = st.text(
    st.sampled_from(" \n.,the worldyesHello你好世界🙂é") | st.characters(exclude_categories=["Cs"]),
    max_size=12,
)
STOPS = st.lists(
    st.text(st.sampled_from(" worldHy\n你好🙂é."), min_size=1, max_size=4)
    | st.sampled_from([" world", "<|im_end|>", "\n\n", "你好"]),
    min_size=1,
    max_size=3,
)
WHERE = st.lists(st.integers(0, 100), max_size=6)
# pieces of an output: texts, bytes that may be none, ids, and special tokens
PARTS = st.lists(TEXTS | st.binary(max_size=5) | st.lists(st.integers(0, 2**16), max_size=4), max_size=5)


def tokenizer(vocabulary: str) -> Tokenizer:
    return byte_level() if vocabulary == "byte level" else tokenizer_of(vocabulary)


def tokens_of(read: Tokenizer, parts: list[str | bytes | list[int]]) -> list[int]:
    found: list[int] = []
    for part in parts:
        if isinstance(part, str):
            found += read.encode(part, add_special_tokens=False)
        elif isinstance(part, bytes):
            names = (read.token_id(f"<0x{byte:02X}>") for byte in part)
            found += [token for token in names if token is not None]
        else:
            found += [token % read.vocab_size for token in part]
    return found


def streamed(stream: Stream, parts: list[list[int]], stop: str | int | None = None) -> str:
    return "".join(stream.push(part) for part in parts) + stream.flush(stop)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=100)
@given(before=PARTS, after=PARTS, where=WHERE, skip=st.booleans())
@example(before=["Hello"], after=[" world world"], where=[1], skip=True)
@example(before=[], after=["你", b"\xe5\xa5\xbd", "x"], where=[1, 2, 3], skip=True)
@example(before=["a", b"\xe5\xa5"], after=[b"\xbd", " world"], where=[], skip=True)
@example(before=["a", b"\xe5\xa5\xbd\xe4\xb8"], after=[b"\x96", "x"], where=[], skip=True)
@example(before=[[1]], after=["    world"], where=[1], skip=True)
def test_a_stream_is_the_whole_and_that_continues_the_prompt(
    vocabulary: str,
    before: list[str | bytes | list[int]],
    after: list[str | bytes | list[int]],
    where: list[int],
    skip: bool,
) -> None:
    read = tokenizer(vocabulary)
    prompt, ids = tokens_of(read, before), tokens_of(read, after)
    params = SamplingParams(skip_special_tokens=skip)
    whole = final_text(read, ids, None, params, prompt)
    assert streamed(Stream.of(read, params, prompt), cuts(ids, where)) == whole
    once = read.decode([*prompt, *ids], skip)
    if "\ufffd" not in once:
        assert whole == once[len(sure_text(read, (), prompt, skip)) :]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=100)
@given(before=PARTS, after=PARTS, stops=STOPS, where=WHERE, skip=st.booleans(), least=st.integers(0, 6))
@example(before=["Hello"], after=[" world"], stops=[" world"], where=[], skip=True, least=0)
@example(before=["a"], after=["你", b"\xe5\xa5\xbd\xe5"], stops=["好"], where=[], skip=True, least=0)
@example(before=["a"], after=["x", [3, 4, 5]], stops=["<|im_end|>"], where=[2], skip=True, least=0)
def test_a_stop_string_ends_the_text_at_one_token_however_many_come_at_once(
    vocabulary: str,
    before: list[str | bytes | list[int]],
    after: list[str | bytes | list[int]],
    stops: list[str],
    where: list[int],
    skip: bool,
    least: int,
) -> None:
    read = tokenizer(vocabulary)
    prompt, ids = tokens_of(read, before), tokens_of(read, after)
    params = SamplingParams(skip_special_tokens=skip, stop=tuple(stops))
    finder = StopStrings(stops, read, output_context(read, params, prompt))

    passed, rest = ids[:least], ids[least:]  # as `min_tokens` does

    def end(parts: list[list[int]]) -> tuple[int, str] | None:
        written = passed
        for part in parts:
            if found := finder.find(written, tuple(part), skip):
                return len(written) + found[0], found[1]
            written = written + part
        return None

    found = end([[token] for token in rest])
    assert end(cuts(rest, where)) == found
    if found is None:
        return
    kept, stop = ids[: found[0] + 1], found[1]
    text = final_text(read, kept, stop, params, prompt)
    assert streamed(Stream.of(read, params, prompt), cuts(kept, where), stop) == text
    if "\ufffd" not in read.decode([*prompt, *kept], skip):
        whole = final_text(read, kept, None, params, prompt)
        assert whole.startswith(text + stop) or (kept[-1] in read.hidden(skip) and whole == text)
        assert passed or not any(other in text for other in stops)


@pytest.mark.parametrize("vocabulary", ["llama", "gemma"])
def test_a_stop_string_that_was_passed_over_ends_nothing_behind_it(vocabulary: str) -> None:
    """Decoders show a run of bytes as garbage while its last character is unfinished."""
    read = tokenizer(vocabulary)
    ids = tokens_of(read, ["好世".encode()])
    assert StopStrings(["好"], read).find(ids[:4], tuple(ids[4:])) is None
    assert StopStrings(["世"], read).find(ids[:4], tuple(ids[4:])) == (1, "世")
    params = SamplingParams(stop=("好",))
    assert final_text(read, ids, "好", params) == "好世"
