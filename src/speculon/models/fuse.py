"""Stock layers replaced by fused ones that compute the same: each is compared with the original before it
takes its place.

What is built lies in models/block and models/linear; here is the door it must pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from speculon.batch import Batch
from speculon.kv.store import PageStore, SpanView, View, as_index
from speculon.models.block import Block, CannotReplace, Norm, Tables, block_of, norm_of, tables_of
from speculon.models.captured import RECORDERS, Captured, capture_bytes, captured, sizes
from speculon.models.compare import close, nearly
from speculon.models.fusion import Fusion
from speculon.models.grouping import FOLD_ROWS
from speculon.models.linear import head_is_copied, hooked, joined, plain
from speculon.models.loop import Loop
from speculon.models.target import Target, stock_forward

if TYPE_CHECKING:
    from speculon.models.compiled import Compiled

LENGTHS, PAGE = (5, 3), 8  # two texts, a page each: one at the beginning, one at the end of the context
Place = tuple[nn.Module, str]  # where a module hangs: its parent, and its name there
# what a module of another build answers
ODD = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class FusedLayer(nn.Module):
    """A block in the place of a stock layer, called as that was."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(
        self, hidden_states: Tensor, *_: Any, view: View, position_embeddings: Any = None, **__: Any
    ) -> Tensor:
        return self.block(hidden_states[0], self.tables(position_embeddings, view), view)[None]

    def tables(self, made: tuple[Tensor, Tensor] | None, view: View) -> Tables | None:
        """The rotary tables of this step, put in order once for all layers that share them."""
        if made is None:
            return None
        if id(made[0]) not in view.memo:
            # `made` is kept: its id stays taken
            view.memo[id(made[0])] = made, tables_of(*made, self.block.attention.head_dim)
        return view.memo[id(made[0])][1]


class Fused(nn.Module):
    """A norm or a product in the place of a stock module."""

    def __init__(self, inner: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass(slots=True)
class Trial:
    """A small batch to try layers on, and what the stock model handed to each layer in it."""

    target: Target
    store: PageStore
    batch: Batch
    view: View
    given: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, lengths: tuple[int, ...] = LENGTHS) -> Trial:
        device, size = target.device, max(PAGE, *lengths)
        store = PageStore(target.layers, len(lengths), size, device)
        spans, row = [], 0
        for page, length in enumerate(lengths):
            spans.append(SpanView(row, row + length, slice(page * size, page * size + length), length))
            row += length
        ids = torch.arange(row, device=device)[None] % target.vocab_size
        # where a layer may do what it does not do near the beginning
        far = max(0, target.max_context - lengths[-1])
        positions = torch.cat(
            [torch.arange(n, device=device) + at for n, at in zip(lengths, (0, far), strict=False)]
        )[None]
        return cls(
            target, store, Batch([], ids, positions, torch.arange(row, device=device)), store.view_of(spans)
        )

    def last(self, *rows: int, scattered: bool = False) -> tuple[Batch, View]:
        """The last `rows[i]` rows of text i; `scattered`: as texts that do not lie in consecutive slots."""
        spans: list[SpanView] = []
        taken: list[int] = []
        for span, count in zip(self.view.spans, rows, strict=False):
            where = as_index(span.where, self.store.device) if scattered else span.where
            spans.append(SpanView(len(taken), len(taken) + count, where, span.context))
            taken += range(span.last - count, span.last)
        ids, positions = (t[:, taken] for t in (self.batch.input_ids, self.batch.position_ids))
        return Batch([], ids, positions, self.batch.score_rows[: len(taken)]), self.store.view_of(spans)

    def outcome(self, layer: nn.Module, number: int, like: torch.dtype | None = None) -> list[Tensor]:
        """What a layer makes of random rows: states, keys and values, [T, ...] float32 each; `like` runs it
        in another dtype.
        """
        given, store = self.given[number], self.store
        width = self.target.model.get_input_embeddings().weight.shape[1]
        rows = torch.randn(
            self.batch.input_ids.shape[1], width, generator=torch.Generator().manual_seed(number)
        )
        x = rows.to(self.target.device, self.target.dtype)[None]
        if like is not None:
            store = PageStore(
                tuple(in_dtype(spec, like) for spec in store.layers), store.num_blocks, PAGE, store.device
            )
            given, x = (
                cast({**given, "view": View(store, self.view.slots, self.view.spans)}, like),
                x.to(like),
            )
        pages = [pool[number] for pool in (store.k, store.v)]
        for pool in pages:
            pool.fill_(torch.nan)  # what a layer forgets to write must show
        out = layer(x, **given)
        states = (out[0] if isinstance(out, tuple) else out)[0]
        return [t.float() for t in (states, *(pool[self.view.slots].flatten(1) for pool in pages))]


