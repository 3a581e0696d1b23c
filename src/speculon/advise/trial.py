"""Settings measured live: candidates and plain decoding, alternated in one run on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.advise.maths import DRAWS, INTERVAL, Cascade
from speculon.advise.measure import FIXED, NO_SPECULATION, request_at
from speculon.bench.measure import Measurement, measure
from speculon.bench.plan import AGAIN, Mode
from speculon.bench.quantiles import quantile
from speculon.bench.rounds import decoding
from speculon.bench.run import alternate
from speculon.bench.workloads import Case
from speculon.config import USUAL_DRAFTS, SpeculationConfig
from speculon.errors import BenchError
from speculon.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.llm import LLM

GOODPUT = "goodput"  # the policy that sets K by itself


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that may be advised: a cascade at a fixed K, or under the policy that sets K."""

    cascade: Cascade
    k: int | None = None  # None: set by the policy `goodput`

    @property
    def policy(self) -> str:
        return GOODPUT if self.k is None else FIXED

    @property
    def label(self) -> str:
        return (
            f"`{self.cascade.name}`, policy `{GOODPUT}`"
            if self.k is None
            else f"`{self.cascade.name}`, K = {self.k}"
        )

    def request(self, config: SpeculationConfig) -> dict[str, Any]:
        """The options of its requests: no default of the engine counts."""
        return request_at(
            self.cascade.name, USUAL_DRAFTS[GOODPUT](config) if self.k is None else self.k, self.policy
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A candidate's measured decoding speed over plain, prompts left out, with a 90 % interval."""

    candidate: Candidate
    ratio: float
    low: float
    high: float
    tokens_per_call: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one concurrency."""

    concurrency: int
    results: tuple[Result, ...]
    again: float  # plain decoding against itself: the noise
    texts: int
    held_out: bool  # whether nothing of them had been measured before

    def of(self, candidate: Candidate) -> Result | None:
        return next((result for result in self.results if result.candidate == candidate), None)

    @property
    def fastest(self) -> Result:
        return max(self.results, key=lambda result: result.ratio)


class Pair(NamedTuple):
    """The decoding steps of one measurement, and of plain decoding on the same prompts and repeat."""

    tokens: int
    ms: float
    sequences: int  # over all steps
    plain_tokens: int
    plain_ms: float

    @classmethod
    def of(cls, one: Measurement, plain: Measurement) -> Pair:
        steps, base = decoding([one]), decoding([plain])
        tokens, ms, sequences = (
            sum(getattr(step, name) for step in steps) for name in ("tokens", "step_ms", "spans")
        )
        return cls(
            tokens, ms, sequences, sum(step.tokens for step in base), sum(step.step_ms for step in base)
        )


def run_trial(
    llm: LLM,
    concurrency: int,
    candidates: Sequence[Candidate],
    cases: Sequence[Case],
    held_out: bool,
    repeats: int,
    advance: Callable[[int], None],
) -> Trial:
    """Candidates, plain decoding, and plain decoding again, alternated; groups of prompts are the pairs."""
    groups = groups_of(cases, concurrency)
    requests = {candidate.label: candidate.request(llm.config.speculation) for candidate in candidates}
    modes = [
        Mode(name, each) for name, each in {OFF: NO_SPECULATION, **requests, AGAIN: NO_SPECULATION}.items()
    ]
    runs: dict[str, list[list[Measurement]]] = {mode.label: [[] for _ in groups] for mode in modes}
    for mode in modes:  # warm-up, discarded
        measure(llm, groups[0], mode.speculation)
    for _, group, mode in alternate(repeats, len(groups), modes):
        runs[mode.label][group].append(measure(llm, groups[group], mode.speculation))
        advance(1)
    pairs = {
        label: [list(map(Pair.of, *repeats)) for repeats in zip(some, runs[OFF], strict=True)]
        for label, some in runs.items()
    }
    results = tuple(result_of(candidate, pairs[candidate.label]) for candidate in candidates)
    again = ratio_of(pair for group in pairs[AGAIN] for pair in group)
    return Trial(concurrency, results, again, len({case.name for case in cases}), held_out)


def result_of(candidate: Candidate, groups: Sequence[Sequence[Pair]]) -> Result:
    """The interval resamples groups of prompts, and repeats within each."""
    rng, every = Random(0), [pair for group in groups for pair in group]

    def again() -> Iterable[Pair]:
        return (
            pair for group in rng.choices(groups, k=len(groups)) for pair in rng.choices(group, k=len(group))
        )

    drawn = sorted(ratio_of(again()) for _ in range(DRAWS))
    low, high = (quantile(drawn, share) for share in INTERVAL)
    per_call = sum(pair.tokens for pair in every) / sum(pair.sequences for pair in every)
    return Result(candidate, ratio_of(every), low, high, per_call)


def ratio_of(pairs: Iterable[Pair]) -> float:
    """Tokens per ms over those of plain decoding."""
    tokens, ms, _, plain_tokens, plain_ms = map(sum, zip(*pairs, strict=True))
    if not tokens or not plain_tokens:
        raise BenchError("no text of the live measurement had a second token")
    return tokens / ms * plain_ms / plain_tokens


def groups_of(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """All cases in groups of exactly `size`, the last filled up from the first."""
    return [[cases[(first + i) % len(cases)] for i in range(size)] for first in range(0, len(cases), size)]


def trial_measurements(cases: int, concurrency: int, candidates: int, repeats: int) -> int:
    """Of one trial, its warm-up left out."""
    return (candidates + 2) * repeats * -(-cases // concurrency)
