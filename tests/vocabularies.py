"""Small tokenizers like those of language models."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speculon.decoding.text.tokenizer import Tokenizer

SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁▁▁▁", "▁world", "Hello", "▁Hello", "▁yes", "yes", "▁no"]
WORDS += ["re", "turn", "▁return", "returned"]
CHARACTERS = [*"abcdefghijklmnopqrstuvwxyzHAB.,:!", "é", "你"]
DECODERS = {
    # Llama 2, Mistral v0.1, TinyLlama, CodeLlama
    "llama": decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
SENTENCEPIECE = tuple(DECODERS)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(wordpiece() if kind == "wordpiece" else sentencepiece(kind))


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """Characters, some words, and bytes for all else; a text gets `<s>`, and but for Gemma's a space."""
    pieces = [*SPECIAL, *BYTES, *WORDS, *CHARACTERS]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges(vocabulary), unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(
        steps if kind == "gemma" else [normalizers.Prepend(SPACE), *steps]
    )
    backend.decoder = DECODERS[kind]
    return finished(backend, "<s>", "</s>")


def wordpiece() -> PreTrainedTokenizerFast:
    words = ["world", "hello", "yes", "no", "return", "##ed", "##s", ".", ",", "a", "##a"]
    names = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = Backend(models.WordPiece(names, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return finished(backend, "<s>", "</s>")


def finished(backend: Backend, bos: str, eos: str) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(SPECIAL)
    begin = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, begin)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token="<unk>")


def merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """From the left, as far as each beginning is a token."""
    found = []
    for piece in WORDS:
        for cut in range(1, len(piece)):
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary:
                found.append((piece[:cut], piece[cut:]))
                break
    return found
