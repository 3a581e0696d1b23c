"""How far a type is from fp32 in bf16, where a few weights give large activations, as in published models."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import TOLERANCE, paged_logits, random_sequences, row_errors

LARGE, EVERY = 64.0, 32  # one channel in `EVERY` of each norm has this weight


def bf16_error_ratio(model: PreTrainedModel) -> float:
    """The median distance of a row to fp32 over that of the stock model, both in bf16.

    Raises `UnsupportedModel` where the load check refuses the model.
    """
    coarse = with_large_activations(model).to(torch.bfloat16)
    target = wrap_model(coarse, share=False)
    sequences = random_sequences(target)
    truth = logits(copy.deepcopy(coarse).float(), sequences)
    both = paged_logits(target), logits(coarse, sequences)
    ours, stock = (row_errors(rows, truth).median() for rows in both)
    return float(ours / stock.clamp(min=TOLERANCE[torch.float32]))


@torch.no_grad()
def with_large_activations(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    norms = [module for module in copied.modules() if "Norm" in type(module).__name__]
    weights = [norm.weight for norm in norms if isinstance(getattr(norm, "weight", None), Tensor)]
    for weight in weights:
        weight.view(-1)[::EVERY] = LARGE
    return copied


@torch.inference_mode()
def logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:  # [R, V]
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences])
