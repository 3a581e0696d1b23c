"""The figures of a benchmark, computed from made-up measurements."""

from __future__ import annotations

import pytest

from speculon.core.config import SamplingParams
from speculon.core.telemetry import PARTS, RequestStats
from speculon.core.types import Draft, SpanOutcome, Verdict
from speculon.measure.bench.cell import ms_by_rows, overhead, profile, quartiles, without_loops
from speculon.measure.bench.measure import Measurement, Step, loops
from speculon.measure.bench.rounds import equal_acceptance, mean_step_ms, needs, reached, rounds_of
from speculon.measure.bench.workloads import Case
from tests.pure.cells import ROUNDS

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
        Step(100, 1, 1, False, timed(0, 90, 100)),
        Step(1, 1, 1, True, timed(0.5, 4, 5)),
        Step(5, 1, 3, True, timed(1, 7, 10)),
        Step(5, 1, 2, True, timed(1, 6, 10)),
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
        steps=[Step(2, 2, 2, True, timed(1, 6, 8)), Step(1, 1, 1, True, timed(1, 6, 7))],
    )
    # of three, whose last had no other beside it
    assert profile([pair], per_text=True) == pytest.approx(timed(2 / 3, 4, 5))
    assert Measurement(0.5, [[1]], [""]).decode_tokens_per_second is None


def test_the_split_of_a_round_is_that_of_the_calls_that_verified_drafts() -> None:
    steps = [
        Step(100, 2, 2, False, timed(5, 90, 100)),
        Step(2, 2, 2, True, timed(9, 4, 15)),  # no draft: none of its time counts
        Step(7, 2, 3, True, timed(3, 12, 16)),  # one sequence with 4 drafts, one with 1
        Step(5, 2, 5, True, timed(1, 20, 24)),
    ]
    one = Measurement(0.5, [[1], [2]], ["", ""], steps=steps)
    found = rounds_of([one])
    assert found is not None
    assert (found.calls, found.step_ms, found.draft_ms_per_position, found.tokens_per_target_call) == (
        2,
        20,
        4 / 8,
        8 / 4,
    )
    assert (found.draft, found.target, found.rest) == pytest.approx((4 / 40, 32 / 40, 4 / 40))
    assert mean_step_ms([one]) == pytest.approx(55 / 3)
    assert rounds_of([Measurement(0.5, [[1]], [""], steps=steps[:2])]) is None
    assert mean_step_ms([Measurement(0.5, [[1]], [""], steps=steps[:1])]) is None


@pytest.mark.parametrize(
    ("tokens", "k", "a"),
    [
        (1.5, 1, 0.5),
        (1.75, 2, 0.5),
        (1 + 0.9 + 0.81 + 0.729, 3, 0.9),
        (5.0, 4, 1.0),
        (1.0, 4, 0.0),
        (0.4, 4, 0.0),
    ],
)
def test_the_acceptance_that_a_number_of_tokens_needs(tokens: float, k: int, a: float) -> None:
    assert equal_acceptance(tokens, k) == pytest.approx(a, abs=1e-9)


def test_more_than_every_draft_and_the_bonus_is_impossible() -> None:
    assert equal_acceptance(5.001, 4) is None


def test_what_a_round_must_bring_follows_from_its_cost() -> None:
    needed = needs(ROUNDS, plain_ms=10.0, k=2)
    assert [(need.speed, need.tokens_per_target_call) for need in needed] == [
        (1.0, 1.25),
        (1.5, 1.875),
        (2.0, 2.5),
    ]
    assert [need.acceptance for need in needed] == pytest.approx(
        [(2**0.5 - 1) / 2, (4.5**0.5 - 1) / 2, (7**0.5 - 1) / 2]
    )
    assert [need.acceptance is None for need in needs(ROUNDS, plain_ms=6.0, k=2)] == [False, True, True]


def test_acceptance_is_counted_over_the_drafts_that_were_reached() -> None:
    stats = RequestStats()
    rounds = [
        (4, SpanOutcome.FULL),
        (3, SpanOutcome.TAIL),
        (0, SpanOutcome.EARLY),
        (2, SpanOutcome.STOP),
        (1, SpanOutcome.EARLY_STOP),
    ]
    for accepted_drafts, kind in rounds:
        draft = Draft((1, 2, 3, 4), ("ngram",) * 4)
        stats.record(draft, Verdict(tuple(range(accepted_drafts + 1)), accepted_drafts, kind), ("ngram",))
    done = stats.speculation()
    assert done is not None and reached(done) == 10 / 13


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