def fuse(target: Target, *, share: bool, compile: bool = False) -> None:
    """Rewrites the target's layers, as far as that changes nothing, and notes in `target.fusion` what was
    done.

    With `share` the weights stay the tensors they are; else they are laid out anew, and the old ones let go
    layer by layer.
    """
    tapped = target.taps.layers if target.taps else ()
    target.capture(())  # a layer with hooks is left as it is
    trial, fusion = Trial.of(target), Fusion(len(target.layers))
    with torch.inference_mode():
        with recorded(target.model, trial) as layers:
            stock_forward(target.model, trial.batch, trial.view)
        for number, (parent, name) in layers.items():
            stock, spec = getattr(parent, name), target.layers[number]
            try:
                fused = FusedLayer(block_of(stock, number, spec.heads, spec.k_dim, share))
                check(stock, fused, trial, number)
            except CannotReplace as reason:
                fusion.refused[str(reason)] += 1
            except ODD as error:
                fusion.refused[
                    f"{type(stock).__name__} is built in another way ({type(error).__name__})"
                ] += 1
            else:
                setattr(parent, name, fused)
                fusion.blocks += 1
        replace_norms(target)
        if not share and fusion.blocks == fusion.layers:
            leave_file(target.model)  # before anything is compiled, which remembers the tensors it saw
        try:
            target.run = loop = loop_of(target, trial, share)
            fusion.one_loop = True
            if compile and target.device.type in RECORDERS:
                target.run = captured_loop(loop, target)
                fusion.captured = True
            elif compile:
                target.run = compiled_loop(loop, target)
                fusion.compiled = True
        except CannotReplace as reason:
            fusion.refused[str(reason)] += 1
    target.fusion = fusion
    target.capture(tapped)


def decoder_layers(model: nn.Module) -> Iterator[tuple[int, Place]]:
    """Each layer's number, and where it hangs."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            number = getattr(getattr(child, "self_attn", None), "layer_idx", None)
            if number is not None:
                yield number, (parent, name)


@contextmanager
def recorded(model: nn.Module, trial: Trial) -> Iterator[dict[int, Place]]:
    """The layers that are called meanwhile, unlike those for images or sounds; and what with, besides the
    hidden states.
    """
    called: dict[int, Place] = {}

    def note(number: int, place: Place) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            called[number] = place
            trial.given[number] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        return keep

    hooks = [
        getattr(*place).register_forward_pre_hook(note(number, place), with_kwargs=True)
        for number, place in decoder_layers(model)
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def check(stock: nn.Module, fused: nn.Module, trial: Trial, number: int) -> None:
    """Raises `CannotReplace` unless the fused layer is as near to the truth as the stock one, and nobody
    watches that.
    """
    if any(map(hooked, stock.modules())):
        raise CannotReplace(f"{type(stock).__name__} has hooks")
    expected, found = trial.outcome(stock, number), trial.outcome(fused, number)
    if trial.target.dtype is torch.float32:
        differ = any(not close(a, b) for a, b in zip(found, expected, strict=True))
    else:
        truth = trial.outcome(copy.deepcopy(stock).float(), number, like=torch.float32)
        differ = any(not nearly(a, b, t) for a, b, t in zip(found, expected, truth, strict=True))
    if differ:
        raise CannotReplace(f"{type(stock).__name__} computes something else")


def in_dtype(spec: Any, dtype: torch.dtype) -> Any:
    return type(spec)(spec.kind, spec.heads, spec.k_dim, spec.v_dim, dtype, spec.window)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every floating tensor in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return {key: cast(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value


def replace_norms(target: Target) -> None:
    """The norms outside of blocks: the last one, and those of layers that stay as they are.

    One whose weight is kept in another dtype than the model's was compared on rows that it is never given,
    and stays.
    """
    for parent in list(target.model.modules()):
        for name, child in list(parent.named_children()):
            try:
                norm = norm_of(child)
            except CannotReplace:
                continue
            if norm.weight.dtype is target.dtype:
                setattr(parent, name, Fused(norm))


def leave_file(model: nn.Module) -> None:
    """Copies what was not laid out anew, an embedding and little else: a single tensor keeps the whole
    checkpoint mapped.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in copies:
                copies[weight] = nn.Parameter(weight.detach().clone(), requires_grad=False)
            setattr(module, name, copies[weight])


