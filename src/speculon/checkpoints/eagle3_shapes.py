"""Sizes of an EAGLE-3 head from the shapes of its tensors, and whether all of them agree."""

from __future__ import annotations

import re
from typing import Any

from speculon.checkpoints.eagle3_config import Eagle3Config
from speculon.checkpoints.source import FIRST_Q, Shapes, Source, own_name
from speculon.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel

UNUSED = re.compile(r".*rotary_emb\.|verifier_|t2d$")
KNOWN = re.compile(
    r"fc\.(weight|bias)|(norm|lm_head|embed_tokens|input_norm)\.weight|fc_norm\.\d+\.weight|d2t"
    r"|layers\.\d+\.((input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
)
# left out, these would change the result
INSIDE = re.compile(r"(fc|norm|lm_head|embed_tokens|input_norm|fc_norm|layers)\b")


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


def tap_sizes(
    source: Source, tap_ids: tuple[int, ...] | None, hidden: int, notes: list[str]
) -> tuple[int, int]:
    """How many taps `fc` takes, and the width of each."""
    width = source.shape("fc.weight")[1]
    count = 3 if tap_ids is None else len(tap_ids)
    if width % count:
        which = "the usual 3" if tap_ids is None else f"{count}, of layers {', '.join(map(str, tap_ids))}"
        raise ModelError(
            f"{source.folder}: fc takes {width:,} numbers, which is not a multiple of the taps, {which}"
        )
    note_mismatch(
        "target_hidden_size", source.body.get("target_hidden_size") or hidden, width // count, notes
    )
    for name in ("num_aux_hidden_states", "num_aux_layers"):
        note_mismatch(name, source.config.get(name, source.part("eagle_config").get(name)), count, notes)
    return count, width // count


def vocabularies(source: Source, hidden: int, target_hidden: int, notes: list[str]) -> tuple[int, int]:
    """Sizes of the target's vocabulary and of the draft's."""
    vocab = target_vocabulary(source, notes)
    drafted = draft_vocabulary(source, vocab, notes)
    refuse_missing_matrices(source, vocab, drafted, (hidden, target_hidden))
    return vocab, drafted


def target_vocabulary(source: Source, notes: list[str]) -> int:
    shapes, configured = source.shapes, source.body.get("vocab_size")
    rows = [shapes[name][0] for name in ("t2d", "embed_tokens.weight") if shapes.get(name)]
    vocab = rows[0] if rows else configured
    if not isinstance(vocab, int) or len(set(rows)) > 1:
        raise ModelError(
            f"{source.folder}: no vocab_size in the config, or t2d and embed_tokens differ: {rows}"
        )
    note_mismatch("vocab_size", configured, vocab, notes)
    return vocab


def draft_vocabulary(source: Source, vocab: int, notes: list[str]) -> int:
    shapes = source.shapes
    configured = source.body.get("draft_vocab_size") or source.body.get("truncated_vocab_size")
    stored = next((shapes[name][0] for name in ("lm_head.weight", "d2t") if shapes.get(name)), None)
    drafted: int = stored or configured or vocab
    note_mismatch("draft_vocab_size", configured, drafted, notes)
    if drafted > vocab:
        raise ModelError(f"{source.folder}: drafts from {drafted:,} tokens, but the vocabulary has {vocab:,}")
    if drafted < vocab and "d2t" not in shapes:
        raise MissingWeights(
            f"{source.folder}: drafts from {drafted:,} of {vocab:,} tokens, but no d2t says which"
        )
    return drafted


def refuse_missing_matrices(source: Source, vocab: int, drafted: int, widths: tuple[int, int]) -> None:
    """A head may use the target's embedding and lm_head only where their sizes are its own."""
    hidden, target_hidden = widths
    has_embedding = "embed_tokens.weight" in source.shapes
    has_head = "lm_head.weight" in source.shapes or (has_embedding and source.body.get("tie_word_embeddings"))
    if not has_head and (drafted != vocab or hidden != target_hidden):
        sizes = f"{vocab:,} x {target_hidden}, not {drafted:,} x {hidden}"
        raise MissingWeights(f"{source.folder}: no lm_head.weight; the target's is {sizes}")
    if not has_embedding and hidden != target_hidden:
        raise MissingWeights(
            f"{source.folder}: no embed_tokens.weight; the target's are {target_hidden} wide, not {hidden}"
        )


def known_names(source: Source, notes: list[str]) -> dict[str, str]:
    """The tensors that the head's formula uses. An unknown one inside a layer is refused."""
    names = {ours: theirs for ours, theirs in source.names.items() if KNOWN.fullmatch(ours)}
    if source.body.get("tie_word_embeddings") and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    others = [theirs for ours, theirs in source.names.items() if ours not in names and not UNUSED.match(ours)]
    inside = next((theirs for theirs in others if INSIDE.match(own_name(theirs))), None)
    if inside:
        raise UnsupportedModel(f"{source.folder}: an EAGLE-3 head with {inside}, which is not supported")
    if others:
        notes.append(f"not read: {', '.join(sorted(others)[:3])}{' and others' * (len(others) > 3)}")
    return names


def check_shapes(source: Source, config: Eagle3Config) -> None:
    """Raises `ModelError` where a tensor that the formula needs is missing or has another shape."""
    optional = optional_shapes(config)
    for layer in range(config.layers):
        optional |= {f"layers.{layer}.{name}": shape for name, shape in optional_in_layer(config).items()}
    expected = needed_shapes(source, config) | {
        name: shape for name, shape in optional.items() if name in source.shapes
    }
    for name, shape in expected.items():
        if source.shape(name) != shape:
            found = list(source.shape(name))
            raise CorruptWeights(f"{source.folder}: {source.names[name]} is {found}, not {list(shape)}")


def needed_shapes(source: Source, config: Eagle3Config) -> Shapes:
    h, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {"fc.weight": (h, config.taps * config.target_hidden), "norm.weight": (h,)}
    shapes |= {
        f"fc_norm.{tap}.weight": (config.target_hidden,) for tap in range(config.taps * config.fc_norm)
    }
    for layer in range(config.layers):
        given = h if layer else 2 * h
        inner: Shapes = {
            "self_attn.q_proj": (q, given),
            "self_attn.k_proj": (kv, given),
            "self_attn.v_proj": (kv, given),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (config.intermediate, h),
            "mlp.up_proj": (config.intermediate, h),
            "mlp.down_proj": (h, config.intermediate),
            "post_attention_layernorm": (h,),
        }
        # later layers have one norm before attention, under either name
        both = ("input_layernorm", "hidden_norm")
        one = next((name for name in both if f"layers.{layer}.{name}.weight" in source.shapes), both[0])
        inner |= dict.fromkeys((one,) if layer else both, (h,))
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return shapes


def optional_shapes(config: Eagle3Config) -> Shapes:
    return {
        "fc.bias": (config.hidden,),
        "lm_head.weight": (config.draft_vocab_size, config.hidden),
        "embed_tokens.weight": (config.vocab_size, config.hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
        "input_norm.weight": (config.taps * config.target_hidden,),
    }


def optional_in_layer(config: Eagle3Config) -> Shapes:
    return {
        "self_attn.q_proj.bias": (config.heads * config.head_dim,),
        "self_attn.k_proj.bias": (config.kv_heads * config.head_dim,),
        "self_attn.v_proj.bias": (config.kv_heads * config.head_dim,),
        "self_attn.o_proj.bias": (config.hidden,),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
