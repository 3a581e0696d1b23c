"""The regret of a token: zero for what is sampled, small for near-ties, infinite for what p excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import TokenLogprobs
from speculon.decoding.sampling import ScoredRow, row_noise, sample
from speculon.decoding.sequence import Rules
from speculon.measure.check.regret import first_difference, movement, tie_limit, token_regret
from tests.builders import make_sequence

VOCAB, LIMIT = 50, 1e-4
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "sampled": {"temperature": 1.0},
    "cool": {"temperature": 0.3, "min_p": 0.05},
    "filtered": {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "hot, with a bias": {"temperature": 2.0, "top_p": 0.9, "logit_bias": {3: 5.0}},
}


def row_of(seed: int = 0, **given: Any) -> ScoredRow:
    params = SamplingParams(seed=seed, **given)
    seq = make_sequence([1, 2, 3], output=[4, 5, 4], params=params, seed=seed, rules=Rules.of(params))
    return ScoredRow(seq, seq.request.rules)


def logits_of(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def noisy(logits: Tensor, row: ScoredRow) -> Tensor:
    noise = row_noise([row], VOCAB, logits.device).view(-1).double()
    return logits.double() - row.rules.params.temperature * noise.log()


@pytest.mark.parametrize("params", PARAMS)
def test_what_is_sampled_has_none_and_all_others_have_some(params: str) -> None:
    for seed in range(30):
        logits, row = logits_of(seed), row_of(seed, **PARAMS[params])
        before = logits.clone()
        (token,) = sample(logits[None], [row])
        regrets = [token_regret(logits, row, other, LIMIT) for other in range(VOCAB)]
        assert [other for other, regret in enumerate(regrets) if regret < LIMIT] == [token]
        assert torch.equal(logits, before), "the logits are left as they are"


def test_the_regret_of_a_sampled_token_is_that_of_its_noisy_score() -> None:
    for seed in range(10):
        logits, row = logits_of(seed), row_of(seed, temperature=0.7)
        scores = noisy(logits, row)
        for token in range(0, VOCAB, 7):
            expected = float(scores.max() - scores[token])
            assert token_regret(logits, row, token) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("gap", "tie"), [(5e-5, True), (5e-3, False)])
def test_a_near_tie_of_noisy_scores_is_one(gap: float, tie: bool) -> None:
    logits, row = logits_of(3), row_of(3, temperature=0.7, top_p=0.95)
    best, second = noisy(logits, row).topk(2).indices.tolist()
    logits[second] = logits[best] = logits.max() + 1  # inside of any filter
    scores = noisy(logits, row)
    best, second = scores.topk(2).indices.tolist()
    logits[second] += scores[best] - scores[second] - gap
    assert sample(logits[None], [row]) == [best]
    assert (token_regret(logits, row, second, LIMIT) < LIMIT) is tie


# Token 0 has the most probability and a low noisy score, token 1 has the best one, token 2 the second best.
EDGES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.5},
}


@pytest.mark.parametrize("slack", [2e-5, 2e-2])
@pytest.mark.parametrize("edge", EDGES)
def test_a_token_at_the_edge_of_a_filter_is_a_tie_and_one_beyond_is_not(edge: str, slack: float) -> None:
    """A logit is moved across the edge by `slack`: what is drawn before and after are both ties, or not."""
    found = 0
    for seed in range(200):
        row = row_of(seed, temperature=1.0, **EDGES[edge])
        inside, outside = at_the_edge(edge, slack)
        (a,), (b,) = (sample(logits[None], [row]) for logits in (inside, outside))
        if a == b:
            continue
        found += 1
        regrets = token_regret(inside, row, b, LIMIT), token_regret(outside, row, a, LIMIT)
        assert [regret < LIMIT for regret in regrets] == [slack < LIMIT] * 2, (seed, regrets)
    assert found > 10, "the edge decides what is drawn"


def at_the_edge(edge: str, slack: float) -> tuple[Tensor, Tensor]:
    """Logits with token 2 just inside of the filter, and just outside."""
    logits = torch.full((VOCAB,), -20.0)
    if edge == "top_k":
        logits[:3] = torch.tensor([0.5, 0.0, 0.0])
        logits[1] = -0.5
        logits[2] = -0.5
    elif edge == "top_p":  # token 2 is kept while the two before it have less than 0.9
        logits[:3] = torch.tensor([0.5, 0.4, 0.1]).log()
    else:
        logits[:3] = torch.tensor([1.0, 0.8, 0.5]).log()
    inside, outside = logits.clone(), logits.clone()
    inside[2] += slack / 2
    outside[2] -= slack / 2
    return inside, outside


def test_a_token_that_cannot_be_is_infinitely_wrong() -> None:
    logits, row = logits_of(1), row_of(1, temperature=1.0, top_k=3)
    (least,) = logits.argsort()[:1].tolist()
    assert token_regret(logits, row, least, LIMIT) == float("inf")
    forbidden = torch.zeros(VOCAB, dtype=torch.bool)
    forbidden[7] = True
    masked = ScoredRow(
        row.seq, Rules.of(SamplingParams(temperature=0, structured={"regex": "a"})), (), 0, forbidden
    )
    assert token_regret(logits, masked, 7, LIMIT) == float("inf")
    assert token_regret(logits, masked, 8, LIMIT) < float("inf")


def test_a_tiny_temperature_is_no_overflow() -> None:
    logits, row = logits_of(2), row_of(2, temperature=1e-40, top_p=0.5)
    (token,) = sample(logits[None], [row])
    assert token_regret(logits, row, token, LIMIT) == 0.0


def test_the_limit_by_dtype() -> None:
    assert tie_limit(0.3, coarse=False, invariant=False) == 1e-4
    assert tie_limit(0.3, coarse=True, invariant=False) == 0.3
    assert tie_limit(0.0, coarse=True, invariant=False) == 1e-4
    assert tie_limit(0.3, coarse=True, invariant=True) == 0.0


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_how_far_a_gap_moves() -> None:
    one = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (9, -1.5)))
    again = TokenLogprobs(4, -0.6, 1, ((9, -0.4), (4, -0.6), (7, -3.0)))
    assert movement(one, again) == pytest.approx(1.2)
    assert movement(one, TokenLogprobs(4, -0.6, 1, ((4, -0.6), (7, -2.0)))) == pytest.approx(0.4)
    assert movement(TokenLogprobs(4, 0.0, 1, ((4, 0.0),)), again) is None
