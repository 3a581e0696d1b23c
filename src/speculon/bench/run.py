"""Modes against each other: alternated within one run, each group of cases paired with its own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from speculon.bench import workloads
from speculon.bench.cell import Cell, Runs, summarise
from speculon.bench.measure import Measurement, measure
from speculon.bench.plan import STOCK, Mode, Plan, parse_mode
from speculon.bench.workloads import Case, Size
from speculon.errors import InvalidParameter

if TYPE_CHECKING:
    from speculon.llm import LLM


def run(llm: LLM, plan: Plan, advance: Callable[[int], None] = lambda n: None) -> tuple[list[Cell], dict[str, list[Case]]]:
    """All cells, and the cases of each workload. A mode that ran no speculative round in a cell raises `BenchError`.

    With `plan.widen` the target of `llm` is another one from here on, with the same function.
    """
    if max(plan.concurrency) > llm.config.max_num_seqs:
        raise InvalidParameter("concurrency", max(plan.concurrency), f"max_num_seqs is {llm.config.max_num_seqs}")
    check_drafters(llm, plan)
    size = Size(plan.prompts, plan.max_tokens, llm.engine.max_context)
    cases = {name: workloads.build(name, llm.tokenizer, size) for name in plan.workloads}
    if plan.widen:
        from speculon.bench.widen import widen_target
        from speculon.models.fuse import fuse

        widen_target(llm.engine.target, plan.widen)
        if plan.fuse:
            fuse(llm.engine.target, share=False)
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


def check_drafters(llm: LLM, plan: Plan) -> None:
    """Raises before anything is measured where a mode has nothing that could draft."""
    for mode in map(parse_mode, plan.modes):
        method = mode.speculation["method"]
        if reason := llm.engine.proposers.lacking(method):
            raise InvalidParameter("modes", mode.label, f"{reason.value}: {method} needs a checkpoint, given with --draft")


def writer(llm: LLM, plan: Plan) -> Callable[[list[Case], Mode], Measurement]:
    if not plan.with_transformers:
        return lambda cases, mode: measure(llm, cases, mode.speculation)
    from speculon.bench.stock import Stock

    stock = Stock(llm, plan.widen)
    return lambda cases, mode: stock.measure(cases) if mode.label == STOCK else measure(llm, cases, mode.speculation)


def alternate(repeats: int, groups: int, modes: list[Mode]) -> Iterator[tuple[int, int, Mode]]:
    """Every mode beside every other in time; who goes first changes, so that a drift of the machine favours nobody."""
    for repeat in range(repeats):
        for group in range(groups):
            first = (repeat + group) % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                yield repeat, group, mode
