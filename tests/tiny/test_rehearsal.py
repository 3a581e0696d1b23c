"""A rehearsal tells what rounds cost, and leaves nothing else behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from speculon import LLM
from speculon.config import SamplingParams
from speculon.control.auto import Auto
from speculon.engine import rehearsal
from speculon.engine.engine import Engine
from speculon.engine.rehearsal import NAME, rehearse
from speculon.proposers import registry
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.scripted import drain, make_engine

PROMPT, GREEDY = [1, 2, 3, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def drafting() -> Iterator[None]:
    use_draft(tiny_target("llama", seed=1))
    yield
    registry._registered.pop("draft_model", None)


def engine(**settings: Any) -> Engine:
    speculation = {**DRAFT, "policy": "auto", "num_speculative_tokens": 4}
    return make_engine(tiny_target("llama"), speculation=speculation, **settings)


def beliefs(engine: Engine) -> Auto:
    learner = engine.policy.of("auto")
    assert isinstance(learner, Auto)
    return learner


def test_afterwards_costs_are_known_and_nothing_of_texts() -> None:
    new = engine()
    assert not beliefs(new).costs.known
    rehearse(new)
    learned = beliefs(new)
    assert learned.costs.known and learned.costs.at(8, 0, 0) > 0
    assert {"suffix", "draft_model"} <= learned.methods.keys()
    for name, known in learned.methods.items():
        assert known.cost.at(1, 4) > 0, name
        assert known.acceptance.state()["seen"] == 0 and not known.kinds, name


def test_nothing_else_stays() -> None:
    new, untouched = engine(), engine()
    rehearse(new)
    new.check_integrity()
    assert new.pool.available == new.pool.num_blocks and new.pool.prefix_cache and not new.has_work
    assert new.counters == untouched.counters
    assert not new.proposers._admitted and not new._requests
    for one in (new, untouched):
        one.add_request(PROMPT, GREEDY, None, "a")
    mine, theirs = drain(new), drain(untouched)
    assert mine["a", 0].tokens == theirs["a", 0].tokens


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    new = engine()
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    rehearse(new)
    new.check_integrity()
    assert not new.has_work and new.pool.available == new.pool.num_blocks


@pytest.mark.parametrize("settings", [{"max_context": 16}, {"num_blocks": 5}], ids=["short context", "few pages"])
def test_an_engine_too_small_for_it_starts_without(settings: dict[str, int]) -> None:
    new = engine(**settings)
    rehearse(new)
    new.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=4), None, "a")
    assert drain(new)


def test_an_error_in_the_middle_leaves_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    new, counters = engine(), None
    counters, round_, calls = new.counters, new.round, iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError("planted")
        return round_(*args)

    monkeypatch.setattr(new, "round", failing)
    with pytest.raises(MemoryError, match="planted"):
        rehearse(new)
    new.check_integrity()
    assert new.counters is counters and not new.has_work and new.pool.available == new.pool.num_blocks


@pytest.mark.parametrize(
    ("policy", "asked", "times"), [("auto", None, 1), ("fixed", None, 0), ("fixed", True, 1), ("auto", False, 0)]
)
def test_who_rehearses(policy: str, asked: bool | None, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Engine] = []
    monkeypatch.setattr("speculon.llm.rehearse", seen.append)
    llm = LLM("demo", speculation={"policy": policy}, rehearse=asked, kv_memory_gb=0.05)
    assert seen == [llm.engine] * times
    assert NAME not in llm.engine._requests
