"""The config of a DFlash, DFlash2 or DSpark drafter, in five formats: sizes from tensors, settings from the
config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel, WrongPair
from speculon.runtimes.torch.drafters.config import AUTHORS, DrafterConfig
from speculon.runtimes.torch.drafters.formats import (
    FIRST_Q,
    KNOWN,
    DrafterSource,
    TensorShapes,
    check_draft_ids,
    check_draft_vocabulary,
    check_shapes,
    checked_layers,
    common_fields,
    note_mismatch,
    read_windows,
    refuse_missing_matrices,
    suggested_tokens,
    used_names,
)

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"
BEFORE, AFTER = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"

MarkovType = Literal["vanilla", "gated", "rnn"]
# Where a sliding window of W begins for the row at position p of a block whose anchor is at position n:
# at p - W + 1, at p - W, or at n - W for all rows.
WindowStart = Literal["row", "before_row", "before_anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """A DFlash drafter; or a DSpark one, which has a Markov head or a confidence head as well; or a DFlash2
    one, which has convolutions and a selector.

    Its taps are in the order of fc's columns.
    """

    window_start: WindowStart = "row"
    causal: tuple[bool, ...]  # of each layer: whether a row of the block sees no later row
    after: bool = True  # id j is the output of layer j, else its input
    target_layers: int | None = None  # N of the target that it was trained for
    block_size: int  # rows of a block, the anchor among them
    sample_from_anchor: bool  # row k drafts the token after its position, else that at its position
    mask_token_id: int
    markov: MarkovType | None = None
    markov_rank: int = 0  # r
    confidence: bool = False  # whether a head predicts each draft's chance of acceptance
    confidence_with_markov: bool = False  # and reads the embedding of the previous token, too
    conv_taps: int = 0  # of the convolutions in each layer; 0: it has none
    conv_groups: int = 0  # G, of neighbouring channels
    selector_rank: int = 0  # 0: it has none
    selector_top_k: int = 0  # candidates of each row
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None  # c: a logit x is c tanh(x / c)

    @property
    def max_drafts(self) -> int:
        """The most drafts of one block: the first row drafts only where it is sampled from."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reaches(self) -> tuple[int | None, ...]:
        """Of each layer: how far before a row, or before the anchor, the pages lie that it sees."""
        reduced = self.window_start == "row"
        return tuple(None if window is None else window - reduced for window in self.windows)

    @property
    def page_windows(self) -> tuple[int | None, ...]:
        return tuple(None if reach is None else reach + 1 for reach in self.reaches)

    @property
    def family(self) -> str:
        if self.conv_taps:
            return "DFlash2"
        return "DSpark" if self.markov or self.confidence else "DFlash"

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Raises `WrongPair` where it was trained for another number of layers."""
        if self.target_layers not in (None, num_layers):
            trained = f"a target of {self.target_layers} layers"
            raise WrongPair(f"{self.path}: was trained for {trained}, the target has {num_layers}")
        if self.tap_ids is not None:
            return (self.tap_ids if self.after else tuple(j - 1 for j in self.tap_ids),)
        if self.taps == 1:
            return ((num_layers // 2,),)
        step = (num_layers - 4) / (self.taps - 1)
        return (tuple(round(1 + i * step) for i in range(self.taps)),)

    def summary(self, num_layers: int | None = None) -> str:
        taps = f"{self.taps} tap{'s' * (self.taps > 1)} of width {self.target_hidden:,}"
        block = f"blocks of {self.block_size} rows with up to {self.max_drafts} drafts"
        parts = [self.shape, f"{taps} {self.describe_taps(num_layers)}", block]
        if self.draft_vocab_size is not None and self.vocab_size is not None:
            parts.append(f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens")
        return f"{self.family} drafter by {AUTHORS[self.format]}: {', '.join(parts)}; {self.size}"

    def describe_taps(self, num_layers: int | None = None) -> str:
        if num_layers is not None:
            return f"after layers {', '.join(map(str, self.tap_layouts(num_layers)[0]))}"
        if self.tap_ids is None:
            return "after evenly spaced layers"
        ids = ", ".join(map(str, self.tap_ids))
        return f"after layers {ids}" if self.after else f"before layers {ids}"

    def describe_block(self) -> str:
        """One line for people on how a block is drafted from."""
        first = "the anchor's row drafts" if self.sample_from_anchor else "the anchor's row does not draft"
        heads = [f"a {self.markov} Markov head of rank {self.markov_rank}"] if self.markov else []
        heads += ["a confidence head"] if self.confidence else []
        if self.conv_taps:
            heads.append(f"convolutions of {self.conv_taps} rows in {self.conv_groups} groups of channels")
            heads.append(f"a selector of rank {self.selector_rank} over {self.selector_top_k} candidates")
        return ", ".join([f"{self.block_size} rows", first, *heads])


NESTED = "dflash_config"
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
CONTEXT_NORM = "hidden_norm.weight"
CONFIDENCE = "confidence_head.proj.weight"
BLOCKS = re.compile(
    rf"{KNOWN}|hidden_norm\.weight|markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias))"
    r"|confidence_head\.proj\.(weight|bias)"
    r"|layers\.\d+\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)"
    r"|candidate_selector\.((predecessor|successor)_codebook|hidden_projection\.weight)"
)
CONVOLUTIONS = ("attention_conv", "mlp_conv")
OF_DFLASH2 = re.compile(r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.")
# what changes the result and is not computed here, and the value that changes nothing
VARIANTS = {"attention_value_scale": 1, "attention_sink_bias": False}
# the same, but computed in a DFlash2 drafter
SCALES = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}


def detect_format(source: DrafterSource) -> str:
    if source.of_speculators:
        return "speculators"
    if "MuseGlimmerAssistant" in source.architecture:
        return "meta"
    if "DSparkDraftModel" in source.architecture or source.part(NESTED).get("projector_type"):
        return "specforge"
    return "deepspec" if is_dspark(source) else "z-lab"


def is_dspark(source: DrafterSource) -> bool:
    """Whether its config is a DSpark one; a Markov head alone does not make it that."""
    architecture, nested = source.architecture.lower(), source.part(NESTED)
    named = "dspark" in architecture or "dspark" in (source.speculators_type, nested.get("projector_type"))
    return named or "num_anchors" in source.config or "num_anchors" in nested


def is_dflash2(source: DrafterSource) -> bool:
    """By its name, or by any tensor that other drafters lack."""
    named = "dflash2" in source.architecture.lower() or source.speculators_type == "dflash2"
    return named or any(map(OF_DFLASH2.match, source.shapes))


def read_dflash(source: DrafterSource) -> DFlashConfig:
    """The config of a DFlash drafter. Raises `ModelError` where tensors and config contradict each other."""
    refuse_variants(source)
    hidden, notes = source.shape(FIRST_Q)[1], list[str]()
    common = common_fields(source, hidden, notes)
    layers = common["layers"]
    tap_ids, after = read_taps(source)
    taps, target_hidden = tap_sizes(source, layers if tap_ids is None else len(tap_ids))
    markov, rank = read_markov(source, setting(source, "markov_head_type"), setting(source, "markov_rank"))
    confidence, with_markov = read_confidence(source, hidden, rank)
    vocab, drafted = vocabularies(source, notes)
    more = read_dflash2(source, hidden, vocab, drafted) if is_dflash2(source) else {}
    windows, causal, start = read_attention(source, layers)
    config = DFlashConfig(
        **common,
        format=detect_format(source),
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
        **more,
        notes=tuple(notes),
    )
    check_shapes(source, config, {CONTEXT_NORM: (hidden,), **head_shapes(config)}, {}, inputs=hidden)
    check_draft_ids(source)
    refuse_missing_matrices(config)
    return config


def setting(source: DrafterSource, name: str) -> Any:
    """The value in `dflash_config`, else at the top; None where neither has one."""
    value = source.part(NESTED).get(name)
    return source.body.get(name) if value is None else value


def number(source: DrafterSource, name: str) -> int | None:
    value = setting(source, name)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"{source.folder}: {name} = {value!r} is no number")
    return value


def refuse_variants(source: DrafterSource) -> None:
    for name, harmless in (VARIANTS if is_dflash2(source) else VARIANTS | SCALES).items():
        if (value := setting(source, name)) not in (None, harmless):
            raise UnsupportedModel(
                f"{source.folder}: a DFlash drafter with {name} = {value}, which is not supported"
            )
    if (source.folder / "mask_embedding.pt").exists():
        raise UnsupportedModel(f"{source.folder}: a DFlash drafter with mask_embedding.pt is not supported")


def read_taps(source: DrafterSource) -> tuple[tuple[int, ...] | None, bool]:
    """The ids as written, and whether id j is the output of layer j. Raises `ModelError` where it needs them.

    speculators numbers inputs, all others outputs.
    """
    outputs = detect_format(source) != "speculators"
    name = "target_layer_ids" if outputs else "aux_hidden_state_layer_ids"
    ids = setting(source, name)
    if ids is None and outputs:
        return None, True
    return tuple(checked_layers(source, name, ids)), outputs


def read_block_size(source: DrafterSource) -> int:
    size = number(source, "block_size")
    if size is None or size < 2:
        raise ModelError(f"{source.folder}: block_size = {size}, which is at least 2")
    return size


def read_mask(source: DrafterSource, vocab: int | None) -> int:
    """The id whose embedding fills the rows after the anchor."""
    ids = (setting(source, name) for name in MASK_IDS)
    mask = next((value for value in ids if value is not None), None)
    if type(mask) is not int or mask < 0 or (vocab is not None and mask >= vocab):
        raise ModelError(f"{source.folder}: mask_token_id = {mask!r} is no token of {vocab}")
    return mask


def samples_from_anchor(source: DrafterSource) -> bool:
    """Whether the anchor's row drafts the first token.

    Without the flag: in the speculators format as many drafts as rows show it, elsewhere DSpark does.
    """
    flag = setting(source, "sample_from_anchor")
    if flag is not None:
        return bool(flag)
    if setting(source, "shift_label"):  # SpecForge's name; DSpark drafters may have it false
        return True
    if detect_format(source) == "speculators":
        return suggested_tokens(source) == read_block_size(source)
    return is_dspark(source)


def read_attention(
    source: DrafterSource, layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...], WindowStart]:
    """The window of each layer, whether its rows see no later ones, and where windows begin.

    Projects differ: see docs/drafters.md.
    """
    windows = block_windows(source, layers)
    sliding = tuple(window is not None for window in windows)
    match detect_format(source):
        case "speculators":
            causal = () if setting(source, "sliding_window_non_causal") else sliding
            return windows, causal or (False,) * layers, "before_anchor"
        case "meta":
            return windows, (False,) * layers, "before_row"
    is_causal = source.config.get("is_causal")
    if is_causal is None:
        is_causal = source.part(NESTED).get("causal")
    return windows, sliding if is_causal is None else (bool(is_causal),) * layers, "row"


def block_windows(source: DrafterSource, layers: int) -> tuple[int | None, ...]:
    types = source.body.get("layer_types")
    window = setting(source, "swa_window_size") or source.body.get("sliding_window")
    if types is None:
        slides = source.part(NESTED).get("use_swa") or detect_format(source) == "meta"
        types = ["sliding_attention" if slides else "full_attention"] * layers
    return read_windows(source, layers, types, window)


def known_names(source: DrafterSource) -> dict[str, str]:
    """The tensors that the formula uses. Any other is refused: left out, it would change the drafts."""
    names, others = used_names(source, BLOCKS)
    if others:
        raise UnsupportedModel(f"{source.folder}: a DFlash drafter with {others[0]}, which is not supported")
    return names


def tap_sizes(source: DrafterSource, count: int) -> tuple[int, int]:
    """How many taps `fc` takes, and the width of each."""
    width = source.shape("fc.weight")[1]
    if width % count:
        raise ModelError(f"{source.folder}: fc takes {width:,} numbers, which is no multiple of {count} taps")
    return count, width // count


def vocabularies(source: DrafterSource, notes: list[str]) -> tuple[int | None, int | None]:
    """Sizes of the target's vocabulary and of the draft's; None where nothing tells.

    Raises `ModelError` where tensors disagree, or where draft ids have no target ids.
    """
    shapes, body = source.shapes, source.body
    whole = agreed(source, {n: shapes[n][0] for n in ("t2d", "embed_tokens.weight") if shapes.get(n)})
    rows = next((shapes[name][0] for name in (W1, BEFORE) if shapes.get(name)), None)
    vocab: int | None = whole or body.get("vocab_size") or rows
    if vocab is not None:
        note_mismatch("vocab_size", body.get("vocab_size"), vocab, notes)
    named = {n: shapes[n][0] for n in ("lm_head.weight", "d2t", W2) if shapes.get(n)}
    drafted: int | None = agreed(source, named) or body.get("draft_vocab_size") or vocab
    for name, size in (("vocab_size", vocab), ("draft_vocab_size", drafted)):
        if size is not None and type(size) is not int:
            raise ModelError(f"{source.folder}: {name} = {size!r} is no number")
    check_draft_vocabulary(source, drafted, vocab)
    return vocab, drafted


def agreed(source: DrafterSource, sizes: Mapping[str, int]) -> int | None:
    """The one size that these tensors have."""
    if len(set(sizes.values())) > 1:
        raise CorruptWeights(f"{source.folder}: vocabularies differ: {dict(sizes)}")
    return next(iter(sizes.values()), None)


def read_markov(
    source: DrafterSource, configured: str | None, rank: int | None
) -> tuple[MarkovType | None, int]:
    """Type and rank of its Markov head, by its tensors. A rank without tensors is refused."""
    if not any(name.startswith("markov_head.") for name in source.shapes):
        if rank:
            raise MissingWeights(f"{source.folder}: markov_rank = {rank}, but there is no tensor {W1}")
        return None, 0
    stored: MarkovType = "gated" if GATE in source.shapes else "rnn" if JOINT in source.shapes else "vanilla"
    if configured not in (None, stored):
        raise ModelError(f"{source.folder}: markov_head_type is {configured!r}, its tensors are {stored}")
    return stored, source.shape(W1)[1]


def read_confidence(source: DrafterSource, hidden: int, rank: int) -> tuple[bool, bool]:
    """Whether it has a confidence head, and whether that reads the previous token's embedding."""
    if CONFIDENCE not in source.shapes:
        return False, False
    width = source.shape(CONFIDENCE)[-1]
    if width not in (hidden, hidden + rank):
        raise CorruptWeights(f"{source.folder}: {CONFIDENCE} takes {width}, not {hidden} or {hidden + rank}")
    return True, width > hidden


