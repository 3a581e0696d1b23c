"""The tokenizer of a GGUF file as llama.cpp has it, with what `Tokenizer` uses of transformers' own."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.checkpoints.gguf.header import chat_template, read_split
from speculon.core.config import EngineConfig
from speculon.core.errors import ModelError, UnsupportedModel
from speculon.runtimes.llama.library import library
from speculon.runtimes.llama.templates import render
from speculon.runtimes.llama.weights import load_weights

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class AddedToken(NamedTuple):
    special: bool


class Vocabulary:
    """Reads and writes texts. Only the vocabulary of the file is loaded, in a tenth of a second."""

    def __init__(self, path: Path, config: EngineConfig):
        self._lib = lib = library()
        self._model = load_weights(path, config, vocab_only=True)
        freed = weakref.finalize(self, lib.llama_model_free, self._model)
        freed.atexit = False  # other threads may still read with it
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._refuse_what_ends_the_process(path)
        self._size: int = lib.llama_vocab_n_tokens(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self.chat_template = chat_template(read_split(path).metadata)

    def __len__(self) -> int:
        return self._size

    def _metadata(self, key: str) -> str | None:
        size = self._lib.llama_model_meta_val_str(self._model, key.encode(), None, 0)
        if size < 0:
            return None
        text = ctypes.create_string_buffer(size + 1)
        self._lib.llama_model_meta_val_str(self._model, key.encode(), text, size + 1)
        return text.value.decode(errors="replace")

    def _refuse_what_ends_the_process(self, path: Path) -> None:
        lib, vocab = self._lib, self._vocab
        if not lib.llama_vocab_type(vocab):
            needs = "texts and draft models need one; for token ids alone, LLM(..., tokenizer=None)"
            raise ModelError(f"{path}: it has no tokenizer ({needs})")
        for name in ("bos", "eos"):
            added = getattr(lib, f"llama_vocab_get_add_{name}")(vocab)
            if added and getattr(lib, f"llama_vocab_{name}")(vocab) < 0:
                raise UnsupportedModel(f"{path}: its tokenizer adds a {name} token that it does not have")

    # ids

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Token ids. Names of special tokens in the text are read as these."""
        data = text.encode()
        size = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self._lib.llama_tokenize(
                self._vocab, data, len(data), ids, size, add_special_tokens, True
            )
            if count >= 0:
                return {"input_ids": ids[:count]}
            size = -count

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """The text, as it is: llama.cpp itself would remove spaces before some signs. Bytes that are no
        character are U+FFFD.
        """
        hidden = self._special if skip_special_tokens else ()
        data = b"".join(self._piece(token) for token in ids if token not in hidden)
        return (data[1:] if self._begins_with_space and data[:1] == b" " else data).decode(errors="replace")

    def _piece(self, token: int) -> bytes:
        """The bytes of a token. Raises `IndexError` for one that is none: llama.cpp would end the process."""
        if not 0 <= token < self._size:
            raise IndexError(f"token {token} of {self._size}")
        if token not in self._pieces:
            size = 1 << 12
            while True:
                text = ctypes.create_string_buffer(size)
                count = self._lib.llama_token_to_piece(self._vocab, token, text, size, 0, True)
                if count >= 0:
                    break
                size = -count
            self._pieces[token] = text.raw[:count]
        return self._pieces[token]

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether a space is put before a text, as SentencePiece does."""
        own = self._metadata("tokenizer.ggml.add_space_prefix")
        return own == "true" if own is not None else self._metadata("tokenizer.ggml.model") == "llama"

    def _with_attribute(self, attributes: int) -> frozenset[int]:
        """The tokens that have any of these."""
        of = self._lib.llama_vocab_get_attr
        return frozenset(token for token in range(self._size) if of(self._vocab, token) & attributes)

    def spell(self) -> tuple[dict[int, tuple[bool, bytes]], frozenset[int]]:
        """As `Spelling` has it: whether each token is special, and its bytes; and which stand for a byte.
        Tokens that only fill up the vocabulary write nothing, and are left out.
        """
        lib = self._lib
        special = self._special | self._with_attribute(lib.LLAMA_TOKEN_ATTR_UNKNOWN)
        pieces = ((token, self._piece(token)) for token in range(self._size))
        keys = {token: (token in special, piece) for token, piece in pieces if piece}
        return keys, self._with_attribute(lib.LLAMA_TOKEN_ATTR_BYTE)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        added = self._with_attribute(self._lib.LLAMA_TOKEN_ATTR_USER_DEFINED)
        return {token: AddedToken(token in self._special) for token in sorted(added | self._special)}

    @cached_property
    def _special(self) -> frozenset[int]:
        """Control tokens. llama.cpp takes words that look like one for such, as </s> of HTML."""
        lib = self._lib
        words = self._with_attribute(lib.LLAMA_TOKEN_ATTR_USER_DEFINED)
        return self._with_attribute(lib.LLAMA_TOKEN_ATTR_CONTROL) - words

    def convert_ids_to_tokens(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        text: bytes = self._lib.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def convert_tokens_to_ids(self, name: str) -> int | None:
        return self._ids.get(name)

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(token): token for token in range(self._size)}

    @property
    def bos_token(self) -> str | None:
        return self._name(self._lib.llama_vocab_bos(self._vocab))

    @property
    def eos_token(self) -> str | None:
        return self._name(self._lib.llama_vocab_eos(self._vocab))

    @property
    def pad_token(self) -> str | None:
        return self._name(self._lib.llama_vocab_pad(self._vocab))

    @property
    def unk_token(self) -> str | None:  # which the library has no function for
        return self._name(int(self._metadata("tokenizer.ggml.unknown_token_id") or -1))

    def _name(self, token: int) -> str | None:
        return self.convert_ids_to_tokens(token) if 0 <= token < self._size else None

    def lltokenizer(self, size: int, ends: Seq[int]) -> LLTokenizer:
        """The vocabulary of so many ids as llguidance reads it, which takes a second."""
        from llguidance.llamacpp import lltokenizer_from_vocab

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it calls older names of llama.cpp
            return lltokenizer_from_vocab(self._vocab, n_vocab=size, eos_token=list(ends))

    # conversations

    def apply_chat_template(
        self,
        conversation: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] | None = None,
        documents: Seq[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """A conversation as the template writes it, as transformers does."""
        source = chat_template or self.chat_template
        assert isinstance(source, str) and not tokenize
        field = "content" if continue_final_message is True else continue_final_message or ""
        known = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
        }
        return render(source, conversation, field, {**known, **variables})
