"""Texts whose distribution should be the plain one: arms with seeds of their own, by a permutation test.

Plain against plain must not be rejected, and planted errors must be; otherwise the test means nothing. At q =
0.05 one rejection in twenty is due to chance. So each is repeated with fresh seeds on both sides, and counts
only if it is rejected again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculon.core.config import MAX_SAMPLES
from speculon.measure.check.arms import Advance, ArmStats, write
from speculon.measure.check.plan import OVERALL, CheckPlan, Q
from speculon.measure.check.stats import cells_of, deal, max_z, p_value, rejected
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

PLAIN = {"method": OFF}
RULES = ("matching", "rejection", "block")
ENDED = -1  # after the end of a text


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
class Arm:
    """The texts of each block (prompt, sampler), [runs, positions]."""

    blocks: list[Tensor]
    work: ArmStats

    def __add__(self, other: Arm) -> Arm:
        return Arm([torch.cat(pair) for pair in zip(self.blocks, other.blocks, strict=True)], self.work)


class Sampled:
    """Writes the arms of a plan and compares them."""

    def __init__(self, llm: LLM, plan: CheckPlan, prompts: list[list[int]], advance: Advance):
        self.llm, self.plan, self.prompts, self.advance = llm, plan, prompts, advance

    def run(self) -> list[Comparison]:
        """The null, then each rule of acceptance and its control."""
        plain = [self.write(f"plain {i}", PLAIN) for i in (1, 2)]
        null = self.compare("plain, twice", "plain", plain[0], plain[1])
        if null.found:
            fresh = [self.write(f"plain {i} again", PLAIN) for i in (1, 2)]
            null.again = self.compare("plain, again", "plain", fresh[0], fresh[1], among=null)
        both, found = plain[0] + plain[1], [null]
        for rule in RULES:
            options = {"acceptance": rule}
            mine = self.write(rule, options)
            first = self.compare(rule, "speculation", both, mine)
            if first.found:
                fresh = [self.write(f"plain {i} for {rule}", PLAIN) for i in (1, 2)]
                repeated = self.write(f"{rule} again", options)
                first.again = self.compare(
                    f"{first.label}, again", "speculation", fresh[0] + fresh[1], repeated, among=first
                )
            planted = self.write(f"{rule} planted", options, share=self.plan.control)
            found += [first, self.compare(f"{first.label}, planted errors", "control", both, planted)]
        return found

    def write(self, arm: str, speculation: Any, share: float = 0.0) -> Arm:
        """Every block's runs. The seeds depend on the arm's name: no two arms share one."""
        plan, prompts, params = self.plan, [], []
        for prompt, sampler in plan.sampled:
            for done in range(0, plan.runs, MAX_SAMPLES):
                seed = plan.chance("arm", arm, prompt, sampler, done).getrandbits(63)
                size = {"n": min(MAX_SAMPLES, plan.runs - done), "max_tokens": plan.positions, "seed": seed}
                prompts.append(self.prompts[prompt])
                params.append(plan.samplers[sampler].model_copy(update=size))
        chance = plan.chance("plants", arm)
        texts = write(
            self.llm, prompts, params, speculation, share=share, chance=chance, advance=self.advance
        )
        same = [
            [*tokens, *[ENDED] * (plan.positions - len(tokens))][: plan.positions] for tokens in texts.tokens
        ]
        return Arm(list(torch.tensor(same).split(plan.runs)), texts.work)

    def compare(
        self, label: str, role: str, one: Arm, other: Arm, among: Comparison | None = None
    ) -> Comparison:
        """A permutation test of every cell and of all; of `among`'s rejected cells alone if it has any."""
        runs = len(one.blocks[0]), len(other.blocks[0])
        seed = self.plan.chance("permutations", label).getrandbits(63)
        arms = deal(*runs, self.plan.permutations, seed)
        cells, together = [], torch.zeros(len(arms))
        for (prompt, sampler), a, b in zip(self.plan.sampled, one.blocks, other.blocks, strict=True):
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
