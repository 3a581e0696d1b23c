"""What the clients ask for: messages, a form of answers, and tools."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
# the demo model writes code: a seed and a bound make an answer of a given form end in time
FORMED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=12)
