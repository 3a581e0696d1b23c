"""Parts of a step as programs of torch's ahead-of-time compiler, on CPU.

A norm, the rotation of heads and a gated activation are one pass over their rows each. Where products are of
packed weights, whose rows do not depend on each other, all between two attentions is one program, with its
products. Weights are inputs, so all layers of one shape share a program. It rounds where the loop does, which
gives the same bits. Programs are kept in a folder, for all models of that shape.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import getsource
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from speculon.core.config.file import cache_folder
from speculon.core.kept_files import chip_name, clean, used
from speculon.runtimes.torch.model.block import (
    SUMS,
    Between,
    CannotReplace,
    FusedNorm,
    Gated,
    Gating,
    Loop,
    Rotary,
    RotaryTables,
    between,
    rotate,
)
from speculon.runtimes.torch.model.compare import nearly
from speculon.runtimes.torch.model.pieces import InPieces, PromptsApart
from speculon.runtimes.torch.model.quantized import MEASURED_ROWS, Packed4, Packed8, cpu_product
from speculon.runtimes.torch.model.trial import cast, refused

BETWEEN = "between"  # the part of a loop that is all between two attentions
CompilerSettings = dict[str, Any]  # of the compiler
RunProgram = Callable[[list[Tensor]], list[Tensor]]

ROWS = 64  # of the example that is compiled, so that threads share the rows, and never a sum
HALVED = 8  # after so many rows they are half as large; an update is not small beside the last ones
FEW = 16  # up to so many rows waking threads takes longer than they save: about equal for 8 of 2 x 1536
UNFINISHED, ABANDONED = ".unfinished-", 24 * 3600  # folders of compilers that run, or were killed; seconds
# roundings to bf16 between operations, and a product and a sum as one operation: both as torch's own kernels
AS_THE_LOOP: CompilerSettings = {
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "fast",
}
ONE_THREAD: CompilerSettings = {"cpp.threads": 1, **AS_THE_LOOP}
THREADS: CompilerSettings = {"cpp.dynamic_threads": True, **AS_THE_LOOP}  # as many as there are when it runs

ExportedPart = tuple[nn.Module, list[Tensor]]  # of a program, with its weights
Plain = Callable[..., Sequence[Tensor]]  # rows -> what a program of them computes, without the compiler

source_of = cache(getsource)  # which parses the whole file of a class


@dataclass(slots=True)
class Program:
    """One module compiled twice, with bitwise equal results for a row."""

    few: RunProgram
    many: RunProgram

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        run = self.few if inputs[0].size(0) <= FEW else self.many
        return run([*inputs])


class NormRows(nn.Module):
    """`FusedNorm` of rows [T, D] or of heads [T, H, D], given its `scaled` weight and `floor`."""

    def forward(self, x: Tensor, scaled: Tensor, floor: Tensor) -> Tensor:
        wide = x.float()
        size = wide.to(SUMS).square().sum(-1, keepdim=True)
        return (wide * torch.rsqrt(size + floor).float() * scaled).to(x.dtype)


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


class PackedRows(nn.Module):
    """The product of rows [T, D] by weights in 4 or 8 bits."""

    def __init__(self, product: Packed4):
        super().__init__()
        self.form = type(product)  # an operator of torch cannot be sent to a process

    def forward(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        assert cpu_product is not None
        return self.form(weight, scales, bias, cpu_product)(x)


class BetweenRows(nn.Module):
    """`Between` of rows x [T, D] and seen [T, H Dh], from its ten parts in their order."""

    def __init__(self, parts: Sequence[ExportedPart], heads: int, head_dim: int):
        super().__init__()
        self.parts = nn.ModuleList(module for module, _ in parts)
        self.counts, self.heads, self.head_dim = [len(weights) for _, weights in parts], heads, head_dim

    def forward(
        self, x: Tensor, seen: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        left = iter(weights)
        own = [[*islice(left, count)] for count in self.counts]
        out, after, before_mlp, gate_up, gating, down, after_mlp, before, qkv, rotary = (
            lambda *rows, module=module, part=part: module(*rows, *part)
            for module, part in zip(self.parts, own, strict=True)
        )
        x = x + after(out(seen))
        x = x + after_mlp(down(gating(gate_up(before_mlp(x)))))
        states = qkv(before(x)).unflatten(1, (-1, self.head_dim))
        return x, rotary(states[:, : self.heads], cos, sin), states[:, self.heads :]


class AllInputs(nn.Module):
    """A module whose inputs have one signature, with any number of weights."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        return self.inner(*inputs)


