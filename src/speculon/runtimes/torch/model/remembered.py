"""What earlier loads of the same checkpoint found, on the same machine with the same code.

Only checks that passed and measured choices are kept, so that a model is refused anew each time.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from speculon.core.config.file import cache_folder
from speculon.core.kept_files import chip_name, key_of, read_json, write_json

KERNELS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "CUBLAS", "NVIDIA_")  # what chooses them

T = TypeVar("T")
log = logging.getLogger("speculon")


@dataclass(slots=True)
class RememberedResults:
    """Results by name, and whether there are new ones."""

    results: dict[str, Any] = field(default_factory=dict)
    new: bool = False


_found: ContextVar[RememberedResults | None] = ContextVar("speculon_found", default=None)


@contextmanager
def remembering(files: list[Path], *settings: object) -> Iterator[None]:
    """Within it `once` returns what was found for these files and settings before, and keeps what is new.

    An exception keeps nothing. A damaged file, or one of other files or another machine, is ignored.
    """
    folder = cache_folder()
    if folder is None:
        yield
        return
    key = key_of((settings, machine(), code()), files)
    path = folder / f"{key}.json"
    known = read_json(path, key)
    token = _found.set(results := RememberedResults(known if isinstance(known, dict) else {}))
    try:
        yield
    finally:
        _found.reset(token)
    if results.new:
        write_json(path, key, results.results)


def once(name: str, compute: Callable[[], T], read: Callable[[Any], T] | None = None) -> T:
    """The remembered result of `compute`, else the result itself, which JSON can hold.

    `read` makes it from JSON again. Raises what `compute` raises.
    """
    remembered = _found.get()
    if remembered is None:
        return compute()
    if name in remembered.results:
        try:
            return read(remembered.results[name]) if read else remembered.results[name]
        except (TypeError, ValueError):
            log.warning("the remembered %s is damaged; it is found anew", name)
    result = remembered.results[name] = compute()
    remembered.new = True
    return result


def passed(name: str) -> bool:
    """Whether a check of that name passed before."""
    remembered = _found.get()
    return remembered is not None and remembered.results.get(name) is True


def passes(name: str) -> None:
    """Keeps that a check passed."""
    once(name, lambda: True)


def machine() -> tuple[object, ...]:
    """What chooses a kernel, and what a kernel adds up in."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    settings = sorted(item for item in os.environ.items() if item[0].startswith(KERNELS))
    process = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.version.cuda
    return platform.platform(), chip(), devices, torch.get_num_threads(), settings, process


def chip() -> tuple[object, ...]:
    """What chooses the layout of a weight."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return chip_name(), sorted(capabilities.items()), torch.backends.cpu.get_cpu_capability()


@cache
def code() -> str:
    """The versions, and all code of speculon."""
    digest = blake2b(repr((torch.__version__, transformers.__version__)).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
