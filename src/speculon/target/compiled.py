"""The loop as compiled programs, for steps of few rows, where calls of operations cost as much as their work.

One row, and few rows, of a sequence in consecutive slots have programs that call torch's attention kernel.
The others write the pages, too, and call back for attention; few rows of several sequences may share a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculon.core.types import LayerSpec
from speculon.decoding.batch import Batch, as_tensor
from speculon.decoding.kv.store import SpanView, View, as_index
from speculon.target.attention import running
from speculon.target.block import CannotReplace, Loop
from speculon.target.compiled_layers import Arguments, Exported, Layers, Program, Settings
from speculon.target.footprint import JOINT_BYTES, compiling_is_faster
from speculon.target.grouping import FOLD_ROWS, MASKS, Kernel, joint_call, visible_keys
from speculon.target.linear import Linear, fastest_layout
from speculon.target.taps import EMBEDDINGS, Taps
from speculon.target.trial import Trial, compare_steps, layer_states, refused

if TYPE_CHECKING:
    from speculon.target.target import Target

# of a joint call: how many times the rows and keys of its sequences it may pad to
WASTED_ROWS, WASTED_KEYS = 4, 2  # guess

# the weights of the loop are shared
SHARED: Settings = {"cpp.weight_prepack": False, "aot_inductor.package_constants_in_so": False}
FOLDED: Settings = {"freezing": True}  # weights are packed: each program holds a copy
# products are kernels of the compiler, chosen by time
TUNED = FOLDED | {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """The programs to compile, with the settings of each."""

    settings: dict[str, Settings]
    few: int  # rows


IN_ROWS = CompilePlan({"one": SHARED, "few": SHARED, "joint": SHARED, "many": SHARED}, few=FOLD_ROWS)
# beyond 12 rows torch's products are as fast as the compiler's
IN_BLOCKS = CompilePlan({"one": TUNED, "few": TUNED, "scattered": TUNED, "many": FOLDED}, few=12)


class Programs:
    """The programs of a network, for one number of threads."""

    def __init__(self, plan: CompilePlan):
        self.plan, self.threads = plan, torch.get_num_threads()
        self.programs: dict[str, Program] = {}

    def compile(self, layers: Exported, steps: Iterable[tuple[str, Arguments]]) -> None:
        """Compiles each program of the plan for the first step that takes it."""
        from speculon.target.programs import program, program_key  # imports the compiler

        settings = self.plan.settings
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")
            key = program_key(layers)  # first: compiling changes attributes
            for variant, arguments in steps:
                if variant in settings.keys() - self.programs.keys():
                    self.programs[variant] = program(layers, variant, settings[variant], arguments, key)
        if missing := settings.keys() - self.programs.keys():
            raise CannotReplace(f"not compiled: no step was tried for {sorted(missing)}")


class PagedPrograms(Programs):
    """Programs that write and read pages, and what each takes for a step."""

    def __init__(self, plan: CompilePlan, layer_kinds: list[int], group: int):
        super().__init__(plan)
        self.layer_kinds, self.group = layer_kinds, group
        self.firsts = [layer_kinds.index(kind) for kind in sorted(set(layer_kinds))]  # a layer of each kind

    def for_step(self, first: list[Tensor], view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments, which begin with those of each row."""
        rows, span = len(first[0]), view.spans[0]
        if rows > self.plan.few or len(view.spans) > 1 or not isinstance(span.where, slice):
            return self.called_back(rows, first, view)
        return self.alone(rows, first, view)

    def called_back(self, rows: int, first: list[Tensor], view: View) -> tuple[str, Arguments]:
        """For any sequences: slots to write and whole pools, and a joint call where one is worth it."""
        slots = as_index(view.slots, view.store.device)
        arguments: Arguments = [*first, slots, *view.pools(len(self.layer_kinds))]
        settings = self.plan.settings
        if "joint" in settings and (joint := self.joint(view)):
            return "joint", [*arguments, *joint]
        few = rows <= self.plan.few and "scattered" in settings
        return "scattered" if few else "many", arguments

    def alone(self, rows: int, first: list[Tensor], view: View) -> tuple[str, Arguments]:
        """For one sequence in consecutive slots: views of its keys and values, and masks for several rows."""
        keys, values, masks, span = [], [], {}, view.spans[0]
        for layer, kind in enumerate(self.layer_kinds):
            window = view.spec(layer).window
            length = visible_keys(span, window)
            key, value = view.slots_of(layer, span.tail(length))
            keys.append(key)
            values.append(value)
            if rows > 1 and kind not in masks:
                masks[kind] = MASKS.slice(rows, length, window, 1, key.dtype, key.device).contiguous()
        by_kind = [masks[kind] for kind in sorted(masks)]
        return "few" if masks else "one", [*first, None, *keys, *values, *by_kind]

    def joint(self, view: View) -> Arguments:
        """The rows [B, n] of a call for all sequences, and the place of each row in its result [T].

        Then, for each kind of layer, slots [B, S] and masks [B, 1, n, S]. Empty where one call is slower.
        """
        spans, device, specs = view.spans, view.store.device, [view.spec(layer) for layer in self.firsts]
        if len(spans) == 1 or not all(is_joint(spans, spec, self.group) for spec in specs):
            return []
        n, sequences = max(span.rows for span in spans), len(spans)
        calls = [joint_call(spans, n, Kernel(spec, 1, True, spec.dtype, device)) for spec in specs]
        order = [i * n + row for i, span in enumerate(spans) for row in range(span.rows)]
        wheres = [as_index(call.where, device).view(sequences, -1) for call in calls]
        masks = [
            torch.zeros(sequences, 1, n, where.shape[1], dtype=spec.dtype) if call.mask is None else call.mask
            for spec, call, where in zip(specs, calls, wheres, strict=True)
        ]
        rows = as_index(calls[0].rows, device).view(sequences, n)
        return [rows, as_tensor(order, device), *wheres, *masks]


