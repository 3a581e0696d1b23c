"""Parameters at the edge of what floats and integers hold still mean what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculon.core.config import SamplingParams
from speculon.decoding.sampling import ScoredRow, keep_likely, sample
from speculon.decoding.sequence import Rules
from tests.builders import make_sequence

LOGITS = [0.5, 1.0, 5.0, 2.0]


def sampled(logits: list[float], **params: Any) -> int:
    p = SamplingParams(max_tokens=5, **params)
    seq = make_sequence([1, 2], params=p, seed=3, rules=Rules.of(p))
    return sample(torch.tensor([logits]), [ScoredRow(seq, seq.request.rules)])[0]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-46, 1e-40, 1e-6])
def test_a_tiny_temperature_takes_the_best_token(temperature: float) -> None:
    assert sampled(LOGITS, temperature=temperature) == 2


@pytest.mark.parametrize("top_k", [-1, 0, 4, 5, 2**31])
def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it(top_k: int) -> None:
    assert {sampled([0.0] * 4, top_k=top_k, seed=None, logit_bias={i: 90.0}) for i in range(4)} == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.parametrize("bias", [1e30, 3e38, 1e39, 1e300, float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflowing_bias_wins(bias: float, temperature: float) -> None:
    assert sampled(LOGITS, logit_bias={3: bias}, temperature=temperature) == 3


@pytest.mark.parametrize("penalty", [1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflowing_reward_of_repetition_wins(penalty: float, temperature: float) -> None:
    assert sampled([9.0, -1.0, 1.0, 9.0], repetition_penalty=penalty, temperature=temperature) == 2


@pytest.mark.parametrize("params", [{"top_k": 4}, {"top_k": 100}, {"min_p": 1e-30}, {"top_k": 3}], ids=str)
def test_a_filter_without_top_p_keeps_the_rarest_tokens(params: dict[str, Any]) -> None:
    """Next to a token of probability 1 - 1e-8 the sum rounds to 1, which is no reason to stop."""
    kept = keep_likely(torch.tensor([[20.0, 0.0, -20.0, 0.5]]), [SamplingParams(**params)])
    assert kept.isfinite().tolist() == [[True, True, params != {"top_k": 3}, True]]
