"""The target model: one flat forward over spans of many sequences."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from speculon.core.errors import ConfigError
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.budget import scratch_bytes
from speculon.runtimes.torch.kv.slots import PER_SEQUENCE
from speculon.runtimes.torch.kv.states import KEPT_BYTES, StateSpan, StateStep, StateStore, slot_bytes
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.model.adapters import Adapter, LinearShapes, with_adapters
from speculon.runtimes.torch.model.attention import running
from speculon.runtimes.torch.model.pieces import with_prompts
from speculon.runtimes.torch.model.quantized import QuantizedLinear, describe, layers_of
from speculon.runtimes.torch.model.recurrent import Mixer, restore
from speculon.runtimes.torch.model.taps import Taps
from speculon.runtimes.torch.model.vision import Vision
from speculon.runtimes.torch.needs import NO_PADDING, LayerSpec, Needs, StateSpec

TargetForward = Callable[[Batch, View, Taps | None], Tensor | None]  # logits [R, V]


@dataclass(slots=True)
class Runner:
    """How the layers of a model run, chosen once, at load; as text, with what was refused and why."""

    run: Callable[..., Any]  # `TargetForward` of a target, or the forward of a drafter's network
    layers: int  # of the model
    fused: int = 0  # of these layers
    form: Literal["layers", "loop", "compiled", "captured"] = "layers"  # `loop`: in the stock forward's place
    refused: Counter[str] = field(default_factory=Counter)  # reason -> layers or modules
    num_bytes: int = 0  # what it takes in addition to the weights
    programs: str = ""  # made in the background: compiling, checking, ready, or why there are none

    @property
    def chosen(self) -> bool:
        """Whether fused layers were tried at all."""
        return bool(self.fused or self.refused)

    @property
    def one_loop(self) -> bool:
        """Whether a loop, compiled or not, replaces the stock forward."""
        return self.form != "layers"

    def __str__(self) -> str:
        if not self.chosen:
            return "no"
        loop = ", one loop" * self.one_loop + f", {self.form}" * (self.form in ("compiled", "captured"))
        why = "".join(f"; {reason} ({count})" for reason, count in self.refused.items())
        return f"{self.fused} of {self.layers} layers{loop}{why}"


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The result of one forward."""

    logits: Tensor  # [R, V] float32
    taps: dict[int, Tensor] | None = None  # [T, D] after each tapped layer
    ms: float = 0.0


