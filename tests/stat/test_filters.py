"""top-k, top-p and min-p over vocabularies beyond the sorted head, against a reference written from their
definitions.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from speculon.core.config import SamplingParams
from speculon.decoding import sampling
from speculon.decoding.sampling import HEAD, keep_likely

TOP_K = [0, 1, 5, HEAD - 1, HEAD, HEAD + 1, 600]


def reference(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The surviving tokens of one row, one by one in the order of their likelihood."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp(np.float64(logits[order]) - np.float64(logits[order[0]]))
    p = weights / weights.sum()
    kept, before = set(), 0.0
    for token, share in zip(order, p, strict=True):
        if kept and ((params.top_p < 1 and before >= params.top_p) or share < params.min_p * p[0]):
            break
        kept.add(token)
        before += share
    return kept


def draw_rows(seed: int) -> tuple[torch.Tensor, list[SamplingParams]]:
    chance = random.Random(seed)
    vocab, spread = chance.choice([50, HEAD, 300, 1000, 4096]), chance.choice([0.1, 1, 3, 8])
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if seed % 3 == 0:
        logits = (logits * 4).round() / 4  # ties
    params = [
        SamplingParams(
            top_k=chance.choice(TOP_K),
            top_p=chance.choice([1, 0.31, 0.9, 0.99]),
            min_p=chance.choice([0, 0, 0.053]),
        )
        for _ in range(4)
    ]
    return logits - logits.amax(-1, keepdim=True), params


def mistakes(seeds: range) -> int:
    """Rows whose survivors are not the reference's; one token more or less at a rounded sum is none."""
    wrong = 0
    for seed in seeds:
        logits, params = draw_rows(seed)
        for row, kept, p in zip(logits, keep_likely(logits, params), params, strict=True):
            survivors, expected = (
                set((kept > -torch.inf).nonzero().flatten().tolist()),
                reference(row.numpy(), p),
            )
            wrong += len(survivors ^ expected) > (1 if p.top_p < 1 else 0)
    return wrong


def test_the_survivors_are_those_of_the_definitions_also_beyond_the_head() -> None:
    assert mistakes(range(150)) == 0


@pytest.mark.parametrize(("top_p", "survivors"), [(0.4, [0]), (0.6, [0, 1]), (0.9, [0, 1, 2])])
def test_top_p_keeps_the_token_that_crosses_the_limit(top_p: float, survivors: list[int]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = keep_likely(logits, [SamplingParams(top_p=top_p)])
    assert (kept[0] > -torch.inf).nonzero().flatten().tolist() == survivors


def test_what_is_kept_keeps_its_logit() -> None:
    logits, params = draw_rows(1)
    kept = keep_likely(logits, params)
    assert torch.equal(kept[kept > -torch.inf], logits[kept > -torch.inf])


def test_a_head_that_is_never_left_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampling.keep_among
    monkeypatch.setattr(
        sampling,
        "keep_among",
        lambda logits, params, head: (real(logits, params, head)[0], torch.ones(len(logits)) > 0),
    )
    assert mistakes(range(60)) > 5


def test_a_row_is_filtered_alike_alone_and_beside_others() -> None:
    for seed in range(30):
        logits, params = draw_rows(seed)
        together = keep_likely(logits, params)
        for i, p in enumerate(params):
            assert torch.equal(keep_likely(logits[i : i + 1], [p])[0], together[i])
