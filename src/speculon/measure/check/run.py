"""The losslessness check: greedy and seeded texts token for token, sampled ones by distribution.

Each has a control with planted errors, which the check has to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from speculon.core.errors import InvalidParameter, TooLong
from speculon.core.types import reasons_in_words
from speculon.measure.bench.data import DataPrompt, answered, encode
from speculon.measure.check.arms import Advance
from speculon.measure.check.exact import Divergence, ExactResult, Margin, greedy, seeded
from speculon.measure.check.plan import CheckPlan, named
from speculon.measure.check.sampled import RULES, Comparison, Sampled
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

WIDEST = 1.0  # guess, in nat: beyond it nearly any token would count as a tie
CheckOutcome = Literal["passed", "failed", "inconclusive"]


@dataclass(slots=True)
class Findings:
    """`problems`: texts that are not the target's; `gaps`: errors that would not have been found."""

    margin: Margin
    exact: list[ExactResult]
    sampled: list[Comparison]
    problems: list[str]
    gaps: list[str]

    @property
    def outcome(self) -> CheckOutcome:
        return "failed" if self.problems else "inconclusive" if self.gaps else "passed"


def check(llm: LLM, plan: CheckPlan, advance: Advance = lambda n: None) -> Findings:
    """Plain decoding against speculation as `llm` is set to.

    Raises `InvalidParameter` where nothing would draft.
    """
    check_drafter(llm)
    texts = [DataPrompt("prompt", text, text) if isinstance(text, str) else text for text in plan.prompts]
    prompts = [encode(text, llm.tokenizer) for text in answered({"": texts}, llm, plan.max_tokens)[""]]
    check_room(llm, plan, prompts)
    margin, exact = greedy(llm, plan, prompts, advance)
    exact += seeded(llm, plan, prompts, margin, advance)
    sampled = Sampled(llm, plan, prompts, advance).run()
    problems = [line for arm in exact if (line := exact_problem(arm))]
    problems += [line for arm in sampled if (line := sampled_problem(plan, arm))]
    arms: list[ExactResult | Comparison] = [*exact, *sampled]
    gaps = [*margin_gaps(margin), *(line for arm in arms if (line := gap(arm)))]
    return Findings(margin, exact, sampled, problems, gaps)


def check_drafter(llm: LLM) -> None:
    """Raises before anything is written where speculation is off, or its drafter is missing."""
    setting = llm.config.speculation
    if setting.method == OFF or not setting.most():
        name, value = ("method", OFF) if setting.method == OFF else ("num_speculative_tokens", 0)
        raise InvalidParameter(name, value, "speculation is off, so there is nothing to check")
    if reason := llm.engine.proposers.lacking(setting.method):
        raise InvalidParameter("method", setting.method, f"{reason.value}: {reason.sentence}")


def check_room(llm: LLM, plan: CheckPlan, prompts: list[list[int]]) -> None:
    """One token more than the text: where two differ, both are scored after their common part."""
    context = llm.engine.max_context
    for prompt in prompts:
        for name, tokens in (("max_tokens", plan.max_tokens), ("positions", plan.positions)):
            if len(prompt) + tokens + 1 > context:
                raise TooLong(
                    f"prompt {len(prompt)} + {name} {tokens} + 1 > context {context} tokens: shorten it, or "
                    f"lower --{name.replace('_', '-')}"
                )


def exact_problem(arm: ExactResult) -> str | None:
    if arm.role == "control" or not arm.failures:
        return None
    first = where(arm.failures[0], arm.limit)
    return (
        f"{arm.label}: {len(arm.failures)} of {arm.texts} texts differ from the target's own by more than a "
        "tie; "
        f"the first is {first}"
    )


def where(divergence: Divergence, limit: float) -> str:
    place = f"text {divergence.text + 1}, token {divergence.at + 1}"
    if divergence.plain is None or divergence.token is None:
        return f"{place}: one of the two texts ends there"
    tokens = f"{place}: {divergence.token} instead of {divergence.plain}"
    if divergence.regret is None:
        return f"{tokens}, which filters or penalties exclude"
    return f"{tokens}, a regret of {divergence.regret:.2g} nat, of which {limit:.2g} are allowed"


def sampled_problem(plan: CheckPlan, arm: Comparison) -> str | None:
    """Rejected, and rejected again with fresh seeds."""
    if arm.role == "control" or not arm.confirmed or arm.again is None:
        return None
    cells, overall = arm.again.rejected, arm.again.overall
    line = (
        f"{arm.label}: another distribution than the target's, in two tests: {len(cells)} cells rejected "
        "again, "
    )
    line += f"p of all cells together = {overall:.2g}"
    if cells:
        least = min(cells, key=lambda cell: cell.p)
        place = "all positions" if least.position is None else f"token {least.position + 1}"
        sampler = named(plan.samplers[least.sampler])
        line += f"; the clearest is prompt {least.prompt + 1}, {sampler}, {place}, p = {least.p:.2g}"
    return line


def margin_gaps(margin: Margin) -> list[str]:
    if margin.limit <= WIDEST:
        return []
    return [f"plain decoding differs from itself by up to {margin.limit:.2g} nat, which would hide any error"]


def gap(arm: ExactResult | Comparison) -> str | None:
    """Why a pass would mean little: nothing was speculated, or planted errors were not found."""
    work = arm.work
    if arm.role == "plain":
        return None
    if not (work.rounds and work.accepted):
        what = "no draft was accepted" if work.rounds else "no round had drafts"
        why = reasons_in_words(work.reasons)
        return f"{arm.label}: {what}{f'; {why}' if why else ''}"
    if arm.role == "speculation":
        return None
    if not work.planted:
        return f"{arm.label}: every draft was right, so no error could be planted; use other prompts"
    if arm.failures if isinstance(arm, ExactResult) else arm.found:
        return None
    return f"{arm.label}: {work.planted} planted errors were not found; raise --runs, or give more prompts"


def count_tokens(plan: CheckPlan) -> int:
    """What will be written unless something has to be repeated."""
    texts = 5 * len(plan.prompts) + 3 * len(plan.sampled) * plan.seeds
    arms = 2 + 2 * len(RULES)  # plain twice, then each rule and its control
    return texts * plan.max_tokens + arms * len(plan.sampled) * plan.runs * plan.positions
