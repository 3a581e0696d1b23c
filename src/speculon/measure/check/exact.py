"""Texts that should be the plain ones token for token: greedy ones, and sampled ones of the same seed.

Batches of other shapes add up floats in another order, so a text may differ where two tokens are nearly
equal. That is judged by one fresh forward over the common part, as a prompt: regret = log p(best) - log
p(token). A fault of the speculation would also hit tokens that are far apart. Only the first difference of a
text is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor

from speculon.core.config import MAX_LOGPROBS, SamplingParams
from speculon.decoding.sampling import ScoredRow
from speculon.measure.check.arms import Advance, ArmStats, Texts, write
from speculon.measure.check.plan import CheckPlan
from speculon.measure.check.regret import TOP, at_or_none, first_difference, movement, tie_limit, token_regret
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.engine import Engine
    from speculon.engine.llm import LLM

# drafts from pooled plain texts would never be wrong, and show nothing
NO_POOL = {"pool": ""}
PLAIN = {**NO_POOL, "method": OFF}
MATCHING = {**NO_POOL, "acceptance": "matching"}  # the rule under which a seed fixes the text


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text first differs from the plain one, and the regrets of the two tokens."""

    text: int
    at: int  # output position
    plain: int | None  # token; None where the text had ended
    token: int | None
    regret: float | None  # nat; None where there is nothing to compare
    regret_of_plain: float | None


@dataclass(slots=True)
class ExactResult:
    """One arm's texts against the plain ones."""

    label: str
    role: str  # plain | speculation | control
    texts: int
    tokens: int
    work: ArmStats
    limit: float
    divergences: list[Divergence]

    @classmethod
    def of(
        cls, label: str, role: str, texts: Texts, margin: Margin, divergences: Iterable[Divergence]
    ) -> ExactResult:
        tokens = sum(map(len, texts.tokens))
        return cls(label, role, len(texts.tokens), tokens, texts.work, margin.limit, list(divergences))

    @property
    def failures(self) -> list[Divergence]:
        return [each for each in self.divergences if each.regret is None or each.regret >= self.limit]

    @property
    def ties(self) -> list[Divergence]:
        return [each for each in self.divergences if each.regret is not None and each.regret < self.limit]

    @property
    def identical(self) -> int:
        return self.texts - len(self.divergences)


@dataclass(slots=True)
class Margin:
    """How far plain decoding differs from itself when the batch has another shape, in nat."""

    # of the gap between the two best tokens, decoded and in one forward
    moved: list[float] = field(repr=False)
    half: bool  # a dtype of less than 32 bits, in which rows depend on their batch
    invariant: bool = False  # rows are bitwise equal in every batch

    @property
    def largest(self) -> float:
        return max(self.moved, default=0.0)

    @property
    def limit(self) -> float:
        """The largest regret of a tie: measured where the dtype is coarse, the law's 1e-4 in fp32.

        Zero where rows are invariant: there a tie is decided alike too.
        """
        return tie_limit(self.largest, coarse=self.half, invariant=self.invariant)


def greedy(
    llm: LLM, plan: CheckPlan, prompts: list[list[int]], advance: Advance
) -> tuple[Margin, list[ExactResult]]:
    """Plain at batch size 1 against: plain batched, speculation at batch size 1 and batched, the control."""
    top = min(TOP, MAX_LOGPROBS, llm.engine.runtime.facts.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=plan.max_tokens)] * len(prompts)
    scored = [params[0].model_copy(update={"logprobs": top})] * len(prompts)

    def run(params: list[SamplingParams], speculation: Mapping[str, Any], **more: Any) -> Texts:
        return write(llm, prompts, params, speculation, advance=advance, **more)

    plain, batched = run(scored, PLAIN, alone=True), run(scored, PLAIN)
    moved = [nats for texts in (plain, batched) for nats in movements(llm, prompts, texts, top)]
    facts = llm.engine.runtime.facts
    half = facts.form["dtype"] != "float32" and not facts.batch_invariant
    margin = Margin(moved, half=half, invariant=facts.batch_invariant)
    planted = run(params, NO_POOL, share=plan.control, chance=plan.chance("greedy"))
    arms = {
        ("greedy, plain batched", "plain"): batched,
        ("greedy, batch size 1", "speculation"): run(params, NO_POOL, alone=True),
        ("greedy, batched", "speculation"): run(params, NO_POOL),
        ("greedy, planted errors", "control"): planted,
    }
    return margin, [
        ExactResult.of(*arm, texts, margin, judge(llm, prompts, plain.tokens, texts.tokens))
        for arm, texts in arms.items()
    ]


