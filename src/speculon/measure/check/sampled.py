"""Texts whose distribution should be the plain one: arms with seeds of their own, by a permutation test.

Plain against plain must not be rejected, and planted errors must be; otherwise the test means nothing. At q =
0.05 one rejection in twenty is due to chance. So each is repeated with fresh seeds on both sides, and counts
only if it is rejected again.

Under the null hypothesis it does not matter which arm a run belongs to, so the statistic is compared with
its values when the runs are dealt out anew (Fisher 1935). That is exact for any number of runs and any
vocabulary, and needs no formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculon.core.config import MAX_SAMPLES
from speculon.measure.check.arms import Advance, ArmStats, write
from speculon.measure.check.plan import OVERALL, CheckPlan, Q
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

PLAIN = {"method": OFF}
RULES = ("matching", "rejection", "block")
ENDED = -1  # after the end of a text
RARE = 5  # tokens seen less often, both arms together, are counted as one


@dataclass(frozen=True, slots=True)
class CellTest:
    """The test of one position of one prompt and one sampler; position None: of all together."""

    prompt: int
    sampler: int
    position: int | None
    p: float
    z: float


@dataclass(slots=True)
class Comparison:
    """Two arms, cell by cell."""

    label: str
    role: str  # plain | speculation | control
    runs: tuple[int, int]  # of the two arms, per prompt and sampler
    permutations: int
    p: list[float] = field(repr=False)
    overall: float  # p of all cells together: the sum of their max-z
    rejected: list[CellTest]
    work: ArmStats
    again: Comparison | None = None  # with fresh seeds, where something was rejected

    @property
    def cells(self) -> int:
        return len(self.p)

    @property
    def found(self) -> bool:
        """Whether the test rejects that both are one distribution."""
        return bool(self.rejected) or self.overall <= OVERALL

    @property
    def confirmed(self) -> bool:
        """Whether it does so twice: by all cells together, or by those that were rejected before."""
        return self.found and self.again is not None and self.again.found


@dataclass(slots=True)
class SampledArm:
    """The texts of each block (prompt, sampler), [runs, positions]."""

    blocks: list[Tensor]
    work: ArmStats

    def __add__(self, other: SampledArm) -> SampledArm:
        return SampledArm(
            [torch.cat(pair) for pair in zip(self.blocks, other.blocks, strict=True)], self.work
        )


class Sampled:
    """Writes the arms of a plan and compares them."""

    def __init__(self, llm: LLM, plan: CheckPlan, prompts: list[list[int]], advance: Advance):
        self.llm, self.plan, self.prompts, self.advance = llm, plan, prompts, advance

    def run(self) -> list[Comparison]:
        """The null, then each rule of acceptance and its control."""
        plain = self.plain("plain {}")
        null = self.compare("plain, twice", "plain", *plain)
        if null.found:
            null.again = self.compare("plain, again", "plain", *self.plain("plain {} again"), among=null)
        both, comparisons = plain[0] + plain[1], [null]
        for rule in RULES:
            options = {"acceptance": rule}
            first = self.compare(rule, "speculation", both, self.write(rule, options))
            if first.found:
                fresh = self.plain(f"plain {{}} for {rule}")
                repeated = self.write(f"{rule} again", options)
                first.again = self.compare(
                    f"{rule}, again", "speculation", fresh[0] + fresh[1], repeated, among=first
                )
            planted = self.write(f"{rule} planted", options, share=self.plan.control)
            comparisons += [first, self.compare(f"{rule}, planted errors", "control", both, planted)]
        return comparisons

    def plain(self, name: str) -> tuple[SampledArm, SampledArm]:
        return self.write(name.format(1), PLAIN), self.write(name.format(2), PLAIN)

    def write(self, arm: str, speculation: Any, share: float = 0.0) -> SampledArm:
        """Every block's runs. The seeds depend on the arm's name: no two arms share one."""
        plan, prompts, params = self.plan, [], []
        for prompt, sampler in plan.sampled:
            for done in range(0, plan.runs, MAX_SAMPLES):
                seed = plan.chance("arm", arm, prompt, sampler, done).getrandbits(63)
                size = {"n": min(MAX_SAMPLES, plan.runs - done), "max_tokens": plan.positions, "seed": seed}
                prompts.append(self.prompts[prompt])
                params.append(plan.samplers[sampler].model_copy(update=size))
        planted: dict[str, Any] = {"share": share, "chance": plan.chance("plants", arm)}
        texts = write(self.llm, prompts, params, speculation, advance=self.advance, **planted)
        filled = torch.full((len(texts.tokens), plan.positions), ENDED)
        for row, tokens in zip(filled, texts.tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens[: plan.positions])
        return SampledArm(list(filled.split(plan.runs)), texts.work)

    def compare(
        self, label: str, role: str, base: SampledArm, other: SampledArm, among: Comparison | None = None
    ) -> Comparison:
        """A permutation test of every cell and of all; of `among`'s rejected cells alone if it has any."""
        runs = len(base.blocks[0]), len(other.blocks[0])
        seed = self.plan.chance("permutations", label).getrandbits(63)
        arms = deal(*runs, self.plan.permutations, seed)
        cells, together = [], torch.zeros(len(arms))
        for (prompt, sampler), a, b in zip(self.plan.sampled, base.blocks, other.blocks, strict=True):
            for position, counts in enumerate(cells_of(torch.cat([a, b]))):
                z = max_z(counts, arms)
                together += z
                where = position if position < self.plan.positions else None
                cells.append(CellTest(prompt, sampler, where, p_value(z), float(z[0])))
        before = {(c.prompt, c.sampler, c.position) for c in among.rejected} if among else set()
        tested = [c for c in cells if not before or (c.prompt, c.sampler, c.position) in before]
        p = [c.p for c in tested]
        rejections = [tested[i] for i in rejected(p, Q)]
        return Comparison(
            label, role, runs, self.plan.permutations, p, p_value(together), rejections, other.work
        )


