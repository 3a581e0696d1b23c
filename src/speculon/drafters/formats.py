"""What the formats of drafters have in common: sizes from tensors, settings of layers from the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel
from speculon.drafters.config import DrafterConfig
from speculon.loading.source import FIRST_Q, Shapes, Source

UNUSED = re.compile(r".*rotary_emb\.|verifier_|t2d$")
# the tensors of layers and around them that the formulas of all methods use
KNOWN = (
    r"fc\.(weight|bias)|(norm|lm_head|embed_tokens)\.weight|d2t"
    r"|layers\.\d+\.((input_layernorm|post_attention_layernorm)\.weight"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
)
TYPES = {"sliding_attention", "full_attention"}
STRETCHED = ("yarn", "llama3")  # types of RoPE that stretch an original length
# `dynamic` and `longrope` are missing: their angles depend on the longest sequence of a batch
ROPES = ("default", "linear", "proportional", *STRETCHED)


def common_fields(source: Source, hidden: int, notes: list[str]) -> dict[str, Any]:
    """Fields of `DrafterConfig` that are read alike, for a network of this width.

    Raises `ModelError` where tensors and config contradict each other.
    """
    if source.twice:
        raise CorruptWeights(f"{source.folder}: {source.twice[0]} are the same tensor")
    body, layers = source.body, count_layers(source)
    head_dim, heads, kv_heads = attention_sizes(source, hidden, notes)
    intermediate = source.shape("layers.0.mlp.gate_proj.weight")[0]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    for name, found in sizes.items():
        note_mismatch(name, body.get(name), found, notes)
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": intermediate,
        "eps": float(body.get("rms_norm_eps") or 1e-6),
        "act": body.get("hidden_act") or "silu",
        "rope": read_rope(source),
        "speculative_tokens": suggested_tokens(source),
        "verifier": verifier_architectures(source),
        "path": source.folder,
        "files": source.files,
        "dtype": source.sizes.most_common(1)[0][0],
        "num_bytes": sum(file.stat().st_size for file in source.files),
    }


def note_mismatch(name: str, configured: Any, found: int, notes: list[str]) -> None:
    if configured is not None and configured != found:
        notes.append(f"the config's {name} is {configured}, the tensors' {found}")


def count_layers(source: Source) -> int:
    there = {int(name.split(".")[1]) for name in source.shapes if re.match(r"layers\.\d+\.", name)}
    if there != set(range(len(there))):
        raise MissingWeights(f"{source.folder}: has tensors of layers {sorted(there)}, not of those between")
    return len(there)


def attention_sizes(source: Source, hidden: int, notes: list[str]) -> tuple[int, int, int]:
    """Width of a head, heads of q, heads of k and v."""
    body, q, k = source.body, source.shape(FIRST_Q)[0], source.shape("layers.0.self_attn.k_proj.weight")[0]
    normed = source.shapes.get("layers.0.self_attn.q_norm.weight")
    configured = body.get("num_attention_heads")
    derived = hidden // configured if isinstance(configured, int) and configured else None
    head_dim: Any = normed[0] if normed else body.get("head_dim") or derived
    if not are_heads(q, k, head_dim):
        raise ModelError(
            f"{source.folder}: q_proj and k_proj yield {q} and {k}, which are no heads of {head_dim}"
        )
    note_mismatch("num_attention_heads", configured, q // head_dim, notes)
    note_mismatch("num_key_value_heads", body.get("num_key_value_heads"), k // head_dim, notes)
    return head_dim, q // head_dim, k // head_dim


def are_heads(q: int, k: int, head_dim: Any) -> bool:
    """Whether rows of q_proj and k_proj divide into grouped heads of that width."""
    return (
        isinstance(head_dim, int)
        and head_dim > 0
        and not (q % head_dim or k % head_dim)
        and not q // head_dim % (k // head_dim)
    )


def read_windows(source: Source, layers: int, types: Any, window: Any) -> tuple[int | None, ...]:
    """The window of each layer by `types` of layers. Raises `ModelError` for other types, or no window."""
    if len(types) < layers or set(types[:layers]) - TYPES:
        raise UnsupportedModel(
            f"{source.folder}: layer_types of {layers} layers = {types}, which is not supported"
        )
    if "sliding_attention" in types[:layers] and (type(window) is not int or window < 1):
        raise ModelError(f"{source.folder}: layer_types ask for a sliding_window, which is {window}")
    return tuple(window if one == "sliding_attention" else None for one in types[:layers])


def checked_layers(source: Source, name: str, ids: Any) -> list[int]:
    """The value of setting `name` as layers. Raises `ModelError` where it is something else."""
    if not isinstance(ids, list) or not ids or not all(type(j) is int for j in ids):
        raise ModelError(f"{source.folder}: {name} = {ids!r} is no list of layers")
    if len(set(ids)) < len(ids):
        raise ModelError(f"{source.folder}: {name} = {ids} names a layer twice")
    return ids


def read_rope(source: Source) -> dict[str, Any]:
    """The drafter's own RoPE as transformers' `rope_parameters`; never the target's."""
    body, given = source.body, rope_table(source)
    rope_type = given.get("rope_type") or given.get("type") or "default"
    rope_type = (
        "default" if rope_type == "mrope" else rope_type
    )  # text tokens have equal positions on all axes
    if rope_type not in ROPES:
        supported = ", ".join(ROPES)
        raise UnsupportedModel(f"{source.folder}: rope_type {rope_type!r} is not supported, but {supported}")
    if rope_type in ("linear", *STRETCHED) and "factor" not in given:
        raise ModelError(f"{source.folder}: rope_type {rope_type!r} without its factor")
    rope = {name: value for name, value in given.items() if name != "type" and not name.startswith("mrope")}
    theta = given.get("rope_theta") or body.get("rope_theta") or 10000.0
    rope |= {"rope_type": rope_type, "rope_theta": float(theta)}
    if body.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", body["partial_rotary_factor"])
    if rope_type in STRETCHED and body.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", body["max_position_embeddings"])
    return rope


