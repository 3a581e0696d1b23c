"""What callers of `SpeculativeDecoder` bring: drafts, and logits of a target that they run themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculon.core.errors import InvalidParameter
from speculon.core.telemetry import Stopwatch
from speculon.core.types import Draft, Verdict
from speculon.decoding.sequence import Request, Round, Sequence, Span
from speculon.decoding.verify import read_logits, verify_given
from speculon.engine.admission import check_draft, check_room, read_ids
from speculon.speculation.control.fixed import Fixed
from speculon.speculation.drafting import Drafting

if TYPE_CHECKING:
    from speculon.engine.engine import Engine


GIVEN = "given"  # source of drafts that came from the caller


def read_draft(drafts: Any, vocab_size: int) -> Draft:
    """A draft as it is, or one of token ids [K]. Raises by name what cannot be judged in one round."""
    tokens = () if isinstance(drafts, Draft) else tuple(read_ids("drafts", drafts))
    draft = drafts if isinstance(drafts, Draft) else Draft(tokens, (GIVEN,) * len(tokens))
    check_draft(draft, vocab_size)
    return draft


def verify_by(engine: Engine, seq: Sequence, draft: Draft, target_logits: Any) -> Verdict:
    """The verdict on a draft after a sequence that has no pages."""
    check_room(seq, len(draft.tokens))
    refuse_prompt_logprobs(seq.request)
    logits = rows_of(engine, target_logits, len(draft.tokens))
    return verify_given(Span(seq, len(seq.tokens) - 1, 1, draft), logits)


@torch.inference_mode()
def round_by(engine: Engine, span: Span, target_logits: Any) -> None:
    """`Engine.round` of one span with these logits in the place of its target call.

    The drafts are as many as policy `fixed` makes, since the rows are there; the span's own policy learns
    from them. Nothing is committed to pages: the target has not computed what would lie there.
    """
    refuse_prompt_logprobs(span.seq.request)
    watch, load, fixed = Stopwatch(engine.counters.profile), engine.scheduler.load, Fixed()
    engine.policy.decide([span], load)  # it has to know the sequence
    fixed.decide([span], load)
    watch.lap("decide")
    with engine.leases.reserve([span]) as lease:
        drafting = Drafting(engine.proposers, fixed, lease, [span])
        drafting.ask_lookups()
        drafting.ask_models()
        draft_ms = watch.lap("propose")
        check_repeatable(span)
        span.verdict = verify_given(span, rows_of(engine, target_logits, len(span.draft.tokens)))
        span.seq.tokens.extend(span.verdict.tokens)
    if span.seq.grammar is not None:
        span.seq.grammar.consume(span.verdict.tokens)
    watch.lap("verify")
    engine.proposers.observe([span], None)
    engine._learn(Round(load, [span], drafting.calls, draft_ms, None), True, watch)


def rows_of(engine: Engine, target_logits: Any, k: int) -> Tensor:  # [K + 1, V] or [K, V]
    target = engine.target
    return read_logits(target_logits, k, target.vocab_size).to(target.device)


def refuse_prompt_logprobs(request: Request) -> None:
    """Raises for log-probabilities of the prompt."""
    value = request.params.prompt_logprobs
    if value is not None:
        raise InvalidParameter("prompt_logprobs", value, "target_logits have no rows of the prompt")


def check_repeatable(span: Span) -> None:
    """Raises where `draft` has returned other drafts than this round has: models draw theirs by the seed."""
    request = span.seq.request
    drawn = {method for method, _, draft in span.proposals if draft.tokens} - request.lookups
    if drawn and not request.params.greedy and request.params.seed is None:
        limit = f"with target_logits, drafts of {', '.join(sorted(drawn))} need a seed, or temperature = 0"
        raise InvalidParameter("seed", None, limit)