def seeded(
    llm: LLM, plan: CheckPlan, prompts: list[list[int]], margin: Margin, advance: Advance
) -> list[ExactResult]:
    """Sampled texts of the same seeds, with speculation and with planted errors, against the plain ones."""
    blocks = [(i, sampler) for i, j in plan.sampled if judged(sampler := plan.samplers[j]) or not margin.half]
    if not blocks:
        return []
    sizes = {"max_tokens": plan.max_tokens, "n": plan.seeds}
    params = [
        sampler.model_copy(update={**sizes, "seed": plan.chance("seeded", block).getrandbits(63)})
        for block, (_, sampler) in enumerate(blocks)
    ]
    many = [prompts[i] for i, _ in blocks]

    def run(speculation: Mapping[str, Any], **more: Any) -> Texts:
        return write(llm, many, params, speculation, advance=advance, **more)

    plain = run(PLAIN)
    arms = {
        ("same seed", "speculation"): run(MATCHING),
        ("same seed, planted errors", "control"): run(
            MATCHING, share=plan.control, chance=plan.chance("seeded")
        ),
    }
    prompt_of_text = [prompt for prompt in many for _ in range(plan.seeds)]
    drawn = [(each, n) for each in params for n in range(plan.seeds)]
    return [
        ExactResult.of(*arm, texts, margin, judge(llm, prompt_of_text, plain.tokens, texts.tokens, drawn))
        for arm, texts in arms.items()
    ]


def judged(sampler: SamplingParams) -> bool:
    """Whether p and the noise determine the token: filters and penalties depend on more."""
    return sampler.model_fields_set <= {"temperature", "seed", "n", "max_tokens"}


def judge(
    llm: LLM,
    prompts: list[list[int]],
    plain: list[list[int]],
    texts: list[list[int]],
    drawn: list[tuple[SamplingParams, int]] | None = None,
) -> Iterator[Divergence]:
    """Every text that differs.

    `drawn`: parameters and sample number of each sampled text; None: they are greedy.
    """
    for i, (mine, base) in enumerate(zip(texts, plain, strict=True)):
        at = first_difference(mine, base)
        if at is None:
            continue
        token, other = at_or_none(mine, at), at_or_none(base, at)
        regrets: list[float] = []
        # a text that was cut off, or filtered, is explained by no tie
        if token is not None and other is not None and (drawn is None or judged(drawn[i][0])):
            logits, row = row_after(llm.engine, prompts[i], base[:at], None if drawn is None else drawn[i])
            regrets = [token_regret(logits, row, each) for each in (token, other)]
        known = regrets and all(map(isfinite, regrets))  # else one of them has probability 0
        yield Divergence(i, at, other, token, *(regrets if known else (None, None)))


def row_after(
    engine: Engine, prompt: list[int], output: list[int], sampled: tuple[SamplingParams, int] | None
) -> tuple[Tensor, ScoredRow]:  # [V]
    """The logits of the token after an output, from forwards over prompt and output without a cache."""
    params, sample = sampled or (SamplingParams(temperature=0), 0)
    params = params.model_copy(update={"max_tokens": len(output) + 1})
    seq = engine.admission.admit("judge", prompt, params, PLAIN, output, prefix_cache=False)[sample]
    return engine.logits_after(seq), ScoredRow(seq, seq.request.rules)


def movements(llm: LLM, prompts: list[list[int]], texts: Texts, top: int) -> Iterator[float]:
    """The change of the gap between the two best tokens in one forward over each text, by position."""
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top)
    for prompt, text, logprobs in zip(prompts, texts.tokens, texts.logprobs, strict=True):
        if not logprobs:
            continue
        output = llm.generate([[*prompt, *text[: len(logprobs)]]], ask, speculation=PLAIN)[0]
        again = (output.prompt_logprobs or [])[len(prompt) :]
        for decoded, fresh in zip(logprobs, again, strict=True):
            if fresh is not None and (nats := movement(decoded, fresh)) is not None:
                yield nats
