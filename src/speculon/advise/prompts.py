"""The prompts that an advice is for: prompts, chats and files of them, or the benchmark's workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from speculon.bench import workloads
from speculon.bench.workloads import Case, Size
from speculon.config import SamplingParams
from speculon.errors import BenchError, InvalidParameter, InvalidRequest
from speculon.text import Tokenizer, check_messages

GROUP = "prompts"


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt: its text, or a conversation."""

    group: str  # where it comes from; groups are reported apart
    content: str | list[dict[str, Any]]


def read_lines(name: str, text: str) -> list[Sample]:
    """A file with JSON lines: a string, {"prompt": ...}, {"messages": [...]}, or a list of messages."""
    return [
        Sample(name, read_line(f"{name}:{number}", line))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def read_line(place: str, line: str) -> str | list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidParameter("prompt-file", place, f"not JSON ({error})") from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, list):
        try:
            check_messages(value)
        except InvalidRequest as error:
            raise InvalidParameter("prompt-file", place, str(error)) from None
    elif not isinstance(value, str) or not value:
        raise InvalidParameter(
            "prompt-file", place, 'a line is "text", {"prompt": "text"}, {"messages": [...]}, or messages'
        )
    return value


def as_cases(
    samples: Sequence[Sample], tokenizer: Tokenizer, params: SamplingParams, chat: bool = False
) -> dict[str, list[Case]]:
    """Cases by group; a sampled one has a seed, so that every measurement writes the same text."""
    found: dict[str, list[Case]] = {}
    for number, sample in enumerate(samples):
        content = (
            [{"role": "user", "content": sample.content}]
            if chat and isinstance(sample.content, str)
            else sample.content
        )
        prompt = tokenizer.encode(content) if isinstance(content, str) else tokenizer.apply_chat(content)
        case = Case(f"{sample.group} {number + 1}", prompt, params)
        found.setdefault(sample.group, []).append(workloads.at(params.temperature, case, number))
    return found


def workload_cases(names: Sequence[str], tokenizer: Tokenizer, size: Size) -> dict[str, list[Case]]:
    """The benchmark's cases of some workloads."""
    built = {name: workloads.build(name, tokenizer, size) for name in names}
    return {
        name: [replace(case, name=f"{name}: {case.name}") for case in some] for name, some in built.items()
    }


@dataclass(frozen=True, slots=True)
class Split:
    """Half of every group is measured, the other half is held out for the live measurement."""

    measured: list[Case]
    held_out: list[Case]
    groups: Mapping[str, str]  # of a case, by name

    @classmethod
    def of(cls, cases: Mapping[str, list[Case]]) -> Split:
        if not any(cases.values()):
            raise BenchError("there is no text to measure")
        groups = {case.name: group for group, some in cases.items() for case in some}
        measured, held_out = (list(alternated(some[first::2] for some in cases.values())) for first in (0, 1))
        return cls(measured, held_out, groups)


def alternated(lists: Iterator[list[Case]]) -> Iterator[Case]:
    """One of each in turn, so that a batch has cases of every group."""
    for row in zip_longest(*lists):
        yield from (case for case in row if case is not None)
