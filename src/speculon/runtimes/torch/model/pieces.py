"""Products in pieces, for whose numbers of rows one order of addition was measured.

Kernels choose that order by the number of rows, so a row's result depends on how many others there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from speculon.core.types import ceil_div
from speculon.runtimes.torch.batch import RowRanges
from speculon.runtimes.torch.model.adapters import Adapted, LowRank
from speculon.runtimes.torch.model.linear import Linear, Packed, Product, SideBySide, packed
from speculon.runtimes.torch.model.quantized import MEASURED_ROWS, IntegerProduct, Packed4
from speculon.runtimes.torch.model.remembered import once

MOST = (64, 32, 16, 8)  # rows of a small piece
# those that cost about the same are together: on an AMD EPYC four rows took 0.8 times as long as two
FEWEST = ((1, 4, 2), (8,))
SIZES = (512, 256, 128)  # rows of a large piece, which must be exactly so many
# rows of prompts: most are in the largest pieces; 64 rows took 1.2 to 1.7 times as long, 256 gained nothing
PROMPT_SIZES = tuple(range(16, 129, 16))
LARGE = 1 << 24  # elements; larger weights are not copied, and fewer numbers of rows are compared
LARGEST_PIECE = {"cpu": 128}  # of large weights: 256 rows gained nothing, and measuring takes seconds
ALL_COUNTS = range(1, max(MOST) + 1)
FEW_COUNTS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64)
# if these agree, too, pieces have as many rows as the last of them; each third one for large weights
MORE_COUNTS = (65, 71, 77, 95, 96, 100, 127, 128, 129, 150, 191, 200, 255, 257, 300, 383, 400, 500, 512)

_prompts: ContextVar[RowRanges] = ContextVar("speculon_prompts", default=())


ProductShape = tuple[Product, int, int, torch.dtype]  # a product, its outputs, its width, and their dtype


@contextmanager
def with_prompts(prompts: RowRanges) -> Iterator[None]:
    """Within the context, these rows of the forward that runs belong to prompts."""
    token = _prompts.set(prompts)
    try:
        yield
    finally:
        _prompts.reset(token)


class InvariantRows(NamedTuple):
    """The numbers of rows between which the results of a row are bitwise equal."""

    min_rows: int
    max_rows: int
    sizes: tuple[int, ...] = ()  # and larger ones, the largest first

    @property
    def as_programs(self) -> bool:
        """Whether pieces are those of a program with this product in it."""
        return self.min_rows == 1 and self.max_rows >= MEASURED_ROWS

    @property
    def only_small(self) -> bool:
        """Whether prompts may take fewer, larger pieces if they need not agree with generated tokens."""
        return not self.sizes and self.max_rows <= max(MOST)


@dataclass(slots=True)
class InPieces:
    """A product in pieces of such numbers of rows."""

    product: Product
    rows: InvariantRows

    def __call__(self, x: Tensor) -> Tensor:  # [T, D] -> [T, O]
        rows, (_, max_rows, sizes) = x.size(0), self.rows  # `len(x)` and `x.shape` are slower
        if rows <= max_rows:
            return self.padded(x, rows)
        pieces = sizes_of(rows, max_rows, sizes)
        return torch.cat([self.padded(*piece) for piece in zip(x.split(pieces), pieces, strict=True)])

    def padded(self, x: Tensor, rows: int) -> Tensor:
        """The product of as few rows as there are; they are repeated where it takes more."""
        if 0 < rows < self.rows.min_rows:
            return self.product(repeated(x, self.rows.min_rows))[:rows]
        return self.product(x)


@dataclass(slots=True)
class PromptsApart:
    """A function of rows, with those of prompts in pieces of these sizes, and another order of addition."""

    generated: Product
    prompt: Product
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:  # [T, D] -> [T, O]
        if not (prompts := _prompts.get()):
            return self.generated(x)
        parts, done = [], 0
        for first, last in prompts:
            if done < first:
                parts.append(self.generated(x[done:first]))
            pieces = sizes_of(last - first, self.sizes[-1], ())
            parts += map(self.piece, x[first:last].split(pieces))
            done = last
        if done < x.size(0):
            parts.append(self.generated(x[done:]))
        return torch.cat(parts)

    def piece(self, x: Tensor) -> Tensor:
        """Of rows that are repeated up to the next size."""
        rows = x.size(0)
        size = next(size for size in self.sizes if size >= rows)
        return self.prompt(x if size == rows else repeated(x, size))[:rows]


def repeated(x: Tensor, size: int) -> Tensor:
    """Its rows again and again, up to so many."""
    return torch.cat([x] * ceil_div(size, x.size(0)))[:size]  # `repeat` takes five times as long


def sizes_of(rows: int, max_rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Rows as pieces of these sizes, and a rest in pieces of at most `max_rows`, about even."""
    pieces = []
    for size in sizes:
        pieces += [size] * (rows // size)
        rows %= size
    parts = ceil_div(rows, max_rows)
    return pieces + [rows * (i + 1) // parts - rows * i // parts for i in range(parts)]


class CannotBeInvariant(Exception):
    """The results of a kernel depend on the batch; the message says which."""


@dataclass(slots=True)
class ProductPieces:
    """Puts products in pieces. Those of one layout, dtype and shape take one kernel and are measured once."""

    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all products so far take as many rows at once as a program of them."""
        rows = [one for one in self.known.values() if isinstance(one, InvariantRows)]
        return all(one.as_programs for one in rows)

    def by_row(self, product: Product, outputs: int, width: int, dtype: torch.dtype) -> Product:
        """The same for a product of all rows of a forward in their order, where prompts may be apart."""
        if isinstance(product, Adapted):
            return self.adapted(product, self.by_row(product.product, outputs, width, dtype), width, dtype)
        made = self.of(product, outputs, width, dtype)
        if not isinstance(made, InPieces) or not made.rows.only_small:
            return made
        sizes = self.prompt_sizes(product, outputs, width, dtype)
        return PromptsApart(made, product, sizes) if sizes else made

    def of(self, product: Product, outputs: int, width: int, dtype: torch.dtype) -> Product:
        """Raises `CannotBeInvariant` where no numbers of rows are equal."""
        match product:
            case nn.Linear():
                return self.of(Linear(product.weight, product.bias), outputs, width, dtype)
            case SideBySide():
                outputs_of = partial(num_outputs, width=width, dtype=dtype)
                return SideBySide([self.of(part, outputs_of(part), width, dtype) for part in product.parts])
            case Adapted():
                return self.adapted(product, self.of(product.product, outputs, width, dtype), width, dtype)
            case IntegerProduct():  # exact in any order
                return product
        return InPieces(product, self.once("rows", (product, outputs, width, dtype), measured, rows_from))

    def adapted(self, product: Adapted, made: Product, width: int, dtype: torch.dtype) -> Adapted:
        """The updates in pieces, too, beside the product that was made of its own."""

        def in_pieces(update: LowRank) -> LowRank:
            rank = num_outputs(update.a, width, dtype)
            outputs = num_outputs(update.b, rank, dtype)
            return LowRank(self.of(update.a, rank, width, dtype), self.of(update.b, outputs, rank, dtype))

        updates = {name: in_pieces(update) for name, update in product.updates.items()}
        return replace(product, product=made, updates=updates)

    def prompt_sizes(self, product: Product, outputs: int, width: int, dtype: torch.dtype) -> tuple[int, ...]:
        """The sizes of pieces of prompts, which agree with one another and may differ from all others."""
        if isinstance(product, nn.Linear):
            product = Linear(product.weight, product.bias)
        return self.once("prompts", (product, outputs, width, dtype), measured_prompts, tuple)

    def once(
        self, name: str, shape: ProductShape, measure: Callable[..., Any], read: Callable[[Any], Any]
    ) -> Any:
        """The result of `measure` for products of this layout and shape; `read` makes it from JSON."""
        key = (name, *kernel_key(shape[0]), *shape[1:])
        if key not in self.known:
            words = (part.__name__ if isinstance(part, type) else str(part) for part in key)
            self.known[key] = once(" ".join(words), partial(measure, *shape), read)
        return self.known[key]


def rows_from(stored: list[Any]) -> InvariantRows:
    fewest, max_rows, sizes = stored
    return InvariantRows(fewest, max_rows, tuple(sizes))


def kernel_key(product: Product) -> tuple[Any, ...]:
    """What chooses its kernel, beside dtype and shape."""
    match product:
        case Linear(weight, bias):
            return Linear, weight.device, weight.is_contiguous(), bias is not None
        case Packed(_, bias):
            return Packed, bias is not None
        case Packed4(weight, _, bias):
            return type(product), weight.device, bias is not None
    return (product,)


@torch.inference_mode()
def measured(product: Product, outputs: int, width: int, dtype: torch.dtype) -> InvariantRows:
    product, x = sample(product, outputs, width, dtype)
    if outputs * width > LARGE and not isinstance(product, Packed4):
        x = x[: LARGEST_PIECE.get(x.device.type, len(x))]
        more = tuple(n for n in MORE_COUNTS[::3] if n < len(x))
        rows = equal_rows(product, x, FEW_COUNTS, (*more, len(x)))
    else:
        rows = equal_rows(product, x)
    if rows is None:
        name = f"a product of {outputs} x {width}"
        raise CannotBeInvariant(f"{name} differs by its number of rows on this machine")
    return rows


@torch.inference_mode()
def measured_prompts(product: Product, outputs: int, width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Those sizes with which a row's result is that in the largest piece, wherever the row is."""
    product, x = sample(product, outputs, width, dtype)
    whole = product(x[: PROMPT_SIZES[-1]].contiguous())
    sizes = tuple(size for size in PROMPT_SIZES if torch.equal(turned(product, x, size), whole[:size]))
    return sizes if PROMPT_SIZES[-1] in sizes else ()


def turned(product: Product, x: Tensor, rows: int) -> Tensor:
    """The product of the first rows in reverse order, and its results in the order of the rows."""
    return product(x[:rows].flip(0).contiguous()).flip(0)


def sample(product: Product, outputs: int, width: int, dtype: torch.dtype) -> tuple[Product, Tensor]:
    """A product to measure in the place of another one, and rows for it.

    Its weights are generated, in the same layout. Where they would be large, they are its own. Of those in
    4 or 8 bits some rows are enough: a head may have 262,144.
    """
    large = outputs * width > LARGE
    weight, bias, x = cancelling(0 if large else outputs, width, dtype)
    match product:
        case Packed4():
            product = product.first(max(SIZES))
        case Packed() if not large:
            product = packed(weight, None if product.bias is None else bias)
        case Linear(own) if not large:
            weight = weight if own.is_contiguous() else weight.t().contiguous().t()
            product = Linear(weight.to(own.device), None if product.bias is None else bias.to(own.device))
    return product, x.to(device_of(product))


def num_outputs(product: Product, width: int, dtype: torch.dtype) -> int:
    return product(torch.zeros(1, width, dtype=dtype, device=device_of(product))).shape[1]


def device_of(product: Any) -> torch.device:
    """That of its weights; products without any are on a CPU."""
    weight = getattr(product, "weight", None)
    return weight.device if isinstance(weight, Tensor) else torch.device("cpu")


def cancelling(outputs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [O, D], a bias [O] and rows [512, D]; in each sum the second half cancels the first.

    The second half is in another order, so that another order of addition changes most results. A bias would
    hide that in its own last bits, so every second one is 0; the others show where it is added.
    """
    generator, half = torch.Generator().manual_seed(0), width // 2
    order = torch.randperm(half, generator=generator)
    sizes = torch.exp2(4 * torch.rand(max(SIZES), width, generator=generator))
    x = (torch.randn(max(SIZES), width, generator=generator) * sizes).to(dtype)
    weight = torch.randn(outputs, width, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    bias[::2] = 0
    if outputs:
        weight[:, width - half :] = weight[:, :half][:, order]
        x[:, width - half :] = -x[:, :half][:, order]
    return weight, bias, x


def equal_rows(
    product: Product, x: Tensor, counts: Iterable[int] = ALL_COUNTS, more: tuple[int, ...] = MORE_COUNTS
) -> InvariantRows | None:
    """The numbers of rows of `x` between which a row's result is equal, wherever it is among them."""
    results = {rows: product(x[:rows].contiguous()) for rows in counts}

    def equal(min_rows: int, max_rows: int) -> bool:
        whole = results[max_rows]
        return torch.equal(turned(product, x, max_rows), whole) and all(
            torch.equal(results[n], whole[:n]) for n in results if min_rows <= n < max_rows
        )

    @cache
    def piece(start: int, rows: int) -> Tensor:
        return product(x[start : start + rows].contiguous())

    def agrees(rows: int, max_rows: int) -> bool:
        """Whether so many rows at once, in another order, yield what small pieces do."""
        pieces = [piece(start, max_rows) for start in range(0, rows, max_rows)]
        return torch.equal(turned(product, x, rows), torch.cat(pieces)[:rows])

    for min_rows, max_rows in candidates():
        if equal(min_rows, max_rows):
            if max_rows == max(MOST) and all(agrees(rows, max_rows) for rows in more):
                return InvariantRows(min_rows, more[-1])
            sizes = (size for size in SIZES if size <= len(x) and agrees(size, max_rows))
            return InvariantRows(min_rows, max_rows, tuple(sizes))
    return None


def candidates() -> Iterator[tuple[int, int]]:
    """Fewest and most rows. The best first: few rows are usual, and larger pieces save time in prompts."""
    return ((fewest, max_rows) for group in FEWEST for max_rows in MOST for fewest in group)


class InvariantProducts(TorchFunctionMode):
    """Within it, products by a matrix of weights in any model code run in pieces.

    Other forms run as they are; where one of them depends on the batch, the comparison of logits shows it.
    """

    def __init__(self, pieces: ProductPieces):
        super().__init__()
        self.pieces = pieces

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        match func, args:
            case F.linear, (x, Tensor() as weight, *bias) if weight.dim() == 2 and len(bias) < 2:
                return self.product(x, weight, *bias, **kwargs)
            case torch.addmm, (bias, x, nn.Parameter() as weight) if not kwargs and weight.dim() == 2:
                return self.product(x, weight.t(), bias)
            case ((torch.matmul | Tensor.matmul | Tensor.__matmul__), (x, Tensor() as weight)) if (
                not kwargs and weight.dim() == 2 and of_parameter(weight)
            ):
                return self.product(x, weight.t())
        return func(*args, **kwargs)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs, width = weight.shape
        product = self.pieces.of(Linear(weight, bias), outputs, width, weight.dtype)
        return product(x.reshape(-1, width)).view(*x.shape[:-1], outputs)


def of_parameter(weight: Tensor) -> bool:
    """Whether it is a parameter, or a part of one, like the matrix of one expert."""
    return isinstance(weight, nn.Parameter) or isinstance(weight._base, nn.Parameter)