def deal(first: int, second: int, permutations: int, seed: int) -> Tensor:
    """1 for runs of the first arm, [1 + permutations, first + second]: as it was, then dealt out anew."""
    runs = first + second
    as_it_was = torch.arange(runs)[None] < first
    order = torch.rand(permutations, runs, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return torch.cat([as_it_was, order < first]).float()


def cells_of(texts: Tensor) -> Iterator[Tensor]:
    """Counts [runs, C] of the C tokens of each position of `texts` [runs, T], then of all positions together.

    The last cell finds a small shift that is the same everywhere.
    """
    for column in texts.T:
        yield counts_of(column[:, None])
    yield counts_of(texts)


def counts_of(texts: Tensor) -> Tensor:
    """How often each run has each token, [runs, C] from [runs, T]; rare tokens share one column."""
    _, index, seen = texts.unique(return_inverse=True, return_counts=True)
    common = seen >= RARE
    column = torch.where(common, common.cumsum(0) - 1, common.sum())
    width = int(common.sum()) + int(not common.all())
    return torch.zeros(len(texts), width).scatter_add_(1, column[index], torch.ones(texts.shape))


def max_z(counts: Tensor, arms: Tensor) -> Tensor:
    """The largest standardised difference of any token's count, [1 + permutations]; 0: all runs are equal.

    counts: [runs, C] of one cell; arms: [1 + permutations, runs] from `deal`.
    """
    runs, first = counts.shape[0], float(arms[0].sum())
    centred = counts - counts.mean(0)
    # of a sum drawn without replacement
    variance = first * (runs - first) / (runs * (runs - 1)) * centred.square().sum(0)
    alive = variance > 1e-9 * runs
    if not alive.any():
        return torch.zeros(len(arms))
    return (arms @ centred[:, alive]).abs_().div_(variance[alive].sqrt()).amax(-1)


def p_value(statistic: Tensor) -> float:
    """The share of values as large as the first one, itself counted: at least 1 / (1 + permutations)."""
    # equal counts may differ by a rounding
    return float((statistic >= statistic[0] * (1 - 1e-5)).double().mean())


def rejected(p: list[float], q: float) -> list[int]:
    """The rejected hypotheses, at most a share q of them wrongly (Benjamini and Hochberg 1995)."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    last = max((rank for rank, i in enumerate(order, 1) if p[i] <= q * rank / len(p)), default=0)
    return sorted(order[:last])