class Target:
    """A causal language model over pages. Made by `load_target` or `wrap_model`, which check it first."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: tuple[LayerSpec, ...],
        *,
        name: str,
        vocab_size: int,
        max_context: int,
        eos_ids: frozenset[int],
        notes: tuple[str, ...] = (),
        mixers: tuple[Mixer, ...] = (),
        vision: Vision | None = None,
        no_images: str = "a text model",
    ):
        self.model, self.layers, self.name, self.vocab_size = model, layers, name, vocab_size
        self.max_context, self.eos_ids, self.notes = max_context, eos_ids, notes
        self.mixers = mixers  # recurrent ones, which have states beside the pages
        self.layer_class = decoder_layer_class(model)  # of its stock layers, before they are fused
        self.source = str(getattr(model, "name_or_path", "") or "") or None  # folder or hub id of its files
        self.device, self.dtype = model.device, model.dtype
        self.runner = Runner(partial(stock_forward, model), len(layers))
        self.vision, self.no_images = vision, no_images  # or why it takes no images
        self.taps: Taps | None = None
        self.linears: LinearShapes = linear_shapes(model)  # before any is fused
        self.adapters: dict[str, Adapter] = {}  # LoRA adapters by name
        self.prompts_apart = False  # whether rows of prompts run in other products than generated tokens
        self.invariance = "no"  # whether its logits are batch-invariant, and why not
        self.count()

    def count(self) -> None:
        """Counts the weights; tied ones count once."""
        weights = {p.data_ptr(): p for p in self.model.parameters()}.values()
        packed = [layer for _, layer in layers_of(self.model)]
        self.layer_bits = min(
            (x.bits for x in packed if x is not self.head), default=None
        )  # of packed layers
        own = [layer for layer in packed if not self.tied_head or layer is not self.head]
        self.num_parameters = sum(p.numel() for p in weights) + sum(x.num_parameters for x in own)
        in_numbers = sum(p.nbytes for p in weights)
        self.weight_bytes = in_numbers + sum(layer.num_bytes for layer in packed)
        self.packed = (
            [
                *describe(packed),
                f"the rest in {str(self.dtype).removeprefix('torch.')}, {in_numbers / 1e6:.0f} MB",
            ]
            if packed
            else []
        )

    @property
    def num_bytes(self) -> int:
        """The weights, and what its runner holds beside them, adapters included."""
        adapters = sum(adapter.num_bytes for adapter in self.adapters.values())
        return self.weight_bytes + self.runner.num_bytes + adapters

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's logits are bitwise equal in every batch."""
        return any(layer.padding != NO_PADDING for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """Whether it keeps states that no page has: prefixes are found again where these have a snapshot."""
        return bool(self.mixers)

    @property
    def state_specs(self) -> tuple[tuple[StateSpec, ...], ...]:
        """Of each mixer."""
        return tuple(mixer.specs for mixer in self.mixers)

    @property
    def state_bytes(self) -> int:
        """Of one slot of states; a sequence holds two, a snapshot one."""
        return slot_bytes(self.state_specs)

    @property
    def by_row(self) -> int:
        """Up to so many rows of a sequence that has a state, a mixer takes one by one."""
        return max((mixer.by_row for mixer in self.mixers), default=0)

    def states(self, slots: int) -> StateStore | None:
        """A store for its recurrent states; None where it has none."""
        if not self.mixers:
            return None
        return StateStore(self.state_specs, slots, self.device, partial(restore, self.mixers))

    @property
    def tied_head(self) -> bool:
        """Whether the head is the embedding, so that its parameters count once."""
        return bool(self.model.config.get_text_config().tie_word_embeddings)

    @property
    def hidden_size(self) -> int:
        """D, the width of the residual stream."""
        return self.model.config.get_text_config().hidden_size

    @property
    def embedding(self) -> Tensor:  # [V, D]
        """The stored rows of the embedding, before any scaling or norm."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """[T, D] -> [T, V]."""
        return self.model.get_output_embeddings()

    def capture(self, layers: tuple[int, ...]) -> None:
        """From now on each forward returns the states after these layers (-1: the embeddings).

        Raises `ConfigError` for a missing layer, and `UnsupportedModel` for one that cannot be tapped.
        """
        if wrong := [layer for layer in layers if not -1 <= layer < len(self.layers)]:
            raise ConfigError(f"tap of layer {wrong[0]}: {self.name} has layers 0 to {len(self.layers) - 1}")
        if self.taps is not None:
            self.taps.close()
        self.taps = Taps(layers) if layers else None
        if self.taps is not None and not self.runner.one_loop:
            self.taps.watch(self.model)

    def tapped(
        self, ids: Tensor, store: PageStore, layers: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [n, V] of one sequence in the first slots of a store, and the states after these layers.

        They stay tapped; recurrent states of the sequence are lost.
        """
        self.capture(layers)
        n, rows = len(ids), torch.arange(len(ids), device=self.device)
        view, states = store.view_of([SpanView(0, n, slice(0, n), n)]), self.states(PER_SEQUENCE)
        if states is not None:
            view.states = StateStep(states, [StateSpan(0, n, 0, 1, fresh=True)])
        output = self.forward(Batch([], ids[None], rows[None], rows), view)
        assert output.taps is not None
        return output.logits, output.taps

    def needs(self, rows: int, scored: int, sequences: int = 0) -> Needs:
        """Its needs, when T = `rows` and R = `scored` in its largest forward over `sequences` sequences; a
        draft model, whose rows are never rejected within a forward, gives 0 of them.
        """
        config = self.model.config.get_text_config()
        scratch = scratch_bytes(config, self.dtype, self.device, rows, scored)
        if sequences:  # the inputs of drafted rows are recorded, and states after them kept; all are scored
            scratch += scored * sum(mixer.width for mixer in self.mixers) * self.dtype.itemsize
            scratch += min(scored * self.state_bytes, KEPT_BYTES)
        return Needs(
            layers=self.layers,
            max_context=self.max_context,
            bytes_fixed=self.num_bytes,
            bytes_scratch=scratch,
            bytes_states=PER_SEQUENCE * sequences * self.state_bytes,
            states=self.state_specs,
            bytes_snapshot=self.state_bytes,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, view: View) -> TargetOutput:
        """Logits of `runtimes.torch.batch.score_rows`; K and V of all rows go to the pages of `view`."""
        start = time.perf_counter()
        assert (view.states is None) == (not self.mixers), "states for a model with mixers alone"
        prompts = batch.prompts if self.prompts_apart else ()
        placed: AbstractContextManager[None] = nullcontext()
        if batch.images:
            assert self.vision is not None, "images for a text model"
            placed = self.vision.placed(batch.images)
        with placed, with_prompts(prompts), with_adapters(batch.adapters):
            scores = self.runner.run(batch, view, self.taps)
        logits = torch.empty(0, self.vocab_size, device=self.device) if scores is None else scores.float()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        taps = self.taps.take() if self.taps is not None else None
        return TargetOutput(logits, taps, (time.perf_counter() - start) * 1e3)


def stock_forward(
    model: PreTrainedModel, batch: Batch, view: View, taps: Taps | None = None
) -> Tensor | None:  # [R, V]
    """One forward of transformers' own code; None where no row is scored. `taps` capture by hooks."""
    row = {"input_ids": batch.input_ids, "use_cache": False}
    if has_positions(cast(Hashable, type(model))):
        row["position_ids"] = batch.position_ids
    with running(view):
        if batch.score_rows.numel():
            return model(**row, logits_to_keep=batch.score_rows).logits[0]
        model.base_model(**row)  # a prompt chunk without scored rows needs no head
    return None


def linear_shapes(model: nn.Module) -> LinearShapes:
    """The linear layers of a stock model by name: outputs, inputs. GPT-2's have transposed weights."""
    linear = nn.Linear | QuantizedLinear
    shapes = {}
    for name, layer in model.named_modules():
        if isinstance(layer, linear):
            shapes[name] = layer.out_features, layer.in_features
        elif isinstance(layer, Conv1D):
            shapes[name] = layer.nf, layer.nx
    return shapes


def decoder_layer_class(model: PreTrainedModel) -> type[nn.Module] | None:
    """The class of its decoder layers; None where they have no usual place."""
    layers = getattr(model.get_decoder(), "layers", None)
    return type(layers[-1]) if isinstance(layers, nn.ModuleList) and len(layers) else None


@cache
def has_positions(cls: Any) -> bool:
    """Whether a class of models takes `position_ids`; a purely recurrent one does not."""
    return "position_ids" in inspect.signature(cls.forward).parameters
