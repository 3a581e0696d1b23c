"""Training method `draft`: a small causal language model that predicts the target's tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from speculon.checkpoints.reading import load_tokenizer, quiet
from speculon.train.data import DocumentRows
from speculon.train.losses import kl
from speculon.train.settings import DraftSettings
from speculon.train.teacher import Teacher, TeacherBatch
from speculon.train.training import Training, attention_heads

FAMILIES = ("llama", "qwen3")  # whose layers a draft may have; any other target gets a llama
COPIED = (
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
)
DRAFTS = 4  # per round, when it is tried out


class TrainedDraftModel(nn.Module):
    """A stock model as a drafter. Parameters have its own names."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, H]"""
        last: Tensor = self.model.get_decoder()(ids, use_cache=False).last_hidden_state
        return last

    def loss(self, batch: TeacherBatch) -> Tensor:
        """KL, a weighted mean over positions."""
        learned, head = batch.weights > 0, self.model.get_output_embeddings().weight
        hidden = self.hidden(batch.ids)[learned]
        return kl(hidden, head, batch.p[learned], batch.entropy[learned], batch.weights[learned])

    def correct(self, batch: TeacherBatch) -> Tensor:
        """Whether its best token is the target's, at each weighted position [1, M]."""
        learned = batch.weights > 0
        logits = self.model.get_output_embeddings()(self.hidden(batch.ids)[learned])
        return (logits.argmax(-1) == batch.best[learned])[None]


class DraftModelTraining(Training[DraftSettings, TrainedDraftModel]):
    """How `train draft` makes its drafter, and writes it at the end."""

    method, proposer, drafts = "draft", "draft_model", DRAFTS

    @property
    def spare(self) -> int:
        return 0

    def check(self, teacher: Teacher) -> None:
        config_of(self.settings, teacher)

    def drafter(self, teacher: Teacher, rows: DocumentRows) -> TrainedDraftModel:
        """A model of few layers, initialised with the target's parameters where the widths agree.

        Its context is the length that it is trained on: not far beyond, its drafts are rejected.
        """
        config = config_of(self.settings, teacher)
        config.max_position_embeddings = rows.ids.shape[1]
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()  # layers that are not copied add nothing at first
        copy_alike(teacher.model, model, config.num_hidden_layers, len(teacher.layers))
        return TrainedDraftModel(model.to(teacher.device))

    def write(self, drafter: TrainedDraftModel, teacher: Teacher, target: str, folder: Path) -> None:
        """The model in bf16, and the target's tokenizer beside it."""
        with quiet():
            copy.deepcopy(drafter.model).to(torch.bfloat16).save_pretrained(folder)
        load_tokenizer(target).save_pretrained(folder)


def config_of(settings: DraftSettings, teacher: Teacher) -> PreTrainedConfig:
    """The target's own config with fewer layers, or a llama's with its numbers."""
    target = teacher.config
    hidden = settings.hidden or teacher.width
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, target)
    intermediate = settings.intermediate or getattr(target, "intermediate_size", None) or 4 * hidden
    numbers = {
        "num_hidden_layers": settings.layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": getattr(target, "head_dim", None) or teacher.width // target.num_attention_heads,
        "intermediate_size": intermediate,
    }
    if target.model_type in FAMILIES:
        known = {name: value for name, value in target.to_dict().items() if name != "layer_types"}
        return type(target)(**{**known, **numbers})
    same = {name: getattr(target, name) for name in COPIED if hasattr(target, name)}
    return LlamaConfig(**same, **numbers)


@torch.no_grad()
def copy_alike(target: nn.Module, draft: nn.Module, layers: int, depth: int) -> None:
    """Copies parameters of equal shape: the first half of the layers from the bottom, others from the top.

    `model.layers.1.mlp...` of a draft of 2 layers is `model.layers.19.mlp...` of a target of 20.
    """
    sources = dict(target.named_parameters())
    for name, parameter in draft.named_parameters():
        before, dot, after = name.partition("layers.")
        if dot:
            number, _, rest = after.partition(".")
            layer = int(number) if int(number) < (layers + 1) // 2 else max(depth - layers + int(number), 0)
            name = f"{before}layers.{layer}.{rest}"
        source = sources.get(name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
