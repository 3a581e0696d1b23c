"""Where the answer begins after a thinking, token by token, and what drafts leave of that."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from speculon.core.config import Thinking
from speculon.decoding.text.thinking import AnswerStart
from speculon.decoding.text.tokenizer import Tokenizer

OPENED, OWN = Thinking(opened=True), Thinking()


class Pieces:
    """A tokenizer of these pieces."""

    PIECES = ("<think>", "</think>", "</", "think", ">", "<", "\n", "a", "b", ">\n", "\n\n")

    def decode(self, ids: Seq[int], **options: Any) -> str:
        return "".join(self.PIECES[token] for token in ids)


def ids(*pieces: str) -> list[int]:
    return [Pieces.PIECES.index(piece) for piece in pieces]


TEXT = Tokenizer(Pieces())
SPELLED = ("</", "think", ">")
CASES: dict[str, tuple[Thinking, list[int], list[int | None]]] = {
    "opened": (OPENED, ids("a", "</think>", "b", "a"), [None, None, 2, 2]),
    "opened twice": (OPENED, ids("<think>", "a", "</think>", "b"), [None, None, None, 3]),
    "spelled": (OPENED, ids("a", *SPELLED, "b"), [None] * 4 + [4]),
    "with a blank": (OPENED, ids("</", "think", ">\n", "\n\n", "b", "\n"), [None] * 4 + [4, 4]),
    "its own": (OWN, ids("<think>", "a", "</think>", "b"), [None, None, None, 3]),
    "its own, after a blank": (OWN, ids("\n", "<think>", "</think>", "b"), [0, None, None, 3]),
    "its own, spelled": (OWN, ids("<", "think", ">", "a", "</think>", "b"), [0, 0, None, None, None, 5]),
    "none": (OWN, ids("a", "<think>", "b"), [0, 0, 0]),
    "almost": (OWN, ids("<", "a", "<think>"), [0, 0, 0]),
    "not ended": (OPENED, ids("a", "</", "think", "b"), [None] * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_begins_after_the_thinking(case: str) -> None:
    thinking, tokens, begins = CASES[case]
    start = AnswerStart(thinking, TEXT)
    assert [start.push(token) for token in tokens] == begins


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_read_as_tokens_are_and_leave_nothing(case: str) -> None:
    thinking, tokens, begins = CASES[case]
    for committed in range(len(tokens)):
        start = AnswerStart(thinking, TEXT)
        for _ in range(2):
            found = {i: begin for begin, a, b in start.runs(tokens, committed) for i in range(a, b)}
            assert found == {i: b for i, b in enumerate(begins) if b is not None and i >= committed}
        start.runs(ids("a", *SPELLED, *SPELLED)[:committed], committed)  # what else may have been drafted