def loop_of(target: Target, trial: Trial, share: bool) -> Loop:
    """The whole forward as one loop. Raises `CannotReplace` where the stock model does anything besides."""
    model, base = target.model, target.model.base_model
    layers = list(getattr(base, "layers", ()))
    norm, head = getattr(base, "norm", None), model.get_output_embeddings()
    if not (layers and all(isinstance(layer, FusedLayer) for layer in layers)):
        raise CannotReplace("no loop: layers of the stock model are left")
    if (
        not isinstance(norm, Fused)
        or not isinstance(norm.inner, Norm)
        or not plain(head)
        or not hasattr(base, "rotary_emb")
    ):
        raise CannotReplace(f"no loop: {type(base).__name__} has another norm, head or rotary table")
    if hooked(model) or hooked(base):
        raise CannotReplace(f"no loop: {type(model).__name__} has hooks")
    loop = Loop(base.embed_tokens, base.rotary_emb, [x.block for x in layers], norm.inner, head)
    try:
        expected, found = stock_forward(model, trial.batch, trial.view), loop(trial.batch, trial.view)
    except ODD as error:
        raise CannotReplace(
            f"no loop: {type(base).__name__} is built in another way ({type(error).__name__})"
        ) from error
    assert expected is not None and found is not None  # all rows are scored
    if not close(found.float(), expected.float()):  # the same operations: in any dtype
        raise CannotReplace(f"no loop: {type(model).__name__} does more than its layers")
    if not share and head_is_copied(head.weight.nbytes, target.num_bytes, target.dtype, target.device):
        if head.weight is base.embed_tokens.weight:
            target.num_bytes += head.weight.nbytes
        loop.head = joined([head], share)
        model.set_output_embeddings(Fused(loop.head))
    return loop


def compiled_loop(loop: Loop, target: Target) -> Compiled:
    """The loop compiled. Raises `CannotReplace` where that is not to be had."""
    from speculon.models.compiled import bytes_more, compiled  # brings the compiler's own modules

    # The first of each kind is compiled: but for one row's, no size is 0 or 1, which the compiler would take
    # for constant.
    trial, crowd, first = (
        Trial.of(target, (8, 3)),
        Trial.of(target, (FOLD_ROWS + 1, 7)),
        Trial.of(target, (1, 1)),
    )
    for each in (trial, crowd):
        loop(each.batch, each.view)  # that there be keys to attend to
    one, few, several, many = (
        trial.last(1),
        trial.last(5),
        (trial.batch, trial.view),
        (crowd.batch, crowd.view),
    )
    some = replace(crowd.batch, score_rows=crowd.batch.score_rows[3:]), crowd.view
    ends = [(replace(batch, score_rows=batch.score_rows[-1:]), view) for batch, view in (few, several, many)]
    late = [trial.last(1, 2), trial.last(2, 2, scattered=True), trial.last(1, scattered=True)]
    early = [trial.last(8), first.last(1), (first.batch, first.view)]
    made = compiled(loop, target, [one, few, several, many, some, *ends, *late, *early])
    target.num_bytes += bytes_more(target.num_bytes, target.dtype, target.device)
    return made


def captured_loop(loop: Loop, target: Target) -> Captured:
    """The loop with its pieces recorded. Raises `CannotReplace` where that is not to be had."""
    trials = (Trial.of(target, (rows - rows // 2, rows // 2) if rows > 1 else (1,)) for rows in sizes())
    made = captured(
        loop,
        target,
        ((trial.batch, trial.view) for trial in trials),
        RECORDERS[target.device.type](target.device),
    )
    target.num_bytes += capture_bytes(target.model.config.get_text_config(), target.layers, target.dtype)
    return made
