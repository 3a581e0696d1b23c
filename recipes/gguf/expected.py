"""What llama.cpp makes of texts and models: the facts with which readings of GGUF files are compared.

    pip install llama-cpp-python==0.3.36 gguf tokenizers numpy
    python -m recipes.gguf.expected tokens
    python -m recipes.gguf.expected files FILE.gguf
    python -m recipes.gguf.expected logprobs FILE.gguf OUT.json

`tokens` trains two small vocabularies on the texts of `texts.py`, asks llama.cpp for the ids of each text
under every pre-tokenizer, and writes tests/formats/gguf_tokens.json. `files` compares the ids of all files
of text of this repository. `logprobs` writes log-probabilities of 200 tokens, computed in three ways: from
weights as they lie in the file (`plain`), from those that llama.cpp packs anew for its faster kernels
(`packed`, its parameter `use_extra_bufts`), and from the same weights as numbers of 32 bits (`fp32`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llama_cpp
import numpy as np
from recipes.gguf.texts import PROSE, TEXTS
from recipes.gguf.vocabularies import (
    RECORDED,
    SPACE,
    SPECIAL,
    byte_alphabet,
    byte_level,
    sentence_piece,
    write,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from speculon.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS
from speculon.checkpoints.reading import load_tokenizer

MERGES, PIECES, CHARACTERS, TOKENS = 2600, 2400, 260, 201
WORDS = (r"\S+", r"\s+\S+", r"\s+", r"\w+", r"\W\w+")
SETTINGS = {  # of files with a vocabulary of SentencePiece
    "prefix": {},
    "no prefix": {"add_space_prefix": False},
    "runs": {"add_space_prefix": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("tokens", "files", "logprobs"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path, default=RECORDED)
    settings = parser.parse_args()
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p())
    if settings.what == "files":
        return files(settings.model)
    found = logprobs(settings.model) if settings.what == "logprobs" else tokens()
    settings.out.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")


@llama_cpp.llama_log_callback
def SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


@contextmanager
def loaded(path: Path, **parameters: bool) -> Iterator[Any]:
    wanted = llama_cpp.llama_model_default_params()
    for name, value in parameters.items():
        setattr(wanted, name, value)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), wanted)
    if model is None:
        raise SystemExit(f"llama.cpp does not load {path}")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def encode(model: Any, text: str, special: bool = False) -> list[int]:
    data = text.encode()
    room = (ctypes.c_int32 * (len(data) + 8))()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), room, len(room), special, True)
    assert count >= 0
    return room[:count]


def tokens() -> dict[str, Any]:
    pairs, pieces = trained_bytes(), trained_pieces()
    variants: dict[str, list[list[int]]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for name in (*PRE_TOKENIZERS, None):
            write(path, byte_level(pairs), pre=name)
            variants[f"pre {name}"] = ids_of_texts(path)
        for name, changes in SETTINGS.items():
            write(path, sentence_piece(pieces, name == "runs"), **changes)
            variants[f"llama {name}"] = ids_of_texts(path)
    found: list[list[list[int]]] = [[] for _ in TEXTS]  # most ways of cutting give the same ids
    for ids in variants.values():
        for known, one in zip(found, ids, strict=True):
            if one not in known:
                known.append(one)
    chosen = {
        name: [known.index(one) for known, one in zip(found, ids, strict=True)]
        for name, ids in variants.items()
    }
    return {"merges": pairs, "pieces": pieces, "ids": found, "chosen": chosen}


def ids_of_texts(path: Path) -> list[list[int]]:
    """With the tokens that the file puts around a text."""
    with loaded(path, vocab_only=True) as model:
        return [encode(model, text, special=True) for text in TEXTS]


def trained_bytes() -> list[tuple[int, int]]:
    """Merges of bytes, as pairs of positions in the alphabet and what was merged before."""
    tokenizer, alphabet = Tokenizer(models.BPE()), byte_alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(ordinary(), trainer)
    place, pairs = {piece: i for i, piece in enumerate(alphabet)}, []
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        if left + right not in place:
            pairs.append((place[left], place[right]))
            place[left + right] = len(place)
    return pairs


def trained_pieces() -> list[str]:
    """Pieces, the first merged first; the rarest characters are left to their bytes."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=CHARACTERS + PIECES, min_frequency=1, limit_alphabet=CHARACTERS, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace(" ", SPACE) for text in ordinary()], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    characters = [piece for piece in tokenizer.get_vocab() if len(piece) == 1]
    return [*dict.fromkeys(left + right for left, right in merges), *sorted(characters)]


def ordinary() -> list[str]:
    """What lies between special tokens, whole, and once more word by word, with and without the space.

    No merge is to make the words of the last text: the vocabulary has them whole.
    """
    between = [part for text in TEXTS[:-1] for part in re.split("|".join(map(re.escape, SPECIAL)), text)]
    return [*between, *(word for text in between for form in WORDS for word in re.findall(form, text))]


def files(model: Path) -> None:
    """Prints in how many files of text of this repository other ids are found here."""
    tokenizer, count, differ = load_tokenizer(model), 0, []
    with loaded(model, vocab_only=True) as opened:
        for name, text in texts_of_repository():
            count += 1
            if encode(opened, text) != tokenizer.encode(text, add_special_tokens=False):
                differ.append(name)
    print(f"{count} files, {len(differ)} differ", *differ)


def texts_of_repository() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    for name in listed.split("\0")[:-1]:
        try:
            yield name, Path(name).read_bytes().decode()
        except (UnicodeDecodeError, IsADirectoryError):
            continue


def logprobs(path: Path) -> dict[str, Any]:
    """Of tokens 1 to 200 of a text, each after all before it, by each of three ways of computing."""
    with TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        widen(path, wide)
        with loaded(path, vocab_only=True) as model:
            ids = encode(model, PROSE, special=True)[:TOKENS]
        found: dict[str, Any] = {"ids": ids}
        for name, file, packed in (("plain", path, False), ("packed", path, True), ("fp32", wide, False)):
            with loaded(file, use_extra_bufts=packed) as model:
                found[name] = [round(float(x), 5) for x in next_tokens(model, ids)]
    return found


def widen(path: Path, wide: Path) -> None:
    """The same weights as numbers of 32 bits: then llama.cpp rounds no activations to 8 bits."""
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype, wanted.allow_requantize, wanted.nthread = llama_cpp.LLAMA_FTYPE_ALL_F32, True, 1
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(wide).encode(), ctypes.byref(wanted)) == 0


def next_tokens(model: Any, ids: Sequence[int]) -> np.ndarray:  # [T - 1]
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = 512
    wanted.n_threads = wanted.n_threads_batch = 1
    wanted.type_k = wanted.type_v = llama_cpp.GGML_TYPE_F32
    wanted.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, wanted)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    scores = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(ids), size)).astype(np.float64)
    llama_cpp.llama_batch_free(batch)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    llama_cpp.llama_free(context)
    return scores[np.arange(len(ids) - 1), ids[1:]]


if __name__ == "__main__":
    main()
