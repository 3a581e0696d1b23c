"""The permutation test of `speculon check`: calibrated where nothing is wrong, and not blind where something
is.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculon.measure.check.sampled import cells_of, counts_of, deal, max_z, p_value, rejected

Q = 0.05
# of tokens: a few likely, a tail
LAW = torch.tensor([0.5, 0.2, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.006, 0.004])


def draw(runs: int, positions: int, generator: torch.Generator, law: Tensor = LAW) -> Tensor:
    """[runs, positions] tokens."""
    return law.expand(runs, -1).multinomial(positions, replacement=True, generator=generator) + 100


def p_of(one: Tensor, other: Tensor, permutations: int = 199, seed: int = 0) -> tuple[list[float], float]:
    """The p of every cell, and of all together."""
    arms = deal(len(one), len(other), permutations, seed)
    z = [max_z(cell, arms) for cell in cells_of(torch.cat([one, other]))]
    return [p_value(statistic) for statistic in z], p_value(torch.stack(z).sum(0))


def shifted(by: float) -> Tensor:
    """The likeliest token loses what a rare one gains: a total variation of `by`."""
    law = LAW.clone()
    law[0] -= by
    law[4] += by
    return law


def test_it_rejects_what_is_true_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    cells, overall, rejections = [], [], 0
    for trial in range(300):
        p, together = p_of(draw(60, 3, generator), draw(40, 3, generator), seed=trial)
        cells += p[:3]
        overall.append(together)
        rejections += bool(rejected(p, Q))
    for found in (torch.tensor(cells), torch.tensor(overall)):
        for level in (0.05, 0.2, 0.5):
            spread = (level * (1 - level) / len(found)) ** 0.5
            assert float((found <= level).double().mean()) == pytest.approx(level, abs=4 * spread + 0.005)
    assert rejections / 300 < Q + 4 * (Q * (1 - Q) / 300) ** 0.5


def test_it_finds_a_shift_and_finds_a_larger_one_more_often() -> None:
    found = {}
    for by in (0.05, 0.15):
        generator = torch.Generator().manual_seed(2)
        hits = [
            p_of(draw(300, 2, generator), draw(150, 2, generator, shifted(by)), seed=i) for i in range(40)
        ]
        found[by] = sum(bool(rejected(p, Q)) for p, _ in hits)
    assert 5 < found[0.05] < found[0.15] == 40


def test_all_cells_together_see_what_none_of_them_shows() -> None:
    generator = torch.Generator().manual_seed(3)
    single, together = 0, 0
    for trial in range(20):
        p, overall = p_of(draw(150, 30, generator), draw(150, 30, generator, shifted(0.04)), seed=trial)
        single += bool(rejected(p[:30], Q))
        together += overall <= 0.01
    assert together > 2 * single


def test_arms_of_different_size_keep_their_sizes() -> None:
    arms = deal(7, 3, 50, seed=0)
    assert arms.shape == (51, 10) and arms[0].tolist() == [1] * 7 + [0] * 3
    assert set(arms.sum(-1).tolist()) == {7} and len({tuple(row) for row in arms.tolist()}) > 30
    assert torch.equal(arms, deal(7, 3, 50, seed=0)) and not torch.equal(arms, deal(7, 3, 50, seed=1))


def test_the_statistic_is_the_textbooks() -> None:
    """Two tokens, 12 of 20 against 5 of 20: z of two proportions with the variance of a draw without
    replacement.
    """
    counts = torch.zeros(40, 2)
    ones = [*range(12), *range(20, 25)]
    counts[ones, 1] = 1
    counts[:, 0] = 1 - counts[:, 1]
    expected = (12 - 20 * 17 / 40) / (20 * 20 / (40 * 39) * 17 * 23 / 40) ** 0.5
    assert float(max_z(counts, deal(20, 20, 0, 0))[0]) == pytest.approx(expected)


def test_equal_runs_give_no_finding() -> None:
    arms = deal(8, 8, 99, seed=0)
    z = max_z(counts_of(torch.full((16, 1), 5)), arms)
    assert p_value(z) == 1 and not z.any()


def test_rare_tokens_are_counted_as_one() -> None:
    texts = torch.tensor([[7]] * 6 + [[i] for i in range(20, 24)])
    counts = counts_of(texts)
    assert counts.tolist() == [[1, 0]] * 6 + [[0, 1]] * 4
    assert counts_of(torch.tensor([[7, 7], [7, 9]] * 5)).sum(0).tolist() == [15, 5]


@pytest.mark.parametrize(
    ("p", "fallen"),
    [
        ([0.01, 0.2, 0.03, 0.9], [0]),
        # the last is small enough for its rank, so all before it fall
        ([0.01, 0.02, 0.03, 0.05], [0, 1, 2, 3]),
        ([0.04, 0.04, 0.04, 0.04], [0, 1, 2, 3]),
        ([0.06, 0.5], []),
        ([], []),
    ],
)
def test_benjamini_and_hochberg(p: list[float], fallen: list[int]) -> None:
    assert rejected(p, 0.05) == fallen
