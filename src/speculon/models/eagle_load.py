"""Loads an EAGLE-3 head from its checkpoint, and says before that what it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculon.checkpoints.eagle3_config import Eagle3Config, check_offsets
from speculon.checkpoints.headers import read_header
from speculon.core import LayerSpec, Needs
from speculon.errors import MissingWeights, UnsupportedModel
from speculon.models.block import Attention, Block, Gated, Norm
from speculon.models.eagle import EagleHead, FirstLayer
from speculon.models.linear import Product, joined
from speculon.models.target import Target, scratch_bytes

NOT_WEIGHTS = {"d2t", "t2d"}


def head_needs(config: Eagle3Config, taps: tuple[int, ...], target: Target, rows: int, scored: int) -> Needs:
    """The needs of a head that is not loaded; T = `rows` and R = `scored` in its largest forward."""
    dtype, widths = target.dtype, config.taps * config.target_hidden
    layers = [LayerSpec("taps", 1, widths, 0, dtype)]
    layers += [
        LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, dtype, window)
        for window in config.windows
    ]
    headers = {name: entry for file in config.files for name, entry in read_header(file)[0].items()}
    weights = sum(
        math.prod(headers[stored]["shape"])
        for name, stored in config.names.items()
        if name not in NOT_WEIGHTS
    )
    sizes = rope_config(config)
    sizes.vocab_size = config.vocab_size  # its logits cover the target's vocabulary
    scratch = scratch_bytes(sizes, dtype, target.device, rows, scored) + 2 * rows * widths * dtype.itemsize
    return Needs(
        taps,
        tuple(layers),
        config.max_context,
        bytes_fixed=weights * dtype.itemsize,
        bytes_scratch=scratch,
    )


def load_head(config: Eagle3Config, target: Target) -> EagleHead:
    """The head in the target's dtype; what its checkpoint lacks is shared with the target.

    Raises `ModelError` for a tensor that it cannot share.
    """
    if config.act not in ACT2FN:
        raise UnsupportedModel(f"{config.path}: hidden_act {config.act!r} is not known")
    parts = HeadParts(config, target, read_tensors(config))
    return EagleHead(
        embed=parts.weight("embed_tokens.weight") if parts.has("embed_tokens") else target.embedding,
        fc=parts.product("fc"),
        tap_norms=parts.tap_norms(),
        first=parts.first_layer(),
        more=[parts.block(layer) for layer in range(1, config.layers)],
        norm=parts.norm("norm"),
        norm_output=config.norm_output,
        head=parts.product("lm_head") if parts.has("lm_head") else target.head,
        scale=config.logit_scale,
        rotary=LlamaRotaryEmbedding(rope_config(config)).to(target.device),
        ids=ids_of(config, parts.tensors.get("d2t"), target.device),
    )


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Builds the parts of a head from its tensors."""

    config: Eagle3Config
    target: Target
    tensors: dict[str, Tensor]

    def has(self, module: str) -> bool:
        return f"{module}.weight" in self.tensors

    def weight(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise MissingWeights(f"{self.config.path}: tensor {name} is missing")
        return self.tensors[name].to(self.target.device, self.target.dtype)

    def norm(self, name: str) -> Norm:
        return Norm(self.weight(f"{name}.weight"), self.config.eps)

    def linear(self, name: str) -> nn.Linear:
        matrix, has_bias = self.weight(f"{name}.weight"), f"{name}.bias" in self.tensors
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=has_bias, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(self.weight(f"{name}.bias"), requires_grad=False)
        return layer

    def product(self, *names: str) -> Product:
        return joined([self.linear(name) for name in names], share=False)

    def attention(self, layer: int) -> Attention:
        config, at = self.config, f"layers.{layer}.self_attn"
        return Attention(
            layer=layer,
            qkv=self.product(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
            out=self.product(f"{at}.o_proj"),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scaling=config.head_dim**-0.5,
            norm=self.heads_norm(at) if self.has(f"{at}.q_norm") else None,
            rotates=True,
            softcap=None,
            sinks=None,
        )

    def heads_norm(self, at: str) -> Norm:
        """The norms of query and key heads as one."""
        query, key = (self.weight(f"{at}.{name}.weight") for name in ("q_norm", "k_norm"))
        both = torch.cat([query.expand(self.config.heads, -1), key.expand(self.config.kv_heads, -1)])
        return Norm(both, self.config.eps)

    def mlp(self, layer: int) -> Gated:
        at = f"layers.{layer}.mlp"
        gate_up = self.product(f"{at}.gate_proj", f"{at}.up_proj")
        return Gated(gate_up, self.product(f"{at}.down_proj"), ACT2FN[self.config.act])

    def block(self, layer: int) -> Block:
        """A layer after the first; some checkpoints name its only norm before attention hidden_norm."""
        at, names = f"layers.{layer}", ("input_layernorm", "hidden_norm")
        before = next((name for name in names if self.has(f"{at}.{name}")), names[0])
        norms = (self.norm(f"{at}.{before}"), None, self.norm(f"{at}.post_attention_layernorm"), None)
        return Block(self.attention(layer), self.mlp(layer), norms)

    def first_layer(self) -> FirstLayer:
        return FirstLayer(
            self.norm("layers.0.input_layernorm"),
            self.norm("layers.0.hidden_norm"),
            self.attention(0),
            self.norm("layers.0.post_attention_layernorm"),
            self.mlp(0),
            self.config.norm_before_residual,
        )

    def tap_norms(self) -> tuple[Norm, ...]:
        names = [f"fc_norm.{i}" for i in range(self.config.taps * self.config.fc_norm)]
        return tuple(map(self.norm, ["input_norm"] if self.config.norm_before_fc else names))


def read_tensors(config: Eagle3Config) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names used here."""
    names = {stored: name for name, stored in config.names.items()}
    tensors: dict[str, Tensor] = {}
    for path in config.files:
        with safe_open(path, framework="pt") as file:
            tensors |= {names[stored]: file.get_tensor(stored) for stored in file.keys() if stored in names}
    return tensors


def rope_config(config: Eagle3Config) -> LlamaConfig:
    """The config that transformers' rotary table reads."""
    return LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope),
    )


def ids_of(
    config: Eagle3Config, offsets: Tensor | None, device: torch.device
) -> Tensor | None:  # [Vd] -> [Vd]
    """The target's id of each draft id; d2t holds the differences."""
    if offsets is None:
        return None
    check_offsets(config.path, offsets.tolist(), config.vocab_size)
    return torch.arange(len(offsets), device=device) + offsets.to(device, torch.long)
