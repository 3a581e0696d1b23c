"""Modes against each other: alternated within one run, each group of cases paired with its own plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from speculon.bench import workloads
from speculon.bench.measure import Measurement, loops, measure
from speculon.bench.workloads import Case, Size
from speculon.config import SamplingParams
from speculon.errors import BenchError, InvalidParameter
from speculon.proposers.registry import OFF, check_method
from speculon.telemetry import RequestStats

if TYPE_CHECKING:
    from speculon.llm import LLM

AGAIN = "off again"  # the same as `off`: how far its ratio is from 1 is the noise
STOCK = "transformers"
TIE_TOP = 20  # candidates looked at for a tie


@dataclass(frozen=True, slots=True)
class Mode:
    label: str
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.label not in (OFF, AGAIN, STOCK)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare. Raises `InvalidParameter` or `UnknownMethod` for what cannot be."""

    workloads: tuple[str, ...] = tuple(workloads.WORKLOADS)
    modes: tuple[str, ...] = (OFF, "ngram:4", "ngram:8")
    concurrency: tuple[int, ...] = (1, 8)
    prompts: int = 16
    max_tokens: int = 128
    repeats: int = 3
    with_transformers: bool = False

    def __post_init__(self) -> None:
        for name in ("workloads", "modes", "concurrency"):
            if not getattr(self, name):
                raise InvalidParameter(name, "", "name at least one")
        for name in ("prompts", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "must be at least 1")
        for count in self.concurrency:
            if not 1 <= count <= self.prompts:
                raise InvalidParameter("concurrency", count, f"goes from 1 to the number of prompts, {self.prompts}")
        for name in self.workloads:
            if name not in workloads.WORKLOADS:
                raise InvalidParameter("workloads", name, f"known are {', '.join(workloads.WORKLOADS)}")
        for mode in self.modes:
            parse_mode(mode)

    def modes_of(self, workload: str, concurrency: int) -> list[Mode]:
        """Plain decoding twice, the modes asked for, and transformers where it does the same: greedy, one at a time."""
        asked = [parse_mode(mode) for mode in self.modes if mode != OFF]
        stock = [Mode(STOCK)] if self.with_transformers and concurrency == 1 and workload != "prose" else []
        return [parse_mode(OFF), *asked, *stock, Mode(AGAIN, {"method": OFF})]

    @property
    def measurements(self) -> int:
        """How many there will be, warm-up included."""
        return sum(
            len(self.modes_of(workload, count)) * (1 + self.repeats * (self.prompts // count))
            for workload in self.workloads
            for count in self.concurrency
        )


@dataclass(slots=True)
class Cell:
    """One mode of one workload at one concurrency; medians over the repeats unless said otherwise."""

    workload: str
    concurrency: int
    mode: str
    texts: int  # per repeat
    tokens: int  # written in the first repeat
    tokens_per_second: float  # prompts included
    decode_tokens_per_second: float | None  # steps without prompt tokens alone
    ratio: float  # to `off`, median over the pairs of (group, repeat)
    ratio_quartiles: tuple[float, float]
    decode_ratio: float | None
    tokens_per_target_call: float | None
    acceptance_rate: float | None
    per_position: list[float]
    ms_by_rows: dict[int, tuple[float, int]]  # rows of a decoding call -> (median ms, calls)
    overhead: float | None  # (step - forward) / step
    looping: float  # share of texts whose end repeats itself and is not the right answer
    exact: float | None  # share of texts equal to the reference
    different: int  # texts of all repeats that are not those of `off`
    tie_nats: list[float]  # how close the two candidates were where a greedy text parted, in the target's own words
    reasons: dict[str, int]
    per_repeat: list[float]  # tokens per second


Runs = dict[str, list[list[Measurement]]]  # mode -> repeat -> group


def parse_mode(text: str) -> Mode:
    """`off`, `ngram`, `ngram:8`."""
    method, colon, k = text.partition(":")
    check_method(method)
    if colon and not (k.isdecimal() and int(k)) or colon and method == OFF:
        raise InvalidParameter("modes", text, "is METHOD or METHOD:K with K of at least 1")
    return Mode(text, {"method": method, **({"num_speculative_tokens": int(k)} if colon else {})})


def run(llm: LLM, plan: Plan, advance: Callable[[int], None] = lambda n: None) -> tuple[list[Cell], dict[str, list[Case]]]:
    """All cells, and the cases of each workload. A mode that ran no speculative round in a cell raises `BenchError`."""
    if max(plan.concurrency) > llm.config.max_num_seqs:
        raise InvalidParameter("concurrency", max(plan.concurrency), f"max_num_seqs is {llm.config.max_num_seqs}")
    size = Size(plan.prompts, plan.max_tokens, llm.engine.max_context)
    cases = {name: workloads.build(name, llm.tokenizer, size) for name in plan.workloads}
    write = writer(llm, plan)
    cells: list[Cell] = []
    for name in plan.workloads:
        for count in plan.concurrency:
            groups = [cases[name][i : i + count] for i in range(0, plan.prompts - count + 1, count)]  # full ones only
            modes = plan.modes_of(name, count)
            for mode in modes:  # warm-up, discarded
                write(groups[0], mode)
                advance(1)
            runs: Runs = {mode.label: [[] for _ in range(plan.repeats)] for mode in modes}
            for repeat, group, mode in alternate(plan.repeats, len(groups), modes):
                runs[mode.label][repeat].append(write(groups[group], mode))
                advance(1)
            written = [case for group in groups for case in group]
            cells.extend(summarise(name, count, mode, runs, written, llm) for mode in modes)
    return cells, cases


def writer(llm: LLM, plan: Plan) -> Callable[[list[Case], Mode], Measurement]:
    if not plan.with_transformers:
        return lambda cases, mode: measure(llm, cases, mode.speculation)
    from speculon.bench.stock import Stock

    stock = Stock(llm)
    return lambda cases, mode: stock.measure(cases) if mode.label == STOCK else measure(llm, cases, mode.speculation)


def alternate(repeats: int, groups: int, modes: list[Mode]) -> Iterator[tuple[int, int, Mode]]:
    """Every mode beside every other in time; who goes first changes, so that a drift of the machine favours nobody."""
    for repeat in range(repeats):
        for group in range(groups):
            first = (repeat + group) % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                yield repeat, group, mode


def summarise(workload: str, concurrency: int, mode: Mode, runs: Runs, cases: list[Case], llm: LLM) -> Cell:
    repeats, plain = runs[mode.label], runs[OFF]
    everything = [one for groups in repeats for one in groups]
    stats = RequestStats()
    for one in everything:
        stats.add(one.stats)
    done = stats.speculation()
    if mode.speculates and done is None:
        raise BenchError(
            f"{mode.label} ran no speculative round in {workload} at concurrency {concurrency}, so there is nothing to compare; "
            f"reasons: {dict(stats.reasons)}"
        )
    ratios = paired([(one.tokens_per_second, base.tokens_per_second) for one, base in pairs(repeats, plain)])
    if not ratios:
        raise BenchError(f"{mode.label} or {OFF} wrote no token in {workload} at concurrency {concurrency}")
    decode = paired([(one.decode_tokens_per_second, base.decode_tokens_per_second) for one, base in pairs(repeats, plain)])
    texts = [tokens for one in repeats[0] for tokens in one.token_ids]
    right = [
        text.strip() == case.reference for text, case in zip((t for one in repeats[0] for t in one.texts), cases, strict=True)
    ]
    looping = [loops(tokens) and not exact for tokens, exact in zip(texts, right, strict=True)]
    apart = [where for groups, others in zip(repeats, plain, strict=True) for where in differences(groups, others)]
    speeds = [sum(one.tokens for one in groups) / sum(one.seconds for one in groups) for groups in repeats]
    return Cell(
        workload=workload,
        concurrency=concurrency,
        mode=mode.label,
        texts=len(texts),
        tokens=sum(map(len, texts)),
        tokens_per_second=median(speeds),
        decode_tokens_per_second=median_or_none([one.decode_tokens_per_second for one in everything]),
        ratio=median(ratios),
        ratio_quartiles=quartiles(ratios),
        decode_ratio=median_or_none(decode),
        tokens_per_target_call=stats.emitted / stats.target_calls if stats.target_calls else None,
        acceptance_rate=done.acceptance_rate if done else None,
        per_position=done.per_position if done else [],
        ms_by_rows=ms_by_rows(everything),
        overhead=overhead(everything),
        looping=sum(looping) / len(texts),
        exact=sum(right) / len(right) if cases[0].reference is not None else None,
        different=len(apart),
        tie_nats=[gap for i, mine, base in apart if (gap := tie_gap(llm, cases[i], mine, base)) is not None],
        reasons=dict(stats.reasons),
        per_repeat=speeds,
    )


def pairs(repeats: list[list[Measurement]], plain: list[list[Measurement]]) -> Iterator[tuple[Measurement, Measurement]]:
    for groups, others in zip(repeats, plain, strict=True):
        yield from zip(groups, others, strict=True)


def paired(speeds: list[tuple[float | None, float | None]]) -> list[float]:
    return [mine / base for mine, base in speeds if mine and base]


def differences(groups: list[Measurement], plain: list[Measurement]) -> list[tuple[int, list[int], list[int]]]:
    """(case, its tokens, plain's tokens) of the texts that differ."""
    mine = [tokens for one in groups for tokens in one.token_ids]
    base = [tokens for one in plain for tokens in one.token_ids]
    return [(i, m, b) for i, (m, b) in enumerate(zip(mine, base, strict=True)) if m != b]


def tie_gap(llm: LLM, case: Case, mine: list[int], base: list[int]) -> float | None:
    """Nats between the two candidates where a greedy text parts; None when sampled, or where one of the texts ended."""
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


def overhead(measurements: list[Measurement]) -> float | None:
    steps = [step for one in measurements for step in one.steps if step.decoding]
    spent = sum(step.step_ms for step in steps)
    return (spent - sum(step.forward_ms for step in steps)) / spent if spent else None


def median_or_none(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return at_share(ordered, 0.25), at_share(ordered, 0.75)


def at_share(ordered: list[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
