"""Older classes of transformers with attention in their own code: the same through the registered function.

Only known classes: one may hide a mask of its own, which the load check is too short to find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speculon.core.errors import UnsupportedModel

STOCK = "eager"


def adapt(model: PreTrainedModel) -> bool:
    """Routes the attention of older classes through the registered function; whether there are any."""
    config = model.config.get_text_config()
    adapted = [module for module in model.modules() if class_path(module) in ADAPTED]
    for module in adapted:
        method, replacement = ADAPTED[class_path(module)]
        setattr(module, method, partial(replacement, module, config))
    return bool(adapted)


def class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}".removeprefix("transformers.models.")


def registered(
    module: nn.Module,
    config: PreTrainedConfig,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:  # [1, T, H, D]
    # some rotate in fp32, and store keys in the model's dtype
    query, key = query.to(value.dtype), key.to(value.dtype)
    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    return function(module, query, key, value, mask, scaling=scaling)[0]


def scores_method(
    module: Any,
    config: PreTrainedConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """In the place of `_attn`: [1, H, T, D] and no weights."""
    if config._attn_implementation == STOCK:
        return type(module)._attn(module, query, key, value, attention_mask)
    scale = module.norm_factor if hasattr(module, "norm_factor") else module.scale_attn
    out = registered(module, config, query, key, value, attention_mask, 1 / float(scale))
    return out.transpose(1, 2), None


def falcon_forward(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,  # [1, T, D]
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`FalconAttention.forward` with rotary positions."""
    if config._attn_implementation == STOCK:
        kwargs["position_embeddings"] = position_embeddings
        return type(module).forward(module, hidden_states, alibi, attention_mask, *args, **kwargs)
    if alibi is not None or position_embeddings is None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by distance to the scores (ALiBi)")
    split = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (heads.transpose(1, 2) for heads in split)
    if module.new_decoder_architecture:  # each key-value head was repeated for its group
        group = module.num_heads // module.num_kv_heads
        key, value = key[:, ::group], value[:, ::group]
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    out = registered(module, config, query, key, value, attention_mask, module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


# class -> the method that is replaced, and by what
ADAPTED: dict[str, tuple[str, Callable[..., Any]]] = {
    "codegen.modeling_codegen.CodeGenAttention": ("_attn", scores_method),
    "falcon.modeling_falcon.FalconAttention": ("forward", falcon_forward),
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": ("_attn", scores_method),
    "gptj.modeling_gptj.GPTJAttention": ("_attn", scores_method),
}
