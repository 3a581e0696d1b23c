"""Recurrent mixers of a stock model over spans of many sequences, each with the states of its sequence.

A mixer is called per group of spans: those that begin a sequence as one chunk from zero; those that continue
one as a chunk where that is exact and faster, else row by row for all of them at once. Both are measured.

Where drafts are rejected, `restore` writes the states after the accepted rows. Row by row, a mixer has kept
the states after each row. After a chunk it runs over the accepted rows once more.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.batch import as_tensor
from speculon.runtimes.torch.kv.states import (
    KEPT_BYTES,
    Group,
    Rejected,
    RowStates,
    StateSpan,
    StateStep,
    StateStore,
)
from speculon.runtimes.torch.model.attention import running_states
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.needs import StateSpec

StateKey = tuple[str, int]  # `conv` or `recurrent`, and the number that the cache knows the state by
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
class MixerCall:
    """The arguments of one call of a mixer: those with a row per token, and the others."""

    rows: dict[str, Tensor]  # [1, T, ...]
    others: dict[str, Any]

    def take(self, rows: Tensor) -> MixerCall:
        """The same with these rows [n] alone, copied."""
        return MixerCall(
            {name: value.index_select(1, rows) for name, value in self.rows.items()}, self.others
        )

    def by_span(self, spans: int) -> dict[str, Any]:
        """The arguments with a dimension of spans: [1, B * n, ...] -> [B, n, ...]."""
        rows = ((name, value, value.shape[1] // spans) for name, value in self.rows.items())
        return self.others | {name: value.reshape(spans, n, *value.shape[2:]) for name, value, n in rows}


@dataclass(eq=False)
class Mixer:
    """Replaces the forward of one stock mixer; outside of a step it is that forward."""

    module: nn.Module
    layer: int
    argument: str  # by which it takes the cache
    states: dict[StateKey, StateSpec]
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
        step = running_states()
        if step is None:
            return self.stock(*args, **kwargs)
        call = self.split_arguments(args, kwargs)
        if step.drafted is not None:
            step.recorded[self.number] = call.take(step.drafted)
        out = self.run(step, call)
        return (out, None) if self.tupled else out

    def split_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MixerCall:
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        named.pop(self.argument, None)
        total = named[self.row].shape[1]
        by_row = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.shape[:2] == (1, total)}
        return MixerCall(by_row, {k: v for k, v in named.items() if k not in by_row})

    def run(self, step: StateStep, call: MixerCall) -> Tensor:  # [1, T, D]
        """The outputs of all rows; the states after each span go to its slot."""
        out: Tensor | None = None
        total = call.rows[self.row].shape[1]
        for group in step.groups(self.limit(step)):
            whole = group.first and len(group.rows) == total
            of_group = self.run_group(step, group, call if whole else call.take(group.rows))
            if whole:
                return of_group
            if out is None:
                out = of_group.new_empty(1, total, of_group.shape[2])
            out.index_copy_(1, group.rows, of_group)
        assert out is not None
        return out

    def run_group(
        self, step: StateStep, group: Group, call: MixerCall
    ) -> Tensor:  # [1, rows of the group, D]
        before = self.read(step.store, group)
        if group.fresh or not 1 < group.lengths[0] <= self.limit(step):
            out, states = self.ask(call.by_span(len(group.lengths)), before)
            out = out.reshape(1, -1, out.shape[-1])
        else:
            row_states = RowStates(group, []) if self.keeps_row_states(step, group) else None
            out, states = self.row_by_row(call, group.lengths, before, row_states)
            if row_states is not None:
                step.row_states[self.number] = row_states
        self.write(step.store, group, before, states)
        return out

    def read(self, store: StateStore, group: Group) -> list[Tensor]:  # [B, ...] each
        """The states that a group continues, for a call to change; one sequence's are in its slot already."""
        if group.fresh:
            return []
        if len(group.spans) > 1:
            return store.read(self.number, group.read)
        span, states = group.spans[0], store.states[self.number]
        written = [state[span.write : span.write + 1] for state in states]
        for new, state in zip(written, states, strict=True):
            new.copy_(state[span.read : span.read + 1])
        return written

    def write(self, store: StateStore, group: Group, before: list[Tensor], states: list[Tensor]) -> None:
        """Puts the states after a group into their slots; those of one sequence may be there already."""
        for number, (state, new) in enumerate(zip(store.states[self.number], states, strict=True)):
            if len(group.spans) == 1 and before and new is before[number]:
                continue
            if new[0].nbytes < LARGE or new.device.type != "cpu":
                state.index_copy_(0, group.write, new.to(state.dtype))
                continue
            for span, of_span in zip(group.spans, new, strict=True):
                state[span.write].copy_(of_span)

    def limit(self, step: StateStep) -> int:
        """Up to how many rows of a sequence that has a state are one call each in this step."""
        single = sum(not span.fresh for span in step.spans) == 1
        return self.alone if single and self.alone is not None else self.by_row

    def keeps_row_states(self, step: StateStep, group: Group) -> bool:
        """Whether the states after each row of a group may be needed, and are not too many."""
        return group.drafted and len(group.rows) * step.store.slot_bytes <= KEPT_BYTES

    def row_by_row(
        self, call: MixerCall, lengths: tuple[int, ...], states: list[Tensor], row_states: RowStates | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [1, T, D] of B spans, and the states [B, ...] after them: one call for each row.

        The spans come longest first. The states after each row are added to `row_states`, if given.
        """
        lengths_ = torch.tensor(lengths, device=states[0].device)
        starts, out, after = lengths_.cumsum(0) - lengths_, None, states
        for row in range(lengths[0]):
            count = sum(length > row for length in lengths)
            at = starts[:count] + row
            before = [state[:count] for state in after]
            if row_states is not None:
                before = [state.clone() for state in before]
            of_row, after = self.ask(call.take(at).by_span(count), before)
            if row_states is not None:
                row_states.after.append(after)
            longer = sum(length > row + 1 for length in lengths)
            for state, old, new in zip(states, before, after, strict=True):
                if row_states is not None or new is not old:  # else it was changed there
                    state[longer:count] = new[longer:]
            out = of_row.new_empty(1, sum(lengths), of_row.shape[-1]) if out is None else out
            out.index_copy_(1, at, of_row.reshape(1, count, -1))
        assert out is not None
        return out, states

    def ask(self, arguments: dict[str, Any], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One call of the stock mixer over [B, n, D], and the states after it. It may write into `states`."""
        layer = LinearAttentionLayer(1 + max(number for _, number in self.states))
        if states:
            load(layer, dict(zip(self.states, states, strict=True)))
        cache = Cache(layers=[layer] * (self.layer + 1))
        out = self.stock(**arguments, **{self.argument: cache})
        after = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        return out if isinstance(out, Tensor) else out[0], [after[part][i] for part, i in self.states]


def load(layer: LinearAttentionLayer, states: dict[StateKey, Tensor]) -> None:
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
    """Writes the states after the accepted rows of spans with rejected drafts."""
    plans: dict[Group | None, RestorePlan] = {}  # by the group whose states after each row were kept
    for mixer in mixers:
        row_states = step.row_states.get(mixer.number)
        group = None if row_states is None else row_states.group
        if group not in plans:
            plans[group] = RestorePlan.of(step, rejected, group)
        plan = plans[group]
        if row_states is not None:
            for accepted, places, slots in plan.copies:
                states = [state.index_select(0, places) for state in row_states.after[accepted - 1]]
                step.store.write(mixer.number, slots, states)
        if plan.replayed.spans:
            mixer.run(plan.replayed, step.recorded[mixer.number])


class StateCopy(NamedTuple):
    """Spans with equally many accepted rows: their places among the kept states, and their slots."""

    accepted: int
    places: Tensor  # [B]
    slots: Tensor  # [B]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Which states are copied, and the rows that a mixer runs over once more for the others."""

    copies: list[StateCopy]
    replayed: StateStep

    @classmethod
    def of(cls, step: StateStep, rejected: list[Rejected], group: Group | None) -> RestorePlan:
        device, in_group = step.store.device, [] if group is None else group.spans
        places = {span: place for place, span in enumerate(in_group)}
        by_accepted: defaultdict[int, list[StateSpan]] = defaultdict(list)
        replayed = []
        for span, accepted, first in rejected:
            if span in places:
                by_accepted[accepted].append(span)
            else:
                replayed.append(replace(span, first=first, last=first + accepted, drafted=False))
        copies = [
            StateCopy(
                accepted,
                as_tensor([places[span] for span in spans], device),
                as_tensor([span.write for span in spans], device),
            )
            for accepted, spans in by_accepted.items()
        ]
        return cls(copies, StateStep(step.store, replayed))


# how a mixer may continue


def decide(mixers: tuple[Mixer, ...]) -> None:
    """Measures, for each class of mixers, how many rows that continue a state are better one call each.

    Raises `UnsupportedModel` where not even a row at a time is exact.
    """
    limits: dict[type[nn.Module], tuple[int, int]] = {}
    for mixer in mixers:
        cls = type(mixer.module)
        if cls not in limits:
            exact = exact_in_one_call(mixer)
            several, alone = (faster_by_row(mixer, n) if exact else ANY for n in SEQUENCES)
            limits[cls] = several, alone
        mixer.by_row, mixer.alone = limits[cls]


@torch.inference_mode()
def faster_by_row(mixer: Mixer, sequences: int) -> int:
    """Up to how many rows of so many sequences row by row takes less time than one call."""
    weight = next(mixer.module.parameters())
    rows = random_rows(mixer, sequences, max(TIMED)).to(weight)
    _, states = mixer.ask({mixer.row: rows[:, :1]}, [])
    limit, began = 1, perf_counter()
    for n in TIMED:
        together, by_row = fastest(mixer, rows[:, :n], ((n,), (1,) * n), states)
        if CALLS_OF_ONE * together <= by_row:
            break
        limit = n
        if perf_counter() - began > SECONDS:  # a call of more rows takes about as long
            return max(n, min(ANY - 1, int(CALLS_OF_ONE * together * n / by_row)))
    return limit


def fastest(
    mixer: Mixer, rows: Tensor, ways: tuple[tuple[int, ...], ...], states: list[Tensor]
) -> list[float]:
    """The least seconds of each way to cut the rows, of a few trials in turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(TRIALS):
        for lengths, times in zip(ways, seconds, strict=True):
            began = perf_counter()
            outputs(mixer, rows, lengths, [state.clone() for state in states])
            if rows.device.type == "cuda":
                torch.cuda.synchronize(rows.device)
            times.append(perf_counter() - began)
    return [min(times) for times in seconds]


@torch.inference_mode()
def exact_in_one_call(mixer: Mixer) -> bool:
    """Whether one call of several rows continues the states exactly, in fp32. A single row must."""
    module = copy.deepcopy(mixer.module).float()
    trial, device = replace(mixer, module=module), next(module.parameters()).device
    rows = random_rows(mixer, 2, LENGTH).to(device)
    expected = outputs(trial, rows, (CUT, *[1] * (LENGTH - CUT)))
    # chunks add in another order, and decays of a long chunk lose digits; the logits are compared later
    if not (error := difference(outputs(trial, rows, (LENGTH,)), expected)) <= LOOSE:
        raise UnsupportedModel(
            f"{mixer.where}: with a state it differs from itself by {error:.2g} of its output"
        )
    try:
        in_chunks = outputs(trial, rows, (CUT, 3, 1, LENGTH - CUT - 4))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return difference(in_chunks, expected) <= TOLERANCE


def random_rows(mixer: Mixer, spans: int, rows: int) -> Tensor:  # [B, n, D]
    return torch.randn(spans, rows, mixer.width, generator=torch.Generator().manual_seed(0))


def outputs(
    mixer: Mixer, rows: Tensor, lengths: tuple[int, ...], states: list[Tensor] | None = None
) -> Tensor:  # [B, n, D]
    """What it returns for rows [B, n, D] in pieces of these lengths, one after the other."""
    states, outs = states or [], []
    for part in rows.split(lengths, 1):
        out, states = mixer.ask({mixer.row: part}, states)
        outs.append(out)
    return torch.cat(outs, 1)
