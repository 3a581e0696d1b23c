"""Biases and penalties: the same numbers as row by row over the whole context, at a fraction of its time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.decoding.sampling import ScoredRow, adjust
from speculon.decoding.sequence import Rules, Sequence
from tests.builders import make_sequence

V = 2048
PARAMS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.3, "frequency_penalty": -0.21},
    "all of them": {"repetition_penalty": 0.7, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biases": {"logit_bias": {i: 0.01 * i for i in range(0, V, 2)}},
    "never and always": {"logit_bias": {3: float("-inf"), 5: float("inf")}, "repetition_penalty": 1.2},
    "none": {},
}


def row_by_row(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """The definition; changes a copy of `logits` [R, V]."""
    logits = logits.clone()
    for x, row in zip(logits, rows, strict=True):
        p, output = row.rules.params, [*row.seq.tokens[row.seq.request.prompt_len :], *row.prefix]
        seen = torch.tensor(sorted({*row.seq.tokens, *row.prefix}))
        x[seen] = torch.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
        counts = torch.tensor(output, dtype=torch.long).bincount(minlength=V)
        x -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts
        x[[*p.logit_bias]] += torch.tensor([*p.logit_bias.values()])
    return logits.clamp_(max=torch.finfo(logits.dtype).max)


def text(chance: random.Random, name: str, context: int) -> Sequence:
    params = SamplingParams(temperature=0, **PARAMS[name])
    prompt, output = ([chance.randrange(V) for _ in range(n)] for n in (context, context // 4))
    return make_sequence(prompt, output=output, params=params, rules=Rules.of(params))


def rows_of(seqs: list[Sequence], k: int, chance: random.Random) -> list[ScoredRow]:
    drafts = [tuple(chance.choice([*seq.tokens, *range(9)]) for _ in range(k)) for seq in seqs]
    rows = [(seq, d[:i]) for seq, d in zip(seqs, drafts, strict=True) for i in range(k + 1)]
    return [ScoredRow(seq, seq.request.rules, prefix) for seq, prefix in rows]


@pytest.mark.parametrize("k", [0, 5])
def test_each_row_is_adjusted_as_by_the_definition(k: int) -> None:
    """In one batch of all requests, while their texts grow."""
    chance = random.Random(k)
    seqs = [text(chance, name, context) for name in PARAMS for context in (1, 40, 200)]
    for _ in range(4):
        rows = rows_of(seqs, k, chance)
        logits = 9 * torch.randn(len(rows), V)
        before = logits.clone()
        assert torch.equal(adjust(logits, rows), row_by_row(logits, rows))
        assert torch.equal(logits, before)
        for seq in seqs:
            seq.tokens += [chance.randrange(V) for _ in range(chance.randrange(3))]
