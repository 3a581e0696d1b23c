"""Configs of DFlash and DSpark drafters in the formats of five projects: sizes from tensors, the rest from
the config.
"""

from __future__ import annotations

from typing import Any

from speculon.checkpoints.dflash_config import DFlashConfig, WindowStart
from speculon.checkpoints.dflash_shapes import (
    check_shapes,
    confidence_of,
    known_names,
    markov_of,
    refuse_missing_matrices,
    tap_sizes,
    vocabularies,
)
from speculon.checkpoints.eagle3_config import check_draft_ids
from speculon.checkpoints.eagle3_formats import read_rope, suggested_tokens, verifier_architectures
from speculon.checkpoints.eagle3_shapes import attention_sizes, count_layers, note_mismatch
from speculon.checkpoints.source import FIRST_Q, Source
from speculon.errors import CorruptWeights, ModelError, UnsupportedModel

NESTED = "dflash_config"
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
TYPES = {"sliding_attention", "full_attention"}
# what changes the result and is not computed here, and the value that changes nothing
VARIANTS = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "attention_value_scale": 1,
    "final_logit_softcapping": None,
    "attention_sink_bias": False,
}


def format_of(source: Source) -> str:
    if source.speculators_type is not None or "speculators_config" in source.config:
        return "speculators"
    if "MuseGlimmerAssistant" in source.architecture:
        return "meta"
    if "DSparkDraftModel" in source.architecture or source.part(NESTED).get("projector_type"):
        return "specforge"
    return "deepspec" if is_dspark(source) else "z-lab"


def is_dspark(source: Source) -> bool:
    """Whether its config is a DSpark one; a Markov head alone does not make it that."""
    architecture, nested = source.architecture.lower(), source.part(NESTED)
    named = "dspark" in architecture or "dspark" in (source.speculators_type, nested.get("projector_type"))
    return named or "num_anchors" in source.config or "num_anchors" in nested


def read_dflash(source: Source) -> DFlashConfig:
    """The config of a DFlash drafter. Raises `ModelError` where tensors and config contradict each other."""
    if source.twice:
        raise CorruptWeights(f"{source.folder}: {source.twice[0]} are the same tensor")
    refuse_variants(source)
    body, notes = source.body, list[str]()
    hidden, layers = source.shape(FIRST_Q)[1], count_layers(source)
    head_dim, heads, kv_heads = attention_sizes(source, hidden, notes)
    intermediate = source.shape("layers.0.mlp.gate_proj.weight")[0]
    tap_ids, after = read_taps(source)
    taps, target_hidden = tap_sizes(source, layers if tap_ids is None else len(tap_ids))
    markov, rank = markov_of(source, setting(source, "markov_head_type"), setting(source, "markov_rank"))
    confidence, with_markov = confidence_of(source, hidden, rank)
    vocab, drafted = vocabularies(source, notes)
    windows, causal, start = read_attention(source, layers)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    for name, found in sizes.items():
        note_mismatch(name, body.get(name), found, notes)
    config = DFlashConfig(
        path=source.folder,
        files=source.files,
        format=format_of(source),
        names=known_names(source),
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
        windows=windows,
        window_start=start,
        causal=causal,
        tap_ids=tap_ids,
        after=after,
        target_layers=number(source, "num_target_layers"),
        block_size=read_block_size(source),
        sample_from_anchor=samples_from_anchor(source),
        mask_token_id=read_mask(source, vocab),
        max_context=number(source, "max_position_embeddings"),
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=with_markov,
        speculative_tokens=suggested_tokens(source),
        verifier=verifier_architectures(source),
        notes=tuple(notes),
        dtype=source.sizes.most_common(1)[0][0],
        num_bytes=sum(file.stat().st_size for file in source.files),
    )
    check_shapes(source, config)
    check_draft_ids(source)
    refuse_missing_matrices(config)
    return config


def setting(source: Source, name: str) -> Any:
    """The value in `dflash_config`, else at the top; None where neither has one."""
    value = source.part(NESTED).get(name)
    return source.body.get(name) if value is None else value


