"""A warm-up measures what rounds cost, and leaves nothing else behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculon import LLM
from speculon.core.config import SamplingParams
from speculon.core.types import Reason
from speculon.engine import warm_up as warming
from speculon.engine.engine import Engine
from speculon.engine.warm_up import warm_up
from speculon.speculation.control.goodput import COLD, Goodput
from tests.engines import torch_runtime
from tests.tiny.account import unknown_to
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.folders import make_folder
from tests.tiny.scripted import assert_nothing_held, drain, make_engine

PROMPT, GREEDY = [1, 2, 3, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 60.0)  # a full machine measures slowly
    use_draft(tiny_target("llama", seed=1))


def engine(**settings: Any) -> Engine:
    speculation = {**DRAFT, "policy": "goodput", "num_speculative_tokens": 4}
    return make_engine(tiny_target("llama"), speculation=speculation, **settings)


def goodput_of(engine: Engine) -> Goodput:
    policy = engine.policy.of("goodput")
    assert isinstance(policy, Goodput) and policy.costs is engine.policy.costs
    return policy


def test_afterwards_costs_are_known_and_nothing_else_stays() -> None:
    new, cold = engine(), engine()
    assert not goodput_of(new).costs.known
    warm_up(new)
    policy = goodput_of(new)
    costs = policy.costs
    assert costs.known and costs.step(8) > 0 and costs.plain(1) is not None and costs.plain(8) is not None
    assert costs.calls("draft_model") >= COLD and costs.proposal("draft_model", 1, 4) > 0
    assert policy.state() == {"": {}} and unknown_to(new)
    assert_nothing_held(new)
    assert new.counters == cold.counters and not torch_runtime(new).space._index, "no later prompt finds it"
    for one in (new, cold):
        one.add_request(PROMPT, GREEDY, None, "a")
    mine, theirs = drain(new)["a", 0], drain(cold)["a", 0]
    assert mine.tokens == theirs.tokens
    assert Reason.COLD not in mine.stats.reasons and theirs.stats.reasons[Reason.COLD] > 0


@pytest.mark.parametrize("speculation", [{"method": "suffix"}, {"method": "off"}], ids=["lookups", "none"])
def test_steps_are_measured_with_and_without_drafts_whatever_drafts(
    speculation: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = make_engine(tiny_target("llama"), speculation={**speculation, "policy": "goodput"})
    costs, seen = new.policy.costs, set[tuple[int, int, int]]()
    observe = costs.observe_step

    def watch(sequences: int, drafting: int, rows: int, *args: Any) -> None:
        seen.add((sequences, drafting, rows))
        observe(sequences, drafting, rows, *args)

    monkeypatch.setattr(costs, "observe_step", watch)
    warm_up(new)
    for size in warming.BATCHES:
        assert seen >= {(size, size, 4 * size), (size, size, size), (size, 0, 0)}


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    new = engine()
    monkeypatch.setattr(warming, "SECONDS", 0.0)
    warm_up(new)
    assert_nothing_held(new)


@pytest.mark.parametrize(
    "settings", [{"max_context": 16}, {"num_blocks": 5}], ids=["short context", "few pages"]
)
def test_an_engine_too_small_for_it_starts_without(settings: dict[str, int]) -> None:
    new = engine(**settings)
    warm_up(new)
    new.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=4), None, "a")
    assert drain(new)


def test_an_error_in_the_middle_leaves_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    new, counters = engine(), None
    counters, round_, calls = new.counters, new.round, iter(range(100))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError("planted")
        return round_(*args, **options)

    monkeypatch.setattr(new, "round", failing)
    with pytest.raises(MemoryError, match="planted"):
        warm_up(new)
    assert_nothing_held(new)
    assert new.counters is counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("warm") / "model")


@pytest.mark.parametrize(
    ("policy", "warmup", "times"),
    [
        (None, None, 1),
        ("fixed", None, 0),
        ("fixed", True, 1),
        ("goodput", False, 0),
    ],
)
def test_who_warms_up(
    folder: Path, policy: str | None, warmup: bool | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Engine] = []
    monkeypatch.setattr("speculon.engine.build.warm_up", seen.append)
    speculation = {"policy": policy} if policy else {}
    llm = LLM(str(folder), num_blocks=64, warmup=warmup, speculation=speculation)
    assert seen == [llm.engine] * times
    assert_nothing_held(llm.engine)
