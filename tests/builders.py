"""Small things that many tests build. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import count, product
from typing import Any, cast

from speculon.core.config import MAX_DRAFTS, SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.core.types import NO_DRAFT, Ask, Decision, Draft, Load, Verdict
from speculon.decoding.rounds import Budget, Drafted, Grant, Judged, Proposed, Span
from speculon.decoding.sequence import Ending, Request, Sequence
from speculon.speculation.control.fixed import Fixed
from speculon.speculation.control.policies import Policies
from speculon.speculation.control.policy import Policy
from speculon.speculation.drafting import Drafting
from speculon.speculation.proposers.compose import Proposers

_ids = count()
NO_VERDICT = Verdict(())
OF_REQUEST = {field.name for field in fields(Request)}


def spread(first: Iterable[Any], second: Iterable[Any], *others: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every pair of the first two, with all combinations of the others in turn, along the diagonals."""
    rows, columns, ways = list(first), list(second), list(product(*others))
    assert len(ways) < len(rows) + len(columns), "some combinations would be left out"
    return [
        (row, column, *ways[(i + j) % len(ways)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def make_sequence(
    tokens: list[int],
    max_tokens: int = 100,
    output: list[int] | None = None,
    methods: tuple[str, ...] = ("ngram",),
    k: int = 4,
    **given: Any,
) -> Sequence:
    """A sequence with prompt `tokens` that has generated `output`; K drafts of each method in a round.

    Further keywords are fields of the request, with `request_id` for its id, or of the sequence.
    """
    number = next(_ids)
    request = Request(
        id=given.pop("request_id", f"t-{number}"),
        prompt_len=len(tokens),
        params=given.pop("params", None) or SamplingParams(temperature=0, max_tokens=max_tokens),
        seed=given.pop("seed", 0),
        max_len=len(tokens) + max_tokens,
        rules=given.pop("rules", cast(Any, None)),
        ending=given.pop("ending", Ending()),
        max_drafts=given.pop("max_drafts", dict.fromkeys(methods, k)),
    )
    request = replace(request, **{name: given.pop(name) for name in [*given] if name in OF_REQUEST})
    fresh: dict[str, Any] = {"id": number, "stats": RequestStats()}
    return Sequence(request=request, tokens=[*tokens, *(output or ())], **fresh | given)


def span_of(seq: Sequence) -> Span:
    """The last token of a sequence that decodes."""
    return Span.of(seq, len(seq.tokens) - 1, 1)


def budget_of(seq: Sequence, drafts: int = MAX_DRAFTS) -> Budget:
    """The budget of a sequence that decodes and of which no method has read anything."""
    span = span_of(seq)
    return Budget.of(span, Grant(drafts), dict.fromkeys(seq.methods, span.start))


def judged_of(seq: Sequence, draft: Draft = NO_DRAFT, verdict: Verdict = NO_VERDICT) -> Judged:
    """The round of a sequence that decodes; its draft was proposed as it is."""
    proposals = (Proposed(draft.sources[0], len(draft.tokens), draft),) if draft.tokens else ()
    return Judged(Drafted(span_of(seq), draft, proposals=proposals), verdict)


def decisions(policy: Policy | Policies, seqs: list[Sequence], load: Load) -> list[Decision]:
    """What a policy decides for these sequences."""
    return policy.decide([budget_of(seq) for seq in seqs], load)


def draft_once(proposers: Proposers, seq: Sequence, asks: dict[str, int]) -> tuple[Drafted, Drafting]:
    """What a round proposes for one sequence."""
    decision = Decision.of(Ask(method, k) for method, k in asks.items())
    drafting = Drafting(proposers, Fixed(), [budget_of(seq)], [decision])
    drafting.ask_lookups()
    drafting.ask_models()
    (drafted,) = drafting.drafted
    return drafted, drafting
