"""A benchmark's tables, and their width: a terminal of 80 columns cuts nothing off."""

from __future__ import annotations

import pytest
from rich.table import Table

from speculon.core.telemetry import PARTS
from speculon.measure.bench.against import Against, MeanRatio
from speculon.measure.bench.plan import AGAIN, MODES
from speculon.measure.bench.report import (
    ALL_FIGURES,
    against_table,
    by_cell,
    difference,
    gates,
    profile_markdown,
    prompts_of,
    speed_table,
    verdict,
)
from speculon.measure.bench.tables import Column, markdown, terminal
from tests.pure.cells import make_cell
from tests.pure.screens import READABLE, colours, cut_off, on_screen

LONG = "draft_model:16/adaptive/rejection"


# figures


def test_a_difference_is_explained() -> None:
    assert difference(make_cell()) is None
    assert difference(make_cell(different=1, tie_nats=[2e-6])) == (
        "ngram:4: 1 of 16 texts differ from those of off; where greedy texts differ, the two tokens are at "
        "most 2e-06 nat apart, a near-tie"
    )
    line = difference(make_cell("draft_model:4/rejection", different=5, rejection=True))
    assert line and line.endswith(
        "5 of 16 texts differ from those of off, as its rule of acceptance allows: the distribution is the "
        "same"
    )


def test_where_a_steps_time_goes_is_shown_in_shares_that_add_up() -> None:
    cells = [make_cell("off"), make_cell(), make_cell(AGAIN, profile={})]
    head, _, *rows = profile_markdown(cells).splitlines()
    assert len(rows) == 2 and all(part in head for part in PARTS)
    assert "| code | 1 | ngram:4 | 10.00 | 1.0% | 0.0% | 12.0% | 83.0% | 3.0% | 0.0% | 1.0% |" in rows


def test_the_markdown_table_has_a_row_per_cell_and_no_ragged_one() -> None:
    lacking = make_cell(
        ratio=0.99,
        ratio_without_loops=None,
        texts_without_loops=0,
        per_position=[],
        sources={},
        different=1,
    )
    cells = [make_cell("off"), make_cell(), lacking]
    lines = markdown(ALL_FIGURES, cells).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2.00 | 1.80 (6) | 2.50 | 6.0 (3) 7.0 (5) | 5.0% | all | - | 25% | pays |" in lines[3]
    assert lines[3].endswith("| 80 50 % | ngram 100% |")
    assert "| 25% | - |" in lines[2]
    assert "| 0.99 | - | 2.50 |" in lines[4] and "| 15/16 |" in lines[4] and lines[4].endswith("| - | - |")


# sentences


def against(mode: str, ratio: float, spread: float | None, **more: object) -> Against:
    bounds = () if spread is None else (ratio - spread, ratio + spread)
    one = MeanRatio(ratio, *bounds)
    place = {"workload": "all", "concurrency": None, **more}
    return Against(**place, mode=mode, picked=(), over_best=one, over_plain=one, again=MeanRatio(1.0))


def test_the_result_is_a_sentence() -> None:
    cells = [
        make_cell(mode, workload=workload, ratio=ratio)
        for workload in ("code", "prose")
        for mode, ratio in (("off", 1.0), ("ngram:4", 2.0), ("auto", 4.5), (AGAIN, 1.02))
    ]
    assert verdict(cells, []) == (
        "Fastest mode: auto, 4.50x plain decoding (plain decoding against itself: 1.02x)."
    )
    with_policies = verdict(cells, [against("auto", 1.5, 0.1), against("auto/solo", 0.9, None)])
    assert with_policies.endswith(
        "auto compared with the best fixed mode: 1.50x, 90 % 1.40-1.60: faster. auto/solo compared with "
        "the best fixed "
        "mode: 0.90x."
    )


