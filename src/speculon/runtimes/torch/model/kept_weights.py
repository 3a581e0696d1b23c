"""Packed weights of earlier loads, mapped from the cache folder instead of packed again.

A file of safetensors holds those of one checkpoint as this chip multiplies by them, with a digest of its
content. What is damaged or of another checkpoint is ignored, and replaced at the end of the load.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculon.core import kept_files
from speculon.core.config.file import cache_folder
from speculon.runtimes.torch.model import remembered

SUFFIX = ".safetensors"
NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32"}
NAMES |= {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# what reading a damaged file raises
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
ALIGNMENT, CHUNK = 64, 1 << 20  # bytes: of the first tensor in a file, and read at once

log = logging.getLogger("speculon")


@dataclass(slots=True)
class KeptWeights:
    """Tensors by name, and whether there are new ones."""

    folder: Path
    key: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    new: bool = False

    def file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


_kept: ContextVar[KeptWeights | None] = ContextVar("speculon_kept_weights", default=None)


@contextmanager
def keeping(files: Sequence[Path], *settings: object) -> Iterator[None]:
    """Within it `kept` returns what earlier loads packed of these files with these settings.

    What is new is written at the end; an exception keeps nothing.
    """
    folder = cache_folder()
    if folder is None:
        yield
        return
    weights = KeptWeights(folder, key := weights_key(files, settings))
    weights.tensors = mapped(path := weights.file(key), key)
    token = _kept.set(weights)
    try:
        yield
    finally:
        _kept.reset(token)
    if weights.new:
        write(path, key, weights.tensors)


def kept(name: str, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A packed weight and its scales, mapped if an earlier load kept them, else what `make` returns.

    On the CPU alone, and only where the weight has a name.
    """
    weights, of_weight, of_scales = _kept.get(), f"{name}.weight", f"{name}.scales"
    if weights is None or not name:
        return make()
    if of_weight in weights.tensors and of_scales in weights.tensors:
        return weights.tensors[of_weight], weights.tensors[of_scales]
    weight, scales = make()
    if weight.device.type == "cpu":
        weights.tensors |= {of_weight: weight, of_scales: scales}
        weights.new = True
    return weight, scales


def kept_apart(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a weight is packed of. It has a file of its own, which is written at once: tensors that nobody
    multiplies by are not held until the end.
    """
    weights = _kept.get()
    if weights is None or not name:
        return make()
    path = weights.file(key := kept_files.key_of((weights.key, name)))
    if tensors := mapped(path, key):
        return tensors
    write(path, key, made := make())
    return made


def weights_key(files: Sequence[Path], settings: tuple[object, ...]) -> str:
    """Unlike the key of remembered checks, it does not depend on threads, but on when a file was written."""
    written = [(str(file.resolve()), file.stat().st_mtime_ns) for file in files]
    return kept_files.key_of((settings, written, remembered.chip(), remembered.code()), files)


def mapped(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped; none where it is missing, damaged or of another key."""
    try:
        with path.open("rb") as stream:
            header = read_header(stream)
            metadata = header.pop("__metadata__")
            if metadata["key"] != key or metadata["digest"] != stream_digest(header, stream):
                raise ValueError("its digest is another one")
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in header}
    except FileNotFoundError:
        return {}
    except DAMAGED as error:
        log.warning("%s is not used (%s); the weights are packed anew", path, error)
        return {}
    kept_files.used(path)
    return tensors


def read_header(stream: BinaryIO) -> dict[str, Any]:
    size = int.from_bytes(stream.read(8), "little")
    if size > os.fstat(stream.fileno()).st_size:
        raise ValueError("it is cut off")
    header: dict[str, Any] = json.loads(stream.read(size))
    return header


def stream_digest(header: dict[str, Any], stream: BinaryIO) -> str:
    digest = sha256(json.dumps(header).encode())
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def write(path: Path, key: str, tensors: dict[str, Tensor]) -> None:
    """Tensors are not copied, as `safetensors.torch.save_file` would copy them all."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    contents = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors.values()]

    def content(stream: BinaryIO) -> None:
        if end > min(kept_files.LIMIT, shutil.disk_usage(path.parent).free // 2):
            raise OSError(f"it would take {end / 1e9:.1f} GB, which is too much")
        digest = sha256(json.dumps(header).encode())
        for part in contents:
            digest.update(part)
        text = json.dumps({"__metadata__": {"key": key, "digest": digest.hexdigest()}, **header}).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        stream.write(len(text).to_bytes(8, "little") + text)
        for part in contents:
            stream.write(part)

    kept_files.write(path, content)
