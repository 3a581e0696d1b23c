"""The small operations between products as programs of torch's ahead-of-time compiler, on CPU.

A norm, the rotation of heads and a gated activation are one pass over their rows each. Weights are inputs, so
all layers of one shape share a program. Programs are kept in the compiler's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from speculon.target.block import ROUNDING, Gated, Gating, Loop, Norm, Rotary, Tables, rotate
from speculon.target.remembered import chip_name
from speculon.target.trial import refused

Settings = dict[str, Any]  # of the compiler
Run = Callable[[list[Tensor]], list[Tensor]]

ROWS = 64  # of the example that is compiled, so that threads share the rows, and never a sum
MOST_ROWS = 1 << 40  # no limit
FEW = 16  # up to so many rows waking threads takes longer than they save: about equal for 8 of 2 x 1536
ONE_THREAD: Settings = {"cpp.threads": 1}
THREADS: Settings = {"cpp.dynamic_threads": True}  # as many as there are when it runs

Replacement = tuple[Any, str, Callable[..., Tensor]]  # an object, the name of its operation, and the program


@dataclass(slots=True)
class Program:
    """One operation compiled twice, with bitwise equal results for a row."""

    few: Run
    many: Run

    def __call__(self, *inputs: Tensor) -> Tensor:
        run = self.few if inputs[0].size(0) <= FEW else self.many
        return run([*inputs])[0]


class NormRows(nn.Module):
    """`Norm` of rows [T, D] or of heads [T, H, D], given its `scaled` weight and `floor`."""

    def forward(self, x: Tensor, scaled: Tensor, floor: Tensor) -> Tensor:
        wide = x.float()
        size = wide.square().sum(-1, keepdim=True)
        return (wide * torch.rsqrt(size + floor) * scaled).to(x.dtype)


class RotaryRows(nn.Module):
    """`Rotary` of heads [T, H, Dh], where heads have a norm with its `scaled` weight and `floor`."""

    def forward(
        self, heads: Tensor, cos: Tensor, sin: Tensor, scaled: Tensor | None = None, floor: Any = None
    ) -> Tensor:
        if scaled is not None:
            heads = NormRows()(heads, scaled, floor)
        return rotate(heads, (cos, sin))


class GatingRows(nn.Module):
    """`Gating` of rows [T, 2 I]."""

    def __init__(self, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.act = act

    def forward(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act(gate) * up


@torch.inference_mode()
def compile_operations(loop: Loop) -> None:
    """Replaces the operations of a loop by programs: half a minute at the first load of a shape.

    Raises `CannotReplace`, with nothing replaced, without a compiler or where a program differs.
    """
    with refused("compiled"):  # no C++ compiler, a read-only folder, or any error of the compiler's own
        replacements = list(programs(loop))
    for owner, name, run in replacements:
        setattr(owner, name, run)


def programs(loop: Loop) -> Iterator[Replacement]:
    """The program of each operation of a loop."""
    made: dict[str, Program] = {}
    x = random_rows(loop.norm.weight.shape[-1], loop.embed)
    for block, kind in zip(loop.blocks, loop.kinds, strict=True):
        attention, mlp = block.attention, block.mlp
        for norm in filter(None, block.norms):
            yield norm, "compute", norm_program(norm, x, made)
        if isinstance(rotary := attention.rotary, Rotary) and rotary.rotates:
            tables = loop.tables(x[None], torch.arange(ROWS)[None], kind)
            heads = attention.states(x)[:, : attention.heads + attention.kv_heads]
            yield attention, "rotary", rotary_program(rotary, heads, tables, made)
        if isinstance(mlp, Gated) and isinstance(mlp.gating, Gating):
            yield mlp, "gating", gating_program(mlp.gating, mlp.gate_up(x), made)
    yield loop.norm, "compute", norm_program(loop.norm, x, made)


def random_rows(width: int, like: Any) -> Tensor:  # [ROWS, D]
    """In the dtype of an embedding."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(like.weight.dtype)