def test_the_mean_over_cells_is_geometric() -> None:
    cells = [
        make_cell(mode, workload=workload, ratio=ratio)
        for workload, ratios in (
            ("code", {"off": 1, "a": 4.0, "b": 2.1, AGAIN: 1}),
            ("prose", {"off": 1, "a": 1.0, "b": 2.1, AGAIN: 1}),
        )
        for mode, ratio in ratios.items()
    ]
    assert verdict(cells, []).startswith("Fastest mode: b, 2.10x")


@pytest.mark.parametrize("ratio", [0.9, 1.02])
def test_a_mode_that_is_not_faster_than_the_noise_is_not_called_fast(ratio: float) -> None:
    cells = [make_cell("off", ratio=1.0), make_cell(ratio=ratio), make_cell(AGAIN, ratio=1.03)]
    assert verdict(cells, []) == (
        f"No mode was faster than plain decoding. The best of them, ngram:4, reached {ratio:.2f}x "
        "(plain decoding against itself: 1.03x)."
    )
    assert verdict([cells[0], cells[2]], []).startswith("No mode was faster than plain decoding. (plain")


def test_a_reason_is_explained_below_the_table() -> None:
    cells = [make_cell(diagnosis=diagnosis) for diagnosis in (None, "pays", "gated: cost", "gated: cost")]
    assert gates(cells[:2]) == ""
    assert gates(cells) == "; gated: cost: drafts would have cost more time than they save"


# the terminal


def worst_cells() -> list[list]:
    """The usual modes and a long one, with figures as wide as they get."""
    wide = {"tokens_per_second": 123456.0, "ratio": 12.34, "tokens_per_target_call": 16.99, "texts": 128}
    cells = [
        make_cell(
            mode, workload=workload, concurrency=64, different=100, diagnosis="gated: low_acceptance", **wide
        )
        for workload in ("prose@0.75", "mixed")
        for mode in ("off", *MODES, LONG, AGAIN)
    ]
    return by_cell(cells)


def wide_against() -> list[Against]:
    rows = [against(mode, 1.234, 0.111, workload="prose@0.75", concurrency=64) for mode in (LONG, "auto")]
    return [*rows, against("auto/adaptive", 0.987, None)]


@pytest.mark.parametrize("width", [80, 200])
def test_no_table_is_cut_off(width: int) -> None:
    tables = [*map(speed_table, worst_cells()), against_table(wide_against())]
    assert len(tables) == 3 and cut_off(tables, width) == []
    text = on_screen(tables, width)
    assert "prose@0.75, concurrency 64" in text and "156/256" in text and "low_acceptance" in text
    assert "1.12-1.34" in text and "undecided" in text


def test_a_planted_table_that_is_too_wide_is_found() -> None:
    table = Table(*("a column of figures",) * 10)
    for column in table.columns:
        column.no_wrap = True
    table.add_row(*["1234567"] * 10)
    assert cut_off([table], 80) == [0] and cut_off([table], 250) == []


def test_colours_are_readable_on_dark_and_on_light() -> None:
    assert 1 < len(colours([*map(speed_table, worst_cells()), against_table(wide_against())]) & READABLE)
    assert colours([*map(speed_table, worst_cells()), against_table(wide_against())]) <= READABLE
    planted = terminal("title", [Column("a", str)], [1], lambda row: "yellow")
    assert 33 in colours([planted]) - READABLE


@pytest.mark.parametrize(
    ("prompts", "workloads", "known", "shown"),
    [
        (32, ["data:qa"], {"data:qa": 2}, "2 prompts"),
        (32, ["data:qa@0.8"], {"data:qa": 1}, "1 prompt"),
        (8, ["data:qa", "data:math", "code"], {"data:qa": 2, "data:math": 99}, "2 to 8 prompts"),
        (32, ["code"], None, "32 prompts"),
    ],
)
def test_a_page_says_how_many_prompts_there_were(
    prompts: int, workloads: list[str], known: dict[str, int] | None, shown: str
) -> None:
    """Not how many were asked for."""
    plan = {"prompts": prompts, "workloads": workloads, "data": known and {"prompts": known}}
    assert prompts_of(plan) == shown
