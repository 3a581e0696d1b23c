"""Rows from files: what is learned, in which order, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.errors import DataError, InvalidParameter, InvalidRequest
from speculon.train.data import Document, DocumentRows, read_documents, split
from speculon.train.settings import HeadSettings, TrainSettings

TURNS = [
    {"role": r, "content": c}
    for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
]


class Bytes:
    """One token per byte."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        answer_follows: bool = True,
    ) -> str:
        if any(m["content"] is None for m in messages):
            raise InvalidRequest("no template for calls")
        rendered = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return rendered + "<assistant>" * answer_follows


def lines(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def read(*paths: Path) -> list[Document]:
    return read_documents(paths, Bytes(), 256)


def text(document: Document) -> str:
    return bytes(document.ids).decode()


def learned(document: Document) -> str:
    return bytes(
        token for token, answer in zip(document.ids, document.answer, strict=True) if answer
    ).decode()


def test_a_folder_is_read_in_order_of_names_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.py", ".hidden", "sub/c.md", ".git/d.txt", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    assert [text(d) for d in read(tmp_path)] == ["a.py", "b.txt", "sub/c.md"]
    assert [learned(d) for d in read(tmp_path)] == ["a.py", "b.txt", "sub/c.md"]


@pytest.mark.parametrize(
    ("record", "whole", "answer", "prompt"),
    [
        pytest.param({"text": "abc"}, "abc", "abc", 0, id="text"),
        pytest.param({"prompt": "ab", "completion": "cd"}, "abcd", "cd", 2, id="completion"),
        pytest.param({"tokens": [97, 98, 99], "prompt_tokens": 2}, "abc", "c", 2, id="tokens"),
        pytest.param({"tokens": [97, 98]}, "ab", "ab", 0, id="tokens without a prompt"),
        pytest.param(
            {
                "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
                "model": "other keys",
            },
            "<user>hi</><assistant>ho</>",
            "ho</>",
            len("<user>hi</><assistant>"),
            id="chat",
        ),
        pytest.param(
            {"messages": TURNS},
            "<user>a</><assistant>b</><user>c</><assistant>d</>",
            "b</>d</>",
            len("<user>a</><assistant>"),
            id="two turns",
        ),
        pytest.param(
            {"messages": [TURNS[1], *TURNS[:2]]},
            "<assistant>b</><user>a</><assistant>b</>",
            "b</>",
            len("<assistant>b</><user>a</><assistant>"),
            id="a greeting",
        ),
    ],
)
def test_the_keys_of_a_line_decide_what_is_learned(
    tmp_path: Path, record: dict[str, Any], whole: str, answer: str, prompt: int
) -> None:
    (document,) = read(lines(tmp_path / "x.jsonl", record))
    assert (text(document), learned(document), document.prompt) == (whole, answer, prompt)


def test_a_document_may_contain_other_line_separators(tmp_path: Path) -> None:
    """As a server writes it that captures its traffic: JSON needs no escape for them."""
    file = tmp_path / "x.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"a{end}b"}, ensure_ascii=False) + "\r\n" for end in "\u2028\u2029\x85\r")
    )
    assert [text(d) for d in read(file)] == ["a\u2028b", "a\u2029b", "a\x85b", "a\rb"]


def test_a_template_that_rewrites_earlier_turns_ends_the_chat(tmp_path: Path) -> None:
    class Forgetful(Bytes):
        def render_chat(self, messages: Sequence[Mapping[str, Any]], *known: Any, **more: Any) -> str:
            return super().render_chat(messages[-2:] if len(messages) > 2 else messages, *known, **more)

    (document,) = read_documents([lines(tmp_path / "x.jsonl", {"messages": TURNS})], Forgetful(), 256)
    assert learned(document) == "b</>"


