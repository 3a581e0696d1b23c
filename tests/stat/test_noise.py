"""The keyed noise: distributed as it must be, independent between neighbours, and a function of its key
alone. Fixed keys.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.decoding import sampling
from speculon.decoding.sampling import ScoredRow, exponential, exponential_race, row_key, sample, uniform
from speculon.decoding.sequence import Rules
from tests.builders import make_sequence

Key = tuple[int, int, int]  # seed, sample, position
FINE, ABSURD = 4.5, 12.0  # standard deviations: of the shipped noise (it measures up to 2.1), of planted ones


def uniforms(keys: Iterable[Key], tokens: Tensor) -> Tensor:  # [N] keys, [N] or [] tokens -> [N] in (0, 1)
    low, high = torch.tensor([sampling.row_key(*key) for key in keys], dtype=torch.int32).T
    return uniform(low, high, tokens.int()).double()


def deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts, in standard deviations."""
    df = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - df) / (2 * df) ** 0.5


def dependence(a: Tensor, b: Tensor, bins: int = 8) -> float:
    """Chi-square of the pairs on a grid of `bins` x `bins`, and their correlation; the worse of the two."""
    cell = (a * bins).long() * bins + (b * bins).long()
    pairs = deviation(
        cell.bincount(minlength=bins * bins).double(), torch.full((bins * bins,), len(a) / bins**2).double()
    )
    return max(pairs, abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) * len(a) ** 0.5)


N = 10_000
numbers = random.Random(1)
SEEDS = [*range(N // 2), *(numbers.getrandbits(64) for _ in range(N // 2))]
PLACES: dict[str, tuple[Callable[[int], Key], Callable[[int], Key]]] = {
    "the next seed": (lambda i: (SEEDS[i], 0, 5), lambda i: (SEEDS[i] + 1, 0, 5)),
    "the next position": (lambda i: (7, 0, i), lambda i: (7, 0, i + 1)),
    "the next position of any seed": (lambda i: (SEEDS[i], 0, 5), lambda i: (SEEDS[i], 0, 6)),
    "the next sample": (lambda i: (7, i, 5), lambda i: (7, i + 1, 5)),
    "the next sample of any seed": (lambda i: (SEEDS[i], 0, 5), lambda i: (SEEDS[i], 1, 5)),
    "seed and position exchanged": (lambda i: (i, 0, 3 * i + 1), lambda i: (3 * i + 1, 0, i)),
    "seed and position of the same sum": (lambda i: (SEEDS[i] + 1, 0, 5), lambda i: (SEEDS[i], 0, 6)),
    "sample and position of the same sum": (lambda i: (SEEDS[i], 1, 5), lambda i: (SEEDS[i], 0, 6)),
    "sample and seed of the same sum": (lambda i: (SEEDS[i] + 1, 0, 5), lambda i: (SEEDS[i], 1, 5)),
    "a seed that differs in its high half": (lambda i: (i, 0, 5), lambda i: (i + (1 << 32), 0, 5)),
    "a seed that differs in one bit": (
        lambda i: (SEEDS[i], 0, 5),
        lambda i: (SEEDS[i] ^ (1 << i % 64), 0, 5),
    ),
}


def place_dependence(where: str = "") -> dict[str, float]:
    """Of the places whose name has these words."""
    token = torch.arange(N) % 97
    return {
        n: dependence(uniforms(map(a, range(N)), token), uniforms(map(b, range(N)), token))
        for n, (a, b) in PLACES.items()
        if where in n
    }


def token_dependence() -> float:
    """Between tokens at some distance, over the tokens of one row and over many rows."""
    token, row = torch.arange(N), [(7, 0, 5)] * N
    found = [dependence(uniforms(row, token), uniforms(row, token + far)) for far in (1, 2, 256, 4096)]
    low, high = torch.randint(
        -(1 << 31), 1 << 31, (2, 1 << 18), generator=torch.Generator().manual_seed(0)
    ).int()
    for pair in ((0, 1), (5, 7), (100, 101), (0, 256), (3, 65_539)):
        a, b = (uniform(low, high, torch.tensor([t], dtype=torch.int32)).double() for t in pair)
        found.append(dependence(a, b))
    return max(found)


def unevenness() -> float:
    """Of the noise over tokens of one row, and over positions of one token."""
    over_tokens = uniforms([(7, 0, 5)] * N, torch.arange(N))
    over_positions = uniforms([(7, 0, i) for i in range(N)], torch.tensor(3))
    even = torch.full((64,), N / 64).double()
    return max(
        deviation((u * 64).long().bincount(minlength=64).double(), even)
        for u in (over_tokens, over_positions)
    )


def test_neighbours_share_nothing() -> None:
    seen = place_dependence()
    assert max(seen.values()) < FINE, seen


def test_tokens_of_a_row_share_nothing() -> None:
    assert token_dependence() < FINE


def test_the_noise_is_even() -> None:
    assert unevenness() < FINE


def test_every_bit_of_the_hash_is_even_and_turns_half_of_the_others() -> None:
    x = torch.arange(1 << 14, dtype=torch.int32)
    bits = torch.arange(32, dtype=torch.int32)
    hashed = sampling.mix32(x.clone())
    assert len(hashed.unique()) == len(x)
    assert ((hashed[:, None] >> bits & 1).double().mean(0) - 0.5).abs().max() < 0.02
    for bit in range(32):
        turned = (hashed ^ sampling.mix32(x ^ sampling.signed32(1 << bit)))[:, None] >> bits & 1
        assert (turned.double().mean(0) - 0.5).abs().max() < 0.06, bit


def test_no_two_rows_have_the_same_key() -> None:
    seeds = [*range(40), *(1 << i for i in range(6, 64)), *(-i for i in range(1, 20)), *SEEDS[-20:]]
    keys = {row_key(*key) for key in itertools.product(seeds, range(4), range(100))}
    assert len(keys) == len({seed % (1 << 64) for seed in seeds}) * 4 * 100


def test_the_extremes_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for end in (0, 1, 0x7FFFFFFF, 0x7FFFFFFE, -1, -(1 << 31)):
        monkeypatch.setattr(sampling, "mix32", lambda x, end=end: torch.full_like(x, end))
        zero = torch.zeros(1, dtype=torch.int32)
        v = uniform(zero, zero, zero)
        assert 2.0**-32 <= float(v) <= 1 - 2.0**-24
        found.append(float(exponential(v)))
    assert 2.0**-32 <= min(found) < 2.0**-31 and 16 < max(found) < 17


# drawing


def rows_of(keys: Iterable[Key]) -> list[Any]:
    return [
        SimpleNamespace(
            seq=SimpleNamespace(request=SimpleNamespace(seed=seed), sample=number), position=at, stream=0
        )
        for seed, number, at in keys
    ]


SHAPES = {
    "uniform over 7": [1 / 7] * 7,
    "a coin": [0.5, 0.5],
    "skewed": [0.7, 0.2, 0.05, 0.03, 0.015, 0.005],
    "rare tails": [0.9, 0.0994, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4],
    "a long tail": [0.5, *[0.5 / 199] * 199],
}
STREAMS: dict[str, Callable[[int], Key]] = {
    "seeds": lambda i: (i, 0, 0),
    "positions": lambda i: (11, 0, i),
    "samples": lambda i: (11, i, 0),
    "texts": lambda i: (i // 50, 0, i % 50),
}


def drawn(p: list[float], keys: Iterable[Key]) -> Tensor:
    rows = rows_of(keys)
    return (
        exponential_race(torch.tensor(p).log().expand(len(rows), -1).contiguous(), rows)
        .bincount(minlength=len(p))
        .double()
    )


def surprise(p: list[float], counts: Tensor) -> float:
    """The chance of a deviation as large as this from softmax."""
    expected = torch.tensor(p).double() * counts.sum()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), len(p) - 1))


