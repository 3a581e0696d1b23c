"""Small vocabularies that were trained on the texts without cutting them into words, and GGUF files of them.

Merges cross every boundary of words, so a text that is cut at another place has other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

RECORDED = Path(__file__).parents[2] / "tests/formats/gguf_tokens.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
ROLES = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}
CONTROLS = "<s> </s> <|im_start|> <|im_end|> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <|é|>"
TOOLS = "<｜end▁of▁sentence｜> <tool_call> </tool_call>"
SPECIAL = {
    "<unk>": UNKNOWN,
    **dict.fromkeys(CONTROLS.split(), CONTROL),
    **dict.fromkeys(TOOLS.split(), USER_DEFINED),
    "<|endoftext|>": NORMAL,  # a control token by its name
    "<unused0>": UNUSED,
}
RUNS = dict.fromkeys(("  ", "   ", "\n\n", "\n\n\n", "    "), USER_DEFINED)  # as Gemma has them


@dataclass
class Vocabulary:
    """Tokens with their types. Byte-level ones have merges; of others, an earlier token is a better one."""

    kind: str
    tokens: dict[str, int]
    merges: list[str] = field(default_factory=list)


def byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def byte_level(pairs: Sequence[tuple[int, int]]) -> Vocabulary:
    """Of merges, as pairs of positions in the alphabet and what was merged before."""
    pieces, merges = byte_alphabet(), []
    for left, right in pairs:
        merges.append(f"{pieces[left]} {pieces[right]}")
        pieces.append(pieces[left] + pieces[right])
    whole = ["\u0120hey", "\u0120hello", "\u0120Qwerty", "?!?!"]  # tokens that no merge makes
    tokens = dict.fromkeys([*pieces, *whole], NORMAL)
    return Vocabulary("gpt2", {**SPECIAL, **tokens}, merges)


def sentence_piece(pieces: Sequence[str], runs: bool = False) -> Vocabulary:
    """Of pieces, the best one first."""
    own = {**dict.fromkeys((f"<0x{byte:02X}>" for byte in range(256)), BYTE), **(RUNS if runs else {})}
    return Vocabulary("llama", {**SPECIAL, **own, **dict.fromkeys(pieces, NORMAL)})


def write(
    path: Path,
    vocabulary: Vocabulary,
    *,
    name: str = "small",
    rows: int | None = None,  # of the embeddings
    more: Sequence[str] = (),  # tokens at the end
    scores: Sequence[float] | None = (),  # by position, unless they are given; None: the file has none
    root: Mapping[str, str] | None = None,  # what is named tokenizer.*
    **settings: bool | int | str | None,  # what is named tokenizer.ggml.*; None leaves it out
) -> Path:
    """A GGUF file with the vocabulary, and with embeddings of width 1."""
    tokens, types = [*vocabulary.tokens, *more], [*vocabulary.tokens.values(), *(NORMAL for _ in more)]
    writer = gguf.GGUFWriter(path, "llama")
    for count in (writer.add_block_count, writer.add_head_count, writer.add_embedding_length):
        count(1)
    writer.add_name(name)
    writer.add_context_length(64)
    writer.add_feed_forward_length(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.kind == "llama" and scores is not None:
        writer.add_token_scores([*scores] or [float(-i) for i in range(len(tokens))])
    roles = {f"{role}_token_id": tokens.index(token) for role, token in ROLES.items()}
    of_vocabulary = {f"ggml.{key}": value for key, value in {**roles, **settings}.items()}
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in {**of_vocabulary, **(root or {})}.items():
        if value is not None:
            add[type(value)](f"tokenizer.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((rows or len(tokens), 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())
