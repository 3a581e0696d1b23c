"""Which drafting method a folder is for, from config and tensor names. Others are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from speculon.checkpoints.gguf.header import is_gguf
from speculon.checkpoints.headers import Checkpoint, read_checkpoint
from speculon.core.errors import MissingWeights, ModelError, SpeculonError, UnsafeCheckpoint, UnsupportedModel
from speculon.runtimes.torch.drafters.config import DTYPE_NAMES, DrafterConfig
from speculon.runtimes.torch.drafters.dflash.config import CONTEXT_NORM, DFlashConfig, is_dflash, read_dflash
from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config, read_eagle3
from speculon.runtimes.torch.drafters.formats import FIRST_Q, DrafterSource, open_source
from speculon.runtimes.torch.drafters.gemma4_assistant.config import (
    PARTS,
    TYPES,
    AssistantConfig,
    read_assistant,
)
from speculon.runtimes.torch.drafters.mtp.tensors import MTP, MtpConfig, mtp_alone

EAGLE3, DFLASH, DRAFT_MODEL, PARD = "eagle3", "dflash", "draft_model", "pard"
ASSISTANT = "gemma4_assistant"
SPECULATORS_TYPES = (EAGLE3, DFLASH, "dflash2", "dspark")
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")  # names of the token that PARD masks with
# what a config or header with values of unexpected types raises
WRONG_TYPES = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


AnyConfig = TypeVar("AnyConfig", bound=DrafterConfig)


@dataclass(frozen=True, slots=True)
class Family:
    """A folder and its drafting method; None where it is unsupported, and `refusal` says why."""

    path: Path
    method: str | None
    summary: str  # one line for people
    head: DrafterConfig | None = None
    modules: MtpConfig | None = None
    checkpoint: Checkpoint | None = None
    refusal: str | None = None

    def for_target(self, num_layers: int | None) -> Family:
        """The same with a summary for a target of `num_layers` layers."""
        return self if self.head is None else replace(self, summary=self.head.summary(num_layers))


Test = Callable[[DrafterSource], bool]


@dataclass(frozen=True, slots=True)
class UnsupportedFamily:
    """A family that is recognised, and not supported."""

    name: str
    what: str
    matches: Test


def named(*words: str) -> Test:
    """An architecture with one of these words in it, or one of them as speculators_model_type."""
    small = tuple(word.lower() for word in words)
    return lambda source: any(
        word in source.architecture.lower() or word == (source.speculators_type or "").lower()
        for word in small
    )


def has_key(*names: str) -> Test:
    return lambda source: any(
        name in table for name in names for table in (source.config, source.part("dflash_config"))
    )


def has_type(*names: str) -> Test:
    return lambda source: source.config.get("model_type") in names


def has_projector(name: str) -> Test:
    return lambda source: source.part("dflash_config").get("projector_type") == name


def has_tensor(pattern: str) -> Test:
    """A tensor whose name here matches the pattern at its beginning."""
    return lambda source: any(re.match(pattern, name) for name in source.shapes)


def has_only(pattern: str) -> Test:
    return lambda source: bool(source.shapes) and all(re.match(pattern, name) for name in source.shapes)


def any_of(*tests: Test) -> Test:
    return lambda source: any(test(source) for test in tests)


def is_eagle1(source: DrafterSource) -> bool:
    """One hidden state and the embedding, joined before the layer instead of inside it."""
    if is_dflash(source):
        return False
    fc, q = source.shapes.get("fc.weight"), source.shapes.get(FIRST_Q)
    joined = fc is not None and q is not None and len(fc) == len(q) == 2 and fc[1] == 2 * q[1] == 2 * fc[0]
    named = (
        has_type("eagle")(source)
        or source.speculators_type == "eagle"
        or ("Eagle" in source.architecture and not claims_eagle3(source))
    )
    return joined or (named and not is_eagle3(source))


def is_tapless(source: DrafterSource) -> bool:
    return has_wide_layer(source) and (
        "fc.weight" not in source.shapes or source.part("eagle_config").get("use_aux_hidden_state") is False
    )


def is_eagle3(source: DrafterSource) -> bool:
    """`fc` takes several hidden states and yields half of what the first layer's queries take."""
    fc = source.shapes.get("fc.weight")
    return (
        has_wide_layer(source) and fc is not None and len(fc) == 2 and 2 * fc[0] == source.shapes[FIRST_Q][1]
    )