def read_dflash2(
    source: DrafterSource, hidden: int, vocab: int | None, drafted: int | None
) -> dict[str, Any]:
    """Sizes of the convolutions and the selector, and scales.

    Raises `ModelError` for sizes that are missing or do not fit, `UnsupportedModel` beside a Markov head or a
    draft vocabulary.
    """

    def needed(name: str) -> int:
        size = number(source, name)
        if size is None:
            raise ModelError(f"{source.folder}: a DFlash2 drafter without {name}")
        return size

    if W1 in source.shapes or drafted != vocab:
        what = "a Markov head" if W1 in source.shapes else "a draft vocabulary"
        raise UnsupportedModel(f"{source.folder}: a DFlash2 drafter with {what} is not supported")
    group, candidates = needed("conv_group_size"), needed("selector_top_k")
    if hidden % group:
        raise ModelError(f"{source.folder}: conv_group_size = {group} does not divide the width {hidden:,}")
    if vocab is not None and candidates > vocab:
        raise ModelError(f"{source.folder}: selector_top_k = {candidates:,} of {vocab:,} tokens")
    return {
        "conv_taps": needed("conv_kernel_size"),
        "conv_groups": hidden // group,
        "selector_rank": needed("selector_rank"),
        "selector_top_k": candidates,
        "embedding_scale": scale(source, "input_embedding_scale") or 1.0,
        "logit_scale": scale(source, "output_multiplier") or 1.0,
        "logit_cap": scale(source, "final_logit_softcapping"),
    }


