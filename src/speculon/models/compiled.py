"""The loop as compiled programs, for steps of few rows, where calls of operations cost as much as their work.

One row, and few rows, of a sequence in consecutive slots have programs that call torch's attention kernel.
The others write the pages, too, and call back for attention; few rows of several sequences may share a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculon.batch import Batch, as_tensor
from speculon.core import LayerSpec
from speculon.kv.store import SpanView, View, as_index
from speculon.models.attention import running
from speculon.models.block import CannotReplace
from speculon.models.compare import close
from speculon.models.compiled_layers import Layers
from speculon.models.grouping import FOLD_ROWS, joint_call, visible_keys
from speculon.models.linear import Linear, layout_of
from speculon.models.loop import Loop
from speculon.models.masks import MASKS
from speculon.models.programs import FOLDED, SHARED, TUNED, Arguments, Program, Settings, key_of, program
from speculon.models.taps import EMBEDDINGS, Taps
from speculon.models.target import Run, Target

COPIES = 5  # of the weights, where each program holds one
# of a joint call: how many times the rows and keys of its sequences it may pad to, and its memory
WASTED_ROWS, WASTED_KEYS, JOINT_BYTES = 4, 2, 32 << 20  # guess

Step = tuple[Batch, View]


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """The programs to compile, with the settings of each."""

    settings: dict[str, Settings]
    few: int  # rows


IN_ROWS = CompilePlan({"one": SHARED, "few": SHARED, "joint": SHARED, "many": SHARED}, few=FOLD_ROWS)
# beyond 12 rows torch's products are as fast as the compiler's
IN_BLOCKS = CompilePlan({"one": TUNED, "few": TUNED, "scattered": TUNED, "many": FOLDED}, few=12)


class Compiled:
    """A loop and its programs, for one number of threads. Steps without scored rows take the loop."""

    def __init__(self, loop: Loop, layer_kinds: list[int], plan: CompilePlan):
        self.loop, self.layer_kinds, self.plan = loop, layer_kinds, plan
        self.threads = torch.get_num_threads()
        self.programs: dict[str, Program] = {}
        self.firsts = [layer_kinds.index(kind) for kind in sorted(set(layer_kinds))]  # a layer of each kind
        self.group = loop.blocks[0].attention.heads // loop.blocks[0].attention.kv_heads

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
        rows, span = batch.input_ids.shape[1], view.spans[0]
        first = [batch.input_ids[0], batch.position_ids[0], batch.score_rows]
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
        most = max(span.rows for span in spans)
        calls = [joint_call(spans, most, spec.window, 1, spec.dtype, device) for spec in specs]
        sequences = len(spans)
        order = [i * most + row for i, span in enumerate(spans) for row in range(span.rows)]
        wheres = [as_index(call.where, device).view(sequences, -1) for call in calls]
        masks = [
            torch.zeros(sequences, 1, most, where.shape[1], dtype=spec.dtype)
            if call.mask is None
            else call.mask
            for spec, call, where in zip(specs, calls, wheres, strict=True)
        ]
        rows = as_index(calls[0].rows, device).view(sequences, most)
        return [rows, as_tensor(order, device), *wheres, *masks]


def is_joint(spans: list[SpanView], spec: LayerSpec, group: int) -> bool:
    """Whether one padded call for all sequences is faster than calling back.

    Within a program it took 0.64 to 1.01 of that time (2 to 8 sequences, contexts of 300 to 1300).
    """
    rows, keys = [span.rows for span in spans], [visible_keys(span, spec.window) for span in spans]
    padded, most = len(spans) * max(keys), max(rows)
    if most > FOLD_ROWS or len(spans) * most > WASTED_ROWS * sum(rows) or padded > WASTED_KEYS * sum(keys):
        return False
    masks = most * (1 + group) * spec.dtype.itemsize  # per key: as passed in, and once per query head
    return padded * (spec.bytes_per_token + masks) <= JOINT_BYTES


def plan_for(dtype: torch.dtype, device: torch.device) -> CompilePlan:
    """The plan for such weights: those in rows are shared by all programs."""
    return IN_ROWS if layout_of(dtype, device) is Linear else IN_BLOCKS


def extra_bytes(weights: int, dtype: torch.dtype, device: torch.device) -> int:
    """Memory that compiling takes in addition to so many bytes of weights."""
    if not measured(dtype, device):
        return 0
    return JOINT_BYTES if plan_for(dtype, device) is IN_ROWS else COPIES * weights


def row_bytes(layers: int, hidden: int, dtype: torch.dtype, device: torch.device) -> int:
    """Memory of the states that a program returns, for each row of a step."""
    return (layers + 1) * hidden * dtype.itemsize if measured(dtype, device) else 0


def measured(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiling was measured to be faster for such weights."""
    return device.type == "cpu" and dtype is torch.float32


def compiled(loop: Loop, target: Target, steps: Iterable[Step]) -> Compiled:
    """The loop compiled for such steps, half a minute each, and compared on all of them, pages included.

    Raises `CannotReplace` where it cannot be compiled, or differs.
    """
    if not measured(target.dtype, target.device):
        raise CannotReplace(f"not compiled: {target.dtype} on {target.device.type} was never measured")
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")
            tried = list(steps)
            made = compile_programs(loop, plan_for(target.dtype, target.device), tried)
        if missing := made.plan.settings.keys() - made.programs.keys():
            raise CannotReplace(f"not compiled: no step was tried for {sorted(missing)}")
        for step in tried:
            check_step(made, step)
    except CannotReplace:
        raise
    except Exception as error:  # no C++ compiler, a read-only folder, or any error of the compiler's own
        line = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        raise CannotReplace(f"not compiled: {line}") from error
    return made


def compile_programs(loop: Loop, plan: CompilePlan, steps: list[Step]) -> Compiled:
    """Compiles the program of each step that is not compiled yet."""
    layer_kinds = [steps[0][1].kind(layer) for layer in range(len(loop.blocks))]
    layers = Layers(loop, [sorted(set(layer_kinds)).index(kind) for kind in layer_kinds])
    made = Compiled(loop, layer_kinds, plan)
    key = key_of(layers)  # first: compiling changes attributes of the layers
    for batch, view in steps:
        variant, arguments = made.arguments(batch, view)
        if variant not in made.programs:
            made.programs[variant] = program(layers, variant, plan.settings[variant], arguments, key)
    return made


def check_step(made: Compiled, step: Step) -> None:
    """Raises `CannotReplace` where logits, states or written pages differ from the loop's."""
    (_, view), layers = step, range(len(made.layer_kinds))
    expected = results(made.loop, step, layers)
    for layer in layers:  # rows that the program does not write stay NaN
        view.write(layer, *(torch.full_like(x, torch.nan) for x in view.slots_of(layer, view.slots)))
    found = results(made, step, layers)
    if len(found) != len(expected) or not all(map(close, found, expected)):
        raise CannotReplace("not compiled: it computes something else")


def results(run: Run, step: Step, layers: range) -> list[Tensor]:
    """Logits of a step, states of all rows after each layer, and the keys and values that are written."""
    (batch, view), taps = step, Taps((EMBEDDINGS, *layers))
    logits = run(batch, view, taps)
    assert logits is not None  # every step that is tried scores rows
    states = [states for _, states in sorted(taps.take().items())]
    written = [rows.clone() for layer in layers for rows in view.slots_of(layer, view.slots)]
    return [logits, *states, *written]
