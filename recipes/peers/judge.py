"""What the target thinks of sampled texts: they cannot be compared token for token, but how likely they are
can.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from speculon.checkpoints.locate import SHIPPED
from speculon.models.load import quiet


class Judge:
    def __init__(self) -> None:
        with quiet():
            self.target = AutoModelForCausalLM.from_pretrained(
                SHIPPED["demo"], dtype=torch.float32, local_files_only=True
            ).eval()

    def nats(self, texts: Iterable[tuple[list[int], list[int]]]) -> float:
        """Surprise of all tokens after their prompts; per token it is near the model's entropy if they were
        sampled from it.
        """
        return sum(self.surprise(prompt, tokens) for prompt, tokens in texts if tokens)

    @torch.inference_mode()
    def surprise(self, prompt: list[int], tokens: list[int]) -> float:
        logits = self.target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]  # [T, V]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="sum").item()
