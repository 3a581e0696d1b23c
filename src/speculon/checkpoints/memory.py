"""What a checkpoint will take of memory, from its config and the headers of its files alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from speculon.checkpoints.headers import read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import locate
from speculon.core import LayerSpec, Needs
from speculon.models.captured import RECORDERS, capture_bytes
from speculon.models.linear import head_is_copied
from speculon.models.load import load_config, quiet
from speculon.models.target import scratch_bytes


def model_needs(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    scored: int,
    fused: bool = True,
    compile: bool = False,
) -> Needs:
    """The needs of a model that is not loaded; `rows` and `scored` are T and R of its largest forward.

    Raises `ModelError` for a checkpoint that loading would refuse.
    """
    checkpoint = read_checkpoint(locate(path))
    refuse_unsafe(checkpoint, allow_pickle=False)
    with quiet():
        config = load_config(checkpoint, trust_remote_code=False).get_text_config()
    stored = checkpoint.num_parameters is None or checkpoint.quantization is not None
    weights = checkpoint.num_bytes if stored else (checkpoint.num_parameters or 0) * dtype.itemsize
    head = config.vocab_size * config.hidden_size * dtype.itemsize
    if fused and config.tie_word_embeddings and head_is_copied(head, weights, dtype, device):
        weights += head
    layers = expected_layers(config, dtype)
    if fused and compile and device.type in RECORDERS:
        weights += capture_bytes(config, layers, dtype)
    elif fused and compile:
        from speculon.models.compiled import bytes_more  # brings the compiler's own modules

        weights += bytes_more(weights, dtype, device)
    return Needs(
        layers=layers,
        max_context=getattr(config, "max_position_embeddings", None),
        bytes_fixed=weights,
        bytes_scratch=scratch_bytes(config, dtype, device, rows, scored),
    )


def expected_layers(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    """One attention layer's K and V as the config tells their shape, for each layer."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention keeps what it expands to
        k_dim, v_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or heads
        k_dim = v_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (LayerSpec("attention", heads, k_dim, v_dim, dtype),) * config.num_hidden_layers
