"""The losslessness gate: greedy and seeded texts token for token, sampled ones by distribution, and controls
for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from speculon.bench.check_plan import CheckPlan, named
from speculon.bench.check_same import Margin, Parting, Sameness, greedy, seeded
from speculon.bench.check_sampled import Comparison, Sampled
from speculon.bench.check_texts import Advance, Work
from speculon.errors import InvalidParameter, TooLong
from speculon.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.llm import LLM

WIDEST = 1.0  # nat, guess: beyond it nearly any token would count as a tie
Outcome = Literal["passed", "failed", "not enough"]


@dataclass(slots=True)
class Findings:
    """All that a check has seen.

    `problems` say that texts are not the target's; `doubts`, that it could not have told.
    """

    margin: Margin
    same: list[Sameness]
    sampled: list[Comparison]
    problems: list[str]
    doubts: list[str]

    @property
    def outcome(self) -> Outcome:
        return "failed" if self.problems else "not enough" if self.doubts else "passed"


def check(llm: LLM, plan: CheckPlan, advance: Advance = lambda n: None) -> Findings:
    """Plain decoding against speculation as `llm` is set to.

    Raises `InvalidParameter` where nothing would draft.
    """
    check_drafter(llm)
    prompts = [llm.tokenizer.encode(text) for text in plan.prompts]
    check_room(llm, plan, prompts)
    margin, same = greedy(llm, plan, prompts, advance)
    same += seeded(llm, plan, prompts, margin, advance)
    sampled = Sampled(llm, plan, prompts, advance).run()
    problems = [said for one in same for said in problems_of(one)]
    problems += [said for one in sampled if (said := departed(plan, one))]
    arms: list[Sameness | Comparison] = [*same, *sampled]
    doubts = [*doubts_of_margin(margin), *(said for one in arms for said in doubts_of(one))]
    return Findings(margin, same, sampled, problems, doubts)


def check_drafter(llm: LLM) -> None:
    """Raises before anything is written where speculation is off, or its drafter is missing."""
    setting = llm.config.speculation
    if setting.method == OFF or not setting.most():
        name, value = ("method", OFF) if setting.method == OFF else ("num_speculative_tokens", 0)
        raise InvalidParameter(name, value, "there is no speculation to check")
    if reason := llm.engine.proposers.lacking(setting.method):
        raise InvalidParameter("method", setting.method, f"{reason.value}: it has nothing to draft with")


def check_room(llm: LLM, plan: CheckPlan, prompts: list[list[int]]) -> None:
    """One token more than the text: where two part, both are scored behind what they share."""
    for prompt in prompts:
        for name, tokens in (("max_tokens", plan.max_tokens), ("positions", plan.positions)):
            if len(prompt) + tokens + 1 > llm.engine.max_context:
                raise TooLong(
                    f"prompt {len(prompt)} + {name} {tokens} + 1 > context {llm.engine.max_context} tokens"
                )


def doubts_of_margin(margin: Margin) -> list[str]:
    if margin.limit <= WIDEST:
        return []
    return [
        f"plain decoding departs from itself by up to {margin.limit:.2g} nat: no difference could be told from that"
    ]


def problems_of(one: Sameness) -> list[str]:
    if one.kind == "control" or not one.failures:
        return []
    first = said(one.failures[0], one)
    return [
        f"{one.label}: {len(one.failures)} of {one.texts} texts differ by more than a tie, the first: {first}"
    ]


def said(parting: Parting, one: Sameness) -> str:
    where = f"text {parting.text + 1}, token {parting.at + 1}"
    if parting.plain is None or parting.token is None:
        return f"{where}: one of the two ends there"
    if parting.regret is None:
        return f"{where}: {parting.token} instead of {parting.plain}, under filters or penalties"
    return f"{where}: {parting.token} instead of {parting.plain}, regret {parting.regret:.2g} nat, allowed {one.limit:.2g}"


def departed(plan: CheckPlan, one: Comparison) -> str | None:
    """Why a comparison fails: it was rejected, and again with fresh seeds."""
    if one.kind == "control" or not one.confirmed or one.again is None:
        return None
    cells = one.again.rejected
    least = min(cells, key=lambda cell: cell.p) if cells else None
    where = ""
    if least:
        place = "all positions" if least.position is None else f"token {least.position + 1}"
        where = f", the clearest: prompt {least.prompt + 1}, {named(plan.samplers[least.sampler])}, {place}, p = {least.p:.2g}"
    again = f"{len(cells)} cells rejected again, all together p = {one.again.overall:.2g}"
    return f"{one.label}: another distribution, twice: {again}{where}"


def doubts_of(one: Sameness | Comparison) -> list[str]:
    """Why a pass would mean little: nothing was speculated, or the planted errors were not found."""
    if one.kind == "plain":
        return []
    if not (one.work.rounds and one.work.accepted):
        return [f"{one.label}: {nothing(one.work)}"]
    if one.kind == "speculation":
        return []
    seen = one.failures if isinstance(one, Sameness) else one.found
    if not one.work.planted:
        return [f"{one.label}: every draft was right, so that no error could be planted"]
    return (
        []
        if seen
        else [f"{one.label}: {one.work.planted} planted errors were not found; ask for more runs or prompts"]
    )


def nothing(work: Work) -> str:
    what = "no draft was accepted" if work.rounds else "no round was speculative"
    return f"{what} (reasons: {', '.join(f'{reason} {n}' for reason, n in work.reasons.items()) or 'none'})"


def tokens_asked(plan: CheckPlan) -> int:
    """What will be written unless something has to be repeated."""
    texts = 5 * len(plan.prompts) + 3 * len(plan.sampled) * plan.seeds
    return texts * plan.max_tokens + 6 * len(plan.sampled) * plan.runs * plan.positions
