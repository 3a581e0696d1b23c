"""An advice on trial: the setting against plain decoding on other prompts, in pairs, with plain decoding against itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from speculon.bench.advise_maths import DRAWS, INTERVAL, Estimate
from speculon.bench.advise_measure import asking
from speculon.bench.cell import at_share
from speculon.bench.measure import Measurement, measure
from speculon.bench.plan import AGAIN, Mode
from speculon.bench.rounds import decoding
from speculon.bench.run import alternate
from speculon.bench.workloads import Case
from speculon.errors import BenchError
from speculon.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.llm import LLM

STRONG = 0.15  # guess: of the measured speed; a prediction this far off, beyond both intervals, was wrong
ADVISED = "advised"


@dataclass(frozen=True, slots=True)
class Check:
    """What a setting brought live. Speeds are those of decoding, as predicted: without the target's reading of prompts."""

    setting: Estimate
    ratio: float
    low: float
    high: float
    again: float  # plain against plain
    tokens_per_call: float
    texts: int
    held_out: bool  # whether nothing of them had been measured before

    @property
    def at_its_tokens(self) -> float:
        """The prediction, had it known the tokens per call of these prompts: what is left is the error of the costs."""
        return self.setting.ratio * self.tokens_per_call / self.setting.speed.tokens_per_call

    @property
    def agrees(self) -> bool:
        """Whether prediction and measurement could be the same number, or are close."""
        overlap = self.low <= self.setting.high and self.setting.low <= self.high
        return overlap or abs(self.setting.ratio / self.ratio - 1) <= STRONG


def check(
    llm: LLM, setting: Estimate, cases: Sequence[Case], held_out: bool, repeats: int, advance: Callable[[int], None]
) -> Check:
    """Writes the cases in crowds of the setting's size; each group of texts is paired with itself."""
    groups = crowds_of(cases, setting.texts)
    modes = [Mode(OFF, {"method": OFF}), Mode(ADVISED, asking(setting.way.name, setting.k)), Mode(AGAIN, {"method": OFF})]
    runs: dict[str, list[list[Measurement]]] = {mode.label: [[] for _ in groups] for mode in modes}
    for mode in modes:  # warm-up, discarded
        measure(llm, groups[0], mode.speculation)
    for _, group, mode in alternate(repeats, len(groups), modes):
        runs[mode.label][group].append(measure(llm, groups[group], mode.speculation))
        advance(1)
    pairs = list(zip(runs[ADVISED], runs[OFF], strict=True))
    ratio = speed_of(runs[ADVISED]) / speed_of(runs[OFF])
    rng = Random(0)
    drawn = sorted(ratio_of(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    low, high = (at_share(drawn, share) for share in INTERVAL)
    steps = decoding([one for some in runs[ADVISED] for one in some])
    per_call = sum(step.tokens for step in steps) / sum(step.spans for step in steps)
    again = speed_of(runs[AGAIN]) / speed_of(runs[OFF])
    return Check(setting, ratio, low, high, again, per_call, len({case.name for case in cases}), held_out)


def crowds_of(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """All cases in groups of exactly `size`, the last filled up from the first."""
    return [[cases[(first + i) % len(cases)] for i in range(size)] for first in range(0, len(cases), size)]


def checks_total(cases: int, crowds: Sequence[int], repeats: int) -> int:
    """Measurements that `check` makes for several crowds."""
    return sum(3 * repeats * -(-cases // crowd) for crowd in crowds)


def ratio_of(pairs: Sequence[tuple[list[Measurement], list[Measurement]]]) -> float:
    return speed_of([mine for mine, _ in pairs]) / speed_of([plain for _, plain in pairs])


def speed_of(groups: Sequence[list[Measurement]]) -> float:
    """Tokens per ms over all decoding steps."""
    steps = decoding([one for some in groups for one in some])
    if not steps:
        raise BenchError("no text of the check had a second token")
    return sum(step.tokens for step in steps) / sum(step.step_ms for step in steps)
