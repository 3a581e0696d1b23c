"""Predicts, measures the best predictions live, and decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculon.advise.advice import MAX_CANDIDATES, Advice
from speculon.advise.maths import Cascade, best, bootstrap_fits
from speculon.advise.measure import RUNS, Advance, ks_to_time, record_drafts, request_at, time_rounds
from speculon.advise.plan import LOOKUP_METHODS, AdvisePlan
from speculon.advise.prompts import Split
from speculon.advise.trial import Candidate, run_trial, trial_measurements
from speculon.errors import InvalidParameter
from speculon.proposers.registry import AUTO, LOOKUPS, OFF

if TYPE_CHECKING:
    from speculon.llm import LLM

BATCH = 8  # sequences of a batch while drafts are recorded


def advise(llm: LLM, split: Split, plan: AdvisePlan, advance: Advance = lambda n: None) -> Advice:
    """Writes no file. Raises what the engine raises."""
    if max(plan.batches) > llm.config.max_num_seqs:
        raise InvalidParameter("concurrency", max(plan.batches), f"max_num_seqs is {llm.config.max_num_seqs}")
    cascades, lacking = cascades_of(llm, plan)
    methods = tuple(dict.fromkeys(method for cascade in cascades for method in cascade.methods))
    for case in (*split.measured, *split.held_out):  # refused before anything is measured
        llm.engine.admission.admit(case.name, case.prompt, case.params, request_at(methods[0], plan.k))
    batch = min(BATCH, llm.config.max_num_seqs)
    recorded = record_drafts(llm, split.measured, methods, plan.k, batch, advance)
    recorded = [one for one in recorded if one.trace.drafts]
    if not recorded:
        reason = "none of these texts has a second token that could be drafted"
        raise InvalidParameter("prompt", len(split.measured), reason)
    timed = time_rounds(llm, split.measured, methods, ks_to_time(plan.k), plan.batches, advance)
    base, fits = llm.config.speculation, bootstrap_fits(timed)
    advice = Advice(plan, cascades, lacking, timed, fits, recorded, split.groups, base)
    if plan.repeats:
        measure_live(llm, advice, split, advance)
    return advice


def cascades_of(llm: LLM, plan: AdvisePlan) -> tuple[list[Cascade], dict[str, str]]:
    """Each method alone, and `auto` where it has several; then why other methods cannot draft here."""
    proposers = llm.engine.proposers
    names = dict.fromkeys([*LOOKUP_METHODS, *LOOKUPS, *llm.config.speculation.drafts, plan.method, AUTO])
    names.pop(OFF, None)
    cascades: list[Cascade] = []
    lacking = {}
    for name in names:
        if reason := proposers.lacking(name):
            lacking[name] = reason.value
            continue
        methods = proposers.methods_of((), name)
        if methods not in [cascade.methods for cascade in cascades]:
            cascades.append(Cascade(name, methods))
    return cascades, lacking


def measure_live(llm: LLM, advice: Advice, split: Split, advance: Advance) -> None:
    """The candidates at the concurrency of the plan; where one pays, at higher concurrency too.

    A fixed K is measured at the highest concurrency at which it should pay, a policy at each.
    """
    plan = advice.plan
    cases = split.held_out
    if not advice.rests_on_loops:
        first = advice.cascades[0].methods[0]
        plain = record_drafts(llm, cases, [first], 1, plan.at_once, lambda n: None)
        cases = [one.case for one in plain if not one.loops]
    held_out = bool(cases)
    cases = cases or [one.case for one in advice.basis]

    def measure(batch: int, candidates: Sequence[Candidate]) -> None:
        advice.trials.append(run_trial(llm, batch, candidates, cases, held_out, plan.repeats, advance))

    measure(plan.at_once, advice.candidates)
    chosen, highest = advice.chosen, advice.up_to or 0
    for batch in plan.batches:
        if plan.at_once < batch and (batch == highest or (highest and not chosen.k)):
            other = best(advice.at(batch))
            candidates = [chosen, advice.by_policy, Candidate(other.cascade, other.k)]
            measure(batch, list(dict.fromkeys(candidates)))


def count_measurements(split: Split, plan: AdvisePlan) -> int:
    """How many there will be, at most."""
    cases = len(split.held_out) or len(split.measured)
    live = trial_measurements(cases, plan.at_once, MAX_CANDIDATES, plan.repeats)
    higher = [batch for batch in plan.batches if batch > plan.at_once]
    live += sum(trial_measurements(cases, batch, 3, plan.repeats) for batch in higher)
    return -(-len(split.measured) // BATCH) + len(plan.batches) * (RUNS + 1) + live
