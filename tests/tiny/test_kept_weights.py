"""Packed weights of an earlier load are mapped with the same bits; damaged or foreign ones are not used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core import kept_files
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import kept_weights, quantized
from speculon.runtimes.torch.model.target import Target
from tests.tiny.gguf_files import tiny_llama, write_gguf

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers whose weights were packed."""
    names: list[str] = []
    pack = quantized.packed_parts

    def recorded(layers: Any) -> Any:
        names.extend(layer.name for layer in layers)
        return pack(layers)

    monkeypatch.setattr(quantized, "packed_parts", recorded)
    return names


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tiny_llama(), tmp_path / "model.gguf", quantise="Q4_1")


def load(path: Path, **settings: Any) -> Target:
    return load_target(path, dtype="bfloat16", **settings)


def the_kept(cache: Path) -> Path:
    (kept,) = cache.glob(f"*{kept_weights.SUFFIX}")
    return kept


@pytest.mark.parametrize("quantization", ["auto", "int4", "int8"])
def test_a_second_load_maps_them_and_computes_the_same(
    quantization: Any, file: Path, cache: Path, packed: list[str], tmp_path: Path
) -> None:
    if quantization != "auto":
        file = tmp_path / "folder"
        tiny_llama().save_pretrained(file)
    first = load(file, quantization=quantization)
    assert LAYER in packed and len(packed) > len(first.layers)
    packed.clear()
    written = the_kept(cache).stat().st_mtime_ns
    second = load(file, quantization=quantization)
    assert packed == [], "nothing is packed again"
    assert torch.equal(paged_logits(first), paged_logits(second))
    assert second.packed == first.packed and second.num_bytes == first.num_bytes
    assert the_kept(cache).stat().st_mtime_ns > written, "it was used, which counts for its age"


def with_a_head(tmp_path: Path) -> Path:
    tiny_llama(vocab_size=112).save_pretrained(tmp_path / "folder")  # rows are packed by 16
    return tmp_path / "folder"


of_integers = pytest.mark.skipif(
    not quantized.has_integer_products(torch.bfloat16, torch.device("cpu")),
    reason="this chip has no products of integers",
)


@pytest.mark.parametrize("integers", [False, pytest.param(True, marks=of_integers)])
def test_a_kept_head_is_not_read(
    integers: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not integers:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    folder = with_a_head(tmp_path)
    first = load(folder, quantization="int8")
    monkeypatch.setattr(quantized, "rounded_rows", lambda *_: pytest.fail("a weight was read"))
    assert torch.equal(paged_logits(first), paged_logits(load(folder, quantization="int8")))


@of_integers
@pytest.mark.parametrize("digested", [True, False])
def test_a_damaged_head_is_made_anew(
    digested: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its digest it would change the logits, so this test can fail."""
    folder = with_a_head(tmp_path)
    first = load(folder, quantization="int8")
    headers = {path: header_of(path) for path in cache.glob(f"*{kept_weights.SUFFIX}")}
    (head,) = (path for path, header in headers.items() if "q" in header)
    flip_a_byte(head)
    if not digested:
        digest, compute = headers[head]["__metadata__"]["digest"], kept_weights.stream_digest
        of_head = {"q", "rows", "columns"}
        monkeypatch.setattr(
            kept_weights, "stream_digest", lambda h, s: digest if of_head == {*h} else compute(h, s)
        )
    assert torch.equal(paged_logits(first), paged_logits(load(folder, quantization="int8"))) is digested


@of_integers
def test_a_head_of_another_file_is_made_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], quantized.integers_of
    monkeypatch.setattr(quantized, "integers_of", lambda layer: made.append(layer.name) or make(layer))
    folder = with_a_head(tmp_path)
    load(folder, quantization="int8")
    load(folder, quantization="int8")
    assert made == ["lm_head"]
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    load(folder, quantization="int8")
    assert made == ["lm_head", "lm_head"]


def header_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return kept_weights.read_header(stream)


def test_what_is_checked_anew_is_compared_with_the_file(
    file: Path, cache: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other threads checks run again, with weights read from the file beside the mapped ones."""
    first = load(file)
    packed.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert torch.equal(paged_logits(first), paged_logits(load(file))) and packed == []


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x77
    path.write_bytes(bytes(content))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def claim_a_huge_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_off, claim_a_huge_header])
