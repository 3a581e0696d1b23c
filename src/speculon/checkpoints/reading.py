"""How transformers reads a checkpoint: without warnings, and its tokenizer.

Apart from `load`, so that a server's process imports no models.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from speculon.checkpoints.gguf.header import is_gguf
from speculon.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from speculon.checkpoints.headers import TOKENIZER_CONFIG, read_json
from speculon.checkpoints.locate import first_line, locate
from speculon.core.errors import ModelError

NEEDLESS = "LLM(..., tokenizer=None) works with token ids only, and needs none"


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


def release_memory() -> None:
    """Gives freed memory back to the system, where the C library would keep it (glibc)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder or GGUF file. Raises `ModelError` where there is none."""
    folder = locate(path, trust_remote_code=trust_remote_code)
    if is_gguf(folder):
        return load_gguf_tokenizer(folder)
    with quiet():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            if (folder / "config.json").is_file():  # which the tokenizer reads, too
                refuse_wrong_config(folder, trust_remote_code)
            raise ModelError(f"{folder}: no usable tokenizer ({first_line(error)}; {NEEDLESS})") from error
    # without files transformers makes a tokenizer of special tokens, which reads every text as nothing
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ModelError(f"{folder}: no usable tokenizer (it has no vocabulary; {NEEDLESS})")
    add_default_template(tokenizer, folder)
    return tokenizer


def refuse_wrong_config(folder: Path, trust_remote_code: bool) -> None:
    """Raises `ModelError` with the reason where transformers cannot read the folder's config."""
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{folder / 'config.json'}: {first_line(error)}") from error


def add_default_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Named templates in files beside a config with the default one: transformers forgets the latter."""
    templates, config = tokenizer.chat_template, folder / TOKENIZER_CONFIG
    if isinstance(templates, dict) and "default" not in templates and config.is_file():
        default = read_json(config, ModelError).get("chat_template")
        if isinstance(default, str):
            tokenizer.chat_template = {"default": default, **templates}
