"""A run of a benchmark: pools, rules of acceptance, recordings of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.config import SpeculationConfig
from speculon.core.errors import BenchError, InvalidParameter
from speculon.core.types import NO_DRAFT, NO_LIMITS, Decision, Draft, Load, Reason
from speculon.decoding.rounds import Budget
from speculon.decoding.sequence import Sequence
from speculon.measure.bench.cell import tie_gap
from speculon.measure.bench.measure import Measurement, measure, recording
from speculon.measure.bench.plan import BenchPlan, parse_mode
from speculon.measure.bench.run import run
from speculon.measure.bench.workloads import Case
from speculon.speculation.control.goodput import Goodput
from speculon.speculation.proposers import registry
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.pools import key_of
from speculon.speculation.proposers.suffix import Suffix
from tests.tiny.bench.plans import small

Pooled = list[tuple[str, int, int, int]]


def watch_pools(
    llm: LLM, plan: BenchPlan, monkeypatch: pytest.MonkeyPatch, pool: Callable[[str], str] = str
) -> Pooled:
    """Every measurement of a run."""
    seen: Pooled = []
    found = llm.engine.proposers.find("suffix")
    assert isinstance(found, Suffix)

    def held(cases: list[Case], time: str) -> int:
        return sum(
            found.pools.sizes.get(str(key_of(f"{case.user}, {time}", case.prompt)), 0) for case in cases
        )

    def watched(llm: LLM, cases: list[Case], speculation: dict[str, Any], time: str = "") -> Measurement:
        before = held(cases, pool(time))
        done = measure(llm, cases, speculation, pool(time))
        seen.append((time, before, held(cases, pool(time)), len(found.pools.sizes)))
        return done

    monkeypatch.setattr("speculon.measure.bench.run.measure", watched)
    run(llm, plan)
    return seen


def not_cold(seen: Pooled, edits: int) -> list[str]:
    """Times in which a user's first edit found something, or a later one nothing."""
    times: dict[str, list[int]] = {}
    for time, before, _, _ in seen:
        times.setdefault(time, []).append(before)
    return [
        time for time, held in times.items() if any((n > 0) != (i % edits > 0) for i, n in enumerate(held))
    ]


WARM: dict[str, Any] = {
    "workloads": ("warm",),
    "prompts": 4,
    "max_tokens": 40,
    "repeats": 2,
    "concurrency": (2,),
}


def test_pools_are_empty_at_a_users_first_edit_in_every_mode_and_repeat_and_not_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    plan = small(modes=("suffix:4", "ngram:4", "suffix:8"), **WARM)
    seen = watch_pools(llm, plan, monkeypatch)
    assert len(seen) == plan.measurements
    assert not_cold([each for each in seen if each[0].startswith("suffix")], edits=2) == []
    assert all((after > before) == time.startswith("suffix") for time, before, after, _ in seen)


def test_a_planted_pool_that_is_the_same_every_time_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    seen = watch_pools(llm, small(modes=("suffix:4",), **WARM), monkeypatch, pool=lambda time: "always")
    assert "suffix:4, repeat 0 of warm, 2" in not_cold(
        [each for each in seen if each[0].startswith("suffix")], edits=2
    )


def test_other_workloads_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    plan = small(workloads=("code", "edit", "prose"), modes=("suffix:4",), prompts=2, max_tokens=40)
    assert {pools for *_, pools in watch_pools(llm, plan, monkeypatch)} == {0}


def test_users_whose_pools_would_be_evicted_are_refused(folder: Path) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "suffix_pools": 3})
    plan = small(
        workloads=("warm",), modes=("suffix:4", "suffix:8"), concurrency=(2,), prompts=4, max_tokens=40
    )
    with pytest.raises(InvalidParameter, match="suffix_pools = 3: must be at least 4 for 2 users in 2 modes"):
        run(llm, plan)