@dataclass(slots=True)
class BetweenProgram:
    """`Between` as a program, with the weights of its layers."""

    run: Program
    weights: list[Tensor]

    def __call__(self, x: Tensor, seen: Tensor, tables: RotaryTables) -> list[Tensor]:
        # a program reads rows as its example had them, whatever their strides are
        rows = x, seen.reshape(x.size(0), -1).contiguous(), *tables
        if x.size(0) <= MEASURED_ROWS:
            return self.run(*rows, *self.weights)
        pieces = zip(*(part.split(MEASURED_ROWS) for part in rows), strict=True)
        results = [self.run(*piece, *self.weights) for piece in pieces]
        return [torch.cat(parts) for parts in zip(*results, strict=True)]


@dataclass(slots=True)
class Wanted:
    """A program for inputs like these; `plain` computes what it does without the compiler."""

    module: nn.Module
    rows: list[Tensor]
    weights: list[Tensor]
    plain: Plain
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = program_key(self.module, [*self.rows, *self.weights])


@dataclass(slots=True)
class Replacement:
    """A part of a loop, and what takes its place: something made of one program, or of several."""

    owner: Any
    name: str
    wanted: list[Wanted]
    make: Callable[[list[Program]], Any]

    def take_place(self, made: dict[str, Program]) -> None:
        setattr(self.owner, self.name, self.make([made[one.key] for one in self.wanted]))


@torch.inference_mode()
def compile_parts(loop: Loop) -> None:
    """Replaces parts of a loop by programs: a minute or two at the first load of a shape.

    Raises `CannotReplace`, with nothing replaced, without a compiler or where a program differs.
    """
    made: dict[str, Program] = {}
    with refused("compiled"):  # no C++ compiler, a read-only folder, or any error of the compiler's own
        replacements = list(replacements_of(loop))
        for wanted in (wanted for one in replacements for wanted in one.wanted if wanted.key not in made):
            made[wanted.key] = checked_program(wanted)
    for one in replacements:
        one.take_place(made)


def replacements_of(loop: Loop) -> Iterator[Replacement]:
    """One program of all between two attentions, where that can be, and always one of each operation.

    Operations are also at both ends of a loop, and where adapters or smaller pieces change products later.
    """
    x = random_rows(loop.norm.weight.shape[-1], loop.embed)
    with suppress(CannotReplace):
        yield between_replacement(loop, x)
    for block, kind in zip(loop.blocks, loop.kinds, strict=True):
        attention, mlp = block.attention, block.mlp
        for norm in filter(None, block.norms):
            yield of_operation(norm, "compute", norm, norm.few_operations, [x])
        if isinstance(rotary := attention.rotary, Rotary) and rotary.rotates:
            tables = loop.tables(x[None], torch.arange(ROWS)[None], kind)
            heads = attention.states(x)[:, : attention.heads + attention.kv_heads]
            yield of_rotary(attention, rotary, heads, tables)
        for gated in (mlp.generated, mlp.prompt) if isinstance(mlp, PromptsApart) else (mlp,):
            if isinstance(gated, Gated) and isinstance(gated.gating, Gating):
                yield of_operation(gated, "gating", gated.gating, gated.gating, [gated.gate_up(x)])
    yield of_operation(loop.norm, "compute", loop.norm, loop.norm.few_operations, [x])


