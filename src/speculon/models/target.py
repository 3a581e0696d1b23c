"""The model whose output the user asked for: one flat forward over spans of many sequences."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from speculon.batch import Batch
from speculon.core import LayerSpec
from speculon.kv.store import View


@dataclass(frozen=True, slots=True)
class Output:
    """What one forward yields."""

    logits: Tensor  # [R, V] float32
    taps: Tensor | None = None  # [T, n * D]
    ms: float = 0.0


class Target:
    """A causal language model behind pages. Made by `load_target` or `wrap_model`, which check it first."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: tuple[LayerSpec, ...],
        *,
        name: str,
        vocab_size: int,
        max_context: int,
        eos_ids: frozenset[int],
        notes: tuple[str, ...] = (),
    ):
        self.model, self.layers, self.name, self.vocab_size = model, layers, name, vocab_size
        self.max_context, self.eos_ids, self.notes = max_context, eos_ids, notes
        self.device, self.dtype = model.device, model.dtype

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._weights())

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for p in self._weights())

    def _weights(self) -> Collection[Parameter]:
        return {p.data_ptr(): p for p in self.model.parameters()}.values()  # tied weights count once

    @torch.inference_mode()
    def forward(self, batch: Batch, view: View) -> Output:
        """Logits of `batch.score_rows`; K and V of all rows go to the pages of `view`."""
        start = time.perf_counter()
        row = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False, "view": view}
        if batch.score_rows.numel():
            logits = self.model(**row, logits_to_keep=batch.score_rows).logits[0].float()  # [R, V]
        else:
            self.model.base_model(**row)  # a prompt chunk that nobody scores needs no head
            logits = torch.empty(0, self.vocab_size, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Output(logits, ms=(time.perf_counter() - start) * 1e3)