def test_a_damaged_file_is_not_used(
    damage: Any, file: Path, cache: Path, packed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = load(file)
    whole = the_kept(cache).read_bytes()
    damage(the_kept(cache))
    packed.clear()
    with caplog.at_level(logging.WARNING, "speculon"):
        second = load(file)
    assert LAYER in packed and torch.equal(paged_logits(first), paged_logits(second))
    assert [record.message for record in caplog.records if "packed anew" in record.message]
    assert the_kept(cache).read_bytes() == whole, "and it is written anew"


def test_without_its_digest_a_damaged_file_would_change_the_logits(
    file: Path, cache: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    first = load(file)
    digest = header_of(the_kept(cache))["__metadata__"]["digest"]
    flip_a_byte(the_kept(cache))
    packed.clear()
    monkeypatch.setattr(kept_weights, "stream_digest", lambda *_: digest)
    assert not torch.equal(paged_logits(first), paged_logits(load(file))) and packed == []


@pytest.mark.parametrize("what", ["file", "time", "chip", "code", "fused"])
def test_those_of_another_file_chip_or_code_are_not_used(
    what: str, file: Path, cache: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file)
    kept = the_kept(cache)
    packed.clear()
    if what == "file":
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(bytes(content))
    elif what == "time":
        os.utime(file, (1, 1))
    elif what != "fused":
        name = {"chip": "chip_name", "code": "code"}[what]
        monkeypatch.setattr(kept_weights.remembered, name, lambda: "another")
    load(file, fused=what != "fused")
    assert LAYER in packed
    (other,) = {*cache.glob(f"*{kept_weights.SUFFIX}")} - {kept}
    shutil.copy(kept, other)  # under the other's name they are not used, either
    packed.clear()
    load(file, fused=what != "fused")
    assert LAYER in packed


def test_the_least_recently_used_are_removed(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file)
    kept, now = the_kept(cache), time.time()
    size = kept.stat().st_size
    ages = {"day": 24 * 3600, "week": 7 * 24 * 3600, "months": kept_files.AGE + 60}
    digests = {name: f"{number:040x}" for number, name in enumerate(ages)}
    mine = cache / "a-model-of-somebody.safetensors"
    kept_ones = [(name, cache / f"{digest}.safetensors") for name, digest in digests.items()]
    for name, path in [*kept_ones, ("months", mine)]:
        shutil.copy(kept, path)
        os.utime(path, (now - ages[name], now - ages[name]))
    another = write_gguf(tiny_llama(), tmp_path / "another.gguf", quantise="Q4_0")
    monkeypatch.setattr(kept_files, "LIMIT", 7 * size // 2)
    load(another)
    left = {path.stem for path in cache.glob(f"*{kept_weights.SUFFIX}")} - {mine.stem}
    assert len(left) == 3 and digests["day"] in left and not left & {digests["week"], digests["months"]}
    monkeypatch.setattr(kept_files, "LIMIT", size // 2)
    load(file, fused=False)
    assert [*cache.glob(f"*{kept_weights.SUFFIX}")] == [mine], "each is larger than the limit"


@pytest.mark.parametrize("place", ["", "file/cache"])
def test_a_folder_that_cannot_be_written_does_no_harm(
    place: str, file: Path, packed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPECULON_CACHE", place and str(tmp_path / place))
    first, second = load(file), load(file)
    assert torch.equal(paged_logits(first), paged_logits(second)) and packed.count(LAYER) == 2


def test_the_file_is_one_of_safetensors(file: Path, cache: Path) -> None:
    load(file)
    content = the_kept(cache).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    assert (8 + size) % kept_weights.ALIGNMENT == 0
    assert max(place["data_offsets"][1] for place in header.values()) == len(content) - 8 - size
