"""DFlash and DSpark drafters in five formats: sizes from tensors, settings from the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel
from speculon.drafters.config import check_draft_ids
from speculon.drafters.dflash.config import GATE, JOINT, W1, W2, DFlashConfig, MarkovType, WindowStart
from speculon.drafters.formats import (
    KNOWN,
    check_shapes,
    checked_layers,
    common_fields,
    note_mismatch,
    read_windows,
    refuse_missing_matrices,
    suggested_tokens,
    used_names,
)
from speculon.loading.source import FIRST_Q, Shapes, Source

NESTED = "dflash_config"
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
CONTEXT_NORM = "hidden_norm.weight"
CONFIDENCE = "confidence_head.proj.weight"
BLOCKS = re.compile(
    rf"{KNOWN}|hidden_norm\.weight|markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias))"
    r"|confidence_head\.proj\.(weight|bias)"
)
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
    refuse_variants(source)
    hidden, notes = source.shape(FIRST_Q)[1], list[str]()
    common = common_fields(source, hidden, notes)
    layers = common["layers"]
    tap_ids, after = read_taps(source)
    taps, target_hidden = tap_sizes(source, layers if tap_ids is None else len(tap_ids))
    markov, rank = markov_of(source, setting(source, "markov_head_type"), setting(source, "markov_rank"))
    confidence, with_markov = confidence_of(source, hidden, rank)
    vocab, drafted = vocabularies(source, notes)
    windows, causal, start = read_attention(source, layers)
    config = DFlashConfig(
        **common,
        format=format_of(source),
        names=known_names(source),
        target_hidden=target_hidden,
        taps=taps,
        vocab_size=vocab,
        draft_vocab_size=drafted,
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
        notes=tuple(notes),
    )
    check_shapes(source, config, {CONTEXT_NORM: (hidden,), **head_shapes(config)}, {}, inputs=hidden)
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
    return tuple(checked_layers(source, name, ids)), outputs


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
    windows = block_windows(source, layers)
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


def block_windows(source: Source, layers: int) -> tuple[int | None, ...]:
    types = source.body.get("layer_types")
    window = setting(source, "swa_window_size") or source.body.get("sliding_window")
    if types is None:
        slides = source.part(NESTED).get("use_swa") or format_of(source) == "meta"
        types = ["sliding_attention" if slides else "full_attention"] * layers
    return read_windows(source, layers, types, window)


def known_names(source: Source) -> dict[str, str]:
    """The tensors that the formula uses. Any other is refused: left out, it would change the drafts."""
    names, others = used_names(source, BLOCKS)
    if others:
        raise UnsupportedModel(f"{source.folder}: a DFlash drafter with {others[0]}, which is not supported")
    return names


def tap_sizes(source: Source, count: int) -> tuple[int, int]:
    """How many taps `fc` takes, and the width of each."""
    width = source.shape("fc.weight")[1]
    if width % count:
        raise ModelError(f"{source.folder}: fc takes {width:,} numbers, which is no multiple of {count} taps")
    return count, width // count


def vocabularies(source: Source, notes: list[str]) -> tuple[int | None, int | None]:
    """Sizes of the target's vocabulary and of the draft's; None where nothing tells.

    Raises `ModelError` where tensors disagree, or where draft ids have no target ids.
    """
    shapes, body = source.shapes, source.body
    whole = agreed(source, {n: shapes[n][0] for n in ("t2d", "embed_tokens.weight") if shapes.get(n)})
    vocab: int | None = whole or body.get("vocab_size") or shapes.get(W1, (None,))[0]
    if vocab is not None:
        note_mismatch("vocab_size", body.get("vocab_size"), vocab, notes)
    named = {n: shapes[n][0] for n in ("lm_head.weight", "d2t", W2) if shapes.get(n)}
    drafted: int | None = agreed(source, named) or body.get("draft_vocab_size") or vocab
    for name, size in (("vocab_size", vocab), ("draft_vocab_size", drafted)):
        if size is not None and type(size) is not int:
            raise ModelError(f"{source.folder}: {name} = {size!r} is no number")
    if vocab is not None and drafted is not None and drafted > vocab:
        raise ModelError(f"{source.folder}: drafts from {drafted:,} tokens, but the vocabulary has {vocab:,}")
    if drafted != vocab and "d2t" not in shapes:
        of = f"{drafted:,} of {vocab:,}" if vocab and drafted else f"{drafted} of unknown"
        raise MissingWeights(f"{source.folder}: drafts from {of} tokens, but no d2t says which")
    return vocab, drafted


def agreed(source: Source, sizes: Mapping[str, int]) -> int | None:
    """The one size that these tensors have."""
    if len(set(sizes.values())) > 1:
        raise CorruptWeights(f"{source.folder}: vocabularies differ: {dict(sizes)}")
    return next(iter(sizes.values()), None)


def markov_of(source: Source, configured: str | None, rank: int | None) -> tuple[MarkovType | None, int]:
    """Type and rank of its Markov head, by its tensors. A rank without tensors is refused."""
    if not any(name.startswith("markov_head.") for name in source.shapes):
        if rank:
            raise MissingWeights(f"{source.folder}: markov_rank = {rank}, but there is no tensor {W1}")
        return None, 0
    found: MarkovType = "gated" if GATE in source.shapes else "rnn" if JOINT in source.shapes else "vanilla"
    if configured not in (None, found):
        raise ModelError(f"{source.folder}: markov_head_type is {configured!r}, its tensors are {found}")
    return found, source.shape(W1)[1]


def confidence_of(source: Source, hidden: int, rank: int) -> tuple[bool, bool]:
    """Whether it has a confidence head, and whether that reads the previous token's embedding."""
    if CONFIDENCE not in source.shapes:
        return False, False
    width = source.shape(CONFIDENCE)[-1]
    if width not in (hidden, hidden + rank):
        raise CorruptWeights(f"{source.folder}: {CONFIDENCE} takes {width}, not {hidden} or {hidden + rank}")
    return True, width > hidden


def head_shapes(config: DFlashConfig) -> Shapes:
    """Those of the Markov head and the confidence head, where there are such."""
    h, r, shapes = config.hidden, config.markov_rank, Shapes()
    if config.markov:
        assert config.vocab_size is not None and config.draft_vocab_size is not None
        shapes |= {W1: (config.vocab_size, r), W2: (config.draft_vocab_size, r)}
    if config.markov == "gated":
        shapes |= {GATE: (r, h + r), "markov_head.gate_proj.bias": (r,)}
    if config.markov == "rnn":
        shapes |= {JOINT: (3 * r, 2 * r + h), "markov_head.joint_proj.bias": (3 * r,)}
    if config.confidence:
        width = h + r * config.confidence_with_markov
        shapes |= {CONFIDENCE: (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def is_dflash(source: Source) -> bool:
    """`fc` takes hidden states, a norm of its result lies outside the layers, and these take one state."""
    fc, norm, q = (source.shapes.get(name) for name in ("fc.weight", CONTEXT_NORM, FIRST_Q))
    if fc is None or norm is None or q is None or not len(fc) == len(q) == 2:
        return False
    return norm == (fc[0],) and q[1] == fc[0]
