"""EAGLE-3 heads as six projects publish them, read into one sheet: tensors decide, configs say the rest and
are doubted.

Nothing is loaded: config.json and the headers of safetensors files say it all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.checkpoints.eagle3_config import Eagle3Config
from speculon.checkpoints.headers import parameters_by_dtype, read_config, read_header, weight_files
from speculon.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel

FIRST_Q = "layers.0.self_attn.q_proj.weight"
PREFIX = re.compile(r"(?:(?:model|speculator|draft_model)\.)+")
OLD_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
UNUSED = re.compile(r".*rotary_emb\.|verifier_|t2d$")
KNOWN = re.compile(
    r"fc\.(weight|bias)|(norm|lm_head|embed_tokens|input_norm)\.weight|fc_norm\.\d+\.weight|d2t"
    r"|layers\.\d+\.((input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
)
# left out, these would change the result
INSIDE = re.compile(r"(fc|norm|lm_head|embed_tokens|input_norm|fc_norm|layers)\b")
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
STRETCHED = ("yarn", "llama3")  # kinds of RoPE that stretch an original length
# not those whose angles hang on the longest text of a batch
ROPES = ("default", "linear", "proportional", *STRETCHED)


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A folder's config and its tensors' shapes, in our names."""

    folder: Path
    files: tuple[Path, ...]
    pickled: bool
    config: dict[str, Any]  # as it is
    shapes: Shapes  # none of pickles
    names: dict[str, str]  # our name -> the name in the files
    sizes: Counter[str]  # parameters by dtype
    twice: tuple[str, ...]  # names in the files that become one in ours

    @property
    def kind(self) -> str | None:
        """What the speculators format says it is."""
        return self.config.get("speculators_model_type")

    @property
    def architecture(self) -> str:
        return " ".join(name for name in self.config.get("architectures") or () if isinstance(name, str))

    def part(self, name: str) -> dict[str, Any]:
        """A table within the config; an empty one where there is none."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def body(self) -> dict[str, Any]:
        """Where the sizes of the layers stand."""
        return {**self.config, **self.part("model"), **self.part("transformer_layer_config")}

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise MissingWeights(f"{self.folder}: no tensor {name}")
        return self.shapes[name]


def open_source(folder: Path) -> Source:
    """Reads config and headers; damaged files are refused."""
    config = read_config(folder)
    files, pickled = weight_files(folder)
    shapes: Shapes = {}
    names: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    twice = []
    for file in () if pickled else files:
        sizes.update(parameters_by_dtype(file))
        for theirs, tensor in read_header(file)[0].items():
            ours = renamed(theirs)
            if ours in names:
                twice.append(f"{names[ours]} and {theirs}")
            shapes[ours], names[ours] = tuple(tensor["shape"]), theirs
    return Source(folder, files, pickled, config, shapes, names, sizes, tuple(twice))


def renamed(theirs: str) -> str:
    bare = PREFIX.sub("", theirs, count=1) if PREFIX.match(theirs) else theirs
    return next(
        (new + bare.removeprefix(old) for old, new in OLD_NAMES.items() if bare.startswith(old)), bare
    )


def format_of(source: Source) -> str:
    if source.kind is not None or "speculators_config" in source.config:
        return "speculators"
    if any(name.startswith("use_") for name in source.part("eagle_config")):
        return "modelopt"
    if source.architecture.startswith("Eagle3Config"):
        return "angelslim"
    if "Eagle3Config" in source.architecture:
        return "specforge"
    return "nebius" if "truncated_vocab_size" in source.config else "safeailab"


def read_eagle3(source: Source) -> Eagle3Config:
    """The sheet of a folder whose tensors are an EAGLE-3 head's.

    Raises `ModelError` for what does not fit together.
    """
    if source.twice:
        raise CorruptWeights(f"{source.folder}: {source.twice[0]} are the same tensor")
    body, notes = source.body, list[str]()
    hidden, layers = source.shape(FIRST_Q)[1] // 2, count_layers(source)
    head_dim, heads, kv_heads = attention_sides(source, hidden, notes)
    intermediate = source.shape("layers.0.mlp.gate_proj.weight")[0]
    tap_ids, after = read_taps(source, notes)
    taps, target_hidden = divide(source, tap_ids, hidden, notes)
    vocab, drafted = vocabularies(source, hidden, target_hidden, notes)
    together, each = tap_norms(source, notes)
    for name, found in (
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
        ("num_hidden_layers", layers),
    ):
        doubt(name, body.get(name), found, notes)
    sheet = Eagle3Config(
        path=source.folder,
        files=source.files,
        dialect=format_of(source),
        names=own_names(source, notes),
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
        speculative_tokens=suggested(source),
        verifier=made_for(source),
        notes=tuple(notes),
        dtype=source.sizes.most_common(1)[0][0],
        num_bytes=sum(file.stat().st_size for file in source.files),
    )
    check_shapes(source, sheet)
    return sheet


# -- sizes, from tensors
# -------------------------------------------------------------------------------------------------------


def doubt(name: str, config: Any, found: int, notes: list[str]) -> None:
    if config is not None and config != found:
        notes.append(f"the config's {name} is {config}, the tensors' {found}")


def count_layers(source: Source) -> int:
    there = {int(name.split(".")[1]) for name in source.shapes if re.match(r"layers\.\d+\.", name)}
    if there != set(range(len(there))):
        raise MissingWeights(f"{source.folder}: has tensors of layers {sorted(there)}, not of those between")
    return len(there)


def attention_sides(source: Source, hidden: int, notes: list[str]) -> tuple[int, int, int]:
    """Width of a head, heads of q, heads of k and v."""
    body, q, k = source.body, source.shape(FIRST_Q)[0], source.shape("layers.0.self_attn.k_proj.weight")[0]
    normed = source.shapes.get("layers.0.self_attn.q_norm.weight")
    said = body.get("num_attention_heads")
    head_dim = (
        normed[0]
        if normed
        else body.get("head_dim") or (hidden // said if isinstance(said, int) and said else None)
    )
    if (
        not isinstance(head_dim, int)
        or head_dim < 1
        or q % head_dim
        or k % head_dim
        or q // head_dim % (k // head_dim)
    ):
        raise ModelError(
            f"{source.folder}: q_proj and k_proj yield {q} and {k}, which are no heads of {head_dim}"
        )
    doubt("num_attention_heads", said, q // head_dim, notes)
    doubt("num_key_value_heads", body.get("num_key_value_heads"), k // head_dim, notes)
    return head_dim, q // head_dim, k // head_dim


def divide(source: Source, tap_ids: tuple[int, ...] | None, hidden: int, notes: list[str]) -> tuple[int, int]:
    """How many taps `fc` takes, and how wide each is."""
    width = source.shape("fc.weight")[1]
    count = 3 if tap_ids is None else len(tap_ids)
    if width % count:
        which = "the usual 3" if tap_ids is None else f"{count}, of layers {', '.join(map(str, tap_ids))}"
        raise ModelError(
            f"{source.folder}: fc takes {width:,} numbers, which is not a multiple of the taps, {which}"
        )
    doubt("target_hidden_size", source.body.get("target_hidden_size") or hidden, width // count, notes)
    for name in ("num_aux_hidden_states", "num_aux_layers"):
        doubt(name, source.config.get(name, source.part("eagle_config").get(name)), count, notes)
    return count, width // count


def vocabularies(source: Source, hidden: int, target_hidden: int, notes: list[str]) -> tuple[int, int]:
    """The target's, and how much of it is drafted from.

    What is absent is the target's own, where the widths are equal.
    """
    shapes, said = source.shapes, source.body.get("vocab_size")
    rows = [shapes[name][0] for name in ("t2d", "embed_tokens.weight") if shapes.get(name)]
    vocab = rows[0] if rows else said
    if not isinstance(vocab, int) or len(set(rows)) > 1:
        raise ModelError(
            f"{source.folder}: no vocab_size in the config, or t2d and embed_tokens differ: {rows}"
        )
    doubt("vocab_size", said, vocab, notes)
    claimed = source.body.get("draft_vocab_size") or source.body.get("truncated_vocab_size")
    drafted = (
        next((shapes[name][0] for name in ("lm_head.weight", "d2t") if shapes.get(name)), None)
        or claimed
        or vocab
    )
    doubt("draft_vocab_size", claimed, drafted, notes)
    if drafted > vocab:
        raise ModelError(f"{source.folder}: drafts from {drafted:,} tokens, but the vocabulary has {vocab:,}")
    if drafted < vocab and "d2t" not in shapes:
        raise MissingWeights(
            f"{source.folder}: drafts from {drafted:,} of {vocab:,} tokens, but no d2t says which"
        )
    own_head = "lm_head.weight" in shapes or (
        "embed_tokens.weight" in shapes and source.body.get("tie_word_embeddings")
    )
    if not own_head and (drafted != vocab or hidden != target_hidden):
        raise MissingWeights(
            f"{source.folder}: no lm_head.weight; the target's is {vocab:,} x {target_hidden}, not {drafted:,} x {hidden}"
        )
    if "embed_tokens.weight" not in shapes and hidden != target_hidden:
        raise MissingWeights(
            f"{source.folder}: no embed_tokens.weight; the target's are {target_hidden} wide, not {hidden}"
        )
    return vocab, drafted


def own_names(source: Source, notes: list[str]) -> dict[str, str]:
    """The tensors that the formula knows.

    One that it does not know inside a layer is refused: leaving it out would be wrong.
    """
    names = {ours: theirs for ours, theirs in source.names.items() if KNOWN.fullmatch(ours)}
    if source.body.get("tie_word_embeddings") and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    others = [theirs for ours, theirs in source.names.items() if ours not in names and not UNUSED.match(ours)]
    inside = next((theirs for theirs in others if INSIDE.match(renamed(theirs))), None)
    if inside:
        raise UnsupportedModel(f"{source.folder}: an EAGLE-3 head with {inside}, which is not carried")
    if others:
        notes.append(f"not read: {', '.join(sorted(others)[:3])}{' and others' * (len(others) > 3)}")
    return names


def check_shapes(source: Source, sheet: Eagle3Config) -> None:
    """Every tensor that the formula needs is there, and all have the shape that the sheet says."""
    optional = optional_shapes(sheet)
    for layer in range(sheet.layers):
        optional |= {f"layers.{layer}.{name}": shape for name, shape in optional_in_layer(sheet).items()}
    wanted = needed_shapes(source, sheet) | {
        name: shape for name, shape in optional.items() if name in source.shapes
    }
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise CorruptWeights(
                f"{source.folder}: {source.names[name]} is {list(source.shape(name))}, not {list(shape)}"
            )


def needed_shapes(source: Source, sheet: Eagle3Config) -> Shapes:
    h, q, kv = sheet.hidden, sheet.heads * sheet.head_dim, sheet.kv_heads * sheet.head_dim
    shapes: Shapes = {"fc.weight": (h, sheet.taps * sheet.target_hidden), "norm.weight": (h,)}
    shapes |= {f"fc_norm.{tap}.weight": (sheet.target_hidden,) for tap in range(sheet.taps * sheet.fc_norm)}
    for layer in range(sheet.layers):
        given = h if layer else 2 * h
        inner: Shapes = {
            "self_attn.q_proj": (q, given),
            "self_attn.k_proj": (kv, given),
            "self_attn.v_proj": (kv, given),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (sheet.intermediate, h),
            "mlp.up_proj": (sheet.intermediate, h),
            "mlp.down_proj": (h, sheet.intermediate),
            "post_attention_layernorm": (h,),
        }
        # later layers have one norm at their door; some call it as they call the first layer's second
        both = ("input_layernorm", "hidden_norm")
        one = next((name for name in both if f"layers.{layer}.{name}.weight" in source.shapes), both[0])
        inner |= dict.fromkeys((one,) if layer else both, (h,))
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return shapes


def optional_shapes(sheet: Eagle3Config) -> Shapes:
    return {
        "fc.bias": (sheet.hidden,),
        "lm_head.weight": (sheet.draft_vocab_size, sheet.hidden),
        "embed_tokens.weight": (sheet.vocab_size, sheet.hidden),
        "d2t": (sheet.draft_vocab_size,),
        "t2d": (sheet.vocab_size,),
        "input_norm.weight": (sheet.taps * sheet.target_hidden,),
    }


def optional_in_layer(sheet: Eagle3Config) -> Shapes:
    return {
        "self_attn.q_proj.bias": (sheet.heads * sheet.head_dim,),
        "self_attn.k_proj.bias": (sheet.kv_heads * sheet.head_dim,),
        "self_attn.v_proj.bias": (sheet.kv_heads * sheet.head_dim,),
        "self_attn.o_proj.bias": (sheet.hidden,),
        "self_attn.q_norm.weight": (sheet.head_dim,),
        "self_attn.k_norm.weight": (sheet.head_dim,),
    }


# -- the rest, from the config
# -------------------------------------------------------------------------------------------------


def flag(source: Source, *names: str) -> bool | None:
    """The nested value before the top one; None where neither says."""
    said = (table.get(name) for name in names for table in (source.part("eagle_config"), source.body))
    return next((bool(value) for value in said if value is not None), None)


def read_taps(source: Source, notes: list[str]) -> tuple[tuple[int, ...] | None, bool | None]:
    """The ids as they are, and whether id j is the output of layer j; what is nested can be meant either way."""
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
    """Whether all taps are normed together, or each by itself.

    The tensors say so; a config without tensors is refused.
    """
    together, each = "input_norm.weight" in source.shapes, "fc_norm.0.weight" in source.shapes
    if together and each:
        raise ModelError(f"{source.folder}: has input_norm and fc_norm, of which a head has one")
    for name, said, found in (
        ("norm_before_fc", flag(source, "norm_before_fc"), together),
        ("fc_norm", flag(source, "fc_norm", "use_aux_norm"), each),
    ):
        if said and not found:
            raise MissingWeights(f"{source.folder}: {name} is set, but there is no tensor for it")
        if found and said is False:
            notes.append(f"the config's {name} is false, but there is a tensor for it")
    return together, each


def norm_before_residual(source: Source, notes: list[str]) -> bool:
    said = flag(source, "norm_before_residual")
    if said is None and format_of(source) == "speculators":
        notes.append("the config does not say norm_before_residual: true is assumed")
        return True
    return bool(said)


def read_rope(source: Source) -> dict[str, Any]:
    """The drafter's own, in transformers' form; never the target's."""
    body = source.body
    if body.get("is_neox_style") is False or body.get("rope_is_neox_style") is False:
        raise UnsupportedModel(f"{source.folder}: interleaved RoPE (is_neox_style is false) is not carried")
    given: Mapping[str, Any] = body.get("rope_parameters") or body.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel(f"{source.folder}: RoPE that differs between layers is not carried")
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # of text alone, all axes of it are equal
    if kind not in ROPES:
        raise UnsupportedModel(f"{source.folder}: rope_type {kind!r} is not carried, but {', '.join(ROPES)}")
    if kind in ("linear", *STRETCHED) and "factor" not in given:
        raise ModelError(f"{source.folder}: rope_type {kind!r} without its factor")
    rope = {name: value for name, value in given.items() if name != "type" and not name.startswith("mrope")}
    rope |= {
        "rope_type": kind,
        "rope_theta": float(given.get("rope_theta") or body.get("rope_theta") or 10000.0),
    }
    if body.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", body["partial_rotary_factor"])
    if kind in STRETCHED and body.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", body["max_position_embeddings"])
    return rope


def read_windows(source: Source, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    body = source.body
    kinds, window = body.get("layer_types"), body.get("sliding_window")
    if not kinds:
        if window and body.get("use_sliding_window"):
            notes.append(f"a window of {window} without layer_types: all of the text is attended to")
        return (None,) * layers
    unknown = sorted({kind for kind in kinds[:layers] if kind not in ("sliding_attention", "full_attention")})
    if unknown or len(kinds) < layers:
        raise UnsupportedModel(
            f"{source.folder}: layer_types of {layers} layers = {kinds}, which is not carried"
        )
    if "sliding_attention" in kinds[:layers] and not isinstance(window, int):
        raise ModelError(f"{source.folder}: layer_types ask for a sliding_window, which is {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def suggested(source: Source) -> int | None:
    methods = source.part("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def made_for(source: Source) -> tuple[str, ...]:
    verifier = source.part("speculators_config").get("verifier")
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    return tuple(name for name in names or () if isinstance(name, str))
