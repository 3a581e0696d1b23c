"""The losslessness check: greedy and seeded texts token for token, sampled ones by distribution.

Each has a control with planted errors, which the check has to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from speculon.core.errors import InvalidParameter, TooLong
from speculon.measure.bench.data import Prompt, answered, encode
from speculon.measure.check.arms import Advance, ArmStats
from speculon.measure.check.exact import Divergence, ExactResult, Margin, greedy, seeded
from speculon.measure.check.plan import CheckPlan, named
from speculon.measure.check.sampled import RULES, Comparison, Sampled
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

WIDEST = 1.0  # guess, in nat: beyond it nearly any token would count as a tie
Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(slots=True)
class Findings:
    """`problems`: texts that are not the target's; `gaps`: errors that would not have been found."""

    margin: Margin
    exact: list[ExactResult]
    sampled: list[Comparison]
    problems: list[str]
    gaps: list[str]

    @property
    def outcome(self) -> Outcome:
        return "failed" if self.problems else "inconclusive" if self.gaps else "passed"


def check(llm: LLM, plan: CheckPlan, advance: Advance = lambda n: None) -> Findings:
    """Plain decoding against speculation as `llm` is set to.

    Raises `InvalidParameter` where nothing would draft.
    """
    check_drafter(llm)
    texts = [Prompt("prompt", text, text) if isinstance(text, str) else text for text in plan.prompts]
    prompts = [encode(one, llm.tokenizer) for one in answered({"": texts}, llm, plan.max_tokens)[""]]
    check_room(llm, plan, prompts)
    margin, exact = greedy(llm, plan, prompts, advance)
    exact += seeded(llm, plan, prompts, margin, advance)
    sampled = Sampled(llm, plan, prompts, advance).run()
    problems = [line for one in exact if (line := exact_problem(one))]
    problems += [line for one in sampled if (line := sampled_problem(plan, one))]
    arms: list[ExactResult | Comparison] = [*exact, *sampled]
    gaps = [*margin_gaps(margin), *(line for one in arms for line in gaps_of(one))]
    return Findings(margin, exact, sampled, problems, gaps)


def check_drafter(llm: LLM) -> None:
    """Raises before anything is written where speculation is off, or its drafter is missing."""
    setting = llm.config.speculation
    if setting.method == OFF or not setting.most():
        name, value = ("method", OFF) if setting.method == OFF else ("num_speculative_tokens", 0)
        raise InvalidParameter(name, value, "there is no speculation to check")
    if reason := llm.engine.proposers.lacking(setting.method):
        raise InvalidParameter("method", setting.method, f"{reason.value}: it has nothing to draft with")


def check_room(llm: LLM, plan: CheckPlan, prompts: list[list[int]]) -> None:
    """One token more than the text: where two differ, both are scored after their common part."""
    context = llm.engine.max_context
    for prompt in prompts:
        for name, tokens in (("max_tokens", plan.max_tokens), ("positions", plan.positions)):
            if len(prompt) + tokens + 1 > context:
                raise TooLong(f"prompt {len(prompt)} + {name} {tokens} + 1 > context {context} tokens")


# problems


def exact_problem(one: ExactResult) -> str | None:
    if one.role == "control" or not one.failures:
        return None
    first = where(one.failures[0], one.limit)
    return (
        f"{one.label}: {len(one.failures)} of {one.texts} texts differ by more than a tie, the first: {first}"
    )


def where(one: Divergence, limit: float) -> str:
    place = f"text {one.text + 1}, token {one.at + 1}"
    if one.plain is None or one.token is None:
        return f"{place}: one of the two ends there"
    tokens = f"{place}: {one.token} instead of {one.plain}"
    if one.regret is None:
        return f"{tokens}, under filters or penalties"
    return f"{tokens}, regret {one.regret:.2g} nat, allowed {limit:.2g}"


def sampled_problem(plan: CheckPlan, one: Comparison) -> str | None:
    """Rejected, and rejected again with fresh seeds."""
    if one.role == "control" or not one.confirmed or one.again is None:
        return None
    cells, overall = one.again.rejected, one.again.overall
    line = f"{one.label}: another distribution, twice: {len(cells)} cells rejected again, "
    line += f"all together p = {overall:.2g}"
    if cells:
        least = min(cells, key=lambda cell: cell.p)
        place = "all positions" if least.position is None else f"token {least.position + 1}"
        sampler = named(plan.samplers[least.sampler])
        line += f", the clearest: prompt {least.prompt + 1}, {sampler}, {place}, p = {least.p:.2g}"
    return line


# gaps


def margin_gaps(margin: Margin) -> list[str]:
    if margin.limit <= WIDEST:
        return []
    return [f"plain decoding differs from itself by up to {margin.limit:.2g} nat, which hides any error"]


def gaps_of(one: ExactResult | Comparison) -> list[str]:
    """Why a pass would mean little: nothing was speculated, or planted errors were not found."""
    if one.role == "plain":
        return []
    if not (one.work.rounds and one.work.accepted):
        return [f"{one.label}: {no_speculation(one.work)}"]
    if one.role == "speculation":
        return []
    if not one.work.planted:
        return [f"{one.label}: every draft was right, so that no error could be planted"]
    if one.failures if isinstance(one, ExactResult) else one.found:
        return []
    return [f"{one.label}: {one.work.planted} planted errors were not found; ask for more runs or prompts"]


def no_speculation(work: ArmStats) -> str:
    what = "no draft was accepted" if work.rounds else "no round was speculative"
    return f"{what} (reasons: {', '.join(f'{reason} {n}' for reason, n in work.reasons.items()) or 'none'})"


def count_tokens(plan: CheckPlan) -> int:
    """What will be written unless something has to be repeated."""
    texts = 5 * len(plan.prompts) + 3 * len(plan.sampled) * plan.seeds
    arms = 2 + 2 * len(RULES)  # plain twice, then each rule and its control
    return texts * plan.max_tokens + arms * len(plan.sampled) * plan.runs * plan.positions
