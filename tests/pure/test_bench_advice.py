"""The advice of a benchmark: which mode it picks from figures that are known, and what it says of them."""

from __future__ import annotations

import random

import pytest

from speculon.core.errors import BenchError
from speculon.measure.bench.advice import answer, chosen, fastest, speeds_of, warnings
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.plan import AGAIN, VARIANT
from tests.pure.cells import make_cell

PLAIN = [100.0] * 4


def cells_of(concurrency: int = 1, workload: str = "code", **speeds: list[float]) -> list[Cell]:
    """The modes of one cell by their speeds per group, in one repeat."""
    every = {"off": PLAIN, **speeds, AGAIN: PLAIN}
    return [
        make_cell(mode, workload=workload, concurrency=concurrency, speeds=[values], looping=0.0)
        for mode, values in every.items()
    ]


def test_the_fastest_mode_is_picked_at_each_concurrency() -> None:
    one = cells_of(1, ngram=[150, 160, 170, 180], auto=[200, 210, 190, 200])
    speeds = speeds_of([*one, *cells_of(4, ngram=[130, 120, 140, 130], auto=[90, 80, 90, 80])])
    assert [fastest(speeds, count) for count in (1, 4)] == ["auto", "ngram"] and chosen(speeds) == "auto"
    assert list(answer(speeds)) == [
        "Yes: use auto, measured 2.00x (1.93 to 2.07) over plain decoding at concurrency 1.",
        "At concurrency 4: auto 0.85x (0.80 to 0.90); ngram 1.30x (1.23 to 1.37) is faster.",
        "Plain decoding against itself: 1.00x, 1.00x.",
    ]


def test_workloads_have_the_same_weight() -> None:
    """`auto` is four times as fast in one workload, `ngram` twice in both."""
    code = cells_of(1, "code", ngram=[200] * 4, auto=[400] * 4)
    prose = cells_of(1, "prose", ngram=[200] * 4, auto=[50] * 4)
    assert chosen(speeds_of([*code, *prose])) == "ngram" and chosen(speeds_of(code)) == "auto"


@pytest.mark.parametrize(
    ("auto", "says"),
    [
        pytest.param([90, 80, 90, 80], "0.85x (0.80 to 0.90) over plain decoding at", id="slower"),
        pytest.param(
            [50, 200, 90, 150], "The interval includes 1: more prompts may settle it.", id="undecided"
        ),
        pytest.param([300], "There is no interval: more prompts may settle it.", id="one group"),
    ],
)
def test_what_is_not_surely_faster_is_left_off(auto: list[float], says: str) -> None:
    cells = cells_of(1, auto=auto)
    if len(auto) == 1:
        cells = [make_cell(one.mode, speeds=[one.speeds[0][:1]], looping=0.0) for one in cells]
    speeds = speeds_of(cells)
    first = next(answer(speeds))
    assert chosen(speeds) == "off"
    assert first.startswith("No: leave speculation off. The fastest mode is auto") and says in first


def test_a_baseline_is_no_mode_to_advise() -> None:
    cells = [*cells_of(1, auto=[150] * 4), make_cell(VARIANT, speeds=[[900.0] * 4])]
    assert chosen(speeds_of(cells)) == "auto"


def test_texts_that_loop_are_named() -> None:
    assert list(warnings(cells_of(auto=PLAIN))) == []
    looping = [make_cell("off", looping=0.25), make_cell("off", workload="edit", looping=0.75)]
    assert list(warnings(looping)) == ["50% of the texts end repeating themselves, which is easily drafted."]


def test_a_mode_without_tokens_is_not_advised() -> None:
    assert chosen(speeds_of(cells_of(auto=[0.0] * 4, ngram=[150] * 4))) == "ngram"
    with pytest.raises(BenchError, match="every mode that drafts, generated nothing at concurrency 1"):
        speeds_of(cells_of(auto=[0.0] * 4))


def test_a_mode_without_tokens_at_a_higher_concurrency_is_told() -> None:
    one, four = cells_of(1, auto=[150] * 4, ngram=[90] * 4), cells_of(4, auto=[0.0] * 4, ngram=[90] * 4)
    assert "At concurrency 4: auto generated nothing; ngram 0.90x" in " ".join(
        answer(speeds_of([*one, *four]))
    )
    silent = [*cells_of(1, auto=[150] * 4)[:-1], make_cell(AGAIN, speeds=[[0.0] * 4])]
    with pytest.raises(BenchError, match="off, or every mode"):
        speeds_of(silent)


def test_a_mode_that_is_surely_faster_is_advised_before_one_that_may_be() -> None:
    speeds = speeds_of(cells_of(auto=[60, 300, 90, 220], ngram=[124, 126, 128, 127]))
    assert fastest(speeds, 1) == "auto" and chosen(speeds) == "ngram"
    assert next(answer(speeds)).startswith("Yes: use ngram, measured 1.26x")


def test_the_more_modes_the_wider_their_intervals() -> None:
    """Of ten modes that are no faster than plain decoding, few runs in a hundred advise one."""
    chance = random.Random(0)
    modes = [f"ngram:{k}" for k in range(1, 11)]
    advised = 0
    for _ in range(40):
        noise = {mode: [100 * chance.lognormvariate(0, 0.1) for _ in range(8)] for mode in modes}
        every = {"off": [100.0] * 8, **noise, AGAIN: [100.0] * 8}
        speeds = speeds_of([make_cell(mode, speeds=[values]) for mode, values in every.items()])
        advised += chosen(speeds) != "off"
    assert advised <= 6
