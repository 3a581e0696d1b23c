"""A draft model for tests: a random model, the target itself, or a target that is wrong now and then."""

from __future__ import annotations

import random
from typing import Any

import torch

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.drafters.draft_model.proposer import NAME, DraftModel
from speculon.runtimes.torch.drafters.table import register
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.target import Target, TargetOutput
from tests.tiny.conftest import tiny_target

DRAFT: dict[str, Any] = {"draft": "a model in memory"}


class NoisyModel:
    """A model that says something else in some rows, so that every accepted length occurs."""

    def __init__(self, model: Target, error_rate: float = 0.3):
        self.model, self.error_rate, self.chance = model, error_rate, random.Random(0)
        self.calls: list[int] = []  # rows of each forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, view: View) -> TargetOutput:
        out = self.model.forward(batch, view)
        self.calls.append(batch.input_ids.shape[1])
        wrong = torch.tensor([self.chance.random() < self.error_rate for _ in out.logits], dtype=torch.bool)[
            :, None
        ]
        return TargetOutput(torch.where(wrong, out.logits.flip(-1), out.logits))


def use_draft(model: Any, name: str = NAME) -> list[DraftModel]:
    """Makes this method draft with `model`, in engines built from now on; they are in the list that is
    returned.
    """
    made: list[DraftModel] = []

    def build(config: Any, host: Any) -> DraftModel:
        made.append(
            DraftModel(lambda: model, model.needs(1, 1), host, config.draft_min_confidence, config.most())
        )
        return made[-1]

    register(name, build)
    return made


def noisy_draft(name: str = "llama", error_rate: float = 0.3) -> NoisyModel:
    model = NoisyModel(tiny_target(name), error_rate)
    use_draft(model)
    return model
