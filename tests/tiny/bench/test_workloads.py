"""The cases of each workload: the same on every run, and of the size wanted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from speculon import LLM
from speculon.core.errors import BenchError, InvalidParameter
from speculon.measure.bench import workloads
from speculon.measure.bench.workloads import Size, build, fingerprint
from tests.tiny.folders import CONTEXT

TOKENS = 96


def test_the_same_cases_at_another_temperature(llm: LLM) -> None:
    size = Size(3, TOKENS, CONTEXT)
    warm, usual = build("prose@0.7", llm.tokenizer, size), build("prose", llm.tokenizer, size)
    assert [(case.prompt, case.params.seed) for case in warm] == [
        (case.prompt, case.params.seed) for case in usual
    ]
    assert {case.params.temperature for case in warm} == {0.7} and {
        case.params.temperature for case in usual
    } == {1}
    sampled = build("code@1", llm.tokenizer, size)
    # a text without a seed would be another in every mode
    assert [case.params.seed for case in sampled] == [0, 1, 2]
    assert [case.params.seed for case in build("code", llm.tokenizer, size)] == [None] * 3
    assert [case.prompt for case in sampled] == [case.prompt for case in build("code", llm.tokenizer, size)]


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_cases_are_the_same_every_time_and_fit(llm: LLM, name: str) -> None:
    size = Size(3, TOKENS, CONTEXT)
    cases = build(name, llm.tokenizer, size)
    assert fingerprint(cases) == fingerprint(build(name, llm.tokenizer, size))
    assert len({case.name for case in cases}) == 3
    assert all(
        0 < len(case.prompt) <= CONTEXT - TOKENS and case.params.max_tokens == TOKENS for case in cases
    )
    sampled, with_answer = (
        {"prose": {0, 1, 2}, "mixed": {2}}.get(name, set()),
        {"mixed": {1}, "code": set(), "prose": set()},
    )
    assert [case.params.greedy for case in cases] == [i not in sampled for i in range(3)]
    assert [case.reference is not None for case in cases] == [
        i in with_answer.get(name, {0, 1, 2}) for i in range(3)
    ]


def test_mixed_cases_are_the_first_of_each_workload_in_turn(llm: LLM) -> None:
    mixed = build("mixed", llm.tokenizer, Size(6, TOKENS, CONTEXT))
    parts = [build(name, llm.tokenizer, Size(2, TOKENS, CONTEXT)) for name in ("code", "edit", "prose")]
    assert [case.prompt for case in mixed] == [part[i].prompt for i in range(2) for part in parts]
    assert [case.params.temperature for case in mixed] == [0, 0, 1] * 2
    assert [
        case.params.temperature for case in build("mixed@0.5", llm.tokenizer, Size(3, TOKENS, CONTEXT))
    ] == [0.5] * 3


def test_in_a_loop_the_right_answer_is_the_next_prompts_source(llm: LLM) -> None:
    cases = build("warm", llm.tokenizer, Size(8, TOKENS, CONTEXT, concurrency=2))
    assert [case.user for case in cases] == ["user 1"] * 4 + ["user 2"] * 4
    for first, second in pairwise(cases):
        follows = bool(first.reference) and str(first.reference) in llm.tokenizer.decode(second.prompt)
        assert follows == (first.user == second.user)


def test_an_edit_asks_for_its_reference(llm: LLM) -> None:
    case = build("edit", llm.tokenizer, Size(1, TOKENS, CONTEXT))[0]
    old, new = case.name.rpartition(", ")[2].split(" -> ")
    prompt = llm.tokenizer.decode(case.prompt)
    assert f"Repeat this function with `{old}` renamed to `{new}`." in prompt
    assert case.reference and case.reference.startswith("```python\n") and new in case.reference


def test_too_few_cases_are_an_error(llm: LLM) -> None:
    with pytest.raises(BenchError, match="of 100000 cases"):
        build("code", llm.tokenizer, Size(100_000, TOKENS, CONTEXT))
    with pytest.raises(InvalidParameter, match="below the context, 64 tokens"):
        build("code", llm.tokenizer, Size(1, 64, 64))