def test_what_comes_after_an_image_is_not_learned(tmp_path: Path) -> None:
    """A captured line has the number of a turn's images alone."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    seen = {**user, "images": 1}
    (document,) = read(lines(tmp_path / "x.jsonl", {"messages": [user, answer, seen, answer]}))
    assert learned(document) == "b</>"
    with pytest.raises(DataError, match="no documents"):
        read(lines(tmp_path / "y.jsonl", {"messages": [seen, answer]}))
    with pytest.raises(DataError, match="no documents"):
        read_documents([lines(tmp_path / "z.jsonl", {"messages": [seen]})], Bytes(), 256, prompts_alone=True)


def test_a_call_that_the_template_cannot_render_ends_the_chat(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    (document,) = read(
        lines(tmp_path / "x.jsonl", {"messages": [*TURNS, TURNS[0], call]}, {"messages": [TURNS[0], call]})
    )
    assert learned(document) == "b</>d</>"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("{", "this line is not JSON", id="no JSON"),
        pytest.param('{"question": "?"}', "none of the keys", id="unknown keys"),
        pytest.param("[1]", "none of the keys", id="no object"),
        pytest.param('{"text": 3}', "text must be a string", id="no text"),
        pytest.param('{"messages": "hi"}', "list of objects with a role", id="no messages"),
        pytest.param(
            '{"messages": [{"role": "user"}, {"role": "assistant"}]}',
            "message 2 has neither",
            id="no content",
        ),
        pytest.param('{"tokens": [-1]}', "list of token ids", id="negative id"),
        pytest.param(
            '{"tokens": [1], "prompt_tokens": 2}',
            "from 0 to the number of tokens, 1",
            id="prompt beyond the text",
        ),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=rf"x\.jsonl:3: .*{words}"):
        read(file)


PROMPTS = [{"messages": TURNS[:1]}, {"prompt": "ask"}, {"messages": TURNS[:2]}]


def test_prompts_without_answers_are_documents_where_the_target_answers(tmp_path: Path) -> None:
    file = lines(tmp_path / "x.jsonl", *PROMPTS, {"prompt": "a", "completion": "b"}, {"messages": []})
    found = read_documents([file], Bytes(), 256, prompts_alone=True)
    assert [text(one) for one in found] == [
        "<user>a</><assistant>",
        "ask",
        "<user>a</><assistant>b</>",
        "ab",
    ]
    assert [learned(one) for one in found] == ["", "", "b</>", "b"]
    assert [one.prompt for one in found[:2]] == [len(one.ids) for one in found[:2]]


@pytest.mark.parametrize(
    ("record", "words"), [(PROMPTS[0], "no documents"), (PROMPTS[1], "none of the keys")]
)
def test_elsewhere_they_are_refused_with_advice(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"{words}.*\(prompts without answers take --regenerate"):
        read(lines(tmp_path / "x.jsonl", record))


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match="no documents"):
        read(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path / "b.bin")
    with pytest.raises(DataError, match="no documents"):  # in a folder it is passed over
        read(tmp_path)
    with pytest.raises(DataError, match="token id 256.*ends at 255"):
        read(lines(tmp_path / "c.jsonl", {"tokens": [256]}))


def documents(count: int = 12) -> list[Document]:
    made = [Document(tuple(range(n, n + 10 + n)), (False,) * 4 + (True,) * (6 + n), 4) for n in range(count)]
    assert all(len(d.ids) == len(d.answer) for d in made)
    return made


def test_a_position_has_the_weight_of_its_successor() -> None:
    rows = DocumentRows.of(
        [Document((1, 2, 3, 4, 5), (False, False, True, False, True), 2)] * 40, 8, 9, 0.25, seed=0
    )
    ids, weights = rows.ids.ravel(), rows.weights.ravel()
    # by token: weight of its successor; 9 ends a document
    expected = {2: 1.0, 3: 0.25, 4: 1.0, 5: 1.0, 9: 0.25, 1: 0.25}
    assert [expected[int(token)] for token in ids[:-1]] == weights[:-1].tolist()


def test_rows_of_weight_0_are_left_out() -> None:
    prompt = Document(tuple(range(64)), (False,) * 63 + (True,), 63)
    assert len(DocumentRows.of([prompt], 8, None, 0.0, seed=0)) == 1
    assert len(DocumentRows.of([prompt], 8, None, 0.1, seed=0)) == 8
    with pytest.raises(DataError, match="no row has a token of an answer"):
        DocumentRows.of([Document(prompt.ids, (False,) * 64, 63)], 8, None, 0.0, seed=0)
    with pytest.raises(DataError, match="64 tokens in all, but one row needs 65"):
        DocumentRows.of([prompt], 65, None, 0.0, seed=0)


@given(seed=st.integers(0, 5), count=st.integers(1, 7), turns=st.integers(1, 3))
def test_every_epoch_reads_every_row_once(seed: int, count: int, turns: int) -> None:
    rows = DocumentRows.of(documents(), 8, None, 0.0, seed)
    read_rows = [row for step in range(turns * len(rows)) for row in rows.chosen(seed, step, count)]
    passes = [read_rows[first : first + len(rows)] for first in range(0, len(read_rows), len(rows))]
    assert all(sorted(one) == list(range(len(rows))) for one in passes)


def test_the_order_is_a_function_of_seed_and_step() -> None:
    one, two = (DocumentRows.of(documents(), 8, None, 0.0, seed=3) for _ in range(2))
    hashes = [one.hash(one.chosen(3, step, 4)) for step in range(20)]
    assert hashes == [two.hash(two.chosen(3, step, 4)) for step in range(20)]
    assert hashes != [two.hash(two.chosen(4, step, 4)) for step in range(20)]
    assert one.fingerprint == two.fingerprint


def test_a_hash_depends_on_every_token_and_weight() -> None:
    rows = DocumentRows.of(documents(), 8, None, 0.0, seed=0)
    other_token = DocumentRows(rows.ids + (np.arange(8, dtype=np.int32) == 3), rows.weights)
    for changed in (other_token, DocumentRows(rows.ids, rows.weights * np.float32(0.5))):
        assert changed.hash([0, 1]) != rows.hash([0, 1])
        assert changed.fingerprint != rows.fingerprint


def test_copies_of_a_document_stay_on_one_side_of_the_split() -> None:
    many = [Document((n % 300, 7), (True, True), 0) for n in range(600)]
    kept, held = split(many)
    assert held
    assert not {d.ids for d in kept} & {d.ids for d in held}
    assert len(kept) + len(held) == 600
    assert [len(part) for part in split(documents(2))] == [1, 1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param({"length": 8}, "length = 8", id="length"),
        pytest.param({"data": ()}, "data = ", id="no data"),
        pytest.param(
            {"length": 128},
            "^eval_tokens = 128: leaves no prompt of 8 tokens in a length of 128",
            id="no eval prompt",
        ),
        pytest.param(
            {"regenerate": 1, "regenerate_tokens": 1017},
            "^regenerate_tokens = 1017: leaves no prompt",
            id="no prompt",
        ),
        pytest.param({"out": "."}, "out = '.': must have a name", id="no name"),
        pytest.param({"epochs": 3}, "epochs = 3: unknown field", id="unknown"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        TrainSettings(**{"target": "demo", "data": ("x",), "out": "y", **values})


def test_two_norms_of_a_head_exclude_each_other() -> None:
    with pytest.raises(
        InvalidParameter, match="^norm_before_fc = True: cannot be used together with fc_norm$"
    ):
        HeadSettings(fc_norm=True, norm_before_fc=True)


@pytest.mark.parametrize("taps", ["", "a", "1,1", "-2"])
def test_taps_are_layers_in_rising_order(taps: str) -> None:
    with pytest.raises(InvalidParameter, match="taps"):
        HeadSettings(taps=taps)
    assert HeadSettings(taps="-1, 4,9").tap_ids == (-1, 4, 9)


def test_two_norms_over_taps_exclude_each_other() -> None:
    with pytest.raises(InvalidParameter, match="cannot be used together"):
        HeadSettings(fc_norm=True, norm_before_fc=True)
    assert not HeadSettings(fc_norm=True).norm_all
