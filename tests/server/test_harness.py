"""What evaluation harnesses rely on: prompts of token ids, echoed with log-probabilities, and one token that
they cut off.
"""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.types import Finish, TokenLogprobs
from speculon.decoding.sequence import Event
from speculon.server.answer import Answer
from speculon.server.completions import read_completion
from speculon.server.schemas import CompletionRequest
from tests.server.test_client_fields import MODEL

ASK: dict[str, Any] = {
    "prompt": [*b"fgh"],
    "max_tokens": 1,
    "temperature": 0,
    "logprobs": 1,
    "echo": True,
    "seed": 1234,
}


@pytest.mark.parametrize(
    "change, ignored",
    [({}, True), ({"echo": False}, False), ({"logprobs": None}, False), ({"max_tokens": 2}, False)],
    ids=["the prompt alone", "no echo", "no log-probabilities", "two tokens"],
)
def test_the_one_token_is_there_even_where_it_ends_the_text(change: dict[str, Any], ignored: bool) -> None:
    assert read_completion(CompletionRequest(**{**ASK, **change}), MODEL).params.ignore_eos is ignored


def test_the_table_has_an_entry_for_every_token_and_none_before_the_first() -> None:
    answer = Answer("cmpl-1", read_completion(CompletionRequest(**ASK), MODEL), MODEL)
    scored = tuple(TokenLogprobs(token, -token / 10, 2, ((ord("j"), -0.1),)) for token in b"gh")
    last = TokenLogprobs(ord("a"), -0.5, 1, ((ord("a"), -0.5),))
    events = [
        Event("cmpl-1-0", 0, (), prompt_logprobs=scored),
        Event("cmpl-1-0", 0, (ord("a"),), logprobs=(last,), finish=Finish("length")),
    ]
    deltas = [delta for event in events if (delta := answer.push(event)) is not None]
    table = answer.whole(deltas)["choices"][0]["logprobs"]
    assert table["tokens"] == ["f", "g", "h", "a"]
    assert table["token_logprobs"] == [None, -10.3, -10.4, -0.5]
    assert table["top_logprobs"] == [None, {"g": -10.3, "j": -0.1}, {"h": -10.4, "j": -0.1}, {"a": -0.5}]
    assert table["text_offset"] == [0, 1, 2, 3]