class Compiled(PagedPrograms):
    """A loop and its programs. Steps without scored rows take the loop."""

    def __init__(self, loop: Loop, plan: CompilePlan, layer_kinds: list[int]):
        of = loop.blocks[0].attention
        super().__init__(plan, layer_kinds, of.heads // of.kv_heads)
        self.loop = loop

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        if not batch.score_rows.numel() or torch.get_num_threads() != self.threads:
            return self.loop(batch, view, taps)
        variant, arguments = self.arguments(batch, view)
        with running(view):
            logits, *states = self.programs[variant](*arguments)
        if taps is not None:
            for layer, after in enumerate(states, EMBEDDINGS):
                taps.keep(layer, after)
        return logits

    def arguments(self, batch: Batch, view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments."""
        return self.for_step([batch.input_ids[0], batch.position_ids[0], batch.score_rows], view)


def is_joint(spans: list[SpanView], spec: LayerSpec, group: int) -> bool:
    """Whether one padded call for all sequences is faster than calling back.

    Within a program it took 0.64 to 1.01 of that time (2 to 8 sequences, contexts of 300 to 1300).
    """
    rows, keys = [span.rows for span in spans], [visible_keys(span, spec.window) for span in spans]
    padded, n = len(spans) * max(keys), max(rows)
    if n > FOLD_ROWS or len(spans) * n > WASTED_ROWS * sum(rows) or padded > WASTED_KEYS * sum(keys):
        return False
    masks = n * (1 + group) * spec.dtype.itemsize  # per key: as passed in, and once per query head
    return padded * (spec.bytes_per_token + masks) <= JOINT_BYTES


def plan_for(dtype: torch.dtype, device: torch.device) -> CompilePlan:
    """The plan for such weights: those in rows are shared by all programs."""
    return IN_ROWS if fastest_layout(dtype, device) is Linear else IN_BLOCKS


def compiled_loop(loop: Loop, target: Target) -> Compiled:
    """The loop compiled, half a minute for each program, and compared on all trial steps, pages included.

    Raises `CannotReplace` where it cannot be compiled, or differs.
    """
    if any(spec.chunk for spec in target.layers):
        raise CannotReplace("not compiled: attention in chunks")
    refuse_unmeasured(target)
    with refused("compiled"):  # no C++ compiler, a read-only folder, or any error of the compiler's own
        tried, layers = trial_steps(loop, target), len(loop.blocks)
        layer_kinds = number_kinds(tried[0][1], layers)
        made = Compiled(loop, plan_for(target.dtype, target.device), layer_kinds)
        made.compile(Layers(loop, layer_kinds), [made.arguments(*step) for step in tried])
        run, expected = (partial(layer_states, form, layers) for form in (made, loop))
        steps = [((batch,), view) for batch, view in tried]
        compare_steps(run, expected, steps, "compiled", written_layers=layers)
    return made


def refuse_unmeasured(target: Target) -> None:
    """Raises `CannotReplace` where compiling was never measured."""
    if not compiling_is_faster(target.dtype, target.device):
        raise CannotReplace(f"not compiled: {target.dtype} on {target.device.type} was never measured")


def trial_steps(loop: Loop, target: Target) -> list[tuple[Batch, View]]:
    """Steps to compile and compare. The first of each program is compiled, so only one row's sizes are 1."""
    trial, batch = Trial.of(target, (8, 3)), Trial.of(target, (FOLD_ROWS + 1, 7))
    single = Trial.of(target, (1, 1))
    for each in (trial, batch):
        loop(each.batch, each.view)  # writes keys to attend to
    one, few = trial.last(1), trial.last(5)
    several, many = (trial.batch, trial.view), (batch.batch, batch.view)
    some = replace(batch.batch, score_rows=batch.batch.score_rows[3:]), batch.view
    ends = [(replace(step, score_rows=step.score_rows[-1:]), view) for step, view in (few, several, many)]
    late = [trial.last(1, 2), trial.last(2, 2, scattered=True), trial.last(1, scattered=True)]
    early = [trial.last(8), single.last(1), (single.batch, single.view)]
    return [one, few, several, many, some, *ends, *late, *early]


def number_kinds(view: View, layers: int) -> list[int]:
    """A number for each layer, from 0 on, that layers with equal keys and windows have in common."""
    numbers = [view.kind(layer) for layer in range(layers)]
    return [sorted(set(numbers)).index(number) for number in numbers]
