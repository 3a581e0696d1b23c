"""What the formats of drafters have in common: their folders, sizes from tensors, settings of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import parameters_by_dtype, read_config, read_header, weight_files
from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel
from speculon.runtimes.torch.drafters.config import INTEGERS, DrafterConfig, check_offsets, read_numbers

FIRST_Q = "layers.0.self_attn.q_proj.weight"
PREFIX = re.compile(r"(?:(?:model|speculator|draft_model)\.)+")
OLD_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",
}

TensorShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DrafterSource:
    """A drafter's config and the shapes of its tensors, under the names used here."""

    folder: Path
    files: tuple[Path, ...]
    pickled: bool
    config: dict[str, Any]
    shapes: TensorShapes  # empty for pickles
    names: dict[str, str]  # name here -> name in the files
    sizes: Counter[str]  # parameters by dtype
    twice: tuple[str, ...]  # pairs of names in the files that are one name here

    @property
    def speculators_type(self) -> str | None:
        """The algorithm that the speculators format names."""
        return self.config.get("speculators_model_type")

    @property
    def of_speculators(self) -> bool:
        """Whether the speculators project's format is used."""
        return self.speculators_type is not None or "speculators_config" in self.config

    @property
    def architecture(self) -> str:
        return " ".join(name for name in self.config.get("architectures") or () if isinstance(name, str))

    def part(self, name: str) -> dict[str, Any]:
        """A nested table of the config, empty where it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def body(self) -> dict[str, Any]:
        """The config with its nested tables of layer sizes laid over it."""
        return {**self.config, **self.part("model"), **self.part("transformer_layer_config")}

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise MissingWeights(f"{self.folder}: no tensor {name}")
        return self.shapes[name]


def open_source(folder: Path) -> DrafterSource:
    """Reads config and headers. Raises `ModelError` for damaged files."""
    config = read_config(folder)
    files, pickled = weight_files(folder)
    shapes: TensorShapes = {}
    names: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    twice = []
    for file in () if pickled else files:
        sizes.update(parameters_by_dtype(file))
        for theirs, tensor in read_header(file)[0].items():
            ours = own_name(theirs)
            if ours in names:
                twice.append(f"{names[ours]} and {theirs}")
            shapes[ours], names[ours] = tuple(tensor["shape"]), theirs
    return DrafterSource(folder, files, pickled, config, shapes, names, sizes, tuple(twice))


def own_name(theirs: str) -> str:
    bare = PREFIX.sub("", theirs, count=1) if PREFIX.match(theirs) else theirs
    return next(
        (new + bare.removeprefix(old) for old, new in OLD_NAMES.items() if bare.startswith(old)), bare
    )


UNUSED = re.compile(r".*rotary_emb\.|verifier_|t2d$")
# the tensors of layers and around them that the formulas of all methods use
KNOWN = (
    r"fc\.(weight|bias)|(norm|lm_head|embed_tokens)\.weight|d2t"
    r"|layers\.\d+\.((input_layernorm|post_attention_layernorm)\.weight"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
)
MASKS = {"BOOL": "B", "U8": "B"}  # dtypes of t2d, beside integers
TYPES = {"sliding_attention", "full_attention"}
STRETCHED = ("yarn", "llama3")  # types of RoPE that stretch an original length
# `dynamic` and `longrope` are missing: their angles depend on the longest sequence of a batch
ROPES = ("default", "linear", "proportional", *STRETCHED)


def common_fields(source: DrafterSource, hidden: int, notes: list[str]) -> dict[str, Any]:
    """Fields of `DrafterConfig` that are read alike, for a network of this width.

    Raises `ModelError` where tensors and config contradict each other.
    """
    if source.twice:
        raise CorruptWeights(f"{source.folder}: {source.twice[0]} are the same tensor")
    body, layers = source.body, count_layers(source)
    head_dim, heads, kv_heads = attention_sizes(source, hidden, notes)
    intermediate = source.shape("layers.0.mlp.gate_proj.weight")[0]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    for name, size in sizes.items():
        note_mismatch(name, body.get(name), size, notes)
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


def note_mismatch(name: str, configured: Any, stored: int, notes: list[str]) -> None:
    if configured is not None and configured != stored:
        notes.append(f"the config's {name} is {configured}, the tensors' {stored}")


def count_layers(source: DrafterSource) -> int:
    there = {int(name.split(".")[1]) for name in source.shapes if re.match(r"layers\.\d+\.", name)}
    if there != set(range(len(there))):
        raise MissingWeights(f"{source.folder}: has tensors of layers {sorted(there)}, not of those between")
    return len(there)


def attention_sizes(source: DrafterSource, hidden: int, notes: list[str]) -> tuple[int, int, int]:
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


def read_windows(source: DrafterSource, layers: int, types: Any, window: Any) -> tuple[int | None, ...]:
    """The window of each layer by `types` of layers. Raises `ModelError` for other types, or no window."""
    if len(types) < layers or set(types[:layers]) - TYPES:
        raise UnsupportedModel(
            f"{source.folder}: layer_types of {layers} layers = {types}, which is not supported"
        )
    if "sliding_attention" in types[:layers] and (type(window) is not int or window < 1):
        raise ModelError(f"{source.folder}: layer_types ask for a sliding_window, which is {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])


def checked_layers(source: DrafterSource, name: str, ids: Any) -> list[int]:
    """The value of setting `name` as layers. Raises `ModelError` where it is something else."""
    if not isinstance(ids, list) or not ids or not all(type(j) is int for j in ids):
        raise ModelError(f"{source.folder}: {name} = {ids!r} is no list of layers")
    if len(set(ids)) < len(ids):
        raise ModelError(f"{source.folder}: {name} = {ids} names a layer twice")
    return ids


def read_rope(source: DrafterSource) -> dict[str, Any]:
    """The drafter's own RoPE as transformers' `rope_parameters`; never the target's."""
    body, table = source.body, rope_table(source)
    rope_type = table.get("rope_type") or table.get("type") or "default"
    rope_type = (
        "default" if rope_type == "mrope" else rope_type
    )  # text tokens have equal positions on all axes
    if rope_type not in ROPES:
        supported = ", ".join(ROPES)
        raise UnsupportedModel(f"{source.folder}: rope_type {rope_type!r} is not supported, but {supported}")
    if rope_type in ("linear", *STRETCHED) and "factor" not in table:
        raise ModelError(f"{source.folder}: rope_type {rope_type!r} without its factor")
    rope = {name: value for name, value in table.items() if name != "type" and not name.startswith("mrope")}
    theta = table.get("rope_theta") or body.get("rope_theta") or 10000.0
    rope |= {"rope_type": rope_type, "rope_theta": float(theta)}
    if body.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", body["partial_rotary_factor"])
    if rope_type in STRETCHED and body.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", body["max_position_embeddings"])
    return rope