def has_wide_layer(source: DrafterSource) -> bool:
    """A first layer that takes an embedding and a hidden state side by side."""
    q, out = source.shapes.get(FIRST_Q), source.shapes.get("layers.0.self_attn.o_proj.weight")
    return q is not None and out is not None and len(q) == len(out) == 2 and q[1] == 2 * out[0]


def claims_eagle3(source: DrafterSource) -> bool:
    """Whether the config is an EAGLE-3 head's; enough to name it where its tensors cannot be read."""
    return named("eagle3")(source) or has_key("draft_vocab_size", "truncated_vocab_size", "eagle_config")(
        source
    )


def is_pard(source: DrafterSource) -> bool:
    """A language model that drafts in one forward; encoders have a `mask_token_id`, too."""
    return has_key("pard_token", "ptd_token_id")(source) or (
        "spd_type" in source.config and "mask_token_id" in source.config
    )


def claims_dflash(source: DrafterSource) -> bool:
    """The same for a DFlash or DSpark drafter's config."""
    return named("dflash", "dspark", "museglimmerassistant")(source) or has_key(
        "dflash_config", "markov_rank", "num_anchors"
    )(source)


UNSUPPORTED = (
    UnsupportedFamily(
        "P-EAGLE",
        "an EAGLE-3 head that drafts all tokens in one pass",
        any_of(named("peagle"), has_tensor("mask_hidden")),
    ),
    UnsupportedFamily("DFlash2 with a beam", "its selector keeps several paths", named("dflash2beam")),
    UnsupportedFamily(
        "Domino",
        "a DFlash drafter with a recurrent head",
        any_of(named("domino"), has_projector("domino"), has_tensor("prefix_gru")),
    ),
    UnsupportedFamily("LiLiCorr", "a DFlash drafter with a lattice head", named("lilicorr")),
    UnsupportedFamily("Gemma 4 DSpark", "a DSpark drafter of layers with four norms", named("gemma4dspark")),
    UnsupportedFamily(
        "MTP",
        "prediction layers without their target, in a layout that is not known here",
        any_of(named("mtp"), has_only("mtp")),
    ),
    UnsupportedFamily(
        "Medusa",
        "one head per position",
        any_of(
            named("medusa"),
            has_key("medusa_num_heads"),
            has_type("medusa"),
            has_tensor(r"(medusa_heads\.)?\d+\.\d+\.(linear\.)?weight"),
        ),
    ),
    UnsupportedFamily(
        "MLP speculator",
        "one small network per position",
        any_of(has_type("mlp_speculator"), named("mlpspeculator")),
    ),
    UnsupportedFamily("LSTM speculator", "one recurrent cell per position", named("lstmspeculator")),
    UnsupportedFamily("an EAGLE-3 head with latent attention", "MLA, as DeepSeek's", named("eagle3deepseek")),
    UnsupportedFamily(
        "an EAGLE-3 head with latent attention",
        "MLA, as DeepSeek's",
        lambda source: (
            "fc.weight" in source.shapes and has_tensor(r"layers\.0\.self_attn\.(q_a|kv_a)_proj")(source)
        ),
    ),
    UnsupportedFamily("an EAGLE-3 head without taps", "it reads the last hidden state only", is_tapless),
    UnsupportedFamily("EAGLE-1/2", "reads the last hidden state only", is_eagle1),
)


def family_of(path: str | Path) -> Family:
    """The family of a folder. Raises `ModelError` for one that cannot be read or contradicts itself."""
    folder = Path(path).expanduser()
    try:
        return classify(folder)
    except SpeculonError:
        raise
    except WRONG_TYPES as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{folder}: its config or headers cannot be read ({reason})") from error


