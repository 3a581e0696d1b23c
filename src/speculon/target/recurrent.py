"""Recurrent mixers of a stock model over spans of many sequences, each with the states of its sequence.

A mixer is called per group of spans: those that begin a sequence as one chunk from zero; those that continue
one as a chunk where that is exact and faster, else row by row for all of them at once. Both are measured.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from speculon.core.errors import UnsupportedModel
from speculon.core.types import StateSpec
from speculon.decoding.batch import as_tensor
from speculon.decoding.kv.states import KEPT_BYTES, STEP, Group, Rejected, StateSpan, StateStep, StateStore
from speculon.target.convolution import exchanged

EXACT = 1e-5  # of the largest output: rounding in fp32
Key = tuple[str, int]  # `conv` or `recurrent`, and the number that the cache knows the state by
TOLERANCE = 1e-4  # of the largest output
LOOSE = 1e-2  # between a chunk from zero and single rows: a lost state gives far more
CUT, LENGTH = 5, 12  # rows of the trial before the cut, and in all
ANY = 1 << 30
CALLS_OF_ONE = 2  # of several rows in one call: the span, and its accepted rows once more
TIMED, TRIALS = (2, 3, 5, 9, 17, 33), 4  # rows and trials of what is timed
SEQUENCES = 8, 1  # a chunk's cost grows with their number, that of single rows hardly: two limits
LARGE = 16384  # bytes of a state: from here `index_copy_` took twice the time of single copies on a CPU
SECONDS = 0.5  # of these trials, roughly: chunks take seconds in plain PyTorch where states are large


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
    """Replaces the forward of one stock mixer; outside of a step it is that forward."""

    module: nn.Module
    layer: int
    argument: str  # by which it takes the cache
    states: dict[Key, StateSpec]
    row: str  # the argument with a row per token
    width: int  # D of these rows
    number: int = 0  # among the mixers of its model
    by_row: int = ANY  # up to so many rows of sequences that have a state are one call each
    alone: int | None = None  # the same where one sequence has a state; None: no other number
    tupled: bool = False  # whether it returns a tuple that begins with its output
    stock: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stock = self.module.forward
        self.names = tuple(inspect.signature(self.stock).parameters)

    @property
    def where(self) -> str:
        return f"{type(self.module).__name__} of layer {self.layer}"

    @property
    def continues(self) -> bool:
        """Whether several rows of a sequence that has a state can be one call."""
        return self.by_row < ANY

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
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        named.pop(self.argument, None)
        total = named[self.row].shape[1]
        by_row = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.shape[:2] == (1, total)}
        return Call(by_row, {k: v for k, v in named.items() if k not in by_row})

    def run(self, step: StateStep, call: Call) -> Tensor:  # [1, T, D]
        """The outputs of all rows; the states after each span go to its slot."""
        out: Tensor | None = None
        total = call.rows[self.row].shape[1]
        limit = self.limit(step)
        for group in step.groups(limit):
            whole = group.first and len(group.rows) == total
            part = call if whole else call.take(group.rows)
            old = self.read(step.store, group)
            kept = self.room_for(step, group)
            each = not group.fresh and 1 < group.lengths[0] <= limit
            found, states = self.advance(part, group.lengths, old, kept, each)
            if kept:
                step.kept[self.number] = kept
            self.write(step.store, group, old, states)
            if whole:
                return found
            if out is None:
                out = found.new_empty(1, total, found.shape[2])
            out.index_copy_(1, group.rows, found)
        assert out is not None
        return out

    def read(self, store: StateStore, group: Group) -> list[Tensor]:  # [B, ...] each
        """The states that a group continues, for a call to change; one sequence's are in its slot already."""
        if group.fresh:
            return []
        if len(group.spans) > 1:
            return store.read(self.number, group.read)
        span, states = group.spans[0], store.states[self.number]
        found = [state[span.write : span.write + 1] for state in states]
        for new, state in zip(found, states, strict=True):
            new.copy_(state[span.read : span.read + 1])
        return found

    def write(self, store: StateStore, group: Group, old: list[Tensor], states: list[Tensor]) -> None:
        """Puts the states after a group into their slots, unless `old` are these and were changed there."""
        for number, (state, new) in enumerate(zip(store.states[self.number], states, strict=True)):
            if len(group.spans) == 1 and old and new is old[number]:
                continue
            if new[0].nbytes < LARGE or new.device.type != "cpu":
                state.index_copy_(0, group.write, new.to(state.dtype))
                continue
            for span, one in zip(group.spans, new, strict=True):
                state[span.write].copy_(one)

    def limit(self, step: StateStep) -> int:
        """Up to how many rows of a sequence that has a state are one call each in this step."""
        single = sum(not span.fresh for span in step.spans) == 1
        return self.alone if single and self.alone is not None else self.by_row

    def room_for(self, step: StateStep, group: Group) -> list[list[Tensor]] | None:
        """Where to keep the states after each row of a group; None where none is read, or there are many."""
        needed = group.drafted and not group.fresh and group.lengths[0] > 1
        return [] if needed and len(group.rows) * step.store.slot_bytes <= KEPT_BYTES else None

    def advance(
        self,
        call: Call,
        lengths: tuple[int, ...],
        states: list[Tensor],
        kept: list[list[Tensor]] | None,
        each: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [1, T, D] of B spans, and the states [B, ...] after them. No states: they begin.

        With `each`, rows are one call each, and states after them are added to `kept`, if given.
        """
        if each:
            return self.row_by_row(call, lengths, states, kept)
        out, states = self.ask(call.by_span(len(lengths)), states)
        return out.reshape(1, -1, out.shape[-1]), states

    def row_by_row(
        self, call: Call, lengths: tuple[int, ...], states: list[Tensor], kept: list[list[Tensor]] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The same in one call for each row of the longest span; the spans come longest first."""
        lengths_ = torch.tensor(lengths, device=states[0].device)
        starts, out, after = lengths_.cumsum(0) - lengths_, None, states
        for row in range(lengths[0]):
            count = sum(length > row for length in lengths)
            at = starts[:count] + row
            now = [state[:count] for state in after]
            if kept is not None:
                now = [state.clone() for state in now]
            found, after = self.ask(call.take(at).by_span(count), now)
            if kept is not None:
                kept.append(after)
            longer = sum(length > row + 1 for length in lengths)
            for state, given, new in zip(states, now, after, strict=True):
                if kept is not None or new is not given:  # else it was changed there
                    state[longer:count] = new[longer:]
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


def restore(mixers: tuple[Mixer, ...], step: StateStep, rejected: list[Rejected]) -> None:
    """Writes the states after the accepted rows: those kept, else what these rows yield once more."""
    plans: dict[tuple[int, bool], tuple[list[Pick], StateStep]] = {}  # by limit, and whether states are kept
    for mixer in mixers:
        key = mixer.limit(step), mixer.number in step.kept
        if key not in plans:
            plans[key] = plan_of(step, rejected, *key)
        picks, again = plans[key]
        for pick in picks:
            states = step.kept[mixer.number][pick.kept - 1]
            found = [state.index_select(0, pick.spans) for state in states]
            step.store.write(mixer.number, pick.write, found)
        if again.spans:
            mixer.run(again, step.recorded[mixer.number])


@dataclass(frozen=True, slots=True)
class Pick:
    """Spans with equally many accepted rows: their places in the group that went row by row, and slots."""

    kept: int
    spans: Tensor
    write: Tensor


def plan_of(
    step: StateStep, rejected: list[Rejected], limit: int, kept: bool
) -> tuple[list[Pick], StateStep]:
    """Which states are among those kept, and the rows that run again for the others."""
    places: dict[StateSpan, int] = {}
    if kept:
        groups = step.groups(limit)
        group = next(g for g in groups if g.drafted and not g.fresh and g.spans[0].rows <= limit)
        places = {span: place for place, span in enumerate(group.spans)}
    by_kept: defaultdict[int, list[StateSpan]] = defaultdict(list)
    again = []
    for one in rejected:
        if one.span in places:
            by_kept[one.kept].append(one.span)
        else:
            again.append(replace(one.span, first=one.first, last=one.first + one.kept, drafted=False))
    device = step.store.device
    picks = [
        Pick(
            count,
            as_tensor([places[span] for span in spans], device),
            as_tensor([span.write for span in spans], device),
        )
        for count, spans in by_kept.items()
    ]
    return picks, StateStep(step.store, again)


# how a mixer may continue


def decide(mixers: tuple[Mixer, ...]) -> None:
    """Measures, for each class of mixers, how many rows that continue a state are better one call each.

    Raises `UnsupportedModel` where not even a row at a time is exact.
    """
    known: dict[type[nn.Module], tuple[int, int]] = {}
    exchange: dict[type[nn.Module], bool] = {}
    for mixer in mixers:
        cls = type(mixer.module)
        if cls not in known:
            exact = exact_in_one_call(mixer)
            exchange[cls] = exchange_convolution(mixer)
            several, one = (faster_by_row(mixer, n) if exact else ANY for n in SEQUENCES)
            known[cls] = several, one
        elif exchange[cls]:
            mixer.stock = exchanged(mixer.module) or mixer.stock
        mixer.by_row, mixer.alone = known[cls]


@torch.inference_mode()
def exchange_convolution(mixer: Mixer) -> bool:
    """Gives a mixer the short convolution of single rows, if its outputs are the same with it."""
    if (made := exchanged(mixer.module)) is None:
        return False
    rows = random_rows(mixer, 2, CUT + 3).to(next(mixer.module.parameters()))
    stock, lengths = mixer.stock, (CUT, 1, 1, 1)
    expected, mixer.stock = outputs(mixer, rows, lengths), made
    try:
        same = difference(outputs(mixer, rows, lengths), expected) <= EXACT
    except (RuntimeError, ValueError, IndexError, TypeError):
        same = False
    mixer.stock = made if same else stock
    return same


@torch.inference_mode()
def faster_by_row(mixer: Mixer, sequences: int) -> int:
    """Up to how many rows of so many sequences row by row takes less time than one call."""
    weight = next(mixer.module.parameters())
    rows = random_rows(mixer, sequences, max(TIMED)).to(weight)
    _, states = mixer.ask({mixer.row: rows[:, :1]}, [])
    found, began = 1, perf_counter()
    for n in TIMED:
        one, each = fastest(mixer, rows[:, :n], ((n,), (1,) * n), states)
        if CALLS_OF_ONE * one <= each:
            break
        found = n
        if perf_counter() - began > SECONDS:  # a call of more rows takes about as long
            return max(n, min(ANY - 1, int(CALLS_OF_ONE * one * n / each)))
    return found


def fastest(
    mixer: Mixer, rows: Tensor, ways: tuple[tuple[int, ...], ...], states: list[Tensor]
) -> list[float]:
    """The least seconds of each way to cut the rows, of a few trials in turns."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(TRIALS):
        for lengths, found in zip(ways, times, strict=True):
            began = perf_counter()
            outputs(mixer, rows, lengths, [state.clone() for state in states])
            if rows.device.type == "cuda":
                torch.cuda.synchronize(rows.device)
            found.append(perf_counter() - began)
    return [min(found) for found in times]


@torch.inference_mode()
def exact_in_one_call(mixer: Mixer) -> bool:
    """Whether one call of several rows continues the states exactly, in fp32. A single row must."""
    module = copy.deepcopy(mixer.module).float()
    trial, device = replace(mixer, module=module), next(module.parameters()).device
    rows = random_rows(mixer, 2, LENGTH).to(device)
    expected = outputs(trial, rows, (CUT, *[1] * (LENGTH - CUT)))
    # chunks add in another order, and decays of a long chunk lose digits; the logits are compared later
    if (error := difference(outputs(trial, rows, (LENGTH,)), expected)) > LOOSE:
        raise UnsupportedModel(
            f"{mixer.where}: with a state it differs from itself by {error:.2g} of its output"
        )
    try:
        found = outputs(trial, rows, (CUT, 3, 1, LENGTH - CUT - 4))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return difference(found, expected) <= TOLERANCE


def random_rows(mixer: Mixer, spans: int, rows: int) -> Tensor:  # [B, n, D]
    return torch.randn(spans, rows, mixer.width, generator=torch.Generator().manual_seed(0))


def outputs(
    mixer: Mixer, rows: Tensor, lengths: tuple[int, ...], states: list[Tensor] | None = None
) -> Tensor:  # [B, n, D]
    """What it returns for rows [B, n, D] in pieces of these lengths, one after the other."""
    states, found = states or [], []
    for part in rows.split(lengths, 1):
        out, states = mixer.ask({mixer.row: part}, states)
        found.append(out)
    return torch.cat(found, 1)


def difference(a: Tensor, b: Tensor) -> float:
    error = float((a - b).abs().max() / b.abs().max())
    return error if error == error else float("inf")
