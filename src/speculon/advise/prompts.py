"""The prompts that an advice is for: prompts, chats and files of them, or the benchmark's workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest

from speculon.bench import workloads
from speculon.bench.data import Prompt, encode
from speculon.bench.workloads import Case, Size
from speculon.config import SamplingParams
from speculon.errors import BenchError
from speculon.text import Tokenizer

Samples = Mapping[str, Sequence[Prompt]]  # by group; groups are reported apart


def as_cases(samples: Samples, tokenizer: Tokenizer, params: SamplingParams) -> dict[str, list[Case]]:
    """Cases by group; a sampled one has a seed, so that every measurement writes the same text."""
    numbers = count()
    return {
        group: [
            workloads.at(params.temperature, Case(prompt.name, encode(prompt, tokenizer), params), number)
            for prompt, number in zip(prompts, numbers, strict=False)
        ]
        for group, prompts in samples.items()
    }


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
