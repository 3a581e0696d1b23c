"""How transformers reads a checkpoint: without warnings, a GGUF file's header once, and its tokenizer.

Apart from `load`, so that a server's process imports no models.
"""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from speculon.core.errors import ModelError
from speculon.loading.gguf.header import is_gguf
from speculon.loading.locate import first_line, locate

BESIDE = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*")
NEEDLESS = "for token ids alone, LLM(..., tokenizer=None) needs none"


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' warnings and progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class Reader(gguf.GGUFReader):
    """Reads through a plain view of the file, and an array at once: a vocabulary takes gguf's own seconds."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """The size of a value, its parts, the indices of those that are data, and its types."""
        array, begin = gguf.GGUFValueType.ARRAY, orig_offs + 12
        count = int(self._get(orig_offs + 4, np.uint64)[0]) if raw_type == array else 0
        inner = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0]) if count else array
        if inner == array:  # no array, or an empty one
            return super()._get_field_parts(orig_offs, raw_type)
        if inner == gguf.GGUFValueType.STRING:
            parts, end = self._texts(begin, count)
        else:
            values = self._get(begin, self.gguf_scalar_to_np[inner], count)
            parts, end = list(values[:, None]), begin + values.nbytes
        return end - orig_offs, parts, list(range(count)), [array, inner]

    def _texts(self, at: int, count: int) -> tuple[list[Any], int]:
        """Texts as views of their bytes, and where they end."""
        view, found = self.data.data, []
        for _ in range(count):
            begin, (length,) = at + 8, struct.unpack_from("<Q", view, at)
            at = begin + length
            found.append(view[begin:at])
        return found, at


def put(reader: Callable[..., Reader]) -> None:
    gguf.GGUFReader = reader  # type: ignore[assignment,misc]  # transformers looks it up at each reading


put(Reader)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within, transformers' readings of one file (config, weights, tokenizer) parse its header once."""
    cached = lru_cache(maxsize=1)(Reader)
    put(lambda path, *mode: cached(os.path.realpath(path), *mode))
    try:
        yield
    finally:
        put(Reader)


def forget_header() -> None:
    """Frees the header that `reading_once` keeps: as much as a quarter of the weights of a small model."""
    put(Reader)
    release_memory()


def release_memory() -> None:
    """Gives freed memory back to the system, where the C library would keep it (glibc)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def from_file(path: Path) -> tuple[Path, dict[str, str]]:
    """The folder and the options with which transformers reads this checkpoint."""
    return (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})


@contextmanager
def alone(path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """As `from_file`, with a GGUF file in a folder of its own where a tokenizer lies beside it.

    transformers prefers that one, and it may be another model's. Raises `ModelError` without such a folder.
    """
    beside = [other for name in BESIDE for other in path.parent.glob(name)] if is_gguf(path) else []
    if not beside:
        yield from_file(path)
        return
    with ExitStack() as stack:
        try:
            link = Path(stack.enter_context(TemporaryDirectory())) / path.name
            link.symlink_to(path.resolve())
        except OSError as error:
            reason = f"{beside[0].name} beside it may be another model's, and a link to the file alone failed"
            raise ModelError(f"{path}: {reason} ({error})") from error
        yield from_file(link)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder or GGUF file. Raises `ModelError` where there is none."""
    folder = locate(path, trust_remote_code=trust_remote_code)
    with quiet(), alone(folder) as (place, options):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                place, trust_remote_code=trust_remote_code, local_files_only=True, **options
            )
        except Exception as error:
            raise ModelError(f"{folder}: no usable tokenizer ({first_line(error)}; {NEEDLESS})") from error
    # without files transformers makes a tokenizer of special tokens, which reads every text as nothing
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ModelError(f"{folder}: no usable tokenizer (it has no vocabulary; {NEEDLESS})")
    return tokenizer
