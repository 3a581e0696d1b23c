"""Recurrent mixers of a stock model over spans of many sequences, each with the states of its sequence.

A mixer is called per group of spans: those that begin a sequence as one chunk from zero; those that continue
one as a chunk where that is exact, else row by row for all of them at once. Which is exact is measured.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from speculon.core import StateSpec
from speculon.errors import UnsupportedModel
from speculon.kv.states import STEP, StateStep

Key = tuple[str, int]  # `conv` or `recurrent`, and the number that the cache knows the state by
TOLERANCE = 1e-4  # of the largest output
CUT, LENGTH = 5, 12  # rows of the trial before the cut, and in all


@dataclass(slots=True)
class Call:
    """The arguments of one call of a mixer: those with a row per token, and the others."""

    rows: dict[str, Tensor]  # [1, T, ...]
    others: dict[str, Any]

    def take(self, rows: Tensor) -> Call:
        """The same with these rows [n] alone, copied."""
        return Call({name: value.index_select(1, rows) for name, value in self.rows.items()}, self.others)

    def by_span(self, spans: int) -> dict[str, Any]:
        """The arguments with a dimension of spans: [1, B * n, ...] -> [B, n, ...]."""
        parts = {
            name: value.reshape(spans, value.shape[1] // spans, *value.shape[2:])
            for name, value in self.rows.items()
        }
        return {**self.others, **parts}


@dataclass(eq=False)
class Mixer:
    """Stands in for the forward of one stock mixer; outside of a step it is that forward."""

    module: nn.Module
    layer: int
    argument: str  # by which it takes the cache
    states: dict[Key, StateSpec]
    row: str  # the argument with a row per token
    width: int  # D of these rows
    number: int = 0  # among the mixers of its model
    continues: bool = False  # whether several rows of a sequence that has a state can be one call
    tupled: bool = False  # whether it returns a tuple that begins with its output
    stock: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stock = self.module.forward
        self.signature = inspect.signature(self.stock)

    @property
    def where(self) -> str:
        return f"{type(self.module).__name__} of layer {self.layer}"

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        return tuple(self.states.values())

    def install(self) -> None:
        """From now on the module's forward is this one."""
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = STEP.get()
        if step is None:
            return self.stock(*args, **kwargs)
        call = self.call_of(args, kwargs)
        if step.drafted is not None:
            step.recorded[self.number] = call.take(step.drafted)
        out = self.run(step, call)
        return (out, None) if self.tupled else out

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = self.signature.bind(*args, **kwargs)
        more = next((n for n, p in self.signature.parameters.items() if str(p).startswith("**")), "")
        named = {**bound.arguments, **bound.arguments.get(more, {})}
        named = {name: value for name, value in named.items() if name not in (more, "view", self.argument)}
        rows = next(v.shape[1] for v in named.values() if isinstance(v, Tensor))
        by_row = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.shape[:2] == (1, rows)}
        return Call(by_row, {k: v for k, v in named.items() if k not in by_row})

    def run(self, step: StateStep, call: Call) -> Tensor:  # [1, T, D]
        """The outputs of all rows; the states after each span go to its slot."""
        out: Tensor | None = None
        total = next(iter(call.rows.values())).shape[1]
        for group in step.groups(ragged=not self.continues):
            whole = group.first and len(group.rows) == total
            part = call if whole else call.take(group.rows)
            old = [] if group.fresh else step.store.read(self.number, group.read)
            found, states = self.advance(part, group.lengths, old)
            step.store.write(self.number, group.write, states)
            if whole:
                return found
            if out is None:
                out = found.new_empty(1, total, found.shape[2])
            out.index_copy_(1, group.rows, found)
        assert out is not None
        return out

    def advance(
        self, call: Call, lengths: tuple[int, ...], states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [1, T, D] of B spans, and the states [B, ...] after them. No states: they begin."""
        one_call = len(set(lengths)) == 1 and (not states or self.continues or lengths[0] == 1)
        if one_call:
            out, states = self.ask(call.by_span(len(lengths)), states)
            return out.reshape(1, -1, out.shape[-1]), states
        return self.row_by_row(call, lengths, states)

    def row_by_row(
        self, call: Call, lengths: tuple[int, ...], states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same in one call for each row of the longest span; the spans come longest first."""
        device = states[0].device
        lengths_ = torch.tensor(lengths, device=device)
        starts, out = lengths_.cumsum(0) - lengths_, None
        for row in range(lengths[0]):
            count = sum(length > row for length in lengths)
            at = starts[:count] + row
            now = [state[:count].clone() for state in states]
            found, after = self.ask(call.take(at).by_span(count), now)
            for state, new in zip(states, after, strict=True):
                state[:count] = new
            out = found.new_empty(1, sum(lengths), found.shape[-1]) if out is None else out
            out.index_copy_(1, at, found.reshape(1, count, -1))
        assert out is not None
        return out, states

    def ask(self, arguments: dict[str, Any], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One call of the stock mixer over [B, n, D], and the states after it. It may write into `states`."""
        layer = LinearAttentionLayer(1 + max(number for _, number in self.states))
        if states:
            load(layer, dict(zip(self.states, states, strict=True)))
        cache = Cache(layers=[layer] * (self.layer + 1))
        out = self.stock(**arguments, **{self.argument: cache})
        kept = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        return out if isinstance(out, Tensor) else out[0], [kept[part][i] for part, i in self.states]


def load(layer: LinearAttentionLayer, states: dict[Key, Tensor]) -> None:
    """Makes these the states of a cache layer, as if earlier calls had left them there."""
    for (part, number), state in states.items():
        layer.device, layer.dtype = state.device, state.dtype
        if part == "conv":
            layer.conv_states[number], layer.is_conv_states_initialized[number] = state, True
            layer.conv_kernel_size[number] = state.shape[-1]
        else:
            layer.recurrent_states[number], layer.is_recurrent_states_initialized[number] = state, True
        layer.has_previous_state[number] = True


def replay(mixers: tuple[Mixer, ...], step: StateStep, recorded: Mapping[int, Call]) -> None:
    """Runs rows that were recorded through the mixers again, for the states they leave."""
    for mixer in mixers:
        mixer.run(step, recorded[mixer.number])


# how a mixer may continue


def decide(mixers: tuple[Mixer, ...]) -> None:
    """Measures, for each class of mixers, whether several rows can continue a state in one call.

    Raises `UnsupportedModel` where not even a row at a time is exact.
    """
    known: dict[type[nn.Module], bool] = {}
    for mixer in mixers:
        cls = type(mixer.module)
        if cls not in known:
            known[cls] = try_both(mixer)
        mixer.continues = known[cls]


@torch.inference_mode()
def try_both(mixer: Mixer) -> bool:
    """Whether one call of several rows continues the states exactly, in fp32. A single row must."""
    module = copy.deepcopy(mixer.module).float()
    trial, device = replace(mixer, module=module), next(module.parameters()).device
    rows = torch.randn(2, LENGTH, mixer.width, generator=torch.Generator().manual_seed(0)).to(device)
    expected = outputs(trial, rows, (LENGTH,))
    single = (CUT, *[1] * (LENGTH - CUT))
    if (error := difference(outputs(trial, rows, single), expected)) > TOLERANCE:
        raise UnsupportedModel(
            f"{mixer.where}: with a state it differs from itself by {error:.2g} of its output"
        )
    try:
        found = outputs(trial, rows, (CUT, 3, 1, LENGTH - CUT - 4))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return difference(found, expected) <= TOLERANCE


def outputs(mixer: Mixer, rows: Tensor, lengths: tuple[int, ...]) -> Tensor:  # [2, n, D]
    """What it returns for rows [2, n, D] in pieces of these lengths, one after the other."""
    states: list[Tensor] = []
    found = []
    for part in rows.split(lengths, 1):
        out, states = mixer.ask({mixer.row: part}, states)
        found.append(out)
    return torch.cat(found, 1)


def difference(a: Tensor, b: Tensor) -> float:
    error = float((a - b).abs().max() / b.abs().max())
    return error if error == error else float("inf")