def of_operation(
    owner: object, name: str, operation: object, plain: Callable[..., Tensor], rows: list[Tensor]
) -> Replacement:
    """`plain` is its function of these rows."""
    module, weights = part(operation)
    wanted = Wanted(module, rows, weights, lambda *rows: [plain(*rows)])
    return Replacement(owner, name, [wanted], lambda runs: lambda *rows: runs[0](*rows, *weights)[0])


def of_rotary(owner: object, rotary: Rotary, heads: Tensor, tables: RotaryTables) -> Replacement:
    def plain(heads: Tensor, *tables: Tensor) -> Tensor:
        cos, sin = tables
        return rotary(heads, (cos, sin))

    one = of_operation(owner, "rotary", rotary, plain, [heads, *tables])
    make = one.make

    def take_tables(runs: list[Program]) -> Callable[[Tensor, RotaryTables], Tensor]:
        run = make(runs)
        return lambda heads, tables: run(heads, *tables)

    one.make = take_tables
    return one


def between_replacement(loop: Loop, x: Tensor) -> Replacement:
    """Raises `CannotReplace` where a part is not of packed weights, or not known."""
    pairs, wanted = between(loop.blocks), []
    for pair, parts, kind in zip(pairs, [*map(parts_between, pairs)], loop.kinds[1:], strict=True):
        earlier, later = pair.before.attention, pair.after.attention
        module = BetweenRows(parts, later.heads + later.kv_heads, later.head_dim)
        tables = loop.tables(x[None], torch.arange(ROWS)[None], kind)
        seen = random_rows(earlier.heads * earlier.head_dim, loop.embed, seed=1)
        weights = [weight for _, part in parts for weight in part]
        wanted.append(Wanted(module, [x, seen, *tables], weights, of_rows(pair)))

    def make(runs: list[Program]) -> list[BetweenProgram]:
        return [BetweenProgram(run, one.weights) for run, one in zip(runs, wanted, strict=True)]

    return Replacement(loop, BETWEEN, wanted, make)


def of_rows(pair: Between) -> Plain:
    """Of rows in any dtype: packed weights have scales in that of their rows."""
    return lambda x, seen, *tables: cast(pair, x.dtype)(x, seen, tables)


def parts_between(pair: Between) -> list[ExportedPart]:
    """In the order in which they run."""
    before, mlp, after, later = pair.before, pair.before.mlp, pair.after, pair.after.attention
    if not isinstance(mlp, Gated):
        raise CannotReplace("an MLP is not fused")
    _, norm, before_mlp, after_mlp = before.norms
    operations = before.attention.out, norm, before_mlp, mlp.gate_up, mlp.gating, mlp.down, after_mlp
    return [part(one) for one in (*operations, after.norms[0], later.qkv, later.rotary)]


def part(operation: object) -> ExportedPart:
    match operation:
        case None:
            return nn.Identity(), []
        case FusedNorm():
            return NormRows(), [operation.scaled, operation.floor]
        case Gating(act):
            return GatingRows(act), []
        case Rotary(norm, True):
            return RotaryRows(), part(norm)[1]
        case InPieces(product, rows) if rows.as_programs:
            return part(product)
        case Packed4(weight, scales, bias):
            return PackedRows(operation), [weight, scales, *([] if bias is None else [bias])]
    raise CannotReplace(f"{type(operation).__name__} is no part of a program")


