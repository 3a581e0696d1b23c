"""Events find the choices of an answer by the id of their request."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.core.types import Finish
from speculon.decoding.sequence import Event
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.answer import Answer
from speculon.server.completions import read_completion
from speculon.server.model import ServedModel
from speculon.server.schemas import CompletionRequest
from tests.server.scripted import Bytes

PROMPTS, N = ["a", "b", "c"], 2


def answer_with(answer_id: str) -> Answer:
    model = ServedModel("m", Tokenizer(Bytes()), 100, 256, "off", ServeConfig())
    return Answer(answer_id, read_completion(CompletionRequest(prompt=PROMPTS, n=N), model), model, "tenant")


def texts_of(answer: Answer) -> list[str]:
    """The text of each choice, where each sequence is its prompt and the number of its sample."""
    deltas = []
    for add in reversed(answer.adds()):
        for sample in range(add.params.n):
            tokens = (*add.prompt, *str(sample).encode())
            deltas.append(answer.push(Event(add.request_id, sample, tokens, finish=Finish("length"))))
    choices = answer.whole([delta for delta in deltas if delta is not None])["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(PROMPTS) * N))
    return [choice["text"] for choice in choices]


@pytest.mark.parametrize("answer_id", ["cmpl-1", "cmpl", "-", "7-8"])
def test_events_find_their_choices_in_any_order(answer_id: str) -> None:
    assert texts_of(answer_with(answer_id)) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_choices_that_are_mixed_up_are_found_out() -> None:
    answer = answer_with("cmpl-1")
    swapped: Any = answer.choices
    swapped[0], swapped[1] = swapped[1], swapped[0]
    with pytest.raises(AssertionError):
        texts_of(answer)


def test_every_message_has_the_tenant_whatever_the_body_says() -> None:
    adds = answer_with("cmpl-1").adds()
    assert [add.prompt for add in adds] == [list(prompt.encode()) for prompt in PROMPTS]
    assert all(add.speculation is not None and add.speculation.tenant == "tenant" for add in adds)
    assert len({add.request_id for add in adds}) == len(PROMPTS)
