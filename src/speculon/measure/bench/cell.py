"""The figures of one mode: medians over pairs with plain decoding, and counts of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from speculon.core.config import SamplingParams
from speculon.core.errors import BenchError
from speculon.core.telemetry import PARTS, RequestStats
from speculon.core.types import reasons_in_words
from speculon.measure.bench.diagnosis import diagnose, gated
from speculon.measure.bench.measure import Measurement, decoding, loops
from speculon.measure.bench.plan import AGAIN, Mode
from speculon.measure.bench.workloads import Case
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

SPEED, DECODE_SPEED = attrgetter("tokens_per_second"), attrgetter("decode_tokens_per_second")
TIE_TOP = 20  # candidates considered for a tie


@dataclass(slots=True)
class Cell:
    """One mode of one workload at one concurrency; medians over the repeats unless noted."""

    workload: str
    concurrency: int
    mode: str
    policy: str
    texts: int  # per repeat
    tokens: int  # written in the first repeat
    tokens_per_second: float  # prompts included
    decode_tokens_per_second: float | None  # steps without prompt tokens alone
    ratio: float  # to `off`, median over the pairs of (group, repeat)
    ratio_quartiles: tuple[float, float]
    decode_ratio: float | None
    ratio_without_loops: float | None  # over texts that do not loop; None above concurrency 1
    texts_without_loops: int  # how many those are
    tokens_per_target_call: float | None
    acceptance_rate: float | None
    per_position: list[float]
    sources: dict[str, float]  # method -> share of the accepted tokens
    rejection: bool  # sampled drafts are judged with q: texts differ, distributions do not
    ms_by_rows: dict[int, tuple[float, int]]  # rows of a decoding call -> (median ms, calls)
    profile: dict[str, float]  # part of a decoding step -> mean ms
    overhead: float | None  # share of a decoding step spent neither in the target nor on drafting
    looping: float  # share of texts whose end repeats itself and is not the right answer
    exact: float | None  # share of texts equal to the reference
    different: int  # texts of all repeats that are not those of `off`
    tie_nats: list[float]  # gap of the two candidates where a greedy text differs
    reasons: dict[str, int]
    diagnosis: str | None  # why it did not help, or that it pays; None: it does not speculate
    per_repeat: list[float]  # tokens per second
    speeds: list[list[float]]  # repeat -> group of prompts -> tokens per second
    # p50 and p95 over the texts of all repeats, where requests arrive at a rate
    first_token_ms: tuple[float, float] | None = None  # from its arrival
    per_token_ms: tuple[float, float] | None = None  # after the first token


Repeats = list[list[Measurement]]  # repeat -> group
RepeatsByMode = dict[str, Repeats]  # by mode


def summarise(
    workload: str, concurrency: int, mode: Mode, runs: RepeatsByMode, cases: list[Case], llm: LLM
) -> Cell:
    repeats, plain = runs[mode.label], runs[OFF]
    measurements, stats = flat(repeats), RequestStats()
    for measurement in measurements:
        stats.add(measurement.stats)
    at = f"in {workload} at concurrency {concurrency}"
    if mode.speculates and not stats.rounds and not gated(stats):
        raise BenchError(
            f"mode {mode.label} had no round with drafts {at}, so there is nothing to compare; "
            f"{reasons_in_words(stats.reasons)}"
        )
    ratios = ratios_of(repeats, plain)
    if not ratios:
        raise BenchError(f"mode {mode.label} or {OFF} wrote no token {at}, so there is no speed to compare")
    rule = mode.speculation.get("acceptance") or llm.config.speculation.acceptance
    speeds = [sum(m.tokens for m in groups) / sum(m.seconds for m in groups) for groups in repeats]
    not_looping = without_loops(repeats, plain, cases)
    done = stats.speculation()
    calls = profile(measurements, per_text=True), profile(flat(plain), per_text=True)
    sampled = not all(case.params.greedy for case in cases)
    return Cell(
        workload=workload,
        concurrency=concurrency,
        mode=mode.label,
        policy=mode.policy(llm.config.speculation.policy),
        tokens_per_second=median(speeds),
        decode_tokens_per_second=median_or_none(map(DECODE_SPEED, measurements)),
        ratio=median(ratios),
        ratio_quartiles=quartiles(ratios),
        decode_ratio=median_or_none(ratios_of(repeats, plain, DECODE_SPEED)),
        ratio_without_loops=median_or_none(chain(*not_looping.values())),
        texts_without_loops=len(not_looping),
        tokens_per_target_call=stats.tokens_per_target_call if stats.target_calls else None,
        acceptance_rate=done.acceptance_rate if done.rounds else None,
        per_position=done.per_position,
        sources={n: of["accepted"] / max(1, done.accepted) for n, of in done.by_source.items()},
        rejection=mode.speculates and rule in ("rejection", "block") and sampled,
        ms_by_rows=ms_by_rows(measurements),
        profile=profile(measurements),
        overhead=overhead(measurements),
        reasons=dict(stats.reasons),
        diagnosis=diagnose(stats, *calls, median(ratios), noise_of(runs)) if mode.speculates else None,
        per_repeat=speeds,
        speeds=[[measurement.tokens_per_second for measurement in groups] for groups in repeats],
        first_token_ms=percentiles(r.first_token_ms for m in measurements for r in m.requests),
        per_token_ms=percentiles(r.per_token_ms for m in measurements for r in m.requests),
        **text_fields(repeats, plain, cases, llm),
    )


def text_fields(repeats: Repeats, plain: Repeats, cases: list[Case], llm: LLM) -> dict[str, Any]:
    """What was written: lengths, loops, right answers, differences from plain decoding."""
    texts = [
        text
        for measurement in repeats[0]
        for text in zip(measurement.token_ids, measurement.texts, strict=True)
    ]
    looping = [loops_wrongly(ids, text, case) for (ids, text), case in zip(texts, cases, strict=True)]
    right = [
        text.strip() == case.reference for (_, text), case in zip(texts, cases, strict=True) if case.reference
    ]
    different = [
        (case, ids, other)
        for groups, others in zip(repeats, plain, strict=True)
        for case, ids, other in zip(cases, all_ids(groups), all_ids(others), strict=True)
        if ids != other
    ]
    gaps = [tie_gap(llm, *difference) for difference in different]
    return {
        "texts": len(texts),
        "tokens": sum(len(ids) for ids, _ in texts),
        "looping": sum(looping) / len(texts),
        "exact": sum(right) / len(right) if right else None,
        "different": len(different),
        "tie_nats": [gap for gap in gaps if gap is not None],
    }


def flat(repeats: Repeats) -> list[Measurement]:
    return [measurement for groups in repeats for measurement in groups]


def all_ids(groups: list[Measurement]) -> list[list[int]]:
    """The tokens of every text, in the order of the cases."""
    return [ids for measurement in groups for ids in measurement.token_ids]


def ratios_of(
    repeats: Repeats, plain: Repeats, speed: Callable[[Measurement], float | None] = SPEED
) -> list[float]:
    pairs = zip(map(speed, flat(repeats)), map(speed, flat(plain)), strict=True)
    return [mine / base for mine, base in pairs if mine and base]


def noise_of(runs: RepeatsByMode) -> tuple[float, float]:
    """The range of half of the pairs of plain decoding with itself, extended to 1."""
    low, high = quartiles(ratios_of(runs[AGAIN], runs[OFF]))
    return min(1.0, low), max(1.0, high)


def loops_wrongly(ids: list[int], text: str, case: Case) -> bool:
    """Whether a text ends repeating itself and is not the right answer."""
    return loops(ids) and text.strip() != case.reference


def without_loops(repeats: Repeats, plain: Repeats, cases: list[Case]) -> dict[int, list[float]]:
    """Ratios by case, where neither text loops: most drafts of a loop are accepted.

    Of measurements of one text alone.
    """
    ratios: dict[int, list[float]] = defaultdict(list)
    for groups, others in zip(repeats, plain, strict=True):
        for i, pair in enumerate(zip(groups, others, strict=True)):
            if all(
                len(measurement.texts) == 1
                and measurement.tokens
                and not loops_wrongly(measurement.token_ids[0], measurement.texts[0], cases[i])
                for measurement in pair
            ):
                ratios[i].append(pair[0].tokens_per_second / pair[1].tokens_per_second)
    return ratios


def tie_gap(llm: LLM, case: Case, mine: list[int], base: list[int]) -> float | None:
    """Nats between the two candidates where a greedy text differs.

    None when sampled, or where one of the texts ended.
    """
    at = next((i for i, (m, b) in enumerate(zip(mine, base, strict=False)) if m != b), None)
    if at is None or not case.params.greedy:
        return None
    top = min(TIE_TOP, llm.engine.runtime.facts.vocab_size)
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=top)
    output = llm.generate([[*case.prompt, *base[:at]]], ask, speculation={"method": OFF})[0]
    likeliest = dict(output.logprobs[0].top) if output.logprobs else {}
    known = {mine[at], base[at]} <= likeliest.keys()
    return abs(likeliest[mine[at]] - likeliest[base[at]]) if known else None


def ms_by_rows(measurements: list[Measurement]) -> dict[int, tuple[float, int]]:
    ms: dict[int, list[float]] = defaultdict(list)
    for step in decoding(measurements):
        ms[step.rows].append(step.forward_ms)
    return {rows: (median(some), len(some)) for rows, some in sorted(ms.items())}


def profile(measurements: list[Measurement], *, per_text: bool = False) -> dict[str, float]:
    """Where the mean decoding step's time goes; empty when there was none.

    `per_text`: for each text in the step, since a batch shrinks as its texts end.
    """
    steps = decoding(measurements)
    count = sum(step.spans for step in steps) if per_text else len(steps)
    return {part: sum(step.profile[part] for step in steps) / count for part in PARTS} if steps else {}


def overhead(measurements: list[Measurement]) -> float | None:
    ms = profile(measurements)
    return 1 - (ms["propose"] + ms["forward"]) / sum(ms.values()) if ms else None


def median_or_none(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def percentiles(values: Iterable[float | None]) -> tuple[float, float] | None:
    """p50 and p95 of the values that are known; None where none is."""
    ordered = sorted(value for value in values if value is not None)
    return (quantile(ordered, 0.5), quantile(ordered, 0.95)) if ordered else None


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return quantile(ordered, 0.25), quantile(ordered, 0.75)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
