"""Which way of drafting is this folder for?

Config and tensor names say it; what is not carried is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from speculon.checkpoints.eagle3_config import SHORT, Eagle3Config
from speculon.checkpoints.eagle3_formats import FIRST_Q, Source, open_source, read_eagle3
from speculon.checkpoints.headers import Checkpoint, read_checkpoint
from speculon.errors import MissingWeights, ModelError, SpeculonError, UnsafeCheckpoint, UnsupportedModel

EAGLE3, DRAFT_MODEL = "eagle3", "draft_model"


@dataclass(frozen=True, slots=True)
class Family:
    """A folder, and the method it is for; none where nothing here can use it, and `refusal` says why."""

    path: Path
    method: str | None
    line: str  # what was found, for a person
    sheet: Eagle3Config | None = None
    checkpoint: Checkpoint | None = None
    refusal: str | None = None

    def beside(self, num_layers: int | None) -> Family:
        """The same, told for a target of so many layers."""
        return self if self.sheet is None else replace(self, line=self.sheet.line(num_layers))


@dataclass(frozen=True, slots=True)
class Foreign:
    """A family that is known by its signs, and not carried."""

    name: str
    what: str
    signs: Callable[[Source], bool]


def said(*words: str) -> Callable[[Source], bool]:
    """An architecture with one of these words in it, or the speculators format's own name for it."""
    small = tuple(word.lower() for word in words)
    return lambda source: any(
        word in source.architecture.lower() or word == (source.kind or "").lower() for word in small
    )


def keyed(*names: str) -> Callable[[Source], bool]:
    return lambda source: any(
        name in table for name in names for table in (source.config, source.part("dflash_config"))
    )


def typed(*names: str) -> Callable[[Source], bool]:
    return lambda source: source.config.get("model_type") in names


def projector(name: str) -> Callable[[Source], bool]:
    return lambda source: source.part("dflash_config").get("projector_type") == name


def holds(pattern: str) -> Callable[[Source], bool]:
    """A tensor whose name, in ours, begins so."""
    return lambda source: any(re.match(pattern, name) for name in source.shapes)


def only(pattern: str) -> Callable[[Source], bool]:
    return lambda source: bool(source.shapes) and all(re.match(pattern, name) for name in source.shapes)


def either(*signs: Callable[[Source], bool]) -> Callable[[Source], bool]:
    return lambda source: any(sign(source) for sign in signs)


def is_eagle1(source: Source) -> bool:
    """One hidden state beside the embedding, joined before the layer instead of in it."""
    fc, q = source.shapes.get("fc.weight"), source.shapes.get(FIRST_Q)
    joined = fc is not None and q is not None and len(fc) == len(q) == 2 and fc[1] == 2 * q[1] == 2 * fc[0]
    named = (
        typed("eagle")(source)
        or source.kind == "eagle"
        or ("Eagle" in source.architecture and not claims_eagle3(source))
    )
    return joined or (named and not is_eagle3(source))


def is_tapless(source: Source) -> bool:
    return has_wide_layer(source) and (
        "fc.weight" not in source.shapes or source.part("eagle_config").get("use_aux_hidden_state") is False
    )


def is_eagle3(source: Source) -> bool:
    """`fc` takes several hidden states and yields half of what the first layer's queries take."""
    fc = source.shapes.get("fc.weight")
    return (
        has_wide_layer(source) and fc is not None and len(fc) == 2 and 2 * fc[0] == source.shapes[FIRST_Q][1]
    )


def has_wide_layer(source: Source) -> bool:
    """A first layer that takes an embedding and a hidden state side by side."""
    q, out = source.shapes.get(FIRST_Q), source.shapes.get("layers.0.self_attn.o_proj.weight")
    return q is not None and out is not None and len(q) == len(out) == 2 and q[1] == 2 * out[0]


def claims_eagle3(source: Source) -> bool:
    """What only a config of such a head says; enough to name it where its tensors cannot be seen."""
    return said("eagle3")(source) or keyed("draft_vocab_size", "truncated_vocab_size", "eagle_config")(source)