def rope_table(source: DrafterSource) -> Mapping[str, Any]:
    """The config's RoPE settings. Interleaved ones and those that differ between layers are refused."""
    body = source.body
    if body.get("is_neox_style") is False or body.get("rope_is_neox_style") is False:
        raise UnsupportedModel(f"{source.folder}: interleaved RoPE (is_neox_style is false) is not supported")
    table: Mapping[str, Any] = body.get("rope_parameters") or body.get("rope_scaling") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedModel(f"{source.folder}: RoPE that differs between layers is not supported")
    return table


def suggested_tokens(source: DrafterSource) -> int | None:
    methods = source.part("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def verifier_architectures(source: DrafterSource) -> tuple[str, ...]:
    verifier = source.part("speculators_config").get("verifier")
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return tuple(name for name in names or () if isinstance(name, str))


def used_names(source: DrafterSource, known: re.Pattern[str]) -> tuple[dict[str, str], list[str]]:
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


def check_draft_vocabulary(source: DrafterSource, drafted: int | None, vocab: int | None) -> None:
    """Raises `ModelError` where draft ids have no target ids."""
    if vocab is not None and drafted is not None and drafted > vocab:
        raise ModelError(f"{source.folder}: drafts from {drafted:,} tokens, but the vocabulary has {vocab:,}")
    if drafted != vocab and "d2t" not in source.shapes:
        of = f"{drafted:,} of {vocab:,}" if vocab and drafted else f"{drafted} of unknown"
        raise MissingWeights(f"{source.folder}: drafts from {of} tokens, but no d2t says which")


def check_shapes(
    source: DrafterSource, config: DrafterConfig, more: TensorShapes, optional: TensorShapes, inputs: int
) -> None:
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
    needed: TensorShapes = {
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
        actual = source.shape(name)
        if actual != shape:
            raise CorruptWeights(f"{source.folder}: {stored[name]} is {list(actual)}, not {list(shape)}")
    for layer in range(config.layers):
        both = [config.has(f"layers.{layer}.self_attn.{name}") for name in ("q_norm", "k_norm")]
        if both[0] != both[1]:
            raise MissingWeights(f"{source.folder}: layer {layer} has one of q_norm and k_norm")


def layer_shapes(config: DrafterConfig, inputs: int) -> tuple[TensorShapes, TensorShapes]:
    """Those of a layer whose attention reads rows of width `inputs`, and those that it may have."""
    h, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    needed: TensorShapes = {
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
    optional: TensorShapes = {
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.bias": (h,),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    return needed, optional


def check_draft_ids(source: DrafterSource) -> None:
    """Raises `CorruptWeights` where d2t and t2d name other tokens as those that are drafted."""
    if source.pickled or not {"d2t", "t2d"} <= source.names.keys():
        return
    offsets = read_numbers(source.files, source.names["d2t"], INTEGERS)
    mask = read_numbers(source.files, source.names["t2d"], MASKS | INTEGERS)
    check_offsets(source.folder, offsets, len(mask))
    mapped = [j + offset for j, offset in enumerate(offsets)]
    drafted = [token for token, used in enumerate(mask) if used]
    if len(mapped) != len(drafted):
        counts = f"d2t has {len(mapped):,} tokens, t2d {len(drafted):,}"
        raise CorruptWeights(f"{source.folder}: {counts}")
    for j, (by_d2t, by_t2d) in enumerate(zip(mapped, drafted, strict=True)):
        if by_d2t != by_t2d:
            raise CorruptWeights(f"{source.folder}: draft id {j} is {by_d2t:,} by d2t, {by_t2d:,} by t2d")
