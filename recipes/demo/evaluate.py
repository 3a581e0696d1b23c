"""Two measures on held-out files: the loss of plain code, and whether edits come out exactly right."""

from collections.abc import Sequence

import numpy as np
import torch
from model import TrainableQwen3


@torch.no_grad()
def loss_sum(model: TrainableQwen3, tokens: np.ndarray, starts: Sequence[int], length: int) -> float:
    """Sum over windows of the mean loss of each; a window is `length` predicted tokens from its start on."""
    total = 0.0
    with torch.compiler.set_stance("force_eager"), torch.autocast("cpu", torch.bfloat16):
        for i in range(0, len(starts), 8):
            rows = [
                torch.from_numpy(tokens[start : start + length + 1]).long() for start in starts[i : i + 8]
            ]
            total += float(model(torch.stack(rows))) * len(rows)  # [up to 8, length + 1]
    return total


@torch.no_grad()
def count_exact(model: TrainableQwen3, probes: Sequence[tuple[list[int], list[int]]]) -> tuple[int, int]:
    """How many answers greedy decoding gets exactly right, and how many answer tokens.

    Greedy decoding is exact if and only if each token of the right answer is the best one after those before
    it, so one forward pass over prompt and answer decides it.
    """
    exact, right = 0, 0
    with torch.compiler.set_stance("force_eager"), torch.autocast("cpu", torch.bfloat16):
        for prompt, answer in probes:
            hidden = model.hidden(torch.tensor([prompt + answer[:-1]]))[:, len(prompt) - 1 :]
            hits = model.logits(hidden).argmax(-1)[0] == torch.tensor(answer)
            exact, right = exact + bool(hits.all()), right + int(hits.sum())
    return exact, right
