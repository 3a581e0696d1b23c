"""Random small EAGLE-3 heads in the formats of six projects: tensor names, shapes and config keys.

>>> write_eagle3(folder, target.config, "specforge", seed=1, draft_vocab=32, norm_before_residual=True)

`make_head` with the same target, seed and variant returns the written head under the names used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMATS = ("safeailab", "specforge", "modelopt", "angelslim", "nebius", "speculators")
TAPLESS = ("safeailab", "nebius")  # their configs name no taps: always the usual three
ARCHITECTURES = {
    "safeailab": "LlamaForCausalLM",
    "specforge": "LlamaForCausalLMEagle3",
    "modelopt": "LlamaForCausalLMEagle3",
    "angelslim": "Eagle3LlamaForCausalLM",
    "nebius": "LlamaForCausalLM",
    "speculators": "Eagle3DraftModel",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Head:
    """A head by the formula's own names; what any format of it means."""

    tensors: dict[str, Tensor]
    hidden: int
    target_hidden: int
    taps: tuple[int, ...]  # outputs of 0-based target layers, -1 the embeddings
    tap_ids: tuple[int, ...] | None  # None: the config names none
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    rope: dict[str, Any]
    windows: tuple[int | None, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float
    target_layers: int
    target_architecture: str
    attention_bias: bool


def usual_taps(num_layers: int) -> tuple[int, ...]:
    return (1, num_layers // 2 - 1, num_layers - 4)


def make_head(
    target: Any,
    seed: int = 0,
    *,
    hidden: int | None = None,
    draft_vocab: int | None = None,
    taps: tuple[int, ...] | None = None,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 48,
    windows: int | tuple[int | None, ...] | None = None,
    rope_theta: float | None = None,
    rope_scaling: dict[str, Any] | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    logit_scale: float = 1.0,
    fc_bias: bool = False,
    attention_bias: bool = False,
    qk_norm: bool = False,
    own_embed: bool | None = None,
    lm_head: bool = True,
    later_norm: str = "input_layernorm",
    dtype: torch.dtype = torch.float32,
) -> Head:
    """A random head for `target`, a config with `hidden_size`, `vocab_size`, `num_hidden_layers` and
    `architectures`.

    Without `taps` the config names none, which means the usual three and asks for a target of 7 layers. A
    head of another width than its target's has its own embeddings. `windows` is one number for all layers, or
    one per layer.
    """
    width, depth, vocab = target.hidden_size, target.num_hidden_layers, target.vocab_size
    mine, chosen = hidden or width, taps or usual_taps(depth)
    drafted, noise = draft_vocab or vocab, torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int, std: float = 0.2) -> None:
        tensors[name] = (torch.randn(shape, generator=noise) * std).to(dtype)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (torch.randn(size, generator=noise) * 0.1 + 1).to(dtype)

    def bias(name: str, size: int) -> None:
        matrix(f"{name}.bias", size, std=0.5)

    matrix("fc.weight", mine, len(chosen) * width)
    if fc_bias:
        bias("fc", mine)
    for layer in range(layers):
        at, given = f"layers.{layer}", 2 * mine if layer == 0 else mine
        norm(f"{at}.{'input_layernorm' if layer == 0 else later_norm}", mine)
        if layer == 0:
            norm(f"{at}.hidden_norm", mine)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{at}.self_attn.{name}_proj.weight", count * head_dim, given)
            if attention_bias:
                bias(f"{at}.self_attn.{name}_proj", count * head_dim)
            if qk_norm and name != "v":
                norm(f"{at}.self_attn.{name}_norm", head_dim)
        matrix(f"{at}.self_attn.o_proj.weight", mine, heads * head_dim)
        if attention_bias:
            bias(f"{at}.self_attn.o_proj", mine)
        norm(f"{at}.post_attention_layernorm", mine)
        matrix(f"{at}.mlp.gate_proj.weight", intermediate, mine)
        matrix(f"{at}.mlp.up_proj.weight", intermediate, mine)
        matrix(f"{at}.mlp.down_proj.weight", mine, intermediate)
    norm("norm", mine)
    if lm_head:
        matrix("lm_head.weight", drafted, mine)
    if mine != width if own_embed is None else own_embed:
        matrix("embed_tokens.weight", vocab, mine)
    if norm_before_fc:
        norm("input_norm", len(chosen) * width)
    for tap in range(len(chosen) * fc_norm):
        norm(f"fc_norm.{tap}", width)
    if draft_vocab:
        used = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values
        tensors["d2t"] = used - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, used, True)
    return Head(
        tensors=tensors,
        hidden=mine,
        target_hidden=width,
        taps=tuple(chosen),
        tap_ids=taps,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab_size=vocab,
        draft_vocab_size=drafted,
        eps=1e-5,
        rope={"rope_type": "default", "rope_theta": rope_theta or 10000.0, **(rope_scaling or {})},
        windows=windows if isinstance(windows, tuple) else (windows,) * layers,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
        logit_scale=logit_scale,
        target_layers=depth,
        target_architecture=(getattr(target, "architectures", None) or ["LlamaForCausalLM"])[0],
        attention_bias=attention_bias,
    )


