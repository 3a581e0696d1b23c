"""Random small DFlash, DFlash2 and DSpark drafters as five projects write them: tensor names and config keys.

>>> write_dflash(folder, target.config, "speculators", seed=1, block_size=4, markov="gated")

`make_drafter` with the same arguments returns the written drafter under the names used here, with what each
row of a block sees by the rules of that project.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny.checkpoint_formats import save_weights

FORMATS = ("z-lab", "specforge", "deepspec", "speculators", "meta")
FROM_ANCHOR = {"specforge": True, "deepspec": True}  # where the config says nothing
MASK = 2


@dataclass(frozen=True)
class Drafter:
    """A drafter by the formula's own names; what any format of it means."""

    format: str
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]  # outputs of 0-based target layers, -1 the embeddings
    width: int  # of the target's states
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]  # of each layer
    markov: str | None
    rank: int
    rope_theta: float
    target_layers: int
    architecture: str  # of the target
    group: int  # channels of a group of the convolutions; 0: it is no DFlash2 drafter
    top_k: int  # candidates of the selector
    scales: dict[str, float]  # by the names of the config
    eps: float = 1e-5

    def sees(self, layer: int, n: int, row: int, position: int) -> bool:
        """Whether row `row` of a block after n positions sees a position; those from n on are of its block.

        A window of W begins at p - W + 1, or at p - W (Meta), or at n - W (speculators).
        """
        own, p, window = position >= n, n + row, self.windows[layer]
        if own and self.causal[layer] and position > p:
            return False
        if window is None:
            return True
        if self.format == "speculators":
            return own or position >= n - window
        reach = window if self.format == "meta" else window - 1
        return abs(position - p) <= reach


def make_drafter(
    target: Any,
    format: str = "z-lab",
    seed: int = 0,
    *,
    taps: tuple[int, ...] = (1, 3, 4),
    hidden: int | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 48,
    block_size: int = 8,
    from_anchor: bool | None = None,
    windows: tuple[int | None, ...] | None = None,
    causal: bool | None = None,
    markov: str | None = None,
    rank: int = 6,
    confidence: str | None = None,
    draft_vocab: int | None = None,
    own_head: bool | None = None,
    qk_norm: bool = True,
    bias: bool = False,
    rope_theta: float = 10000.0,
    group: int = 0,
    conv_taps: int = 2,
    top_k: int = 5,
    scales: dict[str, float] | None = None,
) -> Drafter:
    """A random drafter for `target`, a config. `causal` overrides what the format's windows mean; a
    confidence head reads "h" or "h and e". A `group` of channels makes it a DFlash2 drafter.
    """
    width, vocab, mine = target.hidden_size, target.vocab_size, hidden or target.hidden_size
    drafted, noise = draft_vocab or vocab, torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int, std: float = 0.2) -> None:
        tensors[f"{name}.weight"] = torch.randn(shape, generator=noise) * std

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(size, generator=noise) * 0.1 + 1

    def offset(name: str, size: int) -> None:
        tensors[f"{name}.bias"] = torch.randn(size, generator=noise) * 0.3

    matrix("fc", mine, len(taps) * width)
    norm("hidden_norm", mine)
    norm("norm", mine)
    for layer in range(layers):
        at = f"layers.{layer}"
        norm(f"{at}.input_layernorm", mine)
        norm(f"{at}.post_attention_layernorm", mine)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{at}.self_attn.{name}_proj", count * head_dim, mine)
            if bias:
                offset(f"{at}.self_attn.{name}_proj", count * head_dim)
            if qk_norm and name != "v":
                norm(f"{at}.self_attn.{name}_norm", head_dim)
        matrix(f"{at}.self_attn.o_proj", mine, heads * head_dim)
        if bias:
            offset(f"{at}.self_attn.o_proj", mine)
        matrix(f"{at}.mlp.gate_proj", intermediate, mine)
        matrix(f"{at}.mlp.up_proj", intermediate, mine)
        matrix(f"{at}.mlp.down_proj", mine, intermediate)
    if own_head or draft_vocab or mine != width:
        matrix("lm_head", drafted, mine)
    if mine != width:
        matrix("embed_tokens", vocab, mine)
    if draft_vocab:
        used = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values
        tensors["d2t"] = used - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, used, True)
    if markov:
        matrix("markov_head.markov_w1", vocab, rank, std=1.0)
        matrix("markov_head.markov_w2", drafted, rank, std=1.0)
    if markov == "gated":
        matrix("markov_head.gate_proj", rank, mine + rank)
        offset("markov_head.gate_proj", rank)
    if markov == "rnn":
        matrix("markov_head.joint_proj", 3 * rank, 2 * rank + mine)
        offset("markov_head.joint_proj", 3 * rank)
    if confidence:
        matrix("confidence_head.proj", 1, mine + (rank if confidence == "h and e" else 0))
        offset("confidence_head.proj", 1)
    if group:
        for layer in range(layers):
            for name in ("attention_conv", "mlp_conv"):
                at = f"layers.{layer}.{name}"
                tensors[f"{at}.base_kernel"] = torch.randn((2, conv_taps, mine), generator=noise)
                matrix(f"{at}.kernel_projection", 2 * conv_taps * (mine // group), mine)
        for name in ("predecessor", "successor"):
            tensors[f"candidate_selector.{name}_codebook"] = torch.randn((vocab, rank), generator=noise)
        matrix("candidate_selector.hidden_projection", rank, mine, std=0.5)
    wide = windows or (None,) * layers
    sliding = tuple(w is not None and format != "meta" for w in wide)
    return Drafter(
        format=format,
        tensors=tensors,
        taps=taps,
        width=width,
        hidden=mine,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        block_size=block_size,
        from_anchor=FROM_ANCHOR.get(format, False) if from_anchor is None else from_anchor,
        windows=wide,
        causal=sliding if causal is None else (causal,) * layers,
        markov=markov,
        rank=rank,
        rope_theta=rope_theta,
        target_layers=target.num_hidden_layers,
        group=group,
        top_k=top_k,
        scales=scales or {},
        architecture=(getattr(target, "architectures", None) or ["LlamaForCausalLM"])[0],
    )


def write_dflash(
    folder: str | Path,
    target: Any,
    format: str = "z-lab",
    seed: int = 0,
    *,
    config: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    prefix: str = "",
    **variant: Any,
) -> Path:
    """Writes `make_drafter(target, format, seed, **variant)` and returns the folder.

    `config` overrides top-level keys, None takes one away; `extra` adds tensors.
    """
    folder, drafter = Path(folder), make_drafter(target, format, seed, **variant)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIGS[format](drafter, variant), **(config or {})}
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=2))
    renamed = {prefix + published(name, format): tensor for name, tensor in drafter.tensors.items()}
    save_weights(folder, {**renamed, **(extra or {})})
    return folder


