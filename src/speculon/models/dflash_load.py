"""Loads a DFlash or DSpark drafter from its checkpoint, and says before that what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculon.checkpoints.dflash_config import GATE, JOINT, W1, DFlashConfig
from speculon.core import LayerSpec, Needs
from speculon.errors import UnsupportedModel, WrongPair
from speculon.models.block import Norm
from speculon.models.dflash import BlockLayer, DFlashModel
from speculon.models.dflash_attention import Sight
from speculon.models.dflash_heads import Confidence, GatedMarkov, Markov, RecurrentMarkov
from speculon.models.draft_runs import run_bytes
from speculon.models.drafter_parts import Parts, ids_of, read_tensors, rope_config, weight_bytes
from speculon.models.footprint import scratch_bytes
from speculon.models.target import Target


def dflash_needs(
    config: DFlashConfig, target: Target, rows: int, scored: int, compile: bool = False
) -> Needs:
    """The needs of a drafter that is not loaded; T = `rows` and R = `scored` in its largest forward."""
    dtype, widths = target.dtype, config.taps * config.target_hidden
    layers = [LayerSpec("taps", 1, widths, 0, dtype)]
    for layer, window in enumerate(config.windows):
        seen = None if window is None else sight_of(config, layer).reach
        span = None if seen is None else seen + 1  # a row and the pages before it
        layers.append(LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, dtype, span))
    sizes = rope_config(config)
    sizes.vocab_size = target.vocab_size  # its logits cover the target's vocabulary
    scratch = scratch_bytes(sizes, dtype, target.device, rows, scored) + 2 * rows * widths * dtype.itemsize
    fixed = weight_bytes(config, dtype)
    if compile:
        fixed += run_bytes(sizes, config.layers, fixed, dtype, target.device)
    return Needs(
        taps=config.tap_layouts(len(target.layers))[0],
        layers=tuple(layers),
        max_context=config.max_context,
        max_drafts=config.max_drafts,
        bytes_fixed=fixed,
        bytes_scratch=scratch,
    )


def sight_of(config: DFlashConfig, layer: int) -> Sight:
    """What the rows of a block see in a layer."""
    window, causal = config.windows[layer], config.causal[layer]
    if window is None:
        return Sight(causal)
    reach = window - 1 if config.window_start == "row" else window
    return Sight(causal, reach, config.window_start == "before_anchor")


def load_dflash(config: DFlashConfig, target: Target) -> DFlashModel:
    """The drafter in the target's dtype; what its checkpoint lacks is shared with the target.

    Raises `ModelError` for a tensor that it cannot share.
    """
    if config.act not in ACT2FN:
        raise UnsupportedModel(f"{config.path}: hidden_act {config.act!r} is not known")
    parts = DFlashParts(config, target, read_tensors(config))
    embed = parts.weight("embed_tokens.weight") if parts.has("embed_tokens") else target.embedding
    if config.mask_token_id >= len(embed):
        raise WrongPair(f"{config.path}: mask_token_id {config.mask_token_id} of {len(embed)} embeddings")
    return DFlashModel(
        embed=embed,
        mask_token_id=config.mask_token_id,
        fc=parts.product("fc"),
        context_norm=parts.norm("hidden_norm"),
        layers=[parts.layer(number) for number in range(config.layers)],
        norm=parts.norm("norm"),
        head=parts.product("lm_head") if parts.has("lm_head") else target.head,
        rotary=LlamaRotaryEmbedding(rope_config(config)).to(target.device),
        ids=ids_of(config.path, target.vocab_size, parts.tensors.get("d2t"), target.device),
        markov=parts.markov(),
        confidence=parts.confidence(),
    )


@dataclass(frozen=True, slots=True)
class DFlashParts(Parts):
    """Builds the parts of a drafter from its tensors."""

    config: DFlashConfig

    def layer(self, number: int) -> BlockLayer:
        at = f"layers.{number}"
        inner = f"{at}.self_attn"
        return BlockLayer(
            layer=number,
            q=self.product(f"{inner}.q_proj"),
            kv=self.product(f"{inner}.k_proj", f"{inner}.v_proj"),
            out=self.product(f"{inner}.o_proj"),
            q_norm=self.head_norm(f"{inner}.q_norm", self.config.heads),
            k_norm=self.head_norm(f"{inner}.k_norm", self.config.kv_heads),
            head_dim=self.config.head_dim,
            sight=sight_of(self.config, number),
            norm=self.norm(f"{at}.input_layernorm"),
            mlp_norm=self.norm(f"{at}.post_attention_layernorm"),
            mlp=self.mlp(number),
        )

    def head_norm(self, name: str, heads: int) -> Norm | None:
        """One norm for all heads, where there is such."""
        if not self.has(name):
            return None
        return Norm(self.weight(f"{name}.weight").expand(heads, -1).contiguous(), self.config.eps)

    def markov(self) -> Markov | None:
        if self.config.markov is None:
            return None
        w1, w2 = self.weight(W1), self.product("markov_head.markov_w2")
        match self.config.markov:
            case "gated":
                return GatedMarkov(w1, w2, self.product(GATE.removesuffix(".weight")))
            case "rnn":
                return RecurrentMarkov(w1, w2, self.product(JOINT.removesuffix(".weight")))
        return Markov(w1, w2)

    def confidence(self) -> Confidence | None:
        if not self.config.confidence:
            return None
        return Confidence(self.product("confidence_head.proj"), self.config.confidence_with_markov)
