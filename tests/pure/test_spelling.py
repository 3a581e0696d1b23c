"""Tokens of equal bytes are partners, however two vocabularies write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from speculon.checkpoints.spelling import Overlap, Spelling, compare
from speculon.core.errors import CorruptWeights, WrongPair

BYTE_LEVEL = {
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
}
PIECES = {"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}}]}}


def file(vocab: Any, special: dict[str, int] | None = None, **parts: Any) -> dict[str, Any]:
    added = [{"id": i, "content": token, "special": True} for token, i in (special or {}).items()]
    return {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added, **parts}


def read(vocab: Any, special: dict[str, int] | None = None, **parts: Any) -> Spelling:
    return Spelling.read(file(vocab, special, **parts), "here")


TARGET = read(
    {
        "a": 0,
        "\u0120the": 1,
        "\u010a": 2,
        "\u0120token": 3,
        "izer": 4,
        "\u0120tokenizer": 5,
        "\u00c3\u00a9": 6,
    },
    {"</s>": 7, "<|im_end|>": 8},
    **BYTE_LEVEL,
)
DRAFT = read(
    [
        ["<unk>", 0],
        ["</s>", 0],
        ["<0x0A>", 0],
        ["\u2581the", 0],
        ["\u00e9", 0],
        ["izer", 0],
        ["<0x61>", 0],
        ["a", 0],
    ],
    {"<unk>": 0, "</s>": 1},
    **PIECES,
)


def test_both_ways_of_writing_are_bytes() -> None:
    assert TARGET.keys[1] == DRAFT.keys[3] == (False, b" the")
    assert TARGET.keys[2] == DRAFT.keys[2] == (False, b"\n")
    assert TARGET.keys[6] == DRAFT.keys[4] == (False, "\u00e9".encode())
    assert TARGET.keys[7] == DRAFT.keys[1] == (True, b"</s>")


def test_partners_are_one_to_one_and_a_character_comes_before_its_byte() -> None:
    found = Overlap.of(TARGET, DRAFT, [1, 1, 3, 2])
    assert found.partners == {0: 7, 1: 3, 2: 2, 4: 5, 6: 4, 7: 1}
    assert (found.share, found.of_text) == (5 / 7, 3 / 4)
    assert "75% of the tokens of a sample text and 71% of the vocabulary" in str(found)


def test_a_token_without_partner_is_read_as_its_longest_end() -> None:
    found = Overlap.of(TARGET, DRAFT, [], roles=[(8, 0)], other=1)
    assert found.read_as(5) == 5, "tokenizer ends with izer"
    assert found.read_as(3) == 1, "no end of token is there"
    assert found.read_as(8) == 0, "of one meaning"
    assert Overlap.of(TARGET, DRAFT, [], other=1).read_as(8) == 1


def test_two_of_equal_bytes_have_two_partners() -> None:
    both = read({"<0x61>": 0, "a": 1, "b": 2}, **PIECES)
    assert Overlap.of(both, DRAFT, []).partners == {1: 7, 0: 6}
    single = Overlap.of(both, TARGET, [])
    assert single.partners == {1: 0} and single.read_as(0) == 0


def test_too_few_partners_are_refused_with_the_share() -> None:
    with pytest.raises(
        WrongPair, match="different tokenizers: 40% of the tokens of a sample text and 71% of"
    ):
        Overlap.of(TARGET, DRAFT, [1, 1, 3, 3, 3]).check("draft", "target")
    assert Overlap.of(TARGET, DRAFT, [1, 3]).check("draft", "target").of_text == 0.5


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_folders_are_compared_without_loading(tmp_path: Path) -> None:
    letters = [chr(code) for code in range(33, 127)]
    real = json.loads(Tokenizer(BPE({c: i for i, c in enumerate(letters)}, [])).to_str())
    target = write(tmp_path / "target", real | BYTE_LEVEL)
    padded = real | {"model": real["model"] | {"vocab": real["model"]["vocab"] | {"more": 94}}}
    assert compare(write(tmp_path / "padded", padded), target) is None
    turned = {c: len(letters) - 1 - i for i, c in enumerate(letters)}
    overlap = compare(write(tmp_path / "turned", file(turned, **BYTE_LEVEL)), target)
    assert overlap is not None and (overlap.share, overlap.of_text) == (1, 1) and overlap.read_as(0) == 93
    for name, content, words in (
        ("words", file({"a": 0, "##b": 1}), "bytes of its tokens are not known .a BPE model"),
        ("broken", {"model": {}}, "has no usable vocabulary"),
    ):
        with pytest.raises((WrongPair, CorruptWeights), match=words):
            compare(write(tmp_path / name, content), target)
    broken = write(tmp_path / "damaged", file({"a": 0}, decoder={"type": "ByteLevel"}))
    with pytest.raises(CorruptWeights, match="damaged/tokenizer.json: not readable as a tokenizer "):
        compare(tmp_path / "turned", broken)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongPair, match="no tokenizer.json"):
        compare(tmp_path / "empty", target)
