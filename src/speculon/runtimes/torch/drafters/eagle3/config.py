"""The config of an EAGLE-3 head, in six formats: sizes from tensors, settings from the config."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from speculon.core.errors import MissingWeights, ModelError, UnsupportedModel, WrongPair
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
    own_name,
    read_windows,
    refuse_missing_matrices,
    used_names,
)

ASSUMED = "assumed: its config names no layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """An EAGLE-3 head (Li 2025). Widths come from its tensors, the rest from its config."""

    vocab_size: int  # V
    draft_vocab_size: int  # Vd; V where all of it is drafted from
    norm_before_residual: bool
    norm_before_fc: bool  # `input_norm` [k * Ht]
    fc_norm: bool  # `fc_norm.{i}` [Ht]
    norm_output: bool
    logit_scale: float = 1.0
    after: bool | None = True  # id j is the output of layer j (True) or its input (False); None: unknown

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        usual = (1, num_layers // 2 - 1, num_layers - 4)
        if self.tap_ids is None:
            if not usual[0] < usual[1] < usual[2]:
                needed = f"the usual three need 7 of them; the target has {num_layers}"
                raise WrongPair(f"{self.path}: names no layers, and {needed}")
            return (usual,)
        outputs, inputs = self.tap_ids, tuple(j - 1 for j in self.tap_ids)
        if self.after is not None:
            return (outputs if self.after else inputs,)
        # Projects number outputs or inputs; the usual ids of one convention show that it was meant.
        if inputs == usual:
            return (inputs,)
        return (outputs,) if outputs == usual or outputs[0] == 1 else (outputs, inputs)

    def summary(self, num_layers: int | None = None) -> str:
        taps = f"{self.taps} taps of width {self.target_hidden:,} {self.describe_taps(num_layers)}"
        tokens = f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens"
        return f"EAGLE-3 head by {AUTHORS[self.format]}: {self.shape}, {taps}, {tokens}; {self.size}"

    def describe_taps(self, num_layers: int | None = None) -> str:
        if num_layers is not None:
            layouts = (", ".join(map(str, taps)) for taps in self.tap_layouts(num_layers))
            places = " or ".join(f"after layers {layout}" for layout in layouts)
            return f"{places} ({ASSUMED})" if self.tap_ids is None else places
        if self.tap_ids is None:
            return f"after layers 1, N/2 - 1, N - 4 of N ({ASSUMED})"
        ids = ", ".join(map(str, self.tap_ids))
        if self.after is None and self.tap_ids[0] != 1:
            return f"at layers {ids} (before or after them)"
        return f"before layers {ids}" if self.after is False else f"after layers {ids}"


TAP_IDS = "eagle_aux_hidden_state_layer_ids"
HEADS = re.compile(rf"{KNOWN}|input_norm\.weight|fc_norm\.\d+\.weight|layers\.\d+\.hidden_norm\.weight")
# left out, these would change the result
INSIDE = re.compile(r"(fc|norm|lm_head|embed_tokens|input_norm|fc_norm|layers)\b")


def detect_format(source: DrafterSource) -> str:
    if source.of_speculators:
        return "speculators"
    if any(name.startswith("use_") for name in source.part("eagle_config")):
        return "modelopt"
    if source.architecture.startswith("Eagle3"):
        return "angelslim"
    if "Eagle3" in source.architecture:
        return "specforge"
    return "nebius" if "truncated_vocab_size" in source.config else "safeailab"


def read_eagle3(source: DrafterSource) -> Eagle3Config:
    """The config of an EAGLE-3 head. Raises `ModelError` where tensors and config contradict each other."""
    source, notes = with_usual_norms(source), list[str]()
    hidden = source.shape(FIRST_Q)[1] // 2
    common = common_fields(source, hidden, notes)
    tap_ids, after = read_taps(source, notes)
    taps, target_hidden = tap_sizes(source, tap_ids, hidden, notes)
    vocab = target_vocabulary(source, notes)
    together, each = tap_norms(source, notes)
    config = Eagle3Config(
        **common,
        format=detect_format(source),
        names=known_names(source, notes),
        target_hidden=target_hidden,
        taps=taps,
        vocab_size=vocab,
        draft_vocab_size=draft_vocabulary(source, vocab, notes),
        windows=head_windows(source, common["layers"], notes),
        norm_before_residual=norm_before_residual(source, notes),
        norm_before_fc=together,
        fc_norm=each,
        norm_output=bool(flag(source, "norm_output")),
        logit_scale=float(source.body.get("logit_scale") or 1),
        tap_ids=tap_ids,
        after=after,
        max_context=read_context(source),
        notes=tuple(notes),
    )
    refuse_missing_matrices(config)
    more: TensorShapes = {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(taps * each)}
    more["layers.0.hidden_norm.weight"] = (hidden,)
    check_shapes(source, config, more, {"input_norm.weight": (taps * target_hidden,)}, inputs=2 * hidden)
    check_draft_ids(source)
    return config


def with_usual_norms(source: DrafterSource) -> DrafterSource:
    """Layers after the first have one norm before attention, which some projects name hidden_norm."""
    renamed = {}
    for name in source.names:
        at, in_layer, _ = name.partition(".hidden_norm.")
        usual = f"{at}.input_layernorm.weight"
        if in_layer and at != "layers.0" and usual not in source.names:
            renamed[name] = usual
    names = {renamed.get(ours, ours): theirs for ours, theirs in source.names.items()}
    return replace(
        source, names=names, shapes={renamed.get(name, name): shape for name, shape in source.shapes.items()}
    )


def flag(source: DrafterSource, *names: str) -> bool | None:
    """The value in `eagle_config`, else at the top; None where neither has one."""
    values = (table.get(name) for name in names for table in (source.part("eagle_config"), source.body))
    return next((bool(value) for value in values if value is not None), None)


def read_taps(source: DrafterSource, notes: list[str]) -> tuple[tuple[int, ...] | None, bool | None]:
    """The ids as written, and whether id j is the output of layer j; None: nested ids have no convention."""
    top, nested = source.config.get(TAP_IDS), source.part("eagle_config").get(TAP_IDS)
    ids, after = (top, False) if top else (nested, None)
    if not ids:
        return None, True
    ids = checked_layers(source, TAP_IDS, ids)
    if ids != sorted(ids):
        notes.append(f"the layers {ids} were put in order")
    return tuple(sorted(ids)), after


def tap_sizes(
    source: DrafterSource, tap_ids: tuple[int, ...] | None, hidden: int, notes: list[str]
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


def target_vocabulary(source: DrafterSource, notes: list[str]) -> int:
    shapes, configured = source.shapes, source.body.get("vocab_size")
    rows = [shapes[name][0] for name in ("t2d", "embed_tokens.weight") if shapes.get(name)]
    vocab = rows[0] if rows else configured
    if not isinstance(vocab, int) or len(set(rows)) > 1:
        raise ModelError(
            f"{source.folder}: no vocab_size in the config, or t2d and embed_tokens differ: {rows}"
        )
    note_mismatch("vocab_size", configured, vocab, notes)
    return vocab


def draft_vocabulary(source: DrafterSource, vocab: int, notes: list[str]) -> int:
    shapes = source.shapes
    configured = source.body.get("draft_vocab_size") or source.body.get("truncated_vocab_size")
    stored = next((shapes[name][0] for name in ("lm_head.weight", "d2t") if shapes.get(name)), None)
    drafted: int = stored or configured or vocab
    note_mismatch("draft_vocab_size", configured, drafted, notes)
    check_draft_vocabulary(source, drafted, vocab)
    return drafted


def tap_norms(source: DrafterSource, notes: list[str]) -> tuple[bool, bool]:
    """Whether all taps share one norm, or each has its own. A norm without a tensor is refused."""
    together, each = "input_norm.weight" in source.shapes, "fc_norm.0.weight" in source.shapes
    if together and each:
        raise ModelError(f"{source.folder}: has input_norm and fc_norm, of which a head has one")
    for name, configured, stored in (
        ("norm_before_fc", flag(source, "norm_before_fc"), together),
        ("fc_norm", flag(source, "fc_norm", "use_aux_norm"), each),
    ):
        if configured and not stored:
            raise MissingWeights(f"{source.folder}: {name} is set, but there is no tensor for it")
        if stored and configured is False:
            notes.append(f"the config's {name} is false, but there is a tensor for it")
    return together, each


def norm_before_residual(source: DrafterSource, notes: list[str]) -> bool:
    configured = flag(source, "norm_before_residual")
    if configured is None and detect_format(source) == "speculators":
        notes.append("the config has no norm_before_residual: true is assumed")
        return True
    return bool(configured)


def head_windows(source: DrafterSource, layers: int, notes: list[str]) -> tuple[int | None, ...]:
    body = source.body
    types, window = body.get("layer_types"), body.get("sliding_window")
    if types:
        return read_windows(source, layers, types, window)
    if window and body.get("use_sliding_window"):
        notes.append(f"a window of {window} without layer_types: attention is full")
    return (None,) * layers


def read_context(source: DrafterSource) -> int | None:
    """Positions that its config names, and it was trained for; RoPE has no end of its own."""
    positions = source.body.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 0 else None


def known_names(source: DrafterSource, notes: list[str]) -> dict[str, str]:
    """The tensors that the head's formula uses. An unknown one inside a layer is refused."""
    names, others = used_names(source, HEADS)
    inside = next((theirs for theirs in others if INSIDE.match(own_name(theirs))), None)
    if inside:
        raise UnsupportedModel(f"{source.folder}: an EAGLE-3 head with {inside}, which is not supported")
    if others:
        notes.append(f"not read: {', '.join(sorted(others)[:3])}{' and others' * (len(others) > 3)}")
    return names
