"""The shipped model and its stock twin, and where two texts differ."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

DEMO = Path(__file__).parents[1] / "models" / "demo"
MISSING = not (DEMO / "model.safetensors").exists()
TIE = 1e-4  # nat


@cache
def stock() -> PreTrainedModel:
    """The model as transformers has it; treat it as read-only."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def gap(tokens: list[int]) -> float:
    """How far the stock model's best next token is ahead of the second, nat."""
    with torch.inference_mode():
        best = stock()(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(2).values
    return float(best[0] - best[1])


def first_difference(a: list[int], b: list[int]) -> int | None:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), None if len(a) == len(b) else shorter)
