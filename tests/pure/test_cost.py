"""The cost model: what steps and proposals took is what it says they take, at each batch size."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from speculon.core.types import CallCost, Draft, Timing
from speculon.decoding.rounds import Judged
from speculon.speculation.control import cost as module
from speculon.speculation.control.cost import MAX_SIZES, STEP, Costs
from tests.builders import judged_of, make_sequence

READ = 0.022  # ms of a token that a draft model has not read


def step_ms(sequences: int, drafting: int, rows: int) -> float:
    return 4.0 + 0.55 * sequences + 0.4 * drafting + 0.2 * rows


def call_ms(sequences: int, k: int) -> float:
    return 0.2 + (1.0 + 0.22 * sequences) * k


def measured(count: int = 800, noise: float = 0.05, slow: float = 0.05) -> Costs:
    random, costs = Random(2), Costs()
    for _ in range(count):
        sequences, k = random.choice([1, 2, 4, 8]), random.choice([0, 0, 1, 2, 4, 8])
        ms = step_ms(sequences, sequences if k else 0, k * sequences)
        ms *= random.gauss(1, noise) * (8 if random.random() < slow else 1)
        costs.observe_step(sequences, sequences if k else 0, k * sequences, ms)
        if k:
            unread = random.choice([0, 0, 0, 300, 900])
            ms = call_ms(sequences, k) + READ * unread
            costs.observe_proposal("model", CallCost(sequences, k, ms * random.gauss(1, noise), unread))
    return costs


SIZES = [(1, 0, 0), (1, 1, 4), (8, 0, 0), (8, 8, 16), (4, 4, 8)]


def test_steps_and_proposals_take_what_was_measured_also_in_the_next_process() -> None:
    costs, restored = measured(), Costs()
    for size in SIZES:
        assert costs.step(*size) == pytest.approx(step_ms(*size), rel=0.1)
    for sequences, k in ((1, 2), (8, 4), (4, 8)):
        assert costs.proposal("model", sequences, k) == pytest.approx(call_ms(sequences, k), rel=0.15)
        added = costs.proposal("model", sequences, k, 1000) - costs.proposal("model", sequences, k)
        assert added == pytest.approx(1000 * READ, rel=0.15)
    restored.restore(json.loads(json.dumps(costs.state())))
    for size in SIZES:
        assert restored.step(*size) == pytest.approx(costs.step(*size), rel=0.1)
    assert restored.proposal("model", 4, 4) == pytest.approx(costs.proposal("model", 4, 4))
    assert restored.plain(1) == pytest.approx(costs.plain(1), rel=0.1)
    assert restored.calls("model") == costs.calls("model")


def told(steps: float, calls: float) -> dict[str, Any]:
    """What a process tells that has measured so many times as much as steps and calls take."""
    scales = {"": steps, "model": calls}
    return {
        name: (tuple(scales[name] * part for part in state.parts), state.measured, state.factors)
        for name, state in measured().state().items()
    }


def error(costs: Costs) -> float:
    pairs = [(costs.step(*size), step_ms(*size)) for size in SIZES]
    pairs += [(costs.proposal("model", n, k), call_ms(n, k)) for n, k in ((1, 2), (8, 4))]
    return max(max(said / true, true / said) for said, true in pairs)


WRONG = [(1e-6, 1e-6), (1, 0.02), (0.2, 1), (1, 5), (5, 1), (3, 3), (1e5, 1e5)]


@pytest.mark.parametrize(("steps", "calls"), WRONG)
def test_what_an_earlier_process_told_wrong_is_soon_forgotten(steps: float, calls: float) -> None:
    """It measured beside other load, or its file has absurd numbers."""
    costs, random = Costs(), Random(4)
    costs.restore(told(steps, calls))
    assert error(costs) > 2.5
    for number in range(36):
        sequences, drafting, rows = SIZES[number % len(SIZES)]
        ms = step_ms(sequences, drafting, rows) * random.gauss(1, 0.05)
        costs.observe_step(sequences, drafting, rows, ms)
        if rows:
            k = rows // sequences
            costs.observe_proposal("model", CallCost(sequences, k, call_ms(sequences, k), 0))
    assert error(costs) < 1.35


def test_wrong_costs_would_stay_if_all_measurements_were_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(module, "CONTRADICTIONS", 0)
    costs = Costs()
    costs.restore(told(1, 0.02))
    for _ in range(36):
        costs.observe_proposal("model", CallCost(1, 2, call_ms(1, 2)))
    assert costs.proposal("model", 1, 2) < 0.5 * call_ms(1, 2)


def test_a_slow_first_round_does_not_unsettle_what_an_earlier_process_told() -> None:
    costs = Costs()
    costs.restore(told(1, 1))
    costs.observe_step(1, 0, 0, 20 * step_ms(1, 0, 0))  # kernels that run for the first time
    costs.observe_step(1, 0, 0, step_ms(1, 0, 0))
    for _ in range(2):
        costs.observe_step(1, 0, 0, 20 * step_ms(1, 0, 0))
    assert error(costs) < 1.3


def test_the_first_step_of_a_batch_size_is_believed_and_later_ones_like_it_are_outliers() -> None:
    """Where rows cost much more than one sequence taught, a round or two must show it, not sixteen."""
    costs = Costs()
    for _ in range(50):
        costs.observe_step(1, 0, 0, 8.0)
    before = costs.step(8, 8, 32)
    costs.observe_step(8, 8, 32, 4 * before)
    assert costs.step(8, 8, 32) == pytest.approx(4 * before, rel=0.25)
    for _ in range(20):
        costs.observe_step(8, 8, 32, 4 * before)
    costs.observe_step(8, 8, 32, 16 * before)
    assert costs.step(8, 8, 32) == pytest.approx(4 * before, rel=0.15)


def test_unreported_reading_would_be_seen() -> None:
    """The twin: proposals that read and do not report it raise the cost of all."""
    informed, blind = Costs(), Costs()
    for number in range(400):
        unread = 100 * (number % 2)
        ms = call_ms(1, 2) + READ * unread
        informed.observe_proposal("model", CallCost(1, 2, ms, unread))
        blind.observe_proposal("model", CallCost(1, 2, ms))
    assert informed.proposal("model", 1, 2) == pytest.approx(call_ms(1, 2), rel=0.1)
    assert blind.proposal("model", 1, 2) > 1.2 * call_ms(1, 2)


def test_more_rows_never_cost_less_and_no_step_is_free() -> None:
    costs = Costs()
    random = Random(1)
    for _ in range(300):  # the more rows the faster, which no sum of positive parts can say
        rows = random.randrange(8)
        costs.observe_step(1, int(rows > 0), rows, 9.0 - rows)
    assert all(costs.step(1, 1, rows) <= costs.step(1, 1, rows + 1) for rows in range(1, 64))
    assert costs.step(1) > 0 and min(costs.rows(1, 0, 1, 64)) >= 0 and min(costs.first(1)) >= 0


def test_a_batch_size_that_departs_from_the_sum_is_known_by_itself() -> None:
    costs = measured()
    for _ in range(60):
        costs.observe_step(4, 0, 0, 2 * step_ms(4, 0, 0))
        costs.observe_step(8, 0, 0, step_ms(8, 0, 0))
    assert costs.step(4) > 1.6 * step_ms(4, 0, 0) and costs.step(8) == pytest.approx(
        step_ms(8, 0, 0), rel=0.1
    )


@pytest.mark.parametrize(
    ("seen", "rows", "known"), [(4, 4, True), (4, 8, True), (4, 2, True), (4, 9, False), (1, 8, False)]
)
def test_plain_steps_of_about_a_size_are_known_or_not(seen: int, rows: int, known: bool) -> None:
    costs = Costs()
    costs.observe_step(rows, rows, 4, 50.0)  # one that drafts says nothing about plain ones
    assert costs.plain(rows) is None
    costs.observe_step(seen, 0, 0, step_ms(seen, 0, 0))
    assert (costs.plain(rows) is not None) is known


def bent_ms(sequences: int, rows: int, bend: int, context: float = 0.0) -> float:
    """Rows are free up to a bend, as where reading weights takes longer than the products of a few rows."""
    return 21.0 + 0.3 * sequences + 0.8 * max(0, sequences + rows - bend) + 5.0 * sequences * context


def bent(bend: int, context: float = 0.0) -> Costs:
    """Costs after rounds of a machine with a bend."""
    random, costs = Random(3), Costs()
    for _ in range(400):
        sequences, k = random.choice([1, 2, 4, 8]), random.choice([0, 1, 2, 4, 8])
        of_now = context * random.random()
        costs.observe(judged(sequences, k, of_now), Timing(bent_ms(sequences, k * sequences, bend, of_now)))
    return costs


def judged(sequences: int, k: int, context: float = 0.0) -> list[Judged]:
    """Of so many thousand tokens each."""
    seq = make_sequence([1] * max(1, round(1000 * context)))
    return [judged_of(seq, Draft((1,) * k, ("model",) * k))] * sequences


@pytest.mark.parametrize(("bend", "cheap"), [(8, 6), (32, 12)])
def test_the_number_of_rows_from_which_on_they_cost_is_found(bend: int, cheap: int) -> None:
    costs = bent(bend)
    alone, eight = costs.rows(1, 0, 1, 16), costs.rows(8, 0, 8, 8)
    assert max(alone[:cheap]) < 0.15, "up to the bend they cost next to nothing"
    first = 0 if bend == 8 else 3
    assert min(eight[first:]) > 0.65 and sum(eight[:first]) < 0.5
    assert costs.rows(8, 32, 1, 1) == pytest.approx([0.8], rel=0.15), "beside the drafts of others"


def test_a_bend_that_is_not_there_is_not_found() -> None:
    """Where each row costs the same, so do the 1st and the last, alone and in a batch."""
    costs = measured()
    prices = [ms for sequences in (1, 8) for ms in costs.rows(sequences, 0, sequences, 8)]
    assert prices == pytest.approx([0.2] * 16, rel=0.3)


def test_a_bend_in_the_wrong_place_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BENDS", (64, 128))
    costs = bent(8)
    assert max(costs.rows(1, 0, 1, 6)) > 0.3, "rows that are free seem to cost"
    assert not costs.step(8, 8, 8) == pytest.approx(bent_ms(8, 8, 8), rel=0.02)


def test_a_long_context_is_known_from_the_first_round_of_other_lengths() -> None:
    """Not only after as many rounds as a moving average takes."""
    costs = bent(8, context=0.1)
    for length in (0.2, 0.75):
        costs.observe(judged(8, 0, length), Timing(bent_ms(8, 0, 8, length)))
    assert costs.step(8) == pytest.approx(bent_ms(8, 0, 8, 0.75), rel=0.1)
    # a prompt beside: nothing is fitted, and the length is known
    costs.observe(judged(1, 0, 0.75), Timing(None))
    assert costs.step(1) == pytest.approx(bent_ms(1, 0, 8, 0.75), rel=0.1)
    costs.observe(judged(8, 0, 0.05), Timing(None))
    assert costs.step(8) == pytest.approx(bent_ms(8, 0, 8, 0.05), rel=0.15)


@pytest.mark.parametrize("count", [0, 32, 33, 256])
def test_the_curve_that_is_shown_has_some_of_many_sizes(count: int) -> None:
    costs = Costs()
    for rows in range(1, count + 1):
        costs.observe_step(rows, 0, 0, step_ms(rows, 0, 0))
    found = costs.plain_steps()
    assert min(count, MAX_SIZES // 2) <= len(found) <= MAX_SIZES
    assert list(found) == sorted(found) and (not count or max(found) == count)


def test_nothing_is_known_before_the_first_measurement() -> None:
    costs = Costs()
    assert (
        not costs.known
        and costs.plain(1) is None
        and costs.proposal("model", 1, 4) == 0.0
        and costs.calls("model") == 0
    )
    with pytest.raises(ValueError):
        costs.step(1)
    costs.observe_step(1, 0, 0, 0.0)  # a clock too coarse
    assert not costs.known


def test_a_round_is_observed_as_its_drafts_and_timing_tell() -> None:
    costs, draft = Costs(), Draft((5, 6), ("model",) * 2)
    plain_and_drafted = [judged_of(make_sequence([1, 2])), judged_of(make_sequence([3]), draft)]
    costs.observe(plain_and_drafted, Timing(None, {"model": CallCost(1, 2, 3.0)}))
    assert not costs.known and costs.calls("model") == 1, "a step that also computed a prompt tells nothing"
    costs.observe(plain_and_drafted, Timing(7.0))
    assert costs.step(2, 1, 2) == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize(
    "state",
    [
        {"": [1.0] * len(STEP)},  # of older shapes
        {"": ([1.0] * 9, 3, [])},
        {"": ([1.0] * 4, 3, [])},
        {"": (["x"] * len(STEP), 3, [])},
        {"": ([float("inf")] * len(STEP), 3, [])},
        {"": ([1.0] * len(STEP), -1, [])},
        {"": ([1.0] * len(STEP), 3, [(1, True, 0.0)])},
        {"": ([1.0] * len(STEP), 3, [(1, 1.0)])},
        {"": ([1.0] * len(STEP), 3, []), "model": ([1.0] * 5, 3, [])},
        [1],
        None,
    ],
)
def test_what_no_cost_model_told_is_refused(state: object) -> None:
    costs = Costs()
    with pytest.raises(ValueError):
        costs.restore(state)
    assert not costs.known, "and nothing of it is believed"


def first_of_mixed_steps(planted: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Costs of the first draft, of a step and of a sequence, where some of eight have drafts."""
    if planted:
        features = Costs._features
        monkeypatch.setattr(Costs, "_features", lambda *args: (*(x := features(*args))[:2], 0.0, *x[3:]))
    costs, random = Costs(), Random(2)
    for _ in range(600):
        drafting = random.choice([0, 0, 1, 2, 4, 8])
        rows = drafting * random.choice([1, 2, 4])
        costs.observe_step(8, drafting, rows, 20.0 + 3.0 * (drafting > 0) + 0.5 * drafting + 1.0 * rows)
    return costs.first(8)


@pytest.mark.parametrize("planted", [False, True])
def test_what_drafts_cost_a_step_is_told_from_what_they_cost_a_sequence(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, each = first_of_mixed_steps(planted, monkeypatch)
    assert (1.5 < once < 4.0 and each < 1.0) is not planted, (once, each)