@pytest.mark.parametrize(
    ("name", "stream", "draws"),
    [
        *(("skewed", stream, 20_000) for stream in STREAMS),
        *((name, "texts", 20_000) for name in SHAPES if name not in ("skewed", "rare tails")),
        *(pytest.param("rare tails", stream, 100_000, marks=pytest.mark.soak) for stream in STREAMS),
    ],
)
def test_tokens_are_drawn_from_the_softmax(name: str, stream: str, draws: int) -> None:
    """A row's key does not depend on the shape: each stream with one of them, and each of them once."""
    assert surprise(SHAPES[name], drawn(SHAPES[name], map(STREAMS[stream], range(draws)))) > 1e-3


def test_two_rows_of_one_span_are_drawn_independently() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    logits = torch.tensor(p).log().expand(N, -1).contiguous()
    first, second = (exponential_race(logits, rows_of((i, 0, at) for i in range(N))) for at in (3, 4))
    joint = (first * 4 + second).bincount(minlength=16).double()
    assert surprise([a * b for a in p for b in p], joint) > 1e-3


@pytest.mark.parametrize("spread", [1.0, 5.0, 15.0, 40.0])
def test_the_race_is_won_by_the_largest_log_p_plus_gumbel_noise(spread: float) -> None:
    keys = [(i, 0, i % 7) for i in range(400)]
    logits = torch.randn(400, 2000, generator=torch.Generator().manual_seed(3)) * spread
    logits -= logits.amax(-1, keepdim=True)
    low, high = torch.tensor([row_key(*key) for key in keys], dtype=torch.int32).T[:, :, None]
    v = uniform(low, high, torch.arange(2000, dtype=torch.int32)).double()
    whole = logits.double() - torch.log(-torch.log1p(-v))
    assert torch.equal(exponential_race(logits, rows_of(keys)), whole.argmax(-1))


