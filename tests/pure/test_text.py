"""Tokens to text and back, over a byte-level BPE vocabulary built here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from speculon.core.config import SamplingParams
from speculon.core.errors import InvalidParameter, InvalidRequest
from speculon.decoding.text.stop_strings import StopStrings
from speculon.decoding.text.tokenizer import MAX_UNSURE, Stream, Tokenizer, final_text, truncate

CORPUS = [
    "def add(a, b):\n    return a + b\n\n",
    "the end of the text, stop here. é à ü € 你好 世界 🙂 👩\u200d👩\u200d👧 ",
    "\t\n\n  hello hello",
] * 5
END, HARD = "<|end|>", "<｜é▁hard｜>"
TEMPLATE = (
    "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=[END, HARD], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


VOCAB = byte_level().vocab_size
TEXTS = st.text(
    st.sampled_from("ab \n.stophere€你🙂é") | st.characters(exclude_categories=["Cs"]), max_size=40
)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=80)
OUTPUTS = TEXTS.map(lambda text: byte_level().encode(text)) | IDS
WHERE = st.lists(st.integers(0, 100), max_size=8)
STOPS = st.lists(st.text(st.sampled_from("abstoper \n€你"), min_size=1, max_size=5), min_size=1, max_size=4)


def cuts(ids: list[int], where: list[int]) -> list[list[int]]:
    edges = [0, *sorted(i % (len(ids) + 1) for i in where), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def naive_end(ids: list[int], stops: list[str], min_tokens: int = 0) -> tuple[int, str] | None:
    """By decoding everything again after every token."""
    settled = 0
    for i in range(len(ids)):
        text = byte_level().decode(ids[: i + 1]).rstrip("\ufffd")
        ends = []
        for rank, stop in enumerate(stops):
            for at in range(max(0, settled - len(stop) + 1), len(text)):
                if text.startswith(stop, at):
                    ends.append((at + len(stop), rank, stop))
                    break
        if ends and i >= min_tokens:
            return i, min(ends)[2]
        settled = len(text)
    return None


class TestTokenizer:
    def test_special_tokens_are_hidden_or_shown(self) -> None:
        ids = byte_level().encode(f"a{END}b")
        assert byte_level().decode(ids) == "ab"
        assert byte_level().decode(ids, skip_special_tokens=False) == f"a{END}b"

    @pytest.mark.parametrize("bad", ["\ud83d", "fine until \udc00 here", "\udfff" * 1000])
    def test_a_lone_surrogate_is_refused_by_name(self, bad: str) -> None:
        uses: list[Callable[[str], object]] = [
            byte_level().encode,
            lambda text: byte_level().bad_words([text]),
            lambda text: StopStrings(["fine", text], byte_level()),
        ]
        for use in uses:
            with pytest.raises(InvalidParameter, match="lone surrogate, U\\+D") as caught:
                use(bad)
            str(caught.value).encode()

    @pytest.mark.parametrize("bad", [None, b"bytes", ["a"]])
    def test_what_is_no_string_is_refused(self, bad: object) -> None:
        with pytest.raises(InvalidParameter, match="must be a string"):
            byte_level().encode(bad)  # type: ignore[arg-type]


class TestChat:
    def test_the_template_writes_up_to_the_answer(self) -> None:
        messages = [{"role": "user", "content": "hello €"}]
        assert byte_level().render_chat(messages) == f"{END}user\nhello €{END}assistant\n"
        ids = byte_level().apply_chat(messages)
        assert ids.count(0) == 2
        assert byte_level().decode(ids, skip_special_tokens=False) == byte_level().render_chat(messages)

    def test_no_template(self) -> None:
        backend = Backend(models.WordLevel({"the": 0}, unk_token="the"))
        plain = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        with pytest.raises(InvalidRequest, match="no chat template"):
            plain.apply_chat([{"role": "user", "content": "the"}])

    def test_the_templates_own_refusal_is_passed_on(self) -> None:
        with pytest.raises(InvalidRequest, match="no robots"):
            byte_level().apply_chat([{"role": "robot", "content": "beep"}])

    @pytest.mark.parametrize(
        "messages",
        [
            [],
            {"role": "a"},
            ["a"],
            [{"content": "a"}],
            [{"role": "a"}],
            [{"role": "a", "content": "\ud800"}],
        ],
    )
    def test_bad_messages_are_refused_by_name(self, messages: object) -> None:
        with pytest.raises(InvalidParameter, match="messages"):
            byte_level().apply_chat(messages)  # type: ignore[arg-type]


class TestStream:
    @given(OUTPUTS, WHERE, st.booleans())
    @example([ord("a")] * 3 * MAX_UNSURE, [], True)
    def test_pushes_and_flush_are_the_decoded_whole(
        self, ids: list[int], where: list[int], skip: bool
    ) -> None:
        stream = Stream(byte_level(), skip_special_tokens=skip)
        pieces = [stream.push(part) for part in cuts(ids, where)]
        assert "".join(pieces) + stream.flush() == byte_level().decode(ids, skip_special_tokens=skip)

    @given(
        st.integers(0, 255).map(lambda byte: byte_level().inner.convert_tokens_to_ids(chr(byte)) or 2),
        st.integers(1, 4),
    )
    def test_endless_garbage_is_passed_on(self, token: int, repeats: int) -> None:
        ids = (
            byte_level().encode("€")[-1:] * 3 * MAX_UNSURE * repeats + byte_level().encode("€ you") + [token]
        )
        stream = Stream(byte_level())
        assert stream.push(ids[: 2 * MAX_UNSURE])
        assert len(stream._window) <= MAX_UNSURE
        shown = byte_level().decode(ids)
        stream = Stream(byte_level())
        assert stream.push(ids) + stream.flush() == shown

    def test_half_a_character_is_held_back(self) -> None:
        ids = [i for char in "a€" for i in byte_level().encode(char)]
        assert len(ids) == 4 - (len(byte_level().encode("€")) < 3)
        stream = Stream(byte_level())
        assert [stream.push([i]) for i in ids] == ["a"] + [""] * (len(ids) - 2) + ["€"]
        assert stream.flush() == ""

    def test_a_beginning_of_a_stop_string_is_held_back(self) -> None:
        stream = Stream(byte_level(), stops=["stop here"])
        shown = [stream.push(byte_level().encode(text)) for text in ["a st", "op h", "u", "ge stop"]]
        assert shown == ["a ", "", "stop hu", "ge "]
        assert stream.flush() == "stop"

    @given(OUTPUTS, STOPS, WHERE, st.integers(0, 10))
    def test_a_stop_string_is_shown_whole_where_it_is_asked_for(
        self, ids: list[int], stops: list[str], where: list[int], min_tokens: int
    ) -> None:
        found = naive_end(ids, stops, min_tokens)
        kept, stop = (ids, None) if found is None else (ids[: found[0] + 1], found[1])
        params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=True)
        stream = Stream.of(byte_level(), params)
        text = "".join(stream.push(part) for part in cuts(kept, where)) + stream.flush(stop)
        assert text == final_text(byte_level(), kept, stop, params)
        without = final_text(byte_level(), kept, stop, SamplingParams())
        assert text == without + (stop or "")

    def test_a_stop_string_that_was_passed_over_is_shown(self) -> None:
        a, b, x, y = (byte_level().encode(char) for char in "abxy")
        stream = Stream(byte_level(), stops=["a"])
        assert [stream.push(token) for token in (a, b, a)] == ["", "ab", ""]
        assert stream.flush("a") == ""
        stream = Stream(byte_level(), stops=["a", "xaya"])
        assert [stream.push(token) for token in (x, a, y, a)] == ["", "", "", ""]
        assert stream.flush("a") == "xay" == final_text(byte_level(), [*x, *a, *y, *a], "a", SamplingParams())

    @given(OUTPUTS, STOPS)
    def test_text_is_shown_as_soon_as_it_is_certain(self, ids: list[int], stops: list[str]) -> None:
        stream, shown = Stream(byte_level(), stops), ""
        for i, token in enumerate(ids):
            shown += stream.push([token])
            whole = byte_level().decode(ids[: i + 1])
            if i < MAX_UNSURE and not any(stop[0] in whole[len(shown) :] for stop in stops):
                assert whole[len(shown) :].strip("\ufffd") == ""


class TestStopStrings:
    @settings(max_examples=300)
    @given(OUTPUTS, STOPS, WHERE)
    def test_found_where_decoding_everything_finds_it(
        self, ids: list[int], stops: list[str], where: list[int]
    ) -> None:
        finder, before, found = StopStrings(stops, byte_level()), [], None
        for part in cuts(ids, where):
            found = finder.find(before, tuple(part))
            if found is not None:
                found = len(before) + found[0], found[1]
                break
            before = before + part
        assert found == naive_end(ids, stops)

    def test_what_was_complete_before_does_not_end_the_text_again(self) -> None:
        before = byte_level().encode("stop")
        assert StopStrings(["stop"], byte_level()).find(before, tuple(byte_level().encode(" and on"))) is None

    def test_the_first_to_end_wins_then_the_list(self) -> None:
        def found(*stops: str) -> tuple[int, str] | None:
            return StopStrings(stops, byte_level()).find([5], (6, 0), skip_special_tokens=False)

        assert found("d|", "end", "<|") == (1, "<|")
        assert found("end", "|end", "nd") == (1, "end")
        assert found("|end", "end", "nd|") == (1, "|end")

    def test_hidden_tokens_do_not_part_a_stop_string(self) -> None:
        before, new = byte_level().encode(f"st{END}"), tuple(byte_level().encode("op"))
        finder = StopStrings(["stop"], byte_level())
        assert finder.find(before, new) == (len(new) - 1, "stop")
        assert finder.find(before, new, skip_special_tokens=False) is None

    @pytest.mark.parametrize("stop", ["a", "🙂" * 256], ids=["short", "longest"])
    def test_the_work_does_not_grow_with_the_text(self, stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
        longest, decoded = 4 * len(stop) * 2 + 100, []
        decode = byte_level().decode
        before = byte_level().encode("hello 🦊 " * 2000)
        monkeypatch.setattr(
            Tokenizer, "decode", lambda self, ids, skip=True: decoded.append(len(ids)) or decode(ids, skip)
        )
        StopStrings([stop], byte_level()).find(before, (5,))
        assert max(decoded) <= longest < len(before) / 3

    @pytest.mark.parametrize("length", [1, 2, 7, 23, 256])
    def test_a_stop_string_is_found_byte_by_byte(self, length: int) -> None:
        stop = "🦊" * length
        ids = byte_level().encode("here: " + stop)
        assert StopStrings([stop], byte_level()).find(ids[:-1], (ids[-1],)) == (0, stop)


def test_truncate_and_its_blind_start() -> None:
    assert truncate("a stop b stop", "stop") == "a "
    assert truncate("a stop b stop", "stop", after=6) == "a stop b "
    assert truncate("a stop b stop", "stop", after=5) == "a "
    assert truncate("none", "stop") == "none"
