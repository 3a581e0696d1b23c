"""Each reason that a plain round can carry is given by a real engine, and by nothing but its cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.core.types import Limits, Reason
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.speculation.proposers.registry import register
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.forms import engine_of
from tests.tiny.heads import deep_model, deep_target, folder_of, write_eagle3
from tests.tiny.scripted import Request, Scripted, drain, make_engine, run

PROMPT = [42, 58, 67, 89, 48, 70, 44]  # nothing repeats in it, nor in the 8 tokens that follow
TOKENS = 8  # of which the first comes with the prompt, and the last needs no draft
LAST = {"max_tokens": 1}
OF_POLICIES = {Reason.COLD, Reason.COOLDOWN, Reason.LOW_ACCEPTANCE, Reason.COST, Reason.LOAD}
Reasons = dict[str, int]


def greedy(max_tokens: int = TOKENS, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def stats_of(
    engine: Engine, fields: dict[str, Any] | None, prompt: list[int] | None = None, **params: Any
) -> RequestStats:
    engine.add_request(prompt or PROMPT, greedy(**params), fields, "r")
    return drain(engine)["r", 0].stats


def reasons(fields: dict[str, Any] | None, settings: dict[str, Any] | None = None, **request: Any) -> Reasons:
    return dict(stats_of(make_engine(tiny_target("llama"), **settings or {}), fields, **request).reasons)


def scripted(**fields: Any) -> dict[str, Any]:
    """Makes `scripted` a proposer whose drafts are all wrong, with these attributes of its own; what to ask
    for it.
    """

    def build(config: Any, target: Any) -> Scripted:
        proposer = Scripted({}, lambda position: True)
        vars(proposer).update(fields)
        return proposer

    register("scripted", build)
    return {"method": "scripted"}


def off_config(folder: Path) -> Reasons:
    return reasons(None, {"speculation": {"method": "off"}})


def off_request(folder: Path) -> Reasons:
    by_method = reasons({"method": "off"}, {"speculation": {"method": "ngram"}})
    assert by_method == reasons({"num_speculative_tokens": 0}, {"speculation": {"method": "ngram"}})
    return by_method


def no_drafter(folder: Path) -> Reasons:
    """A draft model is asked for, and the engine was started with none."""
    return reasons({"method": "draft_model"})


def not_ready(folder: Path) -> Reasons:
    """After one token there are no states of the target that a head could read."""
    head = folder_of(write_eagle3(folder, deep_model().config))
    engine = make_engine(deep_target(), speculation=head)
    stats = stats_of(engine, {"method": "eagle3"}, prompt=[5], max_tokens=2)
    assert stats.stops == {"eagle3": {"not_ready": 1}}
    return dict(stats.reasons)


def no_match(folder: Path) -> Reasons:
    return reasons({"method": "ngram"})


def solo(folder: Path) -> Reasons:
    """Another request waits all the time."""
    engine = make_engine(tiny_target("llama"), max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(PROMPT, greedy(), {**scripted(), "policy": "solo"}, name)
    return dict(drain(engine)["first", 0].stats.reasons)


def shadow(folder: Path) -> Reasons:
    return reasons({**scripted(), "policy": "shadow"})


def no_pages(folder: Path) -> Reasons:
    """Two sequences fill the pool to the last page; the second waits then, and the first needs no more
    drafts.
    """
    engine = make_engine(
        tiny_target("llama"), block_size=1, prefix_cache=False, num_blocks=2 * (len(PROMPT) + 1)
    )
    engine.add_request(PROMPT, greedy(3), scripted(), "first")
    engine.add_request(PROMPT[::-1], greedy(3), {"method": "off"}, "second")
    return dict(drain(engine)["first", 0].stats.reasons)


def memory(folder: Path) -> Reasons:
    use_draft(tiny_target("llama"))
    return reasons({"method": "draft_model"}, {"speculation": {**DRAFT, "memory_limit_gb": 1e-6}})


def context_limit(folder: Path) -> Reasons:
    return reasons(scripted(limits=Limits(max_context=len(PROMPT))))


def max_tokens(folder: Path) -> Reasons:
    return reasons({"method": "ngram"}, max_tokens=2)


def error(folder: Path) -> Reasons:
    def fail(seqs: list[Sequence], budgets: list[int]) -> Any:
        raise RuntimeError("planted")

    return reasons(scripted(propose=fail))


CASES: dict[Reason, tuple[Callable[[Path], Reasons], Reasons]] = {
    Reason.OFF_CONFIG: (off_config, {"off_config": 7}),
    Reason.OFF_REQUEST: (off_request, {"off_request": 7}),
    Reason.NO_DRAFTER: (no_drafter, {"no_drafter": 7}),
    Reason.NOT_READY: (not_ready, {"not_ready": 1, **LAST}),
    Reason.NO_MATCH: (no_match, {"no_match": 6, **LAST}),
    Reason.SOLO: (solo, {"solo": 6, **LAST}),
    Reason.SHADOW: (shadow, {"shadow": 6, **LAST}),
    Reason.NO_PAGES: (no_pages, {"no_pages": 1, **LAST}),
    Reason.MEMORY: (memory, {"memory": 7}),
    Reason.CONTEXT_LIMIT: (context_limit, {"context_limit": 6, **LAST}),
    Reason.MAX_TOKENS: (max_tokens, LAST),
    Reason.ERROR: (error, {"error": 7}),
}


@pytest.mark.parametrize("reason", CASES, ids=str)
def test_the_cause_gives_this_reason_and_no_other(reason: Reason, tmp_path: Path) -> None:
    cause, expected = CASES[reason]
    assert cause(tmp_path) == expected and reason.value in expected


def test_every_reason_has_a_case_here_or_belongs_to_a_policy() -> None:
    assert set(CASES) | OF_POLICIES == set(Reason) and not set(CASES) & OF_POLICIES


def test_without_their_cause_rounds_are_speculative() -> None:
    """The twin: the same request, a drafter that works, no neighbour, no limit."""
    assert set(reasons(scripted())) <= set(LAST)
    use_draft(tiny_target("llama"))
    assert set(reasons({"method": "draft_model"}, {"speculation": DRAFT})) <= set(LAST)


# why the proposals of a model end


def stops(params: dict[str, Any], **speculation: Any) -> dict[str, int]:
    use_draft(tiny_target("llama"))
    engine = engine_of(speculation={**DRAFT, **speculation})
    return stats_of(engine, {"method": "draft_model", "num_speculative_tokens": 4}, **params).stops[
        "draft_model"
    ]


def test_a_chain_ends_at_its_limit_or_where_it_is_less_sure() -> None:
    params = {"max_tokens": 20}
    assert set(stops(params)) == {"limit"}
    doubted = stops(params, draft_min_confidence=0.9999)
    # the limit is 1 where 2 tokens are left
    assert doubted["confidence"] > 3 and set(doubted) <= {"confidence", "limit"}


def test_a_chain_ends_where_the_grammar_does() -> None:
    """After the first of three letters nothing but two more can follow."""
    assert stops({"structured": {"regex": "[c-f]{3}"}, "ignore_eos": False}) == {"grammar": 1}


def test_lookups_tell_their_match_in_the_account() -> None:
    result = run(
        tiny_target("llama"), [Request([5, 6, 7, 8, 9, 5, 6, 7, 8], greedy(2 * TOKENS), {"method": "ngram"})]
    )["r", 0]
    (found,) = result.stats.matches.values()
    ends = result.stats.stops["ngram"]
    assert found.total() == ends["limit"] > 0 and set(ends) <= {"limit", "no_match"}
    assert sum(ends.values()) == result.stats.draft_calls


def test_proposals_are_counted() -> None:
    engine = make_engine(tiny_target("llama"))
    engine.add_request(PROMPT, greedy(), scripted(), "r")
    for _ in range(3):
        engine.step()
    assert engine.scheduler.running[0].stats.proposed == {("scripted", "", 0): 2}