def scale(source: DrafterSource, name: str) -> float | None:
    value = setting(source, name)
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ModelError(f"{source.folder}: {name} = {value!r} is no positive number")
    return value


def head_shapes(config: DFlashConfig) -> TensorShapes:
    """Those of tensors beside the usual ones of layers: heads, convolutions and a selector."""
    h, r, shapes = config.hidden, config.markov_rank, TensorShapes()
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
    if config.conv_taps:
        assert config.vocab_size is not None
        taps, rank = config.conv_taps, config.selector_rank
        shapes |= dict.fromkeys((BEFORE, AFTER), (config.vocab_size, rank))
        shapes["candidate_selector.hidden_projection.weight"] = (rank, h)
        for at in (f"layers.{layer}.{name}" for layer in range(config.layers) for name in CONVOLUTIONS):
            shapes[f"{at}.base_kernel"] = (2, taps, h)
            shapes[f"{at}.kernel_projection.weight"] = (2 * taps * config.conv_groups, h)
    return shapes


def is_dflash(source: DrafterSource) -> bool:
    """`fc` takes hidden states, a norm of its result lies outside the layers, and these take one state."""
    fc, norm, q = (source.shapes.get(name) for name in ("fc.weight", CONTEXT_NORM, FIRST_Q))
    if fc is None or norm is None or q is None or not len(fc) == len(q) == 2:
        return False
    return norm == (fc[0],) and q[1] == fc[0]