def test_a_policy_without_a_draft_is_no_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(policy: Goodput, budgets: list[Budget], load: Load) -> list[Decision]:
        return [Decision.plain(Reason.COST) for _ in budgets]

    monkeypatch.setattr(Goodput, "decide", decide)
    cells, _ = run(llm, small(modes=("ngram:4/goodput",)))
    found = {cell.mode: cell.diagnosis for cell in cells}
    # pays: by noise, which one text cannot exclude
    assert found["ngram:4/goodput"] in ("gated: cost", "pays")


def test_rules_of_acceptance_are_modes(drafting: LLM) -> None:
    """A draft that agrees with the target exactly is accepted under all; by matching the text is the plain
    one.
    """
    modes = ("draft_model:3/matching", "draft_model:3/rejection", "draft_model:3/block")
    cells, _ = run(drafting, small(workloads=("prose@0.7",), modes=modes, prompts=2, max_tokens=24))
    by_mode = {cell.mode: cell for cell in cells}
    matching, rejection, block = (by_mode[mode] for mode in modes)
    assert (matching.different, matching.rejection) == (0, False)
    assert rejection.rejection and block.rejection and block.different == 2
    assert matching.per_position == rejection.per_position == block.per_position == [1, 1, 1]


class Mute:
    """Never drafts."""

    limits = NO_LIMITS

    def __init__(self, config: SpeculationConfig, target: TargetFacts):
        pass

    def admit(self, seq: Sequence) -> None: ...

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        return [NO_DRAFT] * len(seqs)

    def observe(self, seqs: object, verdicts: object) -> None: ...

    def release(self, seq: Sequence) -> None: ...


def test_a_drafter_that_never_drafts_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {"mute": Mute})
    with pytest.raises(BenchError, match=r"mute:4 had no round with drafts .*no_match: .* \(14 rounds\)"):
        run(llm, small(modes=("mute:4",)))


def test_a_recording_sees_every_step_and_leaves_the_engine_as_it_was(llm: LLM) -> None:
    case = Case(
        "x",
        llm.tokenizer.encode("class Stack:"),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
    )
    one = measure(llm, [case, case], {"method": "off"})
    assert [step.decoding for step in one.steps] == [False] + [True] * 9
    assert [step.rows for step in one.steps] == [2 * len(case.prompt)] + [2] * 9
    assert sum(step.tokens for step in one.steps) == one.tokens == 20
    assert all(0 < step.forward_ms < step.step_ms for step in one.steps)
    assert [step.spans for step in one.steps] == [2] * 10
    with pytest.raises(ZeroDivisionError), recording(llm.engine):
        raise ZeroDivisionError
    assert "step" not in vars(llm.engine)


def test_a_recording_sees_what_was_drafted_and_how_long_it_took(drafting: LLM) -> None:
    case = Case(
        "x",
        drafting.tokenizer.encode("class Stack:"),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    )
    before = drafting.engine.counters.profile["propose"]
    one = measure(drafting, [case, case], parse_mode("draft_model:3").speculation)
    assert [(step.rows - step.spans, step.tokens) for step in one.steps[1:]] == [(6, 8), (6, 8)]
    draft_ms = [step.profile["propose"] for step in one.steps]
    assert all(0 < ms < step.step_ms - step.forward_ms for ms, step in zip(draft_ms, one.steps, strict=True))
    assert sum(draft_ms) == pytest.approx(drafting.engine.counters.profile["propose"] - before)


def test_the_gap_where_two_outputs_differ(llm: LLM) -> None:
    case = Case("x", llm.tokenizer.encode("class Stack:"), SamplingParams(temperature=0, max_tokens=6))
    output = llm.generate([case.prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0]
    assert output.logprobs is not None
    (_, best), (second, less) = output.logprobs[3].top
    other = [*output.token_ids[:3], second, 9, 9]
    assert tie_gap(llm, case, other, output.token_ids) == pytest.approx(best - less, abs=1e-4)
    assert tie_gap(llm, case, output.token_ids[:4], output.token_ids) is None
