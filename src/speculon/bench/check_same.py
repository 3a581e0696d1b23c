"""Texts that should be the plain ones token for token: greedy ones, and sampled ones of the same seed.

Batches of other shapes add up floats in another order, so a text may part where two tokens stand close.
Whether they did is judged by one fresh forward over what the two texts share, as a prompt: regret = log
p(best) - log p(token). A fault of the speculation has no reason to look for close tokens. Only the first
difference of a text is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite, log
from typing import TYPE_CHECKING

import torch

from speculon.bench.check_plan import CheckPlan
from speculon.bench.check_texts import Advance, Texts, Work, write
from speculon.config import MAX_LOGPROBS, SamplingParams
from speculon.core import TokenLogprobs
from speculon.proposers.registry import OFF
from speculon.sampling import exponential, row_key, uniform

if TYPE_CHECKING:
    from speculon.llm import LLM

TIE_NATS = 1e-4  # fp32, law 6 of docs/architecture.md
TOP = 8  # guess: the second of a batch is among so many of another
# Nobody remembers the plain texts: who drafts from them is never wrong, and shows nothing.
FORGETFUL = {"pool": ""}
PLAIN = {**FORGETFUL, "method": OFF}
MATCHING = {**FORGETFUL, "acceptance": "matching"}  # the rule under which a seed fixes the text


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text first differs from the plain one, and how far the two tokens are apart in a fresh forward."""

    text: int
    at: int  # output position
    plain: int | None  # token; None where the text had ended
    token: int | None
    regret: float | None  # nat; None where there is nothing to compare
    regret_of_plain: float | None


@dataclass(slots=True)
class Sameness:
    """One arm's texts against the plain ones."""

    label: str
    kind: str  # plain | speculation | control
    texts: int
    tokens: int
    work: Work
    limit: float
    partings: list[Parting]

    @property
    def failures(self) -> list[Parting]:
        return [one for one in self.partings if one.regret is None or one.regret > self.limit]

    @property
    def ties(self) -> list[Parting]:
        return [one for one in self.partings if one.regret is not None and one.regret <= self.limit]

    @property
    def identical(self) -> int:
        return self.texts - len(self.partings)


@dataclass(slots=True)
class Margin:
    """How far plain decoding departs from itself when the batch has another shape, nat."""

    # of the gap between the two best tokens, decoded and in one forward
    moved: list[float] = field(repr=False)
    half: bool  # a dtype of less than 32 bits

    @property
    def largest(self) -> float:
        return max(self.moved, default=0.0)

    @property
    def limit(self) -> float:
        """What a text may part by: measured where the dtype is coarse, the law's 1e-4 in fp32."""
        return max(self.largest, TIE_NATS) if self.half else TIE_NATS


def greedy(
    llm: LLM, plan: CheckPlan, prompts: list[list[int]], advance: Advance
) -> tuple[Margin, list[Sameness]]:
    """Plain alone against: plain in a crowd, speculation alone and in a crowd, and the control."""
    top = min(TOP, MAX_LOGPROBS, llm.engine.target.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=plan.max_tokens)] * len(prompts)
    scored = [params[0].model_copy(update={"logprobs": top})] * len(prompts)
    plain = write(llm, prompts, scored, PLAIN, alone=True, advance=advance)
    crowd = write(llm, prompts, scored, PLAIN, advance=advance)
    moved = [nats for texts in (plain, crowd) for nats in movements(llm, prompts, texts, top)]
    margin = Margin(moved, half=llm.engine.target.dtype.itemsize < 4)
    arms = {
        ("greedy, plain in a crowd", "plain"): crowd,
        ("greedy, alone", "speculation"): write(llm, prompts, params, FORGETFUL, alone=True, advance=advance),
        ("greedy, in a crowd", "speculation"): write(llm, prompts, params, FORGETFUL, advance=advance),
        ("greedy, planted errors", "control"): write(
            llm, prompts, params, FORGETFUL, share=plan.control, chance=plan.chance("greedy"), advance=advance
        ),
    }
    found = []
    for (label, kind), texts in arms.items():
        partings = list(judge(llm, prompts, plain.tokens, texts.tokens))
        found.append(
            Sameness(label, kind, len(texts.tokens), total(texts), texts.work, margin.limit, partings)
        )
    return margin, found


