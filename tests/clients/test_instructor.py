"""instructor: answers as pydantic models, by tools and by JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict

from .forms import ASK, FORMED, City, Person


class Anything(BaseModel):
    """An object of any form: plain JSON mode forces no schema."""

    model_config = ConfigDict(extra="allow")


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, mode: instructor.Mode, model: Any) -> Any:
    return instructor.from_openai(client, mode=mode).create(
        response_model=model, messages=ASK, model="demo", max_retries=0, **FORMED
    )


@pytest.mark.parametrize(
    ("mode", "model"),
    [
        (instructor.Mode.TOOLS, Person),
        (instructor.Mode.JSON_SCHEMA, Person),
        (instructor.Mode.JSON, Anything),
    ],
)
def test_an_answer_is_of_the_model(client: openai.OpenAI, mode: instructor.Mode, model: Any) -> None:
    assert isinstance(ask(client, mode, model), model)


def test_parallel_tools_are_accepted(client: openai.OpenAI) -> None:
    """The model decides whether a tool is called; instructor raises an error where it calls none."""
    try:
        answers = list(ask(client, instructor.Mode.PARALLEL_TOOLS, Iterable[Person | City]))
    except InstructorRetryException as error:
        assert "No tool calls in response" in str(error)
    else:
        assert answers and all(isinstance(answer, Person | City) for answer in answers)
