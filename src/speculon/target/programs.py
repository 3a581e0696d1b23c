"""Programs of the compiled layers: made by torch's ahead-of-time compiler, kept in its cache folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import getfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, export

if TYPE_CHECKING:
    from speculon.target.compiled_layers import Arguments, Exported, Program, Settings

MOST = 1 << 40  # rows or slots: no limit


def program(layers: Exported, variant: str, settings: Settings, arguments: Arguments, key: str) -> Program:
    """The layers compiled for arguments like these; sizes above one may vary."""
    # without the number of pages, which differs between stores
    shapes = [None if x is None else x.shape[x.dim() > 2 :] for x in arguments]
    name = hashlib.sha256(f"{key} {variant} {settings} {shapes}".encode()).hexdigest()
    path = Path(cache_dir()) / "speculon" / f"{name}.pt2"
    if path.exists():
        with suppress(RuntimeError):  # a damaged file is replaced
            return loaded(path, layers, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    # clones, because pages are inference tensors
    examples = tuple(None if x is None else x.clone() for x in arguments)
    made = export(layers, examples, dynamic_shapes=dynamic_sizes(arguments, layers), strict=False)
    # moved into place when complete: other processes read this folder
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        package = f"{folder}/{path.name}"
        os.replace(aoti_compile_and_package(made, package_path=package, inductor_configs=settings), path)
    return loaded(path, layers, settings)


def loaded(path: Path, layers: Exported, settings: Settings) -> Program:
    """The program in a file; where it holds no weights, it uses those of `layers`."""
    package = aoti_load_package(str(path), run_single_threaded=True)
    run = package.loader.boxed_run
    if settings.get("aot_inductor.package_constants_in_so", True):
        return partial(call, run)
    weights = dict(
        chain(layers.named_parameters(remove_duplicate=False), layers.named_buffers(remove_duplicate=False))
    )
    names = package.get_constant_fqns()
    if missing := set(names) - weights.keys():
        raise LookupError(f"{min(missing)} is a constant, but no weight")
    used = {name: weights[name].detach() for name in names}  # the package keeps them
    package.load_constants(used, check_full_update=True, user_managed=True)
    return partial(call, run)


def call(run: Callable[[list[Tensor]], list[Tensor]], *arguments: Tensor | None) -> list[Tensor]:
    """The package's call without its pytrees, which cost a twelfth of a step of one row."""
    return run([x for x in arguments if x is not None])


def dynamic_sizes(arguments: Arguments, layers: Exported) -> tuple[Any, ...]:
    """The dynamic sizes: rows, scored rows, sequences, most rows of one, and slots of each layer kind."""
    count, layer_kinds = len(layers.sizes), layers.layer_kinds
    named = {name: Dim(name, min=2, max=MOST) for name in (*layers.sizes, "sequences", "most")}
    first = [
        {0: named[name]} if x is not None and len(x) > 1 else {}
        for name, x in zip(layers.sizes, arguments, strict=False)
    ]
    slots, pages, rows = arguments[count], arguments[count + 1 :], first[0]
    of_kind = {kind: Dim(f"slots_{kind}", min=2, max=MOST) for kind in sorted(set(layer_kinds))}
    if slots is None:
        keys = [{0: of_kind[kind]} for kind in layer_kinds]
        more = [{**rows, 1: of_kind[kind]} for kind in of_kind]
    else:
        keys = [{0: Dim("slots", min=2, max=MOST)}] * len(layer_kinds)
        sequences, n = {0: named["sequences"]}, named["most"]
        wheres = [{**sequences, 1: seen} for seen in of_kind.values()]
        masks = [{**sequences, 2: n, 3: seen} for seen in of_kind.values()]
        more = [{**sequences, 1: n}, rows, *wheres, *masks]
    return *first, None if slots is None else rows, (*keys, *keys, *more)[: len(pages)]


def program_key(layers: Exported) -> str:
    """The key of programs in the compiler's cache: weights, machine, versions, and this code."""
    versions = torch.__version__, transformers.__version__
    machine: tuple[object, ...] = (str(pick_vec_isa()), getattr(torch.cpu, "get_capabilities", dict)())
    build: tuple[object, ...] = (layers, versions, machine, torch.get_num_threads())
    parts: list[Any] = [program, *layers.code, *map(type, layers.modules())]
    sources = b"".join(Path(file).read_bytes() for file in sorted({getfile(part) for part in parts}))
    key = hashlib.sha256(f"{build}".encode() + sources)
    # numbers become constants of a program: eps, scaling, layer kinds
    for name, module in layers.named_modules():
        constants = [(x, y) for x, y in vars(module).items() if isinstance(y, int | float | list)]
        key.update(f"{name} {constants}".encode())
        key.update(f"{getattr(vars(module).get('act'), '__qualname__', '')}".encode())
    # rotary tables are buffers outside of the state
    for name, weight in {**layers.state_dict(), **dict(layers.named_buffers())}.items():
        key.update(f"{name} {weight.shape}".encode())
        key.update(weight.contiguous().numpy())
    return key.hexdigest()
