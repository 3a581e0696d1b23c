"""The config of an EAGLE-3 head in one set of names, whichever project wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from speculon.core.errors import WrongPair
from speculon.drafters.config import AUTHORS, DrafterConfig

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
            found = " or ".join(f"after layers {layout}" for layout in layouts)
            return f"{found} ({ASSUMED})" if self.tap_ids is None else found
        if self.tap_ids is None:
            return f"after layers 1, N/2 - 1, N - 4 of N ({ASSUMED})"
        ids = ", ".join(map(str, self.tap_ids))
        if self.after is None and self.tap_ids[0] != 1:
            return f"at layers {ids} (before or after them)"
        return f"before layers {ids}" if self.after is False else f"after layers {ids}"
