"""Memory that a model will take, estimated from its config and file headers before it is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from speculon.core.config.speculation import Quantization
from speculon.core.types import LayerSpec, Needs, StateSpec
from speculon.loading.headers import Checkpoint, read_checkpoint, refuse_unsafe
from speculon.loading.load import load_config
from speculon.loading.locate import locate
from speculon.loading.probe import RECURRENT_LAYERS, expected_states
from speculon.loading.quantization import packed_bytes
from speculon.loading.reading import quiet
from speculon.target.captured import RECORDERS
from speculon.target.footprint import CaptureSizes, scratch_bytes
from speculon.target.linear import head_is_packed

WITHOUT_ATTENTION = RECURRENT_LAYERS - {"hybrid", "hybrid_sliding"}  # layers that keep nothing in pages

MADE_NUMBERS = ("fp8",)  # methods whose weights transformers makes numbers of, on a CPU

log = logging.getLogger("speculon")


def model_needs(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    scored: int,
    fused: bool = True,
    compile: bool = False,
    quantization: Quantization = "auto",
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Needs:
    """The needs of a model that is not loaded; T = `rows` and R = `scored` in its largest forward.

    Raises `ModelError` for a checkpoint that loading would refuse.
    """
    folder = locate(path, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    checkpoint = read_checkpoint(folder)
    refuse_unsafe(checkpoint, allow_pickle=allow_pickle)
    with quiet():
        whole = load_config(checkpoint, trust_remote_code)
    config = whole.get_text_config()
    weights = packed_bytes(quantization, checkpoint, whole, dtype, device)
    if weights is None:
        weights = weight_bytes(checkpoint, dtype) + (fused_bytes(config, dtype, device) if fused else 0)
    scratch = scratch_bytes(config, dtype, device, rows, scored)
    if fused and compile and device.type in RECORDERS:
        weights += CaptureSizes.of_target(config, expected_layers(config, dtype)).num_bytes(dtype)
    return Needs(
        layers=expected_layers(config, dtype),
        max_context=getattr(config, "max_position_embeddings", None),
        bytes_fixed=weights,
        bytes_scratch=scratch,
        states=recurrent_states(config, dtype),
    )


def recurrent_states(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[tuple[StateSpec, ...], ...]:
    """The recurrent states of each mixer, where the config names recurrent layers."""
    if not RECURRENT_LAYERS & set(getattr(config, "layer_types", None) or ()):
        return ()
    try:
        with quiet():
            return expected_states(config, dtype)
    except Exception as error:  # of any model code; the engine judges again what was loaded
        log.info("the states of %s are unknown before it is loaded: %s", type(config).__name__, error)
        return ()


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """The weights in `dtype`; as they are stored those of pickles, and quantised ones that stay so."""
    if checkpoint.num_parameters is None or checkpoint.quantization not in (None, *MADE_NUMBERS):
        return checkpoint.num_bytes
    return checkpoint.num_parameters * dtype.itemsize


def fused_bytes(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """What fusing adds: a packed copy of a head that is tied to the embedding."""
    head: int = config.vocab_size * config.hidden_size * dtype.itemsize
    return head if config.tie_word_embeddings and head_is_packed(dtype, device) else 0


def expected_layers(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    """The shapes of the K and V of each layer that attends, as the config implies."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # purely recurrent
        return ()
    if getattr(config, "kv_lora_rank", None):  # latent attention: pages hold the expanded heads
        k_dim, v_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or heads
        k_dim = v_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or ()
    silent = sum(kind in WITHOUT_ATTENTION for kind in types)
    return (LayerSpec("attention", heads, k_dim, v_dim, dtype),) * (int(config.num_hidden_layers) - silent)
