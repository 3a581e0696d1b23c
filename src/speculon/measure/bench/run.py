"""Modes alternated in one run; each group of cases is paired with its own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from speculon.core.errors import InvalidParameter
from speculon.measure.bench import workloads
from speculon.measure.bench.arrivals import Arrivals, poisson_times, serve
from speculon.measure.bench.cell import Cell, RepeatsByMode, summarise
from speculon.measure.bench.data import answered
from speculon.measure.bench.measure import Measurement, in_place, measure
from speculon.measure.bench.plan import AGAIN, BenchPlan, Mode, parse_mode
from speculon.measure.bench.workloads import Case
from speculon.speculation.control.policies import Policies
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM


def run(
    llm: LLM, plan: BenchPlan, advance: Callable[[int], None] = lambda n: None
) -> tuple[list[Cell], dict[str, list[Case]]]:
    """All cells, and the cases of each workload. A mode that ran no speculative round in a cell raises
    `BenchError`.
    """
    refuse_what_cannot_run(llm, plan)
    context = llm.engine.max_context
    plan = with_answers(llm, plan)
    cases = {
        name: workloads.build(name, llm.tokenizer, plan.size(context, name), plan.more)
        for name in plan.workloads
    }
    refuse_evictions(llm, plan, cases)
    write = writer(llm, plan)
    modes = plan.compared
    cells: list[Cell] = []
    for name in plan.workloads:
        for count in plan.concurrency:
            groups = workloads.groups_of(cases[name], count)
            for mode in modes:  # warm-up, discarded
                write(groups[0], mode, f"warm-up of {name}, {count}")
                advance(1)
            if plan.request_rate is not None:
                groups = [cases[name]]
            runs: RepeatsByMode = {mode.label: [[] for _ in range(plan.repeats)] for mode in modes}
            for repeat, group, mode in alternate(plan.repeats, len(groups), modes):
                arrivals = arrivals_of(plan, groups[group], count, f"repeat {repeat} of {name}")
                measured = write(groups[group], mode, f"repeat {repeat} of {name}, {count}", arrivals)
                runs[mode.label][repeat].append(measured)
                advance(1)
            written = [case for group in groups for case in group]
            cells.extend(summarise(name, count, mode, runs, written, llm) for mode in modes)
    return cells, cases


def with_answers(llm: LLM, plan: BenchPlan) -> BenchPlan:
    """Later turns of a file's prompts follow the target's answers: the same ones in every mode."""
    if plan.data is None:
        return plan
    names = {name.partition("@")[0] for name in plan.workloads} & plan.data.prompts.keys()
    chosen = {name: plan.data.prompts[name] for name in names}
    with_turns = {name: some for name, some in chosen.items() if any(prompt.follows for prompt in some)}
    prompts = {**plan.data.prompts, **answered(with_turns, llm, plan.max_tokens)}
    return plan.model_copy(update={"data": replace(plan.data, prompts=prompts)})


def refuse_what_cannot_run(llm: LLM, plan: BenchPlan) -> None:
    """Raises before anything is measured where a mode lacks a drafter, or would be plain decoding."""
    highest = max(plan.concurrency)
    if highest > llm.config.max_num_seqs:
        raise InvalidParameter(
            "concurrency", highest, f"must be at most max_num_seqs, {llm.config.max_num_seqs}"
        )
    for mode in map(parse_mode, plan.modes):
        method = mode.speculation["method"]
        if reason := llm.engine.proposers.lacking(method):
            advice = f"{reason.value}: {reason.sentence}; give a checkpoint for {method} with --draft"
            raise InvalidParameter("modes", mode.label, advice)


def refuse_evictions(llm: LLM, plan: BenchPlan, cases: dict[str, list[Case]]) -> None:
    """Raises where the pools of one mode would be evicted while the other modes run."""
    looping = any(case.user for some in cases.values() for case in some)
    pools, needed = llm.config.speculation.suffix_pools, plan.users
    if looping and 0 < pools < needed:
        reason = (
            f"must be at least {needed} for {max(plan.concurrency)} users in {len(plan.modes)} modes, or 0"
        )
        raise InvalidParameter("suffix_pools", pools, reason)


def policies_of(llm: LLM, plan: BenchPlan) -> dict[str, Policies]:
    """Each mode's policies: with the engine's measured costs, updated by rounds of this mode alone."""
    return {label: llm.engine.policy.with_costs_alone() for label in (OFF, AGAIN, *plan.modes)}


class Writer(Protocol):
    """Runs cases in a mode, as one batch or as they arrive; pools last for one mode and one time."""

    def __call__(
        self, cases: list[Case], mode: Mode, time: str, arrivals: Arrivals | None = None
    ) -> Measurement: ...


def writer(llm: LLM, plan: BenchPlan) -> Writer:
    policies = policies_of(llm, plan)

    def write(cases: list[Case], mode: Mode, time: str, arrivals: Arrivals | None = None) -> Measurement:
        with in_place(llm.engine, policy=policies[mode.label]):
            time = f"{mode.label}, {time}"
            if arrivals is None:
                return measure(llm, cases, mode.speculation, time)
            return serve(llm, cases, mode.speculation, arrivals, time)

    return write


def arrivals_of(plan: BenchPlan, cases: list[Case], concurrency: int, seed: str) -> Arrivals | None:
    """When the cases arrive, in every mode alike; None where they begin together."""
    if plan.request_rate is None:
        return None
    return Arrivals(poisson_times(len(cases), plan.request_rate, seed), concurrency)


def alternate(repeats: int, groups: int, modes: list[Mode]) -> Iterator[tuple[int, int, Mode]]:
    """All modes in turn, so that a drift of the machine affects them alike.

    Rows of a Latin square in which each mode follows each other one equally often (Williams 1949); with an
    odd number of modes the mirror image is needed, too.
    """
    n = len(modes)
    # 0, n-1, 1, n-2, ...: each step of another width
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    for repeat in range(repeats):
        for group in range(groups):
            row = repeat * groups + group
            order = [modes[(place + row) % n] for place in zigzag]
            mirrored = n % 2 == 1 and row // n % 2 == 1
            yield from ((repeat, group, mode) for mode in (reversed(order) if mirrored else order))
