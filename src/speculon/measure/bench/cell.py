"""The figures of one mode: medians over pairs with plain decoding, and counts of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from speculon.core.config import SamplingParams
from speculon.core.errors import BenchError
from speculon.core.telemetry import PARTS, RequestStats, SpeculationStats
from speculon.measure.bench.diagnosis import diagnose, gated
from speculon.measure.bench.measure import Measurement, loops
from speculon.measure.bench.plan import AGAIN, Mode
from speculon.measure.bench.rounds import (
    Requirement,
    RoundCosts,
    decoding,
    mean_step_ms,
    needs,
    reached,
    rounds_of,
)
from speculon.measure.bench.workloads import Case
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

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
    rounds: RoundCosts | None  # the split of a call that verified drafts
    reached: float | None  # mean acceptance per position: of drafts whose predecessors were all accepted
    needed: list[Requirement]  # at concurrency 1
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


Repeats = list[list[Measurement]]  # repeat -> group
Runs = dict[str, Repeats]  # by mode


def summarise(workload: str, concurrency: int, mode: Mode, runs: Runs, cases: list[Case], llm: LLM) -> Cell:
    repeats, plain = runs[mode.label], runs[OFF]
    stats = RequestStats()
    for one in flat(repeats):
        stats.add(one.stats)
    at = f"in {workload} at concurrency {concurrency}"
    if mode.speculates and not stats.rounds and not gated(stats):
        raise BenchError(
            f"{mode.label} ran no speculative round {at}, so there is nothing to compare; "
            f"reasons: {dict(stats.reasons)}"
        )
    ratios = ratios_of(repeats, plain)
    if not ratios:
        raise BenchError(f"{mode.label} or {OFF} wrote no token {at}")
    calls = per_text(flat(repeats)), per_text(flat(plain))
    rule = mode.speculation.get("acceptance") or llm.config.speculation.acceptance
    return Cell(
        workload=workload,
        concurrency=concurrency,
        mode=mode.label,
        policy=mode.policy(llm.config.speculation.policy),
        ratio=median(ratios),
        ratio_quartiles=quartiles(ratios),
        tokens_per_target_call=stats.tokens_per_target_call if stats.target_calls else None,
        rejection=mode.speculates
        and rule in ("rejection", "block")
        and not all(case.params.greedy for case in cases),
        reasons=dict(stats.reasons),
        diagnosis=diagnose(stats, *calls, median(ratios), noise_of(runs)) if mode.speculates else None,
        **speed_fields(repeats, plain, cases),
        **draft_fields(stats.speculation(), repeats, plain, concurrency),
        **text_fields(repeats, plain, cases, llm),
    )


def speed_fields(repeats: Repeats, plain: Repeats, cases: list[Case]) -> dict[str, Any]:
    """The speeds of a cell, and where its time went."""
    speeds = [sum(one.tokens for one in groups) / sum(one.seconds for one in groups) for groups in repeats]
    decode = [
        (one.decode_tokens_per_second, base.decode_tokens_per_second) for one, base in pairs(repeats, plain)
    ]
    free = without_loops(repeats, plain, cases)
    return {
        "tokens_per_second": median(speeds),
        "decode_tokens_per_second": median_or_none([mine for mine, _ in decode]),
        "decode_ratio": median_or_none(paired(decode)),
        "ratio_without_loops": median_or_none([ratio for ratios in free.values() for ratio in ratios]),
        "texts_without_loops": len(free),
        "ms_by_rows": ms_by_rows(flat(repeats)),
        "profile": profile(flat(repeats)),
        "overhead": overhead(flat(repeats)),
        "per_repeat": speeds,
        "speeds": [[one.tokens_per_second for one in groups] for groups in repeats],
    }


def draft_fields(
    done: SpeculationStats | None, repeats: Repeats, plain: Repeats, concurrency: int
) -> dict[str, Any]:
    """What became of the drafts of a cell; `done` is None where there were none."""
    costs, plain_ms = rounds_of(flat(repeats)), mean_step_ms(flat(plain))
    if done is None:
        return {
            "acceptance_rate": None,
            "per_position": [],
            "sources": {},
            "rounds": costs,
            "reached": None,
            "needed": [],
        }
    needed = needs(costs, plain_ms, len(done.per_position)) if costs and plain_ms and concurrency == 1 else []
    return {
        "acceptance_rate": done.acceptance_rate,
        "per_position": done.per_position,
        "sources": {name: n["accepted"] / max(1, done.accepted) for name, n in done.by_source.items()},
        "rounds": costs,
        "reached": reached(done),
        "needed": needed,
    }


def text_fields(repeats: Repeats, plain: Repeats, cases: list[Case], llm: LLM) -> dict[str, Any]:
    """What a cell wrote: lengths, loops, right answers, differences from plain decoding."""
    texts = [tokens for one in repeats[0] for tokens in one.token_ids]
    looping = [stuck(one, i, case) for (one, i), case in zip(slots(repeats[0]), cases, strict=True)]
    answers = [
        one.texts[i].strip() == case.reference
        for (one, i), case in zip(slots(repeats[0]), cases, strict=True)
        if case.reference
    ]
    different = [
        where for groups, others in zip(repeats, plain, strict=True) for where in differences(groups, others)
    ]
    gaps = [tie_gap(llm, cases[i], mine, base) for i, mine, base in different]
    return {
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "looping": sum(looping) / len(texts),
        "exact": sum(answers) / len(answers) if answers else None,
        "different": len(different),
        "tie_nats": [gap for gap in gaps if gap is not None],
    }


def flat(repeats: Repeats) -> list[Measurement]:
    return [one for groups in repeats for one in groups]


def ratios_of(repeats: Repeats, plain: Repeats) -> list[float]:
    return paired([(one.tokens_per_second, base.tokens_per_second) for one, base in pairs(repeats, plain)])


def noise_of(runs: Runs) -> tuple[float, float]:
    """The range of half of the pairs of plain decoding with itself, extended to 1."""
    low, high = quartiles(ratios_of(runs[AGAIN], runs[OFF]))
    return min(1.0, low), max(1.0, high)


def pairs(repeats: Repeats, plain: Repeats) -> Iterator[tuple[Measurement, Measurement]]:
    for groups, others in zip(repeats, plain, strict=True):
        yield from zip(groups, others, strict=True)


def paired(speeds: list[tuple[float | None, float | None]]) -> list[float]:
    return [mine / base for mine, base in speeds if mine and base]


def slots(groups: list[Measurement]) -> Iterator[tuple[Measurement, int]]:
    """Every text, as its measurement and its place in it, in the order of the cases."""
    return ((one, i) for one in groups for i in range(len(one.texts)))


def stuck(one: Measurement, i: int, case: Case) -> bool:
    """Whether a text ends repeating itself and is not the right answer."""
    return loops(one.token_ids[i]) and one.texts[i].strip() != case.reference


def without_loops(repeats: Repeats, plain: Repeats, cases: list[Case]) -> dict[int, list[float]]:
    """Ratios by case, where neither text loops: most drafts of a loop are accepted.

    Of measurements of one text alone.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for groups, others in zip(repeats, plain, strict=True):
        for i, sides in enumerate(zip(groups, others, strict=True)):
            if all(len(one.texts) == 1 and one.tokens and not stuck(one, 0, cases[i]) for one in sides):
                found[i].append(sides[0].tokens_per_second / sides[1].tokens_per_second)
    return found