def test_a_removed_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -60.0]]).expand(5000, -1).contiguous()
    assert exponential_race(logits, rows_of((i, 0, 0) for i in range(5000))).unique().tolist() == [1]


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    """Greedy rows, filtered rows and penalised rows beside it included."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 3, "temperature": 0.7},
        {"min_p": 0.1},
    ]
    settings += [{"presence_penalty": 1.0, "repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}}]
    rows = []
    for i in range(70):
        params = SamplingParams(**settings[i % len(settings)], max_tokens=9)
        seq = make_sequence(
            [1, 2, 3], output=[4] * (i % 5), params=params, seed=i // 3, sample=i % 2, rules=Rules.of(params)
        )
        rows.append(ScoredRow(seq, seq.request.rules, (5, 6)[: i % 3]))
    logits = torch.randn(70, 50, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    together = sample(logits, rows)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2)).tolist()
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    assert torch.equal(logits, before)


def ahead(text: int, steps: int = 40) -> tuple[list[Tensor], list[Tensor]]:
    """The noise of a text that goes on by 1, 2, .. 5 positions as it is handed out, and as it is drawn for
    each row alone.
    """
    seq = make_sequence([1, 2], seed=text, sample=1, rules=Rules.of(SamplingParams()))
    cpu, handed, alone = torch.device("cpu"), [], []
    for step in range(steps):
        rows = [ScoredRow(seq, seq.request.rules, (7,) * i) for i in range(step % 4 + 1)]
        handed.append(sampling.row_noise(rows, 11, cpu).view(-1, 11))
        alone.append(sampling.draw_noise([(seq, row.position, 0) for row in rows], 11, cpu))
        seq.tokens.extend([3] * (step % 5 + 1))
    return handed, alone


def test_noise_drawn_ahead_is_that_of_the_row_alone() -> None:
    handed, alone = ahead(5)
    assert all(torch.equal(a, b) for a, b in zip(handed, alone, strict=True))


def test_a_stock_at_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = sampling.draw_noise
    monkeypatch.setattr(
        sampling, "draw_noise", lambda places, *rest: draw(places, *rest).roll(int(len(places) > 8), 0)
    )
    handed, alone = ahead(5)
    assert not all(torch.equal(a, b) for a, b in zip(handed, alone, strict=True))


def test_equal_weights_go_to_the_lowest_id() -> None:
    weights = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [2.0, -torch.inf, 2.0]])
    wide = torch.cat([weights, torch.full((3, sampling.SHORT), -torch.inf)], -1)
    assert sampling.best(weights).tolist() == sampling.best(wide).tolist() == [1, 0, 0]


# planted errors


def by_key(
    key: Callable[[int, int, int], tuple[int, int, int]],
) -> Callable[[int, int, int], tuple[int, int]]:
    return lambda seed, number, at: row_key(*key(seed, number, at))


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        pytest.param(
            by_key(lambda seed, number, at: (seed, number, 0)), "the next position", id="no position"
        ),
        pytest.param(by_key(lambda seed, number, at: (seed, 0, at)), "the next sample", id="no sample"),
        pytest.param(
            by_key(lambda seed, number, at: (seed + at, number, 0)), "the same sum", id="seed + position"
        ),
        pytest.param(
            by_key(lambda seed, number, at: (seed + number, 0, at)), "the same sum", id="seed + sample"
        ),
        pytest.param(
            by_key(lambda seed, number, at: (seed ^ at, number, 0)), "exchanged", id="seed xor position"
        ),
        pytest.param(
            by_key(lambda seed, number, at: (seed & 0xFFFFFFFF, number, at)),
            "high half",
            id="32 bits of seed",
        ),
    ],
)
def test_a_key_that_forgets_or_mixes_its_parts_is_seen(
    bad: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "row_key", bad)
    assert max(place_dependence(where).values()) > ABSURD


@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(lambda x: x, id="none"),
        pytest.param(lambda x: x * 1664525 + 1013904223, id="a linear congruence"),
        pytest.param(lambda x: x ^ (x >> 16), id="a shift"),
    ],
)
def test_a_poor_hash_is_seen(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "mix32", mix)
    assert max(token_dependence(), unevenness()) > ABSURD


def test_noise_of_the_wrong_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform instead of exponential noise."""
    monkeypatch.setattr(sampling, "exponential", lambda v: v)
    assert surprise(SHAPES["skewed"], drawn(SHAPES["skewed"], map(STREAMS["seeds"], range(N)))) < 1e-9
