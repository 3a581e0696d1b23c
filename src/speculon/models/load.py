"""From a folder, a hub id or a model in memory to a Target that has proved itself."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from speculon.models import attention
from speculon.models.probe import discover, use_attention
from speculon.models.target import Target

OWN_BUFFER = 1 << 16  # elements; smaller buffers (rotary tables) are copied, larger ones (packed weights) shared


def wrap_model(model: PreTrainedModel, *, name: str | None = None, max_context: int | None = None) -> Target:
    """A Target over the weights of a model in memory. Does not modify `model`."""
    return make_target(own_structure(model), name or type(model).__name__, max_context)


def own_structure(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a module tree with a config of its own: the attention choice is written into the config."""
    shared = [*model.parameters(), *(b for b in model.buffers() if b.numel() > OWN_BUFFER)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    return copy.deepcopy(model, memo)


def make_target(model: PreTrainedModel, name: str, max_context: int | None) -> Target:
    model.eval()
    config = model.config.get_text_config()
    layers, vocab = discover(model)
    use_attention(model, attention.NAME)
    return Target(model, layers, name=name, vocab_size=vocab, max_context=config.max_position_embeddings, eos_ids=frozenset())