def published(name: str, format: str) -> str:
    if format == "meta":
        return name.replace("hidden_norm", "encoder.output_norm_enc").replace("fc.", "encoder.fc.")
    return name


# -- config.json, format by format


def qwen3(drafter: Drafter) -> dict[str, Any]:
    """What all of them share."""
    windowed = [w for w in drafter.windows if w]
    types = ["sliding_attention" if w else "full_attention" for w in drafter.windows]
    return {
        "model_type": "qwen3",
        "hidden_size": drafter.hidden,
        "intermediate_size": drafter.tensors["layers.0.mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": drafter.layers,
        "vocab_size": drafter.vocab_size,
        "rms_norm_eps": drafter.eps,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": drafter.rope_theta,
        "tie_word_embeddings": False,
        **({"sliding_window": windowed[0]} if windowed else {}),
        **({"layer_types": types} if windowed or drafter.format == "meta" else {}),
    }


def flag(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    """The flags that the variant asked for by name."""
    given = {"sample_from_anchor": drafter.from_anchor} if variant.get("from_anchor") is not None else {}
    if variant.get("causal") is not None:
        given["is_causal"] = variant["causal"]
    return given


def heads(drafter: Drafter) -> dict[str, Any]:
    found = {"markov_rank": drafter.rank if drafter.markov else 0}
    return {**found, "markov_head_type": drafter.markov} if drafter.markov else found


def flash2(drafter: Drafter) -> dict[str, Any]:
    taps = drafter.tensors["layers.0.mlp_conv.base_kernel"].shape[1]
    sizes = {"conv_kernel_size": taps, "conv_group_size": drafter.group}
    return {**sizes, "selector_rank": drafter.rank, "selector_top_k": drafter.top_k, **drafter.scales}


def zlab(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    if drafter.group:
        return {
            "architectures": ["DFlash2DraftModel"],
            **qwen3(drafter),
            "is_causal": False,
            **flag(drafter, variant),
            "num_target_layers": drafter.target_layers,
            "dflash_config": {
                "block_size": drafter.block_size,
                "mask_token_id": MASK,
                "target_layer_ids": list(drafter.taps),
                **flash2(drafter),
            },
        }
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **qwen3(drafter),
        **flag(drafter, variant),
        "block_size": drafter.block_size,
        "num_target_layers": drafter.target_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(drafter.taps)},
    }


def specforge(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    nested = {
        "block_size": drafter.block_size,
        "mask_token_id": MASK,
        "target_layer_ids": list(drafter.taps),
        "projector_type": "dspark",
        "shift_label": False,
        **heads(drafter),
    }
    config = {**qwen3(drafter), **flag(drafter, variant), "dflash_config": nested}
    return {"architectures": ["DSparkDraftModel"], **config}


def deepspec(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3(drafter),
        **flag(drafter, variant),
        **heads(drafter),
        "block_size": drafter.block_size,
        "mask_token_id": MASK,
        "target_layer_ids": list(drafter.taps),
        "num_anchors": 512,
    }


def meta(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": drafter.rope_theta}
    settings = {name: value for name, value in qwen3(drafter).items() if name != "vocab_size"}
    return {
        **settings,
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "rope_parameters": rope,
        "block_size": drafter.block_size,
        "mask_token_id": MASK,
        "target_layer_ids": list(drafter.taps),
    }


def speculators(drafter: Drafter, variant: dict[str, Any]) -> dict[str, Any]:
    algorithm = "dspark" if drafter.markov else "dflash2" if drafter.group else "dflash"
    drafts = drafter.block_size - (not drafter.from_anchor)
    method = {"proposal_type": "greedy", "speculative_tokens": drafts}
    windowed = any(drafter.windows)
    return {
        "architectures": [f"{algorithm}DraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "/somebody/elses", "architectures": [drafter.architecture]},
        },
        "transformer_layer_config": qwen3(drafter),
        "draft_vocab_size": drafter.tensors.get("lm_head.weight", torch.empty(drafter.vocab_size)).shape[0],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
        "mask_token_id": MASK,
        "block_size": drafter.block_size,
        **({"sliding_window_non_causal": not any(drafter.causal)} if windowed else {}),
        **{name: value for name, value in flag(drafter, variant).items() if name != "is_causal"},
        **(heads(drafter) if drafter.markov else {}),
        **(flash2(drafter) if drafter.group else {}),
    }


CONFIGS = {
    "z-lab": zlab,
    "specforge": specforge,
    "deepspec": deepspec,
    "meta": meta,
    "speculators": speculators,
}
