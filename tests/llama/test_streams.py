"""What a stream computed is used by later sequences that begin alike, and never by others."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from speculon import LLM, SamplingParams
from speculon.core.errors import InvalidRequest
from speculon.runtimes.llama.streams import common
from tests.llama.conftest import TOY, Toy
from tests.llama.test_drafts import GREEDY, PLAIN, runtime_of, texts

LONG = [(7 * place) % 90 + 4 for place in range(120)]


@pytest.fixture
def llm(toy: Toy) -> Iterator[LLM]:
    with LLM(str(toy()), tokenizer=None, **TOY) as llm:
        runtime_of(llm).space.copied_from = 16  # as where copies are fast
        yield llm
        llm.engine.check_integrity()


def cached(llm: LLM, prompt: list[int], **request: bool) -> int:
    params = GREEDY if not request else GREEDY.model_copy(update=request)
    return llm.generate([prompt], params)[0].outputs[0].stats.cached_tokens


def test_the_same_prompt_is_computed_once(llm: LLM) -> None:
    first, again = (texts(llm, GREEDY, PLAIN, [LONG]) for _ in range(2))
    assert first == again
    assert cached(llm, LONG) == len(LONG) - 1


def test_the_last_token_of_a_prompt_is_always_computed(llm: LLM) -> None:
    texts(llm, GREEDY, PLAIN, [LONG])
    llm.engine.add_request(LONG, GREEDY, request_id="again")
    (seq,) = llm.engine.scheduler.waiting
    found = runtime_of(llm).space.cached(seq)
    llm.engine.abort("again")
    assert found == len(LONG) - 1


def test_a_conversation_goes_on_in_its_stream(llm: LLM) -> None:
    (out,) = llm.generate([LONG[:60]], GREEDY)
    assert cached(llm, [*LONG[:60], *out.token_ids, 5, 6]) == 60 + len(out.token_ids) - 1


def test_a_running_prompt_is_copied(llm: LLM) -> None:
    params = GREEDY.model_copy(update={"n": 3, "temperature": 1.0, "seed": 1})
    (computed,) = llm.generate([LONG[:100]], params)
    assert [one.stats.cached_tokens for one in computed.outputs] == [0, 99, 99]
    (found,) = llm.generate([LONG[:100]], params)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in computed.outputs]
    assert len({tuple(one.token_ids) for one in found.outputs}) == 3


def test_a_little_in_common_does_not_drop_another_conversation(llm: LLM) -> None:
    assert cached(llm, LONG) == 0
    assert cached(llm, [*LONG[:20], *[5] * 60]) == 20, "a copy: the whole stream stays"
    assert cached(llm, LONG) == len(LONG) - 1


def test_without_the_cache_nothing_is_found(toy: Toy) -> None:
    with LLM(str(toy()), tokenizer=None, prefix_cache=False, **TOY) as llm:
        assert [cached(llm, LONG) for _ in range(2)] == [0, 0]


def test_the_stream_that_was_unused_for_longest_is_dropped(llm: LLM) -> None:
    first, *others, last = [[4 + number] * 30 for number in range(5)]
    for prompt in (first, *others, last):
        assert cached(llm, prompt) == 0
    assert [cached(llm, prompt) for prompt in (*others, last, first)] == [29, 29, 29, 29, 0]


def test_prompt_log_probabilities_take_nothing_from_the_cache(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    first, again = (llm.generate([LONG], params)[0].prompt_logprobs for _ in range(2))
    assert first and first == again and len(first) == len(LONG)


def test_a_prompt_beyond_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="256"):
        llm.generate([[5] * 300], GREEDY)


def test_common_beginnings_are_those_of_a_plain_count() -> None:
    chance = random.Random(5)
    for _ in range(300):
        a = [chance.randrange(2) for _ in range(chance.randrange(12))]
        b = [*a[: chance.randrange(13)], *(chance.randrange(2) for _ in range(chance.randrange(5)))]
        plain = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common(a, b) == plain
