"""Sizes of a DFlash drafter's tensors, and whether all of them agree."""

from __future__ import annotations

import re
from collections.abc import Mapping

from speculon.checkpoints.dflash_config import GATE, JOINT, W1, W2, DFlashConfig, MarkovType
from speculon.checkpoints.eagle3_shapes import note_mismatch
from speculon.checkpoints.source import FIRST_Q, Shapes, Source
from speculon.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel

CONTEXT_NORM = "hidden_norm.weight"
CONFIDENCE = "confidence_head.proj.weight"
UNUSED = re.compile(r".*rotary_emb\.|verifier_|t2d$")
KNOWN = re.compile(
    r"fc\.(weight|bias)|(norm|hidden_norm|lm_head|embed_tokens)\.weight|d2t"
    r"|markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias))"
    r"|confidence_head\.proj\.(weight|bias)"
    r"|layers\.\d+\.((input_layernorm|post_attention_layernorm)\.weight"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
)


def known_names(source: Source) -> dict[str, str]:
    """The tensors that the formula uses. Any other is refused: left out, it would change the drafts."""
    names = {ours: theirs for ours, theirs in source.names.items() if KNOWN.fullmatch(ours)}
    others = (theirs for ours, theirs in source.names.items() if ours not in names and not UNUSED.match(ours))
    if (other := next(others, None)) is not None:
        raise UnsupportedModel(f"{source.folder}: a DFlash drafter with {other}, which is not supported")
    if source.body.get("tie_word_embeddings") and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
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


def refuse_missing_matrices(config: DFlashConfig) -> None:
    """The target's embedding and lm_head may be used only where their sizes are the drafter's."""
    own_width = config.hidden != config.target_hidden
    if "lm_head.weight" not in config.names and (own_width or config.draft_vocab_size != config.vocab_size):
        sizes = f"{config.vocab_size} x {config.target_hidden}"
        needed = f"not {config.draft_vocab_size} x {config.hidden}"
        raise MissingWeights(f"{config.path}: no lm_head.weight; the target's is {sizes}, {needed}")
    if "embed_tokens.weight" not in config.names and own_width:
        widths = f"{config.target_hidden} wide, not {config.hidden}"
        raise MissingWeights(f"{config.path}: no embed_tokens.weight; the target's are {widths}")


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


def check_shapes(source: Source, config: DFlashConfig) -> None:
    """Raises `ModelError` where a tensor that the formula needs is missing or has another shape."""
    optional = {**optional_shapes(config), **optional_in_layers(config)}
    expected = {
        **needed_shapes(config),
        **head_shapes(config),
        **{name: shape for name, shape in optional.items() if name in source.shapes},
    }
    for name, shape in expected.items():
        if source.shape(name) != shape:
            found = list(source.shape(name))
            raise CorruptWeights(f"{source.folder}: {source.names[name]} is {found}, not {list(shape)}")
    for layer in range(config.layers):
        both = [f"layers.{layer}.self_attn.{name}.weight" in source.shapes for name in ("q_norm", "k_norm")]
        if both[0] != both[1]:
            raise MissingWeights(f"{source.folder}: layer {layer} has one of q_norm and k_norm")


def needed_shapes(config: DFlashConfig) -> Shapes:
    h, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {
        "fc.weight": (h, config.taps * config.target_hidden),
        CONTEXT_NORM: (h,),
        "norm.weight": (h,),
    }
    for layer in range(config.layers):
        inner: Shapes = {
            "input_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "post_attention_layernorm": (h,),
            "mlp.gate_proj": (config.intermediate, h),
            "mlp.up_proj": (config.intermediate, h),
            "mlp.down_proj": (h, config.intermediate),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return shapes


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


def optional_shapes(config: DFlashConfig) -> Shapes:
    shapes: Shapes = {"fc.bias": (config.hidden,)}
    if config.vocab_size is not None and config.draft_vocab_size is not None:
        shapes |= {
            "lm_head.weight": (config.draft_vocab_size, config.hidden),
            "embed_tokens.weight": (config.vocab_size, config.hidden),
            "d2t": (config.draft_vocab_size,),
            "t2d": (config.vocab_size,),
        }
    return shapes


def optional_in_layers(config: DFlashConfig) -> Shapes:
    inner = {
        "self_attn.q_proj.bias": (config.heads * config.head_dim,),
        "self_attn.k_proj.bias": (config.kv_heads * config.head_dim,),
        "self_attn.v_proj.bias": (config.kv_heads * config.head_dim,),
        "self_attn.o_proj.bias": (config.hidden,),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    return {f"layers.{i}.{name}": shape for i in range(config.layers) for name, shape in inner.items()}


def is_dflash(source: Source) -> bool:
    """`fc` takes hidden states, a norm of its result lies outside the layers, and these take one state."""
    fc, norm, q = (source.shapes.get(name) for name in ("fc.weight", CONTEXT_NORM, FIRST_Q))
    if fc is None or norm is None or q is None or not len(fc) == len(q) == 2:
        return False
    return norm == (fc[0],) and q[1] == fc[0]
