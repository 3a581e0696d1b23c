"""The likelihood of sampled texts under the target: they cannot be compared token for token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.reading import quiet
from speculon.runtimes.torch.loading.load import load_config, load_model


class Judge:
    def __init__(self, target: Path) -> None:
        checkpoint = read_checkpoint(target)
        with quiet():
            config = load_config(checkpoint, trust_remote_code=False)
            model = load_model(checkpoint, config, torch.float32, torch.device("cpu"), False)
            self.target = model.eval()

    def nats(self, texts: Iterable[tuple[list[int], list[int]]]) -> float:
        """Of all tokens after their prompts; per token near the model's entropy if sampled from it."""
        return sum(self.nats_of(prompt, tokens) for prompt, tokens in texts if tokens)

    @torch.inference_mode()
    def nats_of(self, prompt: list[int], tokens: list[int]) -> float:
        logits = self.target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]  # [T, V]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="sum").item()
