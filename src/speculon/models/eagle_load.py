"""Loads an EAGLE-3 head from its checkpoint, and says before that what it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculon.checkpoints.eagle3_config import Eagle3Config
from speculon.core import LayerSpec, Needs
from speculon.errors import UnsupportedModel
from speculon.models.block import Attention, Block, Norm
from speculon.models.draft_runs import run_bytes
from speculon.models.drafter_parts import Parts, ids_of, read_tensors, rope_config, weight_bytes
from speculon.models.eagle import EagleHead, FirstLayer
from speculon.models.footprint import scratch_bytes
from speculon.models.target import Target

OF_PAIRS = 3  # widths of a state: the given states, and the pairs that the first layer reads


def head_needs(
    config: Eagle3Config,
    taps: tuple[int, ...],
    target: Target,
    rows: int,
    scored: int,
    compile: bool = False,
) -> Needs:
    """The needs of a head that is not loaded; T = `rows` and R = `scored` in its largest forward."""
    dtype, widths = target.dtype, config.taps * config.target_hidden
    layers = [LayerSpec("taps", 1, widths, 0, dtype)]
    layers += [
        LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, dtype, window)
        for window in config.windows
    ]
    sizes = rope_config(config)
    sizes.vocab_size = config.vocab_size  # its logits cover the target's vocabulary
    scratch = scratch_bytes(sizes, dtype, target.device, rows, scored) + 2 * rows * widths * dtype.itemsize
    fixed = weight_bytes(config, dtype)
    if compile:
        fixed += run_bytes(sizes, config.layers, fixed, dtype, target.device, more=OF_PAIRS)
    return Needs(
        taps,
        tuple(layers),
        config.max_context,
        bytes_fixed=fixed,
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
        ids=ids_of(config.path, config.vocab_size, parts.tensors.get("d2t"), target.device),
    )


@dataclass(frozen=True, slots=True)
class HeadParts(Parts):
    """Builds the parts of a head from its tensors."""

    config: Eagle3Config

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