def seeded(
    llm: LLM, plan: CheckPlan, prompts: list[list[int]], margin: Margin, advance: Advance
) -> list[Sameness]:
    """Sampled texts of the same seeds, with speculation and with planted errors, against the plain ones."""
    blocks = [(i, sampler) for i, j in plan.sampled if judged(sampler := plan.samplers[j]) or not margin.half]
    if not blocks:
        return []
    many = [prompts[i] for i, _ in blocks]
    update = {"max_tokens": plan.max_tokens, "n": plan.seeds}
    seeds = [plan.chance("seeded", block).getrandbits(63) for block in range(len(blocks))]
    params = [
        s.model_copy(update={**update, "seed": seed}) for (_, s), seed in zip(blocks, seeds, strict=True)
    ]
    plain = write(llm, many, params, PLAIN, advance=advance)
    arms = {
        ("same seed", "speculation"): write(llm, many, params, MATCHING, advance=advance),
        ("same seed, planted errors", "control"): write(
            llm, many, params, MATCHING, share=plan.control, chance=plan.chance("seeded"), advance=advance
        ),
    }
    found = []
    for (label, kind), texts in arms.items():
        each = [(prompt, p, n) for prompt, p in zip(many, params, strict=True) for n in range(plan.seeds)]
        partings = list(
            judge(
                llm,
                [prompt for prompt, _, _ in each],
                plain.tokens,
                texts.tokens,
                [(p, n) for _, p, n in each],
            )
        )
        found.append(
            Sameness(label, kind, len(texts.tokens), total(texts), texts.work, margin.limit, partings)
        )
    return found


def total(texts: Texts) -> int:
    return sum(map(len, texts.tokens))


def judged(sampler: SamplingParams) -> bool:
    """Whether how close two tokens came can be told from p and the noise: what is filtered or penalised hangs
    on more.
    """
    return sampler.model_fields_set <= {"temperature", "seed", "n", "max_tokens"}


def first_difference(a: list[int], b: list[int]) -> int | None:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), None if len(a) == len(b) else shorter)


def judge(
    llm: LLM,
    prompts: list[list[int]],
    plain: list[list[int]],
    texts: list[list[int]],
    drawn: list[tuple[SamplingParams, int]] | None = None,
) -> Iterator[Parting]:
    """Every text that differs.

    `drawn` are the parameters and the number of each sampled text; greedy ones have none.
    """
    for i, (mine, base) in enumerate(zip(texts, plain, strict=True)):
        at = first_difference(mine, base)
        if at is None:
            continue
        if at >= min(len(mine), len(base)):  # one of them was cut off, which no tie explains
            yield Parting(i, at, at_or_none(base, at), at_or_none(mine, at), None, None)
            continue
        context = [*prompts[i], *base[:at]]
        theirs, ours = (score(llm, context, token) for token in (base[at], mine[at]))
        if drawn is None:
            best = ours.top[0][1]
            regret, other = best - ours.logprob, theirs.top[0][1] - theirs.logprob
        elif judged(drawn[i][0]):
            params, sample = drawn[i]
            chances = noise(params.seed or 0, sample, at, base[at], mine[at])
            races = [
                lp.logprob - params.temperature * log(e)
                for lp, e in zip((theirs, ours), chances, strict=True)
            ]
            regret, other = max(races) - races[1], max(races) - races[0]
        else:
            yield Parting(i, at, base[at], mine[at], None, None)
            continue
        known = isfinite(regret) and isfinite(other)  # a token that cannot be has no log p
        yield Parting(i, at, base[at], mine[at], regret if known else None, other if known else None)


def at_or_none(tokens: list[int], at: int) -> int | None:
    return tokens[at] if at < len(tokens) else None


def score(llm: LLM, context: list[int], token: int) -> TokenLogprobs:
    """log p of a token after a context, and of the best one, from a forward over all of it: nothing of it is
    cached.
    """
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored = llm.generate([[*context, token]], ask, speculation=PLAIN)[0].prompt_logprobs
    assert scored is not None and scored[-1] is not None
    return scored[-1]


def noise(seed: int, sample: int, position: int, *tokens: int) -> list[float]:
    """The exponential noise E that a seed has for these tokens; the one with the largest p^(1/T) / E is
    drawn.
    """
    low, high = torch.tensor([row_key(seed, sample, position)], dtype=torch.int32).chunk(2, 1)
    return exponential(uniform(low, high, torch.tensor(tokens, dtype=torch.int32)))[0].tolist()


def movements(llm: LLM, prompts: list[list[int]], texts: Texts, top: int) -> Iterator[float]:
    """By how much the gap between the two best tokens differs in one forward over each whole text, position
    by position.
    """
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top)
    for prompt, text, logprobs in zip(prompts, texts.tokens, texts.logprobs, strict=True):
        if not logprobs:
            continue
        output = llm.generate([[*prompt, *text[: len(logprobs)]]], ask, speculation=PLAIN)[0]
        again = (output.prompt_logprobs or [])[len(prompt) :]
        for decoded, fresh in zip(logprobs, again, strict=True):
            if fresh is not None and len(decoded.top) > 1:
                (a, best), (b, second) = decoded.top[:2]
                known, beyond = dict(fresh.top), fresh.top[-1][1]
                yield abs((best - second) - (known.get(a, beyond) - known.get(b, beyond)))
