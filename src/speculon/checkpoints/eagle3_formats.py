"""Configs of EAGLE-3 heads in the formats of six projects: sizes from tensors, settings from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculon.checkpoints.eagle3_config import Eagle3Config, check_draft_ids
from speculon.checkpoints.eagle3_shapes import (
    attention_sizes,
    check_shapes,
    count_layers,
    known_names,
    note_mismatch,
    tap_sizes,
    vocabularies,
)
from speculon.checkpoints.source import FIRST_Q, Source
from speculon.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
STRETCHED = ("yarn", "llama3")  # types of RoPE that stretch an original length
# `dynamic` and `longrope` are missing: their angles depend on the longest sequence of a batch
ROPES = ("default", "linear", "proportional", *STRETCHED)


def format_of(source: Source) -> str:
    if source.speculators_type is not None or "speculators_config" in source.config:
        return "speculators"
    if any(name.startswith("use_") for name in source.part("eagle_config")):
        return "modelopt"
    if source.architecture.startswith("Eagle3"):
        return "angelslim"
    if "Eagle3" in source.architecture:
        return "specforge"
    return "nebius" if "truncated_vocab_size" in source.config else "safeailab"


def read_eagle3(source: Source) -> Eagle3Config:
    """The config of an EAGLE-3 head. Raises `ModelError` where tensors and config contradict each other."""
    if source.twice:
        raise CorruptWeights(f"{source.folder}: {source.twice[0]} are the same tensor")
    body, notes = source.body, list[str]()
    hidden, layers = source.shape(FIRST_Q)[1] // 2, count_layers(source)
    head_dim, heads, kv_heads = attention_sizes(source, hidden, notes)
    intermediate = source.shape("layers.0.mlp.gate_proj.weight")[0]
    tap_ids, after = read_taps(source, notes)
    taps, target_hidden = tap_sizes(source, tap_ids, hidden, notes)
    vocab, drafted = vocabularies(source, hidden, target_hidden, notes)
    together, each = tap_norms(source, notes)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    for name, found in sizes.items():
        note_mismatch(name, body.get(name), found, notes)
    config = Eagle3Config(
        path=source.folder,
        files=source.files,
        format=format_of(source),
        names=known_names(source, notes),
        hidden=hidden,
        target_hidden=target_hidden,
        taps=taps,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab_size=vocab,
        draft_vocab_size=drafted,
        eps=float(body.get("rms_norm_eps") or 1e-6),
        act=body.get("hidden_act") or "silu",
        rope=read_rope(source),
        windows=read_windows(source, layers, notes),
        norm_before_residual=norm_before_residual(source, notes),
        norm_before_fc=together,
        fc_norm=each,
        norm_output=bool(flag(source, "norm_output")),
        logit_scale=float(body.get("logit_scale") or 1),
        tap_ids=tap_ids,
        after=after,
        speculative_tokens=suggested_tokens(source),
        max_context=read_context(source),
        verifier=verifier_architectures(source),
        notes=tuple(notes),
        dtype=source.sizes.most_common(1)[0][0],
        num_bytes=sum(file.stat().st_size for file in source.files),
    )
    check_shapes(source, config)
    check_draft_ids(source)
    return config


def flag(source: Source, *names: str) -> bool | None:
    """The value in `eagle_config`, else at the top; None where neither has one."""
    values = (table.get(name) for name in names for table in (source.part("eagle_config"), source.body))
    return next((bool(value) for value in values if value is not None), None)


def read_taps(source: Source, notes: list[str]) -> tuple[tuple[int, ...] | None, bool | None]:
    """The ids as written, and whether id j is the output of layer j; None: nested ids have no convention."""
    top, nested = source.config.get(TAP_IDS), source.part("eagle_config").get(TAP_IDS)
    ids, after = (top, False) if top else (nested, None)
    if not ids:
        return None, True
    if not isinstance(ids, list) or not all(type(j) is int for j in ids):
        raise ModelError(f"{source.folder}: {TAP_IDS} = {ids!r} is no list of layers")
    if len(set(ids)) < len(ids):
        raise ModelError(f"{source.folder}: {TAP_IDS} = {ids} names a layer twice")
    if ids != sorted(ids):
        notes.append(f"the layers {ids} were put in order")
    return tuple(sorted(ids)), after


def tap_norms(source: Source, notes: list[str]) -> tuple[bool, bool]:
    """Whether all taps share one norm, or each has its own. A norm without a tensor is refused."""
    together, each = "input_norm.weight" in source.shapes, "fc_norm.0.weight" in source.shapes
    if together and each:
        raise ModelError(f"{source.folder}: has input_norm and fc_norm, of which a head has one")
    for name, configured, found in (
        ("norm_before_fc", flag(source, "norm_before_fc"), together),
        ("fc_norm", flag(source, "fc_norm", "use_aux_norm"), each),
    ):
        if configured and not found:
            raise MissingWeights(f"{source.folder}: {name} is set, but there is no tensor for it")
        if found and configured is False:
            notes.append(f"the config's {name} is false, but there is a tensor for it")
    return together, each


def norm_before_residual(source: Source, notes: list[str]) -> bool:
    configured = flag(source, "norm_before_residual")
    if configured is None and format_of(source) == "speculators":
        notes.append("the config has no norm_before_residual: true is assumed")
        return True
    return bool(configured)


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


def read_windows(source: Source, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    body = source.body
    types, window = body.get("layer_types"), body.get("sliding_window")
    if not types:
        if window and body.get("use_sliding_window"):
            notes.append(f"a window of {window} without layer_types: attention is full")
        return (None,) * layers
    unknown = set(types[:layers]) - {"sliding_attention", "full_attention"}
    if unknown or len(types) < layers:
        raise UnsupportedModel(
            f"{source.folder}: layer_types of {layers} layers = {types}, which is not supported"
        )
    if "sliding_attention" in types[:layers] and not isinstance(window, int):
        raise ModelError(f"{source.folder}: layer_types ask for a sliding_window, which is {window}")
    return tuple(window if one == "sliding_attention" else None for one in types[:layers])


def read_context(source: Source) -> int | None:
    """Positions that its config names, and it was trained for; RoPE has no end of its own."""
    found = source.body.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else None


def suggested_tokens(source: Source) -> int | None:
    methods = source.part("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def verifier_architectures(source: Source) -> tuple[str, ...]:
    verifier = source.part("speculators_config").get("verifier")
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return tuple(name for name in names or () if isinstance(name, str))