def write_eagle3(
    folder: str | Path,
    target: Any,
    format: str = "speculators",
    seed: int = 0,
    *,
    shards: int = 1,
    pickled: bool = False,
    prefix: str = "",
    aux_norms: bool = False,
    config: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    **variant: Any,
) -> Path:
    """Writes `make_head(target, seed, **variant)` as `format` does, and returns the folder.

    `prefix` goes before every name; `aux_norms` uses the old names of `fc_norm`; `config` overrides top-level
    keys, None takes one away; `extra` adds tensors.
    """
    folder, head = Path(folder), make_head(target, seed, **variant)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIGS[format](head), **(config or {})}
    kept = {
        name: value for name, value in settings.items() if value is not None or name not in (config or {})
    }
    (folder / "config.json").write_text(json.dumps(kept, indent=2))
    renamed = {prefix + published(name, format, aux_norms): tensor for name, tensor in head.tensors.items()}
    save_weights(folder, {**renamed, **(extra or {})}, shards, pickled)
    return folder


def published(name: str, format: str, aux_norms: bool = False) -> str:
    if aux_norms and name.startswith("fc_norm."):
        return f"aux_norm_{('low', 'mid', 'high')[int(name.split('.')[1])]}.weight"
    return name if format == "speculators" else name.replace("layers.0.", "midlayer.")


def save_weights(folder: Path, tensors: dict[str, Tensor], shards: int = 1, pickled: bool = False) -> None:
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )


def without(*names: str) -> Callable[[Path], None]:
    """Takes tensors out of a checkpoint that has been written in one file."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name: tensor for name, tensor in tensors.items() if name not in names},
            folder / "model.safetensors",
        )

    return change


# -- config.json, format by format


def llama(head: Head) -> dict[str, Any]:
    """What all of them share."""
    qwen3 = "layers.0.self_attn.q_norm.weight" in head.tensors
    windowed = any(head.windows)
    return {
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": head.hidden,
        "intermediate_size": head.intermediate,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.layers,
        "vocab_size": head.vocab_size,
        "rms_norm_eps": head.eps,
        "hidden_act": "silu",
        "attention_bias": head.attention_bias,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **({"sliding_window": max(w for w in head.windows if w)} if windowed else {}),
        **(
            {"layer_types": ["sliding_attention" if w else "full_attention" for w in head.windows]}
            if windowed
            else {}
        ),
        **({"logit_scale": head.logit_scale} if head.logit_scale != 1 else {}),
    }


def old_rope(head: Head) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; none of them for what is usual."""
    scaling = {name: value for name, value in head.rope.items() if name != "rope_theta"}
    theta = {"rope_theta": head.rope["rope_theta"]} if head.rope["rope_theta"] != 10000 else {}
    return {**theta, **({"rope_scaling": scaling} if scaling["rope_type"] != "default" else {})}


def wide(head: Head) -> dict[str, Any]:
    return {"target_hidden_size": head.target_hidden} if head.target_hidden != head.hidden else {}


def flags(head: Head, *names: str) -> dict[str, Any]:
    """Those that are set: nobody but speculators writes what is off."""
    return {name: True for name in names if getattr(head, name)}


def fc_bias(head: Head) -> dict[str, Any]:
    return {"bias": True} if "fc.bias" in head.tensors else {}


def safeailab(head: Head) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES["safeailab"]],
        **untapped(head),
        "draft_vocab_size": head.draft_vocab_size,
        "torch_dtype": "float16",
    }


def untapped(head: Head) -> dict[str, Any]:
    if head.tap_ids is not None:
        raise ValueError(f"this format names no taps, and {head.tap_ids} were asked for")
    named = flags(head, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {**llama(head), **old_rope(head), **wide(head), **fc_bias(head), **named}


def nebius(head: Head) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES["nebius"]],
        **untapped(head),
        "truncated_vocab_size": head.draft_vocab_size,
    }


def specforge(head: Head, who: str = "specforge") -> dict[str, Any]:
    nested = {"eagle_aux_hidden_state_layer_ids": list(head.taps)} if head.tap_ids is not None else {}
    return {
        "architectures": [ARCHITECTURES[who]],
        **llama(head),
        **old_rope(head),
        **wide(head),
        **fc_bias(head),
        **flags(head, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        "draft_vocab_size": head.draft_vocab_size,
        "num_aux_hidden_states": len(head.taps),
        **({"eagle_config": nested} if nested else {}),
    }


def angelslim(head: Head) -> dict[str, Any]:
    return specforge(head, "angelslim")


def modelopt(head: Head) -> dict[str, Any]:
    nested = {
        "eagle_aux_hidden_state_layer_ids": list(head.taps) if head.tap_ids is not None else [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        **flags(head, "norm_before_fc"),
    }
    top = {name: value for name, value in specforge(head, "modelopt").items() if name != "norm_before_fc"}
    return {**top, "eagle_config": nested}


def speculators(head: Head) -> dict[str, Any]:
    inner = {"architectures": ["LlamaForCausalLM"], **llama(head), "rope_parameters": head.rope}
    return {
        "architectures": [ARCHITECTURES["speculators"]],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "/somebody/elses/path", "architectures": [head.target_architecture]},
        },
        "transformer_layer_config": inner,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden if head.target_hidden != head.hidden else None,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": None if head.tap_ids is None else [tap + 1 for tap in head.taps],
        "transformers_version": "5.0.0",
        **({"logit_scale": head.logit_scale} if head.logit_scale != 1 else {}),
    }


CONFIGS = {
    "safeailab": safeailab,
    "specforge": specforge,
    "modelopt": modelopt,
    "angelslim": angelslim,
    "nebius": nebius,
    "speculators": speculators,
}
