"""Products in pieces, for whose numbers of rows one order of addition was measured.

Kernels choose that order by the number of rows, so a row's result depends on how many others there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from speculon.core.types import ceil_div
from speculon.decoding.batch import Runs
from speculon.target.linear import Linear, Packed, Product, SideBySide, packed
from speculon.target.remembered import once

MOST = (64, 32, 16, 8)  # rows of a small piece
# those that cost about the same are together: on an AMD EPYC four rows took 0.8 times as long as two
FEWEST = ((1, 4, 2), (8,))
SIZES = (512, 256, 128)  # rows of a large piece, which must be exactly so many
# rows of prompts: most are in the largest pieces; 64 rows took 1.2 to 1.7 times as long, 256 gained nothing
PROMPT_SIZES = tuple(range(16, 129, 16))
LARGE = 1 << 24  # elements; larger weights are not copied, and fewer numbers of rows are compared
ALL_COUNTS = range(1, max(MOST) + 1)
FEW_COUNTS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64)
# if these agree, too, pieces have as many rows as the last of them; each third one for large weights
MORE_COUNTS = (65, 71, 77, 95, 96, 100, 127, 128, 129, 150, 191, 200, 255, 257, 300, 383, 400, 500, 512)

_prompts: ContextVar[Runs] = ContextVar("speculon_prompts", default=())


@contextmanager
def with_prompts(prompts: Runs) -> Iterator[None]:
    """Within the context, these rows of the forward that runs belong to prompts."""
    token = _prompts.set(prompts)
    try:
        yield
    finally:
        _prompts.reset(token)


class Rows(NamedTuple):
    """The numbers of rows between which the results of a row are bitwise equal."""

    fewest: int
    most: int
    sizes: tuple[int, ...] = ()  # and larger ones, the largest first
    prompts: tuple[int, ...] = ()  # those that agree with the largest of them, and may differ from all above

    @property
    def prompts_differ(self) -> bool:
        """Whether prompts take fewer, larger pieces if they need not agree with generated tokens."""
        return bool(self.prompts) and not self.sizes

    def in_prompts(self, other: Rows) -> tuple[int, ...]:
        """The sizes of pieces of prompts that pass two products one after the other."""
        return tuple(size for size in self.prompts if size in other.prompts)


@dataclass(slots=True)
class InPieces:
    """A product in pieces of such numbers of rows."""

    product: Product
    rows: Rows

    def __call__(self, x: Tensor) -> Tensor:  # [T, D] -> [T, O]
        rows, (_, most, sizes, _) = x.size(0), self.rows  # `len(x)` and `x.shape` are slower
        if rows <= most:
            return self.padded(x, rows)
        pieces = cut(rows, most, sizes)
        return torch.cat([self.padded(*piece) for piece in zip(x.split(pieces), pieces, strict=True)])

    def padded(self, x: Tensor, rows: int) -> Tensor:
        """The product of as few rows as there are; they are repeated where it takes more."""
        if 0 < rows < self.rows.fewest:
            return self.product(repeated(x, self.rows.fewest))[:rows]
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
            pieces = cut(last - first, self.sizes[-1], ())
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


def cut(rows: int, most: int, sizes: tuple[int, ...]) -> list[int]:
    """More rows than `most` as pieces of these sizes, and a rest in pieces of at most `most`, about even."""
    pieces = []
    for size in sizes:
        pieces += [size] * (rows // size)
        rows %= size
    parts = ceil_div(rows, most)
    return pieces + [rows * (i + 1) // parts - rows * i // parts for i in range(parts)]


class CannotBeInvariant(Exception):
    """The results of a kernel depend on the batch; the message says which."""


@dataclass(slots=True)
class Pieces:
    """Puts products in pieces. Those of one layout, dtype and shape take one kernel and are measured once."""

    known: dict[Any, Rows] = field(default_factory=dict)

    def by_row(self, product: Product, outputs: int, width: int, dtype: torch.dtype) -> Product:
        """The same for a product of all rows of a forward in their order, where prompts may be apart."""
        made = self.of(product, outputs, width, dtype)
        if isinstance(made, InPieces) and made.rows.prompts_differ:
            return PromptsApart(made, product, made.rows.prompts)
        return made

    def of(self, product: Product, outputs: int, width: int, dtype: torch.dtype) -> Product:
        """Raises `CannotBeInvariant` where no numbers of rows are equal."""
        match product:
            case nn.Linear():
                return self.of(Linear(product.weight, product.bias), outputs, width, dtype)
            case SideBySide():
                linear = [part for part in product.parts if isinstance(part, Linear)]
                return SideBySide([self.of(part, len(part.weight), width, dtype) for part in linear])
        key = *layout_of(product), dtype, outputs, width
        rows = self.known.get(key)
        if rows is None:
            rows = self.known[key] = once(
                f"rows {key_name(key)}", lambda: measured(product, outputs, width, dtype), rows_from
            )
        return InPieces(product, rows)


def key_name(key: tuple[Any, ...]) -> str:
    return " ".join(part.__name__ if isinstance(part, type) else str(part) for part in key)


def rows_from(kept: list[Any]) -> Rows:
    fewest, most, sizes, prompts = kept
    return Rows(fewest, most, tuple(sizes), tuple(prompts))


def layout_of(product: Product) -> tuple[Any, ...]:
    """What chooses its kernel, beside dtype and shape."""
    match product:
        case Linear(weight, bias):
            return Linear, weight.device, weight.is_contiguous(), bias is not None
        case Packed(_, bias):
            return Packed, bias is not None
    return (product,)


@torch.inference_mode()
def measured(product: Product, outputs: int, width: int, dtype: torch.dtype) -> Rows:
    """Of generated weights in the layout of the product; where they would be large, of its own."""
    large = outputs * width > LARGE
    weight, bias, x = cancelling(0 if large else outputs, width, dtype)
    match product:
        case Packed() if not large:
            product = packed(weight, None if product.bias is None else bias)
        case Linear(own) if not large:
            weight = weight if own.is_contiguous() else weight.t().contiguous().t()
            product = Linear(weight.to(own.device), None if product.bias is None else bias.to(own.device))
    if isinstance(product, Linear):
        x = x.to(product.weight.device)
    rows = equal_rows(product, x, *((FEW_COUNTS, MORE_COUNTS[::3]) if large else (ALL_COUNTS, MORE_COUNTS)))
    if rows is None:
        name = f"a product of {outputs} x {width}"
        raise CannotBeInvariant(f"{name} differs by its number of rows on this machine")
    return rows


def cancelling(outputs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [O, D], a bias [O] and rows [512, D]; in each sum the second half cancels the first.

    The second half is in another order, so that another order of addition changes most results.
    """
    generator, half = torch.Generator().manual_seed(0), width // 2
    order = torch.randperm(half, generator=generator)
    sizes = torch.exp2(4 * torch.rand(max(SIZES), width, generator=generator))
    x = (torch.randn(max(SIZES), width, generator=generator) * sizes).to(dtype)
    weight = torch.randn(outputs, width, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    if outputs:
        weight[:, width - half :] = weight[:, :half][:, order]
        x[:, width - half :] = -x[:, :half][:, order]
    return weight, bias, x


def equal_rows(
    product: Product, x: Tensor, counts: Iterable[int] = ALL_COUNTS, more: tuple[int, ...] = MORE_COUNTS
) -> Rows | None:
    """The numbers of rows of `x` between which a row's result is equal, wherever it is among them."""
    found = {rows: product(x[:rows].contiguous()) for rows in counts}

    def equal(fewest: int, most: int) -> bool:
        whole = found[most]
        turned = product(x[:most].flip(0).contiguous()).flip(0)
        return torch.equal(turned, whole) and all(
            torch.equal(found[n], whole[:n]) for n in found if fewest <= n < most
        )

    def agrees(size: int, most: int) -> bool:
        """All its rows, and not the first alone, are those of pieces of so many, in any order."""
        pieces = torch.cat([product(part) for part in x[:size].split(cut(size, most, ()))])
        turned = product(x[:size].flip(0).contiguous()).flip(0)
        return torch.equal(turned, pieces) and torch.equal(product(x[:size].contiguous()), pieces)

    for fewest, most in candidates():
        if equal(fewest, most):
            if most == max(MOST) and all(agrees(size, most) for size in more):
                return Rows(fewest, more[-1])
            sizes = tuple(size for size in SIZES if size <= len(x) and agrees(size, most))
            return Rows(fewest, most, sizes, prompt_sizes(product, x))
    return None


def prompt_sizes(product: Product, x: Tensor) -> tuple[int, ...]:
    """Those with which a row's result is that in the largest piece, wherever the row is."""
    most = PROMPT_SIZES[-1]
    whole = product(x[:most].contiguous())

    def agrees(size: int) -> bool:
        turned = product(x[:size].flip(0).contiguous()).flip(0)
        return torch.equal(product(x[:size].contiguous()), whole[:size]) and torch.equal(turned, whole[:size])

    return tuple(size for size in PROMPT_SIZES if agrees(size)) if agrees(most) else ()


def candidates() -> Iterator[tuple[int, int]]:
    """Fewest and most rows. The best first: few rows are usual, and larger pieces save time in prompts."""
    return ((fewest, most) for group in FEWEST for most in MOST for fewest in group)


class InvariantProducts(TorchFunctionMode):
    """Within it, products by a matrix of weights in any model code run in pieces.

    Other forms run as they are; where one of them depends on the batch, the comparison of logits shows it.
    """

    def __init__(self, pieces: Pieces):
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
            case ((torch.matmul | Tensor.matmul | Tensor.__matmul__), (x, nn.Parameter() as weight)) if (
                not kwargs and weight.dim() == 2
            ):
                return self.product(x, weight.t())
        return func(*args, **kwargs)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs, width = weight.shape
        product = self.pieces.of(Linear(weight, bias), outputs, width, weight.dtype)
        return product(x.reshape(-1, width)).view(*x.shape[:-1], outputs)
