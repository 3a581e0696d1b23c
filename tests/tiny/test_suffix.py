"""Earlier answers change no token of a text, whoever's they are; the same answer again costs few target
calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speculon.speculation.proposers.suffix import Suffix
from tests.tiny.conftest import tiny_target
from tests.tiny.requests import MODES, assert_same, plain, requests_of
from tests.tiny.scripted import Key, Result, drain, make_engine


def write(engine: Any, mode: str, speculations: list[dict[str, Any]]) -> dict[Key, Result]:
    for request, speculation in zip(requests_of(mode), speculations, strict=True):
        engine.add_request(request.prompt, request.params, {"method": "suffix", **speculation}, request.id)
    return drain(engine)


def calls(results: dict[Key, Result]) -> int:
    return sum(result.stats.target_calls for result in results.values())


def pools_of(engine: Any) -> Any:
    proposer = engine.proposers.find("suffix")
    assert isinstance(proposer, Suffix)
    return proposer.pools


@pytest.mark.parametrize("mode", MODES)
def test_the_same_answer_again_costs_few_calls(mode: str) -> None:
    engine = make_engine(tiny_target("llama"))
    alike = [{"num_speculative_tokens": 8}] * len(requests_of(mode))
    cold, warm = (write(engine, mode, alike) for _ in range(2))
    nobody, together = (write(engine, mode, [{**one, "pool": pool} for one in alike]) for pool in ("", "all"))
    for results in (cold, warm, nobody, together):
        assert_same(requests_of(mode), results, plain(mode))
    assert calls(warm) < 0.5 * calls(cold) and calls(nobody) == calls(cold)
    assert len(pools_of(engine).sizes) == len(alike) + 1, "everybody's own pool, and the one of all"


def test_an_aborted_sequence_leaves_what_was_committed() -> None:
    engine = make_engine(tiny_target("llama"))
    request = replace(requests_of("greedy")[1])
    engine.add_request(request.prompt, request.params, {"method": "suffix", "pool": "me"}, "r")
    written: list[int] = []
    while len(written) < 20:
        written += [token for event in engine.step() for token in event.tokens]
    engine.abort("r")
    ((_, _, kept),) = pools_of(engine).state()
    assert list(kept) == [*request.prompt[-8:], *written, -1]
    assert written == plain("greedy")[request.id, 0][: len(written)]