def classify(folder: Path) -> Family:
    if is_gguf(folder):  # drafters of other methods have no GGUF form that is read here
        checkpoint = read_checkpoint(folder)
        return Family(folder, DRAFT_MODEL, model_summary(checkpoint), checkpoint=checkpoint)
    source = open_source(folder)
    # the layout of speculators has MiMo's names, but another order
    modules = None if named(MTP)(source) else mtp_alone(folder, source.names.values())
    if modules is not None:
        return Family(folder, MTP, modules.summary(), modules=modules)
    unsupported = next((family for family in UNSUPPORTED if family.matches(source)), None)
    if unsupported:
        name, what = unsupported.name, unsupported.what
        refusal = f"{name} ({what}) is recognised, but not supported"
        return Family(folder, None, f"{name}: {what}", refusal=refusal)
    if source.speculators_type not in (None, *SPECULATORS_TYPES):
        summary = f"speculators_model_type {source.speculators_type!r}"
        return Family(folder, None, summary, refusal=f"{summary} is not known here")
    if has_type(*TYPES)(source):
        if not {*PARTS} <= source.shapes.keys():
            raise missing_parts(source, "a Gemma 4 assistant's", PARTS)
        assistant = read_assistant(source)
        return Family(folder, ASSISTANT, assistant.summary(), head=assistant)
    if is_dflash(source):
        block = read_dflash(source)
        return Family(folder, DFLASH, block.summary(), head=block)
    if is_eagle3(source):
        head = read_eagle3(source)
        return Family(folder, EAGLE3, head.summary(), head=head)
    if claims_dflash(source):
        raise missing_parts(source, "a DFlash drafter's", ("fc.weight", CONTEXT_NORM, FIRST_Q))
    if claims_eagle3(source):
        raise missing_parts(source, "an EAGLE-3 head's", ("fc.weight", FIRST_Q))
    checkpoint = read_checkpoint(folder)
    method, summary = (PARD, "PARD ") if is_pard(source) else (DRAFT_MODEL, "")
    return Family(folder, method, summary + model_summary(checkpoint), checkpoint=checkpoint)


def read_head(kind: type[AnyConfig], name: str, path: str | Path) -> AnyConfig:
    """The config of a drafter of this kind. Raises `UnsupportedModel` for anything else."""
    family = family_of(path)
    if not isinstance(family.head, kind):
        raise another(family, f"no {name}")
    return family.head


read_eagle3_config = partial(read_head, Eagle3Config, "EAGLE-3 head")
read_dflash_config = partial(read_head, DFlashConfig, "DFlash drafter")
read_assistant_config = partial(read_head, AssistantConfig, "Gemma 4 assistant")


def another(family: Family, what: str) -> UnsupportedModel:
    what_it_is = f"a{'n' * family.summary.startswith('E')} {family.summary}"
    return UnsupportedModel(f"{family.path}: {family.refusal or f'{what}, but {what_it_is}'}")


def missing_parts(source: DrafterSource, whose: str, needed: tuple[str, ...]) -> ModelError:
    """Why the tensors of a drafter are missing that its config names."""
    if source.pickled:
        return UnsafeCheckpoint(
            f"{source.files[0]}: pickle weights can run code; a drafter is recognised by the headers "
            "of safetensors files, so convert them, allow_pickle does not help"
        )
    missing = next((name for name in needed if name not in source.shapes), None)
    if missing:
        return MissingWeights(f"{source.folder}: the config is {whose}, but there is no tensor {missing}")
    fc, q = source.shapes["fc.weight"], source.shapes[FIRST_Q]
    shapes = f"fc is {list(fc)} and the first q_proj {list(q)}"
    return ModelError(f"{source.folder}: the config is {whose}, but {shapes}")


def model_summary(checkpoint: Checkpoint) -> str:
    size = f"{checkpoint.num_parameters:,} parameters" if checkpoint.num_parameters else "pickle weights"
    dtype = DTYPE_NAMES.get(checkpoint.dtype or "", checkpoint.dtype)
    layers = f"{checkpoint.num_layers} layer{'s' * (checkpoint.num_layers != 1)} of {checkpoint.hidden_size}"
    weights = f"{dtype}, {checkpoint.num_bytes / 1e6:.1f} MB"
    return f"language model {checkpoint.architecture}: {layers}, {size}; {weights}"
