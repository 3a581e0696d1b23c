"""The tokenizer of a checkpoint. Apart from `load`, so that a server's process imports no models."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from speculon.checkpoints.locate import first_line, locate
from speculon.errors import ModelError
from speculon.models.gguf_reader import from_file
from speculon.models.quiet import quiet

NEEDLESS = "for token ids alone, LLM(..., tokenizer=None) needs none"


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder or GGUF file. Raises `ModelError` where there is none."""
    folder = locate(path, trust_remote_code=trust_remote_code)
    place, options = from_file(folder)
    with quiet():
        try:
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                place, trust_remote_code=trust_remote_code, local_files_only=True, **options
            )
        except Exception as error:
            raise ModelError(f"{folder}: no usable tokenizer ({first_line(error)}; {NEEDLESS})") from error
    # without files transformers makes a tokenizer of special tokens, which reads every text as nothing
    if len(found) <= len(found.get_added_vocab()):
        raise ModelError(f"{folder}: no usable tokenizer (it has no vocabulary; {NEEDLESS})")
    return found