FOREIGN = (
    Foreign(
        "P-EAGLE",
        "an EAGLE-3 head that drafts all tokens in one pass",
        either(said("peagle"), holds("mask_hidden")),
    ),
    Foreign("DFlash2", "drafts a block of tokens in one pass", said("dflash2")),
    Foreign(
        "Domino",
        "a DFlash drafter with a recurrent head",
        either(said("domino"), projector("domino"), holds("prefix_gru")),
    ),
    Foreign("LiLiCorr", "a DFlash drafter with a lattice head", said("lilicorr")),
    Foreign(
        "DSpark",
        "a DFlash drafter with a Markov head",
        either(
            said("dspark"),
            projector("dspark"),
            keyed("markov_rank", "num_anchors"),
            holds("(logit_head.)?markov_head"),
        ),
    ),
    Foreign(
        "DFlash",
        "drafts a block of tokens in one pass",
        either(said("dflash", "museglimmerassistant"), keyed("dflash_config"), holds("hidden_norm")),
    ),
    Foreign("MTP", "prediction layers that belong to their target", either(said("mtp"), only("mtp"))),
    Foreign(
        "Medusa",
        "one head per position",
        either(
            said("medusa"),
            keyed("medusa_num_heads"),
            typed("medusa"),
            holds(r"(medusa_heads\.)?\d+\.\d+\.(linear\.)?weight"),
        ),
    ),
    Foreign(
        "MLP speculator",
        "one small network per position",
        either(typed("mlp_speculator"), said("mlpspeculator")),
    ),
    Foreign("LSTM speculator", "one recurrent cell per position", said("lstmspeculator")),
    Foreign("PARD", "a draft model that drafts all tokens in one pass", keyed("pard_token")),
    Foreign(
        "Gemma 4 assistant",
        "reads its target's own keys and values",
        either(typed("gemma4_assistant"), said("gemma4assistant")),
    ),
    Foreign("an EAGLE-3 head with latent attention", "MLA, as DeepSeek's", said("eagle3deepseek")),
    Foreign(
        "an EAGLE-3 head with latent attention",
        "MLA, as DeepSeek's",
        lambda source: (
            "fc.weight" in source.shapes and holds(r"layers\.0\.self_attn\.(q_a|kv_a)_proj")(source)
        ),
    ),
    Foreign("an EAGLE-3 head without taps", "it reads the last hidden state only", is_tapless),
    Foreign("EAGLE-1/2", "reads the last hidden state only", is_eagle1),
)


def family_of(path: str | Path) -> Family:
    """What a folder is.

    Raises `ModelError` for one that cannot be read, or whose tensors contradict each other.
    """
    folder = Path(path).expanduser()
    try:
        return look_at(folder)
    except SpeculonError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:  # a value of another kind somewhere
        raise ModelError(
            f"{folder}: its config or headers are not to be read ({type(error).__name__}: {error})"
        ) from error


def look_at(folder: Path) -> Family:
    source = open_source(folder)
    foreign = next((one for one in FOREIGN if one.signs(source)), None)
    if foreign:
        name, what = foreign.name, foreign.what
        return Family(
            folder, None, f"{name}: {what}", refusal=f"{name} ({what}) is recognised, but not carried"
        )
    if source.kind not in (None, EAGLE3):
        line = f"speculators_model_type {source.kind!r}"
        return Family(folder, None, line, refusal=f"{line} is not known here")
    if is_eagle3(source):
        sheet = read_eagle3(source)
        return Family(folder, EAGLE3, sheet.line(), sheet=sheet)
    if claims_eagle3(source):
        raise unseen(source)
    checkpoint = read_checkpoint(folder)
    return Family(folder, DRAFT_MODEL, line_of(checkpoint), checkpoint=checkpoint)


def read_eagle3_config(path: str | Path) -> Eagle3Config:
    """The sheet of an EAGLE-3 head; anything else is refused by what it is."""
    family = family_of(path)
    if family.sheet is None:
        raise UnsupportedModel(f"{family.path}: {family.refusal or f'no EAGLE-3 head, but a {family.line}'}")
    return family.sheet


def unseen(source: Source) -> ModelError:
    """Why a head that its config promises is not in its files."""
    if source.pickled:
        return UnsafeCheckpoint(
            f"{source.files[0]}: pickle weights can run code; a drafter is known by the headers of safetensors files, "
            "so convert them, allow_pickle does not help"
        )
    missing = next((name for name in ("fc.weight", FIRST_Q) if name not in source.shapes), None)
    if missing:
        return MissingWeights(
            f"{source.folder}: the config is an EAGLE-3 head's, but there is no tensor {missing}"
        )
    fc, q = source.shapes["fc.weight"], source.shapes[FIRST_Q]
    return ModelError(
        f"{source.folder}: the config is an EAGLE-3 head's, but fc is {list(fc)} and the first q_proj {list(q)}"
    )


def line_of(checkpoint: Checkpoint) -> str:
    size = f"{checkpoint.num_parameters:,} parameters" if checkpoint.num_parameters else "pickle weights"
    dtype = SHORT.get(checkpoint.dtype or "", checkpoint.dtype)
    layers = f"{checkpoint.num_layers} layer{'s' * (checkpoint.num_layers != 1)} of {checkpoint.hidden_size}"
    return f"language model {checkpoint.architecture}: {layers}, {size}; {dtype}, {checkpoint.num_bytes / 1e6:.1f} MB"
