"""When requests arrive, and what is counted of those that did."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import expon, kstest

from speculon.core.errors import InvalidParameter
from speculon.core.types import Finish
from speculon.decoding.sequence import Event
from speculon.measure.bench.arrivals import ServedRequest, poisson_times, steady
from speculon.measure.bench.cell import percentiles
from speculon.measure.bench.measure import Measurement
from speculon.measure.bench.plan import BenchPlan, make_plan
from speculon.measure.bench.report import speed_table
from tests.pure.cells import make_cell
from tests.pure.screens import cut_off, on_screen

COUNT, RATE = 4000, 5.0
TIMES = Callable[[int, float, str], list[float]]


def poisson_faults(times_of: TIMES) -> list[str]:
    """What tells such arrivals from a Poisson process; each bound is missed by chance once in a million."""
    times = times_of(COUNT, RATE, "a")
    gaps = [after - before for before, after in pairwise(times)]
    counts = np.bincount(np.asarray(times).astype(int))[:-1]  # arrivals in each whole second
    spread = 5 * (2 / len(counts)) ** 0.5
    faults = {
        "the first is not at 0": times[0] != 0 or len(times) != COUNT,
        "the mean gap": abs(np.mean(gaps) * RATE - 1) > 5 / COUNT**0.5,
        "gaps are not exponential": kstest(gaps, expon(scale=1 / RATE).cdf).pvalue < 1e-6,
        "counts are not as uneven as they must be": abs(np.var(counts) / np.mean(counts) - 1) > spread,
        "another seed gives the same": times == times_of(COUNT, RATE, "b"),
        "the same seed gives others": times != times_of(COUNT, RATE, "a"),
    }
    return [fault for fault, found in faults.items() if found]


def test_requests_arrive_as_a_poisson_process() -> None:
    assert poisson_faults(poisson_times) == []


def rng_of(seed: str) -> np.random.Generator:
    return np.random.default_rng(list(seed.encode()))


@pytest.mark.parametrize(
    ("times_of", "fault"),
    [
        (lambda n, rate, seed: [i / rate for i in range(n)], "gaps are not exponential"),
        (lambda n, rate, seed: poisson_times(n, rate / 2, seed), "the mean gap"),
        (
            lambda n, rate, seed: [0.0, *np.cumsum(rng_of(seed).uniform(0, 2 / rate, n - 1))],
            "gaps are not exponential",
        ),
        (
            lambda n, rate, seed: [0.0, *np.cumsum(np.repeat(rng_of(seed).exponential(1 / rate, n // 2), 2))],
            "counts are not as uneven as they must be",
        ),
        (lambda n, rate, seed: poisson_times(n, rate, "fixed"), "another seed gives the same"),
        (
            lambda n, rate, seed: [0.0, *np.cumsum(np.random.default_rng().exponential(1 / rate, n - 1))],
            "the same seed gives others",
        ),
    ],
    ids=["even", "half the rate", "uniform gaps", "each gap twice", "one seed for all", "no seed"],
)
def test_planted_arrivals_of_another_kind_are_seen(times_of: TIMES, fault: str) -> None:
    assert fault in poisson_faults(times_of)


def event(*tokens: int, ends: bool = False) -> Event:
    return Event("r", 0, tokens, finish=Finish("length") if ends else None)


def request(arrived: float, *events: tuple[float, Event]) -> ServedRequest:
    made = ServedRequest(arrived)
    for seconds, new in events:
        made.note(seconds, new)
    return made


def test_latencies_count_from_the_arrival_and_from_the_first_token() -> None:
    one = request(1.0, (1.2, event()), (1.5, event(7)), (2.0, event(7, 8, 9)), (2.5, event(7, ends=True)))
    assert (one.first_token_ms, one.per_token_ms) == pytest.approx((500, 250))
    assert request(1.0, (1.5, event(7, ends=True))).per_token_ms is None
    empty = request(1.0, (1.5, event(ends=True)))  # its first token was a stop token
    assert (empty.first_token_ms, empty.per_token_ms) == (500, None)


def test_the_batch_that_shrinks_at_the_end_does_not_count() -> None:
    long = request(0.0, (1.0, event(1)), (2.0, event(1, 2, 3)), (9.0, event(1, ends=True)))
    last = request(1.5, (3.0, event(1)), (3.5, event(1, 2, ends=True)))
    tokens, seconds = steady([long, last])
    assert (tokens, seconds) == (5, 3.0)
    done = Measurement(seconds, [[1] * 5, [1] * 3], ["", ""], counted=tokens)
    assert done.tokens_per_second == pytest.approx(5 / 3)
    assert Measurement(9.0, [[1] * 5, [1] * 3], ["", ""]).tokens_per_second == pytest.approx(8 / 9)


def test_percentiles_are_of_what_is_known() -> None:
    assert percentiles([]) is percentiles([None]) is None
    assert percentiles([None, *map(float, range(101))]) == (50, 95)


def test_a_rate_leaves_out_users_who_wait_for_their_answers() -> None:
    plan = BenchPlan(request_rate=2)
    assert plan.workloads == ("code", "edit", "prose", "mixed")
    assert plan.measurements == len(plan.compared) * 4 * 3 * 2  # a warm-up and one measurement of each
    assert make_plan({"request_rate": 2.0}, quick=True).request_rate == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_rate": 0}, "request_rate = 0: .*greater than 0"),
        ({"request_rate": float("inf")}, "request_rate = inf"),
        ({"request_rate": float("nan")}, "request_rate = nan"),
        ({"request_rate": 1, "workloads": ("warm",)}, "workloads = 'warm': its users wait"),
        (
            {"request_rate": 1, "prompts": 15},
            "prompts = 15: a request rate needs at least 16 with concurrency 8",
        ),
    ],
)
def test_a_rate_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        BenchPlan(**fields)  # type: ignore[arg-type]


def test_the_table_shows_latencies_in_80_columns() -> None:
    wide = {"first_token_ms": (12345.6, 123456.7), "per_token_ms": (123.45, 1234.56), "ratio": 12.34}
    cells = [
        make_cell(mode, concurrency=64, diagnosis="gated: low_acceptance", different=1, **wide)
        for mode in ("off", "draft_model:16/adaptive/rejection")
    ]
    table = speed_table(cells)
    assert cut_off([table], 80) == []
    text = on_screen([table], 80)
    assert "12346 / 123457" in text and "123.5 / 1234.6" in text and "tok/call" not in text
    assert "tok/call" in on_screen([speed_table([make_cell()])], 80)