def differences(
    groups: list[Measurement], plain: list[Measurement]
) -> list[tuple[int, list[int], list[int]]]:
    """(case, its tokens, plain's tokens) of the texts that differ."""
    mine = [tokens for one in groups for tokens in one.token_ids]
    base = [tokens for one in plain for tokens in one.token_ids]
    return [(i, m, b) for i, (m, b) in enumerate(zip(mine, base, strict=True)) if m != b]


def tie_gap(llm: LLM, case: Case, mine: list[int], base: list[int]) -> float | None:
    """Nats between the two candidates where a greedy text differs.

    None when sampled, or where one of the texts ended.
    """
    at = next((i for i, (m, b) in enumerate(zip(mine, base, strict=False)) if m != b), None)
    if at is None or not case.params.greedy:
        return None
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=min(TIE_TOP, llm.engine.target.vocab_size))
    output = llm.generate([[*case.prompt, *base[:at]]], ask, speculation={"method": OFF})[0]
    top = dict(output.logprobs[0].top) if output.logprobs else {}
    return abs(top[mine[at]] - top[base[at]]) if mine[at] in top and base[at] in top else None


def ms_by_rows(measurements: list[Measurement]) -> dict[int, tuple[float, int]]:
    found: dict[int, list[float]] = defaultdict(list)
    for one in measurements:
        for step in one.steps:
            if step.decoding:
                found[step.rows].append(step.forward_ms)
    return {rows: (median(ms), len(ms)) for rows, ms in sorted(found.items())}


def profile(measurements: list[Measurement]) -> dict[str, float]:
    """Where the mean decoding step's time goes; empty when there was none."""
    steps = decoding(measurements)
    return {part: sum(step.profile[part] for step in steps) / len(steps) for part in PARTS} if steps else {}


def per_text(measurements: list[Measurement]) -> dict[str, float]:
    """ms of the decoding steps per text in them: a batch shrinks as its texts end."""
    steps = decoding(measurements)
    texts = sum(step.spans for step in steps)
    return {part: sum(step.profile[part] for step in steps) / texts for part in PARTS} if texts else {}


def overhead(measurements: list[Measurement]) -> float | None:
    ms = profile(measurements)
    return 1 - (ms["propose"] + ms["forward"]) / sum(ms.values()) if ms else None


def median_or_none(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return quantile(ordered, 0.25), quantile(ordered, 0.75)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
