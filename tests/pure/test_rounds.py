"""What bounds a round before anything is decided, why nothing may draft, and whose decision is whose."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config import SpeculationConfig
from speculon.core.types import Ask, Decision, Load, Reason
from speculon.decoding.rounds import Budget, Grant, grants
from speculon.speculation.control.policies import Policies
from tests.builders import budget_of, decisions, make_sequence, span_of


@pytest.mark.parametrize(
    ("wanted", "rows", "granted"),
    [
        pytest.param([4, 32, 0], 36, [4, 32, 0], id="all fit"),
        pytest.param([4, 32, 32], 36, [4, 16, 16], id="the longest shrink"),
        pytest.param([4, 32, 32], 10, [3, 3, 3], id="all shrink"),
        pytest.param([4, 0, 4], 1, [0, 0, 0], id="none is left"),
        pytest.param([4, 0, 4], -1, [0, 0, 0], id="more rows than there may be"),
        pytest.param([], 1, [], id="nobody decodes"),
    ],
)
def test_rows_are_shared_out(wanted: list[int], rows: int, granted: list[int]) -> None:
    reasons = [Reason.LOAD if k and not any(granted) else None for k in wanted]
    assert grants(wanted, rows) == [*map(Grant, granted, reasons)]


METHODS = {"lookup": 9, "model": 4}


@pytest.mark.parametrize(
    ("fields", "grant", "max_drafts", "reason"),
    [
        pytest.param({}, Grant(64), {"lookup": 9, "model": 4}, None, id="as set"),
        pytest.param({}, Grant(6), {"lookup": 6, "model": 4}, None, id="what is granted"),
        pytest.param({}, Grant(0, Reason.NO_PAGES), {"lookup": 0, "model": 0}, Reason.NO_PAGES, id="no room"),
        pytest.param({"max_tokens": 4}, Grant(64), {"lookup": 3, "model": 3}, None, id="tokens left"),
        pytest.param(
            {"max_tokens": 1}, Grant(0), {"lookup": 0, "model": 0}, Reason.MAX_TOKENS, id="the last token"
        ),
        pytest.param(
            {"max_context": {"model": 5}}, Grant(64), {"lookup": 9, "model": 2}, None, id="its context"
        ),
        pytest.param(
            {"max_drafts": {"model": 4}, "max_context": {"model": 3}},
            Grant(0),
            {"model": 0},
            Reason.CONTEXT_LIMIT,
            id="no context left",
        ),
        pytest.param({"failed": True}, Grant(64), {}, Reason.ERROR, id="failed"),
        pytest.param(
            {"max_drafts": {}, "off": Reason.OFF_REQUEST}, Grant(64), {}, Reason.OFF_REQUEST, id="off"
        ),
    ],
)
def test_a_budget_is_all_that_bounds_k(
    fields: dict[str, Any], grant: Grant, max_drafts: dict[str, int], reason: Reason | None
) -> None:
    seq = make_sequence([1, 2, 3], **{"max_drafts": METHODS, "chained": True, **fields})
    budget = Budget.of(span_of(seq), grant)
    assert (budget.max_drafts, budget.reason) == (max_drafts, reason)
    for policy in ("fixed", "adaptive", "solo", "shadow"):
        decision = Policies(SpeculationConfig()).of(policy).decide([budget], Load(1, 0, 9))[0]
        assert decision.reason is reason and decision.k <= max(max_drafts.values(), default=0)
        assert all(0 < ask.k <= max_drafts[ask.method] for ask in decision.asks)


def test_policies_decide_for_their_own_and_answer_in_the_order_asked() -> None:
    policies, names = Policies(SpeculationConfig()), ("fixed", "goodput", "solo", "goodput", "fixed")
    seqs = [make_sequence([1], k=number, policy=name) for number, name in enumerate(names, 1)]
    plain = {"goodput": Decision.plain(Reason.COLD), "solo": Decision.plain(Reason.SOLO)}
    expected = [plain.get(name, Decision.of([Ask("ngram", k)])) for k, name in enumerate(names, 1)]
    assert decisions(policies, seqs, Load(5, 0, 9)) == expected
    budgets = [budget_of(seq) for seq in seqs]
    asks = {budget: Ask("ngram", k) for k, budget in enumerate(budgets, 1)}
    assert policies.confirm("ngram", asks) == asks