def norm_program(norm: Norm, x: Tensor, made: dict[str, Program]) -> Callable[[Tensor], Tensor]:
    scaled, floor = norm.scaled, norm.floor
    run = program(NormRows(), [x], [scaled, floor], norm.few_operations(x.float()), made)
    return lambda x: run(x, scaled, floor)


def rotary_program(
    rotary: Rotary, heads: Tensor, tables: Tables, made: dict[str, Program]
) -> Callable[[Tensor, Tables], Tensor]:
    weights = [] if rotary.norm is None else [rotary.norm.scaled, rotary.norm.floor]
    cos, sin = (table.float() for table in tables)
    run = program(RotaryRows(), [heads, *tables], weights, rotary(heads.float(), (cos, sin)), made)
    return lambda heads, tables: run(heads, *tables, *weights)


def gating_program(gating: Gating, both: Tensor, made: dict[str, Program]) -> Callable[[Tensor], Tensor]:
    return program(GatingRows(gating.act), [both], [], gating(both.float()), made)


def program(
    module: nn.Module,
    rows: list[Tensor],
    weights: list[Tensor],
    expected: Tensor,
    made: dict[str, Program],
) -> Program:
    """A module compiled for inputs like these, and compared with `expected`, its results in fp32.

    The programs of this load are in `made`. Raises `ValueError` where one differs.
    """
    key = program_key(module, [*rows, *weights])
    if key not in made:
        compiled = partial(load_or_compile, key, module, rows, weights)
        made[key] = Program(compiled(ONE_THREAD), compiled(THREADS))
    results = made[key](*rows, *weights)
    limit = 2 * ROUNDING[results.dtype] * expected.abs().amax(-1, keepdim=True)  # of norm and rotation
    if results.dtype is not rows[0].dtype or not ((results - expected).abs() <= limit).all():
        raise ValueError("it computes something else")
    for count in (1, 2, 3, FEW, FEW + 1, ROWS - 1):
        if not torch.equal(made[key](*(x[:count] for x in rows), *weights), results[:count]):
            raise ValueError("a row depends on how many there are")
    return made[key]


def program_key(module: nn.Module, inputs: list[Tensor]) -> str:
    """The name of a program in the compiler's cache: machine, versions, code, and shapes."""
    shapes = [(x.shape, x.stride(), x.dtype) for x in inputs]
    act = getattr(module, "act", None)
    numbers = {
        name: x for name, x in getattr(act, "__dict__", {}).items() if isinstance(x, int | float | str)
    }
    called = type(module).__name__, getattr(act, "__qualname__", type(act).__qualname__), numbers
    versions = torch.__version__, transformers.__version__, chip_name()
    parts = versions, Path(__file__).read_bytes(), getsource(rotate), called, shapes
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load_or_compile(
    key: str, module: nn.Module, rows: list[Tensor], weights: list[Tensor], settings: Settings
) -> Run:
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.export import Dim, export

    def loaded() -> Run:
        run: Run = aoti_load_package(str(path), run_single_threaded=True).loader.boxed_run
        return run

    path = Path(cache_dir()) / "speculon" / f"{key}-{'-'.join(settings)}.pt2"
    if path.exists():
        with suppress(RuntimeError):  # a damaged file is replaced
            return loaded()
    path.parent.mkdir(parents=True, exist_ok=True)
    any_rows = Dim("rows", min=2, max=MOST_ROWS)  # one row works, too: the program has no number of rows
    shapes = (*({0: any_rows} for _ in rows), *({} for _ in weights))
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        examples = tuple(map(copied, (*rows, *weights)))
        exported = export(module, examples, dynamic_shapes=shapes, strict=False)
        # moved into place when complete: other processes read this folder
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            package = f"{folder}/{path.name}"
            aoti_compile_and_package(exported, package_path=package, inductor_configs=settings)
            os.replace(package, path)
    return loaded()


def copied(x: Tensor) -> Tensor:
    """With the same strides, and no tensor of inference mode, which cannot be exported."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
