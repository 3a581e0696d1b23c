"""What a benchmark computes, without a model: plans, order, tables, loops."""

from __future__ import annotations

import pytest
from rich.console import Console

from speculon.bench.measure import Measurement, Step, loops
from speculon.bench.report import accepted, by_cell, figures, markdown, notes, table
from speculon.bench.run import AGAIN, STOCK, Cell, Mode, Plan, alternate, ms_by_rows, overhead, parse_mode, quartiles
from speculon.errors import InvalidParameter, UnknownMethod


def make_cell(mode: str = "ngram:4", **fields: object) -> Cell:
    defaults: dict[str, object] = {
        "workload": "code",
        "concurrency": 1,
        "mode": mode,
        "texts": 8,
        "tokens": 512,
        "tokens_per_second": 200.0,
        "decode_tokens_per_second": 210.0,
        "ratio": 2.0,
        "ratio_quartiles": (1.5, 2.5),
        "decode_ratio": 2.1,
        "tokens_per_target_call": 2.5,
        "acceptance_rate": 0.5,
        "per_position": [0.8, 0.5],
        "ms_by_rows": {1: (5.0, 10), 3: (6.0, 30), 5: (7.0, 90)},
        "overhead": 0.05,
        "looping": 0.25,
        "exact": None,
        "different": 0,
        "tie_nats": [],
        "reasons": {"no_match": 3},
        "per_repeat": [200.0, 200.0],
    }
    return Cell(**(defaults | fields))  # type: ignore[arg-type]


LOOP = [*range(100), *list(range(20)) * 3]


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        pytest.param([], False, id="nothing"),
        pytest.param(list(range(200)), False, id="no repetition"),
        pytest.param(LOOP, True, id="a period of 20"),
        pytest.param([7] * 17, True, id="the shortest loop there is: 16 twice, one apart"),
        pytest.param([7] * 16, False, id="16 once"),
        pytest.param([*range(16), *range(50, 82), *range(16)], True, id="within 64"),
        pytest.param([*range(16), *range(50, 83), *range(16)], False, id="one token too far apart"),
        pytest.param([*LOOP, *range(200, 264)], False, id="a loop it got out of"),
        pytest.param([*range(100, 115), 0, *range(100, 115), 1], False, id="15 in a row"),
    ],
)
def test_loops(tokens: list[int], answer: bool) -> None:
    assert loops(tokens) is answer


def test_a_mode_is_a_method_and_a_number() -> None:
    assert parse_mode("ngram:8").speculation == {"method": "ngram", "num_speculative_tokens": 8}
    assert parse_mode("ngram").speculation == {"method": "ngram"}
    assert parse_mode("off").speculation == {"method": "off"}


@pytest.mark.parametrize("text", ["ngram:", "ngram:0", "ngram:x", "ngram:-1", "off:4"])
def test_a_mode_that_is_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="modes"):
        Plan(modes=(text,))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"modes": ("zzz:4",)}, UnknownMethod),
        ({"workloads": ("poems",)}, InvalidParameter),
        ({"workloads": ()}, InvalidParameter),
        ({"prompts": 4}, InvalidParameter),  # fewer than the 8 at once
        ({"concurrency": (0,)}, InvalidParameter),
        ({"repeats": 0}, InvalidParameter),
        ({"max_tokens": 0}, InvalidParameter),
    ],
)
def test_a_plan_that_cannot_be(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Plan(**fields)  # type: ignore[arg-type]


def test_plain_decoding_is_measured_twice_and_transformers_only_where_it_does_the_same() -> None:
    plan = Plan(modes=("ngram:4",), with_transformers=True)
    assert [mode.label for mode in plan.modes_of("code", 1)] == ["off", "ngram:4", STOCK, AGAIN]
    assert [mode.label for mode in plan.modes_of("code", 8)] == ["off", "ngram:4", AGAIN]
    assert [mode.label for mode in plan.modes_of("prose", 1)] == ["off", "ngram:4", AGAIN]
    assert [mode.speculates for mode in plan.modes_of("code", 1)] == [False, True, False, False]


def test_modes_alternate_and_nobody_is_always_first() -> None:
    modes = [Mode("a"), Mode("b"), Mode("c")]
    order = [(repeat, group, mode.label) for repeat, group, mode in alternate(2, 3, modes)]
    assert len(set(order)) == len(order) == 18
    blocks = ["".join(label for _, _, label in order[i : i + 3]) for i in range(0, 18, 3)]
    assert blocks == ["abc", "bca", "cab", "bca", "cab", "abc"]


def test_the_bar_knows_how_many_measurements_there_will_be() -> None:
    plan = Plan(workloads=("code", "prose"), modes=("ngram:4",), concurrency=(1, 4), prompts=10, repeats=2)
    assert plan.measurements == 2 * (3 * (1 + 2 * 10) + 3 * (1 + 2 * 2))


def test_quartiles() -> None:
    assert quartiles([5.0]) == (5.0, 5.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)


def test_steps_with_prompt_tokens_do_not_count_as_decoding() -> None:
    steps = [Step(100, 1, False, 90, 100), Step(1, 1, True, 4, 5), Step(5, 3, True, 8, 10), Step(5, 2, True, 7, 10)]
    one = Measurement(0.5, [list(range(7))], [""], steps=steps)
    assert one.tokens_per_second == 14
    assert one.decode_tokens_per_second == pytest.approx(6 / 0.025)
    assert ms_by_rows([one]) == {1: (4, 1), 5: (7.5, 2)}
    assert overhead([one]) == pytest.approx(6 / 25)
    assert Measurement(0.5, [[1]], [""]).decode_tokens_per_second is None


def test_tables_say_what_differs() -> None:
    assert [figures(cell)[5] for cell in (make_cell("off"), make_cell(), make_cell(different=1))] == ["-", "all", "15/16"]
    assert notes(make_cell("off", per_position=[])) == []
    assert notes(make_cell(different=1, tie_nats=[2e-6])) == [
        "ngram:4: 80 50 % of the drafts at positions 1 to 2 accepted",
        "ngram:4: 1 of 16 texts differ from those of off; where greedy ones part, the candidates are at most 2e-06 nat apart",
    ]
    assert accepted(make_cell(per_position=[])) == "-"


def test_the_markdown_table_has_a_row_per_cell_and_no_ragged_one() -> None:
    lines = markdown([make_cell("off"), make_cell(), make_cell(AGAIN, ratio=0.99)]).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2.00 | 2.50 | 6.0 (3) 7.0 (5) | 5.0% | all |" in lines[3]


def test_the_terminal_has_a_table_per_workload_and_crowd() -> None:
    cells = [make_cell(mode, concurrency=count) for count in (1, 8) for mode in ("off", "ngram:4")]
    tables = [table(some) for some in by_cell(cells)]
    assert [made.title for made in tables] == ["code, one at a time", "code, 8 at once"]
    assert [made.row_count for made in tables] == [2, 2]
    assert Console(width=80).measure(tables[1]).minimum <= 80
