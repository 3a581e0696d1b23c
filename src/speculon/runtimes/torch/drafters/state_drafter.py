"""What drafters over the target's own hidden states have in common.

The states of every position lie in pages, as their own keys and values do, so a sequence may be preempted,
start behind a cached prefix, or be computed again: nothing that they need is ever lost. `Pages.drafted` says
how far they have read; what is missing is computed with the next draft.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

from speculon.checkpoints.locate import locate
from speculon.core.config import SpeculationConfig
from speculon.core.errors import ConfigError, UnsupportedModel
from speculon.core.types import Draft, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.base import WeightedProposer
from speculon.runtimes.torch.drafters.config import DrafterConfig, TargetShape, check_pair
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.loading.quantization import BITS
from speculon.runtimes.torch.model.quantized import supported
from speculon.runtimes.torch.model.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.torch.kv.draft_pages import DraftPages

NOT_READY = no_draft(Stop.NOT_READY)
TAPS = "taps"  # the option
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")

AnyConfig = TypeVar("AnyConfig", bound=DrafterConfig)

log = logging.getLogger("speculon")


class StateDrafter(WeightedProposer):
    """A drafter that reads the target's states; how it drafts is up to `_propose` of each method.

    It reads the prompt with the first draft, and computes rows of drafts again from committed states.
    """

    own: DraftPages  # without the first layer, which holds the states

    def __init__(self, host: DrafterHost, min_confidence: float):
        self.target, self.min_confidence = host.model, min_confidence
        self.vocab_size, self.max_rows = host.model.vocab_size, host.rows or sys.maxsize
        self.compile = host.compile

    def bind(self, pages: DraftPages) -> None:
        super().bind(pages)
        self.own = pages.after(1)

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        return after_states(seqs, ks, self._propose)

    @abstractmethod
    def _propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]: ...


def after_states(seqs: list[Sequence], ks: list[Any], propose: Callable[..., list[Draft]]) -> list[Draft]:
    """What `propose` drafts; nothing after a single token, since there are no states before it."""
    able = [len(seq.tokens) > 1 for seq in seqs]
    if not any(able):
        return [NOT_READY] * len(seqs)
    drafts = iter(propose([*compress(seqs, able)], [*compress(ks, able)]))
    return [next(drafts) if yes else NOT_READY for yes in able]


def final_norm(target: Target) -> Callable[[Tensor], Tensor]:
    """The norm that taps have not passed. Raises `UnsupportedModel` where none is known."""
    decoder = target.model.get_decoder()
    norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
    if norm is None:
        raise UnsupportedModel(f"{target.name}: no module is its final norm, which its drafter reads")
    return norm


@dataclass(frozen=True, slots=True)
class Overrides:
    """The options that override a drafter's config, beside its taps."""

    flags: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    rising: bool = False  # whether taps are in rising order; else in that of fc's columns

    def applied(self, config: AnyConfig, options: Mapping[str, Any]) -> AnyConfig:
        """What a config says wrongly, or not at all, as the user knows it.

        Taps are outputs of 0-based target layers. Raises `ConfigError` for a value of another kind.
        """
        values = {name: options[name] for name in (*self.flags, *self.positions, TAPS) if name in options}
        for name, value in values.items():
            if name in self.flags:
                good, expected = type(value) is bool, "true or false"
            elif name in self.positions:
                good, expected = type(value) is int and value > 0, "a number of positions"
            else:
                good = self.are_layers(value) and len(value) == config.taps
                expected = f"a list of {config.taps} layers{' in rising order' * self.rising}"
            if not good:
                raise ConfigError(f"options.{name} = {value!r}: for {config.path} it is {expected}")
        taps: dict[str, Any] = {"tap_ids": tuple(values.pop(TAPS)), "after": True} if TAPS in values else {}
        return replace(config, **values, **taps)

    def are_layers(self, value: Any) -> bool:
        layers = isinstance(value, list | tuple) and all(type(tap) is int for tap in value)
        return layers and (not self.rising or sorted(set(value)) == list(value))


def checked_config(
    method: str,
    config: SpeculationConfig,
    model: Target,
    read: Callable[[Any], AnyConfig],
    overrides: Overrides,
) -> AnyConfig:
    """The config of the method's checkpoint with the options that override it, checked against the target.

    Raises `ConfigError` without a folder or for wrong options, `ModelError` where the two do not fit.
    """
    source = config.drafts.get(method)
    if not isinstance(source, str):
        raise ConfigError(f"{method} needs draft = a checkpoint's folder")
    checkpoint = overrides.applied(read(locate(source)), config.options)
    setting = config.draft_quantization
    as_target = next((name for name, bits in BITS.items() if bits == model.layer_bits), setting)
    checkpoint = replace(checkpoint, quantization=as_target if setting == "auto" else setting)
    if setting in BITS and not supported(model.dtype, model.device):
        where = f"in {model.dtype} on this {model.device.type}"
        raise ConfigError(f"draft_quantization: torch has no products of packed weights {where}")
    layers, architecture = len(model.layers), type(model.model).__name__
    odd = check_pair(checkpoint, TargetShape(model.hidden_size, model.vocab_size, layers, architecture))
    log.info("%s: %s", method, checkpoint.summary(layers))
    for note in (*checkpoint.notes, *odd):
        log.warning("%s: %s", method, note)
    return checkpoint