def number(source: Source, name: str) -> int | None:
    value = setting(source, name)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"{source.folder}: {name} = {value!r} is no number")
    return value


def refuse_variants(source: Source) -> None:
    for name, harmless in VARIANTS.items():
        if (value := setting(source, name)) not in (None, harmless):
            raise UnsupportedModel(
                f"{source.folder}: a DFlash drafter with {name} = {value}, which is not supported"
            )
    if (source.folder / "mask_embedding.pt").exists():
        raise UnsupportedModel(f"{source.folder}: a DFlash drafter with mask_embedding.pt is not supported")


def read_taps(source: Source) -> tuple[tuple[int, ...] | None, bool]:
    """The ids as written, and whether id j is the output of layer j. Raises `ModelError` where it needs them.

    speculators numbers inputs, all others outputs.
    """
    outputs = format_of(source) != "speculators"
    name = "target_layer_ids" if outputs else "aux_hidden_state_layer_ids"
    ids = setting(source, name)
    if ids is None and outputs:
        return None, True
    if not isinstance(ids, list) or not ids or not all(type(j) is int for j in ids):
        raise ModelError(f"{source.folder}: {name} = {ids!r} is no list of layers")
    if len(set(ids)) < len(ids):
        raise ModelError(f"{source.folder}: {name} = {ids} names a layer twice")
    return tuple(ids), outputs


def read_block_size(source: Source) -> int:
    size = number(source, "block_size")
    if size is None or size < 2:
        raise ModelError(f"{source.folder}: block_size = {size}, which is at least 2")
    return size


def read_mask(source: Source, vocab: int | None) -> int:
    """The id whose embedding fills the rows after the anchor."""
    ids = (setting(source, name) for name in MASK_IDS)
    mask = next((value for value in ids if value is not None), None)
    if type(mask) is not int or mask < 0 or (vocab is not None and mask >= vocab):
        raise ModelError(f"{source.folder}: mask_token_id = {mask!r} is no token of {vocab}")
    return mask


def samples_from_anchor(source: Source) -> bool:
    """Whether the anchor's row drafts the first token.

    Without the flag: in the speculators format as many drafts as rows show it, elsewhere DSpark does.
    """
    given = setting(source, "sample_from_anchor")
    if given is not None:
        return bool(given)
    if setting(source, "shift_label"):  # SpecForge's name; DSpark drafters may have it false
        return True
    if format_of(source) == "speculators":
        return suggested_tokens(source) == read_block_size(source)
    return is_dspark(source)


def read_attention(
    source: Source, layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...], WindowStart]:
    """The window of each layer, whether its rows see no later ones, and where windows begin.

    Projects differ: see docs/drafters.md.
    """
    windows = read_windows(source, layers)
    sliding = tuple(window is not None for window in windows)
    match format_of(source):
        case "speculators":
            causal = () if setting(source, "sliding_window_non_causal") else sliding
            return windows, causal or (False,) * layers, "before_anchor"
        case "meta":
            return windows, (False,) * layers, "before_row"
    given = source.config.get("is_causal")
    if given is None:
        given = source.part(NESTED).get("causal")
    return windows, sliding if given is None else (bool(given),) * layers, "row"


def read_windows(source: Source, layers: int) -> tuple[int | None, ...]:
    types = source.body.get("layer_types")
    window = setting(source, "swa_window_size") or source.body.get("sliding_window")
    if types is None:
        slides = source.part(NESTED).get("use_swa") or format_of(source) == "meta"
        types = ["sliding_attention" if slides else "full_attention"] * layers
    if set(types[:layers]) - TYPES or len(types) < layers:
        raise UnsupportedModel(
            f"{source.folder}: layer_types of {layers} layers = {types}, which is not supported"
        )
    if "sliding_attention" in types[:layers] and (type(window) is not int or window < 1):
        raise ModelError(f"{source.folder}: layer_types ask for a sliding_window, which is {window}")
    return tuple(window if one == "sliding_attention" else None for one in types[:layers])