def rope_table(source: Source) -> Mapping[str, Any]:
    """The config's RoPE settings. Interleaved ones and those that differ between layers are refused."""
    body = source.body
    if body.get("is_neox_style") is False or body.get("rope_is_neox_style") is False:
        raise UnsupportedModel(f"{source.folder}: interleaved RoPE (is_neox_style is false) is not supported")
    given: Mapping[str, Any] = body.get("rope_parameters") or body.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel(f"{source.folder}: RoPE that differs between layers is not supported")
    return given


def suggested_tokens(source: Source) -> int | None:
    methods = source.part("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def verifier_architectures(source: Source) -> tuple[str, ...]:
    verifier = source.part("speculators_config").get("verifier")
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return tuple(name for name in names or () if isinstance(name, str))


def used_names(source: Source, known: re.Pattern[str]) -> tuple[dict[str, str], list[str]]:
    """Tensors that a formula uses, by their names here; and the names in the files of unknown others."""
    names = {ours: theirs for ours, theirs in source.names.items() if known.fullmatch(ours)}
    others = [theirs for ours, theirs in source.names.items() if ours not in names and not UNUSED.match(ours)]
    if source.body.get("tie_word_embeddings") and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    return names, others


def refuse_missing_matrices(config: DrafterConfig) -> None:
    """The target's embedding and lm_head may be used only where their sizes are the drafter's."""
    own_width = config.hidden != config.target_hidden
    if not config.has("lm_head") and (own_width or config.draft_vocab_size != config.vocab_size):
        sizes = [
            f"{'an unknown number' if rows is None else f'{rows:,}'} x {width}"
            for rows, width in (
                (config.vocab_size, config.target_hidden),
                (config.draft_vocab_size, config.hidden),
            )
        ]
        raise MissingWeights(f"{config.path}: no lm_head.weight; the target's is {sizes[0]}, not {sizes[1]}")
    if not config.has("embed_tokens") and own_width:
        widths = f"{config.target_hidden} wide, not {config.hidden}"
        raise MissingWeights(f"{config.path}: no embed_tokens.weight; the target's are {widths}")


def check_shapes(source: Source, config: DrafterConfig, more: Shapes, optional: Shapes, inputs: int) -> None:
    """Raises `ModelError` where a tensor that the formula needs is missing or has another shape.

    `more` are needed beside those of layers; `inputs` is the width of what the first layer's attention reads.
    """
    optional = {"fc.bias": (config.hidden,), **optional}
    if config.vocab_size is not None and config.draft_vocab_size is not None:
        optional |= {
            "lm_head.weight": (config.draft_vocab_size, config.hidden),
            "embed_tokens.weight": (config.vocab_size, config.hidden),
            "d2t": (config.draft_vocab_size,),
            "t2d": (config.vocab_size,),
        }
    needed: Shapes = {
        "fc.weight": (config.hidden, config.taps * config.target_hidden),
        "norm.weight": (config.hidden,),
        **more,
    }
    for layer in range(config.layers):
        inner, maybe = layer_shapes(config, config.hidden if layer else inputs)
        needed |= {f"layers.{layer}.{name}": shape for name, shape in inner.items()}
        optional |= {f"layers.{layer}.{name}": shape for name, shape in maybe.items()}
    stored = {**source.names, **config.names}
    for name, shape in {**needed, **{n: s for n, s in optional.items() if n in source.shapes}}.items():
        found = source.shape(name)
        if found != shape:
            raise CorruptWeights(f"{source.folder}: {stored[name]} is {list(found)}, not {list(shape)}")
    for layer in range(config.layers):
        both = [config.has(f"layers.{layer}.self_attn.{name}") for name in ("q_norm", "k_norm")]
        if both[0] != both[1]:
            raise MissingWeights(f"{source.folder}: layer {layer} has one of q_norm and k_norm")


def layer_shapes(config: DrafterConfig, inputs: int) -> tuple[Shapes, Shapes]:
    """Those of a layer whose attention reads rows of width `inputs`, and those that it may have."""
    h, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    needed: Shapes = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (config.intermediate, h),
        "mlp.up_proj.weight": (config.intermediate, h),
        "mlp.down_proj.weight": (h, config.intermediate),
    }
    optional: Shapes = {
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.bias": (h,),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    return needed, optional
