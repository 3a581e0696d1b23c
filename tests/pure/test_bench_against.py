"""Policies against the best fixed mode, and why a mode did not help: figures that are known, and planted
errors.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from math import log
from pathlib import Path
from statistics import fmean, stdev

import pytest

from speculon.core.telemetry import PARTS, RequestStats
from speculon.core.types import Reason
from speculon.measure.bench import against, report
from speculon.measure.bench.against import Against, MeanRatio, against_best_fixed, estimate, fastest_fixed
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.diagnosis import GATES, diagnose, gated
from speculon.measure.bench.plan import AGAIN
from speculon.measure.bench.report import Report
from tests.pure.cells import make_cell

PLAIN = [100.0] * 4


def cells_of(workload: str = "code", **speeds: list[float]) -> list[Cell]:
    """The modes of one cell by their speeds per group, in one repeat; `auto` is the one whose policy is not
    fixed.
    """
    every = {"off": PLAIN, **speeds, AGAIN: speeds.get("again", PLAIN)}
    every.pop("again", None)
    return [
        make_cell(mode, workload=workload, policy="auto" if mode == "auto" else "fixed", speeds=[values])
        for mode, values in every.items()
    ]


def one(cells: list[Cell]) -> Against:
    found, whole = against_best_fixed(cells)
    assert (whole.workload, whole.concurrency, whole.picked) == ("all", None, ())
    assert whole.over_best.ratio == pytest.approx(found.over_best.ratio)
    return found


def test_the_best_fixed_mode_is_picked_on_one_half_and_compared_on_the_other() -> None:
    """`early` is fast in the first half alone, `late` in the second: what is picked on one half is slow on
    the other.
    """
    found = one(cells_of(early=[400, 400, 100, 100], late=[100, 100, 300, 300], auto=[200, 200, 200, 200]))
    assert found.picked == ("early", "late")
    assert found.over_best.ratio == pytest.approx(2) and found.over_plain.ratio == pytest.approx(2)


def fastest_on_the_same_half(fixed: list[Cell], plain: Cell, half: int) -> Cell:
    return fastest_fixed(fixed, plain, 1 - half)


def test_a_planted_choice_on_the_same_half_gives_another_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of(early=[400, 400, 100, 100], late=[100, 100, 400, 400], auto=[200, 200, 200, 200])
    honest = one(cells).over_best
    monkeypatch.setattr(against, "fastest_fixed", fastest_on_the_same_half)
    assert (honest.ratio, one(cells).over_best.ratio) == (pytest.approx(2), pytest.approx(0.5))


def test_plain_decoding_is_a_fixed_mode_and_the_control_is_none() -> None:
    found = one(cells_of(slow=[50] * 4, again=[900] * 4, auto=[90] * 4))
    assert found.picked == ("off", "off") and found.over_best.ratio == pytest.approx(0.9)
    assert found.again.ratio == pytest.approx(9)


def test_pairs_are_those_of_a_group_and_a_repeat() -> None:
    """A group that is twice as long, and a repeat on a machine twice as slow, say nothing of a mode."""
    cells = cells_of(fast=[], auto=[])
    weight = [[100.0, 200.0, 100.0, 50.0], [50.0, 100.0, 50.0, 25.0]]
    for cell, factor in zip(cells, (1, 2, 1.8, 1), strict=True):
        cell.speeds = [[factor * speed for speed in groups] for groups in weight]
    found = one(cells)
    assert found.over_best == MeanRatio(
        *[pytest.approx(0.9)] * 3
    ) and found.over_plain.ratio == pytest.approx(1.8)


def test_the_interval_is_that_of_the_bootstrap() -> None:
    """Against the normal one for many groups; its width is 2 * 1.645 standard errors."""
    rng = random.Random(1)
    logs = {i: rng.gauss(0.1, 0.2) for i in range(200)}
    found = estimate([logs])
    assert found.low is not None and found.high is not None and found.low < found.ratio < found.high
    assert found.high / found.low == pytest.approx(2.718281828 ** (2 * 1.645 * 0.2 / 200**0.5), abs=0.005)
    assert found == estimate([logs])  # the same draws on every run


def test_few_groups_are_not_surer_than_they_are() -> None:
    """Six groups: as wide as by their standard deviation; drawing six of them would make it 0.91 of that."""
    rng, widths = random.Random(2), []
    for _ in range(60):
        logs = {i: rng.gauss(0, 0.1) for i in range(6)}
        found = estimate([logs])
        assert found.low is not None and found.high is not None
        widths.append(log(found.high / found.low) / (2 * 1.645 * stdev(logs.values()) / 6**0.5))
    assert fmean(widths) == pytest.approx(1, abs=0.04)


def test_all_cells_weigh_the_same() -> None:
    cells = cells_of("code", fast=[200] * 4, auto=[400] * 4) + cells_of(
        "prose", fast=[200] * 4, auto=[50] * 4
    )
    # 2 where lookups pay; 0.5 where the best fixed mode, plain or fast, is fast
    *_, whole = against_best_fixed(cells)
    assert whole.over_best.ratio == pytest.approx(
        (2 * 0.25) ** 0.5
    ) and whole.over_plain.ratio == pytest.approx(2**0.5)


def test_a_single_group_has_no_other_half_and_fixed_modes_alone_no_table() -> None:
    cells = cells_of(fast=[200], auto=[300])
    for cell in cells:
        cell.speeds = [cell.speeds[0][:1]]
    assert against_best_fixed(cells) == []
    assert against_best_fixed(cells_of(fast=[200] * 4)) == []


def test_a_bound_needs_two_groups_in_each_cell() -> None:
    assert estimate([{0: 0.1, 1: 0.2}, {0: 0.1}]).low is None
    assert estimate([{0: 0.1, 1: 0.2}, {0: 0.1, 1: 0.3}]).low is not None


def test_what_wrote_nothing_is_left_out() -> None:
    cells = cells_of(fast=[200] * 4, auto=[0, 100, 100, 100])
    assert one(cells).over_best.ratio == pytest.approx(0.5)
    assert against_best_fixed(cells_of(fast=[200] * 4, auto=[0] * 4)) == []


@pytest.mark.parametrize(
    ("auto", "verdict"),
    [
        pytest.param(
            [180, 181, 182, 183], "slower", id="slower than the best fixed mode, though faster than plain"
        ),
        pytest.param([220, 221, 222, 223], "faster", id="faster"),
        pytest.param([180, 220, 181, 221], "undecided", id="now this, now that"),
    ],
)
def test_the_report_says_who_is_slower(auto: list[float], verdict: str, tmp_path: Path) -> None:
    cells = cells_of(fast=[200] * 4, auto=auto)
    facts = {
        "name": "x",
        "parameters": 1,
        "layers": 1,
        "dtype": "float32",
        "threads": 1,
        "drafts": {},
    }
    made = Report(
        "speculon bench",
        {"repeats": 1, "workloads": ["code"], "prompts": 4, "max_tokens": 8},
        facts,
        {},
        cells,
        against_best_fixed(cells),
    )
    report.write(made, tmp_path)
    lines = (tmp_path / "bench.md").read_text().splitlines()
    for start in ("| code | 1 | auto | fast |", "| all | - | auto | - |"):
        (row,) = (line for line in lines if line.startswith(start))
        assert f"| {verdict} |" in row
    saved = json.loads((tmp_path / "bench.json").read_text())["against_best_fixed"]
    assert [each["picked"] for each in saved] == [["fast", "fast"], []]
    assert saved[0]["over_best"]["ratio"] == pytest.approx(sum(auto) / 800, rel=0.02)


# diagnosis

NOISE = (0.97, 1.03)


def part(propose: float, forward: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | {"propose": propose, "forward": forward}


def stats(rounds: int, k: int, accepted: float, **reasons: int) -> RequestStats:
    """`accepted` drafts of K in a round, and for each count of a reason a call without any."""
    calls = rounds + sum(reasons.values())
    return RequestStats(
        rounds=rounds,
        accepted=int(rounds * accepted),
        target_calls=calls,
        emitted=int(calls + rounds * accepted),
        drafted_at=Counter(dict.fromkeys(range(k), rounds)),
        reasons=Counter(reasons),
    )


PLAIN_STEP = part(0, 5)


@pytest.mark.parametrize(
    ("found", "step", "ratio", "expected"),
    [
        pytest.param(stats(100, 4, 2), part(1, 6), 1.5, "pays", id="faster"),
        pytest.param(stats(2, 4, 0, no_match=98), part(0.1, 5), 1.0, "no proposals", id="nothing to look up"),
        pytest.param(
            stats(0, 4, 0, no_match=98), part(0.1, 5.4), 0.9, "no proposals", id="not once, on a slow machine"
        ),
        pytest.param(
            stats(2, 4, 0, cost=90, no_match=8), part(0.1, 5), 1.0, "gated: cost", id="the policy saw no gain"
        ),
        pytest.param(
            stats(0, 4, 0, load=98), part(0, 5), 0.99, "gated: load", id="memory is reserved for others"
        ),
        pytest.param(
            stats(40, 4, 0.3, no_match=60),
            part(0.1, 6.5),
            0.8,
            "low acceptance",
            id="few drafts, and wrong ones",
        ),
        pytest.param(
            stats(100, 4, 3.8), part(20, 6), 0.9, "draft cost", id="right, but as dear as the target"
        ),
        pytest.param(
            stats(100, 4, 3.8), part(0.1, 26), 0.9, "verify cost", id="right, but the rows are dear"
        ),
        pytest.param(
            stats(100, 4, 2, max_tokens=1),
            part(1, 6),
            1.01,
            "even",
            id="faster decoding, drowned in the noise",
        ),
        pytest.param(stats(100, 4, 2), part(1, 6), 0.8, "unclear", id="faster decoding, slower all the same"),
        pytest.param(
            stats(40, 4, 2, no_match=60), part(0.1, 5.1), 0.99, "no proposals", id="too few to be seen"
        ),
    ],
)
def test_the_diagnosis_names_what_was_measured(
    found: RequestStats, step: dict[str, float], ratio: float, expected: str
) -> None:
    assert diagnose(found, step, PLAIN_STEP, ratio, NOISE) == expected


def test_the_noise_decides_what_pays() -> None:
    assert diagnose(stats(100, 4, 2), part(1, 6), PLAIN_STEP, 1.04, (0.97, 1.03)) == "pays"
    assert diagnose(stats(100, 4, 2), part(1, 6), PLAIN_STEP, 1.04, (0.95, 1.05)) == "even"


def test_a_policy_may_decide_against_all_drafts_and_a_drafter_may_not_have_none() -> None:
    for reason in Reason:
        assert gated(RequestStats(reasons=Counter({reason.value: 3, "max_tokens": 1}))) is (reason in GATES)
