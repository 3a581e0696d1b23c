"""A small batch on which replacements are compared with what they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import PageStore, View, end_to_end
from speculon.runtimes.torch.model.attention import running
from speculon.runtimes.torch.model.block import CannotReplace
from speculon.runtimes.torch.model.compare import Same, close
from speculon.runtimes.torch.model.taps import EMBEDDINGS, Taps
from speculon.runtimes.torch.needs import LayerSpec

if TYPE_CHECKING:
    from speculon.runtimes.torch.model.target import Target, TargetForward

TrialForward = Callable[..., Any]  # inputs and a view -> a tensor, or several
TrialStep = tuple[tuple[Any, ...], View]  # the arguments of one

LENGTHS, PAGE = (5, 3), 8  # two sequences, a page each: one at the beginning, one at the end of the context


@dataclass(slots=True)
class Trial:
    """Sequences in pages, and the arguments that the stock model passed to each layer."""

    target: Target
    store: PageStore
    batch: Batch
    view: View
    arguments: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, lengths: tuple[int, ...] = LENGTHS) -> Trial:
        device, size = target.device, max(PAGE, *lengths)
        store = PageStore(target.layers, len(lengths), size, device)
        starts, rows = range(0, len(lengths) * size, size), sum(lengths)
        spans = end_to_end((n, slice(at, at + n), n, 0) for at, n in zip(starts, lengths, strict=True))
        ids = torch.arange(rows, device=device)[None] % target.vocab_size
        # the second sequence is at the end of the context, where a layer may compute something else
        firsts = (0, max(0, target.max_context - lengths[-1]))
        ranges = [torch.arange(n, device=device) + at for n, at in zip(lengths, firsts, strict=False)]
        batch = Batch([], ids, torch.cat(ranges)[None], torch.arange(rows, device=device))
        return cls(target, store, batch, store.view_of(spans))

    def run_layer(self, layer: nn.Module, number: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """States, keys and values [T, ...] of a layer on random rows, run in `dtype` if given."""
        arguments, store, view = self.arguments[number], self.store, self.view
        width = self.target.model.get_input_embeddings().weight.shape[1]
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(self.batch.input_ids.shape[1], width, generator=generator)
        x = rows.to(self.target.device, self.target.dtype)[None]
        if dtype is not None:
            store, x = store_in(store, dtype), x.to(dtype)
            view = View(store, self.view.slots, self.view.spans)
            arguments = cast(arguments, dtype)
        pages = [pool[number] for pool in (store.k, store.v)]
        for pool in pages:
            pool.fill_(torch.nan)  # rows that the layer does not write stay NaN
        with running(view):
            out = layer(x, **arguments)
        states = (out[0] if isinstance(out, tuple) else out)[0]
        results = (states, *(pool[self.view.slots].flatten(1) for pool in pages))
        return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in results]


def store_in(store: PageStore, dtype: torch.dtype) -> PageStore:
    """An empty store of the same shape in another dtype."""
    layers: tuple[LayerSpec, ...] = tuple(replace(spec, dtype=dtype) for spec in store.layers)
    return PageStore(layers, store.num_blocks, PAGE, store.device)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every floating tensor in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [cast(item, dtype) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)  # of a named tuple
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **cast({part.name: getattr(value, part.name) for part in fields(value)}, dtype))
    return value


def layer_states(run: TargetForward, layers: int, batch: Batch, view: View) -> list[Tensor]:
    """Logits of a step of a target, and the states of all rows after each of its layers."""
    taps = Taps((EMBEDDINGS, *range(layers)))
    logits = run(batch, view, taps)
    assert logits is not None  # every step that is tried scores rows
    return [logits, *(states for _, states in sorted(taps.take().items()))]


def compare_steps(
    made: TrialForward, network: TrialForward, steps: Iterable[TrialStep], form: str, *, same: Same = close
) -> None:
    """Raises `CannotReplace` where a `form` of a network differs from it on a step."""
    for inputs, view in steps:
        expected, results = (as_list(run(*inputs, view)) for run in (network, made))
        if len(results) != len(expected) or not all(map(same, results, expected)):
            raise CannotReplace(f"not {form}: it computes something else")


@contextmanager
def refused(form: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Within the context, errors are reasons not to use a `form`: they raise `CannotReplace`."""
    try:
        yield
    except CannotReplace:
        raise
    except errors as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        raise CannotReplace(f"not {form}: {line}") from error


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else results
