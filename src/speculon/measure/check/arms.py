"""The texts of one arm of a check, what was speculated, and the planted errors of a control.

Errors are planted from outside, in the verdicts of one engine and for the time of one arm; its code is
unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speculon.core.config import SamplingParams
from speculon.core.telemetry import RequestStats, Stopwatch
from speculon.core.types import TokenLogprobs, Verdict
from speculon.decoding.rounds import Drafted, Judged
from speculon.decoding.verify import WITH_Q, judged_by
from speculon.measure.bench.measure import in_place

if TYPE_CHECKING:
    from speculon.engine.engine import Engine
    from speculon.engine.llm import LLM
    from speculon.engine.outputs import Completion
    from speculon.runtimes.base import Step

Advance = Callable[[int], None]


@dataclass(slots=True)
class ArmStats:
    """What was speculated in one arm."""

    rounds: int = 0
    accepted: int = 0
    by_q: int = 0  # rounds whose drafts carried q and were judged with it
    wrong: int = 0  # rounds that ended at a wrong draft
    planted: int = 0  # of these, rounds that kept it: the control
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Texts:
    """Token ids of each text with its stop token, in the order of the prompts; n texts of each."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    work: ArmStats


def write(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    speculation: Mapping[str, Any],
    *,
    alone: bool = False,
    share: float = 0.0,
    chance: random.Random | None = None,
    advance: Advance = lambda n: None,
) -> Texts:
    """All prompts in one batch, or each `alone`; `share` of the wrong drafts is kept."""
    groups = [slice(i, i + 1) for i in range(len(prompts))] if alone else [slice(None)]
    completions: list[Completion] = []
    with watched(llm.engine, share, chance or random.Random(0)) as work:
        for group in groups:
            outputs = llm.generate(
                prompts[group], list(params[group]), speculation=speculation, on_token=lambda _, n: advance(n)
            )
            completions += [completion for output in outputs for completion in output.outputs]
    stats = RequestStats()
    for completion in completions:
        stats.add(completion.stats)
    work.rounds, work.accepted, work.reasons = stats.rounds, stats.accepted, dict(stats.reasons)
    written = sum(len(completion.token_ids) for completion in completions)
    advance(sum((p.max_tokens or 0) * p.n for p in params) - written)
    return Texts(
        list(map(with_stop_token, completions)), [completion.logprobs for completion in completions], work
    )


def with_stop_token(completion: Completion) -> list[int]:
    """A text with the token that ended it: another stop is a difference, too."""
    stop = completion.stop
    return [*completion.token_ids, *([stop] if isinstance(stop, int) else [])]


@contextmanager
def watched(engine: Engine, share: float, chance: random.Random) -> Iterator[ArmStats]:
    """Counts wrong drafts and rounds judged with q, and keeps `share` of the wrong drafts."""
    work, judge = ArmStats(), engine.forward_and_verify

    def judge_and_plant(step: Step, drafted: list[Drafted], watch: Stopwatch) -> list[Judged]:
        judged = judge(step, drafted, watch)
        for i, one in enumerate(judged):
            work.by_q += one.span.samples and judged_by(one.drafted) in WITH_Q
            if wrong_draft(one) is None:
                continue
            work.wrong += 1
            if chance.random() < share:
                work.planted += 1
                judged[i] = Judged(one.drafted, planted(one))
        return judged

    with in_place(engine, forward_and_verify=judge_and_plant):
        yield work


def planted(judged: Judged) -> Verdict:
    """The verdict with the wrong draft in place of the round's last token.

    Under block verification with all drafts behind it, up to a stop token: alone it is often as likely as
    what replaced it, since the drafts behind it were the wrong ones.
    """
    draft, at = judged.draft.tokens, judged.verdict.accepted
    last, stops = at + 1, judged.seq.request.ending.stop_ids
    while judged_by(judged.drafted) == "block" and draft[last:] and draft[last] not in stops:
        last += 1
    return replace(judged.verdict, tokens=draft[:last], accepted=last - 1)


def wrong_draft(judged: Judged) -> int | None:
    """The draft that the round's last token replaced; None where there is none, as in a tree, or the text
    ends.

    Block verification may put the same token in its place.
    """
    draft, verdict = judged.draft.tokens, judged.verdict
    at = verdict.accepted
    if (
        judged.draft.parents is not None
        or not judged.span.samples
        or verdict.finish
        or at == len(draft)
        or len(verdict.tokens) != at + 1
    ):
        return None
    same = {*judged.seq.request.ending.stop_ids, verdict.tokens[-1]}
    return None if draft[at] in same else draft[at]