def random_rows(width: int, like: Any, seed: int = 0) -> Tensor:  # [ROWS, D]
    """In the dtype of an embedding, each row smaller than the one before."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed))
    return (rows * torch.exp2(-torch.arange(ROWS)[:, None] / HALVED)).to(like.weight.dtype)


def checked_program(wanted: Wanted) -> Program:
    """A module compiled, and about as near as `plain` to what that yields in fp32.

    Raises `ValueError` where it differs.
    """
    rows, weights = wanted.rows, wanted.weights
    compiled = partial(load_or_compile, wanted.key, wanted.module, rows, weights)
    run = Program(compiled(ONE_THREAD), compiled(THREADS))
    results = run(*rows, *weights)
    compared = zip(results, wanted.plain(*rows), wanted.plain(*(x.float() for x in rows)), strict=True)
    equal = all(nearly(*(x.float().flatten(1) for x in three)) for three in compared)
    if not equal or any(x.dtype is not rows[0].dtype for x in results):
        raise ValueError("it computes something else")
    check_rows(run, wanted, results)
    return run


def check_rows(run: Program, wanted: Wanted, results: list[Tensor]) -> None:
    """Raises `ValueError` where a row of the results has other bits in a call of fewer rows."""
    for count in (1, 2, 3, FEW, FEW + 1, ROWS - 1):
        fewer = run(*(x[:count] for x in wanted.rows), *wanted.weights)
        if not all(torch.equal(a, b[:count]) for a, b in zip(fewer, results, strict=True)):
            raise ValueError("a row depends on how many there are")


def program_key(module: nn.Module, inputs: list[Tensor]) -> str:
    """The name of a program in the compiler's cache: machine, versions, code, and shapes."""
    shapes = [(x.shape, x.stride(), x.dtype) for x in inputs]
    called = [described(part) for part in module.modules()]
    versions = torch.__version__, transformers.__version__, chip_name()
    code = Path(__file__).read_bytes(), *map(source_of, (rotate, Packed4, Packed8))
    parts = versions, code, called, shapes
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def described(module: nn.Module) -> list[object]:
    """Its class, its activation, and the numbers of both."""
    act, form = getattr(module, "act", None), getattr(module, "form", None)
    named = [vars(owner).items() for owner in (module, act) if hasattr(owner, "__dict__")]
    numbers = [item for items in named for item in items if isinstance(item[1], int | float | str)]
    return [type(module).__name__, getattr(act, "__qualname__", type(act).__qualname__), form, numbers]


def load_or_compile(
    key: str, module: nn.Module, rows: list[Tensor], weights: list[Tensor], settings: CompilerSettings
) -> RunProgram:
    path = program_file(key, settings)
    if path.exists():
        with suppress(RuntimeError):  # a damaged file is replaced
            return load_program(path)
    compile_program(path, module, rows, weights, settings)
    return load_program(path)


def compile_program(
    path: Path, module: nn.Module, rows: list[Tensor], weights: list[Tensor], settings: CompilerSettings
) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch.export import Dim, export

    path.parent.mkdir(parents=True, exist_ok=True)
    clean_programs(path.parent)
    any_rows = Dim("rows", min=2, max=1 << 40)  # one row works, too, and there is no limit
    shapes = (*({0: any_rows} for _ in rows), *({} for _ in weights))
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        examples = tuple(map(copied, (*rows, *weights)))
        exported = export(AllInputs(module), examples, dynamic_shapes=(shapes,), strict=False)
        # moved into place when complete: other processes read this folder; torch changes the settings
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as folder:
            package = f"{folder}/{path.name}"
            aoti_compile_and_package(exported, package_path=package, inductor_configs={**settings})
            os.replace(package, path)


def clean_programs(folder: Path) -> None:
    """Removes programs that no start uses any more, and what killed compilers have left."""
    clean(folder)
    for left in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process cleans, too
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left)


def load_program(path: Path) -> RunProgram:
    """By the loader itself, since the compiler's package takes seconds to import."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)  # one runner, no device
    used(path)
    return loader.boxed_run


def program_file(key: str, settings: CompilerSettings) -> Path:
    """Where a program is kept: beside what loads found, or else in the compiler's own cache folder."""
    folder = cache_folder()
    if folder is None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir()) / "speculon" / program_name(key, settings)
    return folder / "programs" / program_name(key, settings)


def program_name(key: str, settings: CompilerSettings) -> str:
    return f"{key}-{next(iter(settings))}.pt2"


def copied(x: Tensor) -> Tensor:
    """With the same strides, and no tensor of inference mode, which cannot be exported."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
