"""The figures of a benchmark, computed from made-up measurements."""

from __future__ import annotations

import pytest

from speculon.core.config import SamplingParams
from speculon.core.telemetry import PARTS
from speculon.measure.bench.cell import ms_by_rows, overhead, profile, quartiles, without_loops
from speculon.measure.bench.measure import MeasuredStep, Measurement, loops
from speculon.measure.bench.workloads import Case

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


def test_quartiles() -> None:
    assert quartiles([5.0]) == (5.0, 5.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)


def timed(draft: float, forward: float, step: float) -> dict[str, float]:
    """The profile of a step; what is left is the settling."""
    return dict.fromkeys(PARTS, 0.0) | {
        "propose": draft,
        "forward": forward,
        "settle": step - draft - forward,
    }


def test_steps_with_prompt_tokens_do_not_count_as_decoding() -> None:
    steps = [
        MeasuredStep(100, 1, 1, False, timed(0, 90, 100)),
        MeasuredStep(1, 1, 1, True, timed(0.5, 4, 5)),
        MeasuredStep(5, 1, 3, True, timed(1, 7, 10)),
        MeasuredStep(5, 1, 2, True, timed(1, 6, 10)),
    ]
    one = Measurement(0.5, [list(range(7))], [""], steps=steps)
    assert one.tokens_per_second == 14
    assert one.decode_tokens_per_second == pytest.approx(6 / 0.025)
    assert ms_by_rows([one]) == {1: (4, 1), 5: (6.5, 2)}
    assert overhead([one]) == pytest.approx((25 - 17 - 2.5) / 25)
    assert profile([one]) == pytest.approx(timed(2.5 / 3, 17 / 3, 25 / 3))
    assert profile([]) == profile([], per_text=True) == {} and overhead([]) is None
    pair = Measurement(
        0.5,
        [[1], [2]],
        [""],
        steps=[MeasuredStep(2, 2, 2, True, timed(1, 6, 8)), MeasuredStep(1, 1, 1, True, timed(1, 6, 7))],
    )
    # of three, whose last had no other beside it
    assert profile([pair], per_text=True) == pytest.approx(timed(2 / 3, 4, 5))
    assert Measurement(0.5, [[1]], [""]).decode_tokens_per_second is None


def written(seconds: float, *texts: list[int], text: str = "") -> Measurement:
    return Measurement(seconds, list(texts), [text] * len(texts))


def test_loops_do_not_count_where_they_flatter() -> None:
    cases = [Case(name, [1], SamplingParams(), "right") for name in "abc"]
    free = list(range(100))
    plain = [[written(1.0, free), written(1.0, LOOP), written(1.0, LOOP, text="right")]] * 2
    fast = [[written(0.5, free), written(0.01, LOOP), written(0.25, LOOP, text="right")]] * 2
    assert without_loops(fast, plain, cases) == {0: [2, 2], 2: [4, 4]}  # a right answer is no loop
    sampled = [[written(0.5, LOOP), *fast[0][1:]]] * 2  # another text than plain's: either may loop
    assert without_loops(sampled, plain, cases) == {2: [4, 4]}


def test_a_ratio_without_loops_needs_texts_written_alone() -> None:
    cases = [Case(name, [1], SamplingParams()) for name in "ab"]
    batched = [[written(1.0, [1, 2], [3, 4])]]
    assert without_loops(batched, batched, cases) == {}
