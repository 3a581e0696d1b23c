"""Log-probabilities of GGUF files beside those of llama.cpp, which `recipes/gguf/expected.py` recorded.

llama.cpp rounds activations to 8 bits where weights are quantised. By that alone its own log-probabilities of
these 200 tokens are 0.054 nat (SmolLM2) and GEMMA nat (Gemma 3) from those of the same weights as numbers of
32 bits, so these are the truth. Its kernels for packed weights differ from its plain ones by PACKED.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from recipes.quantized.quality import log_probabilities
from torch import Tensor

from speculon.loading.load import load_target
from speculon.loading.reading import load_tokenizer
from speculon.target.target import Target

ROUNDING = 1e-3  # nat, in fp32: 1e-5 (SmolLM2) was seen on an AMD EPYC
NOISE = 1.5  # times llama.cpp's own distance from fp32: 0.58 was seen of SmolLM2
FLOAT32 = struct.pack("<I", 6)  # the type of a number in a header


@pytest.fixture(scope="session")
def facts(name: str) -> dict[str, Tensor]:
    """Ids [201], and log-probabilities [200] of all but the first, by the way they were computed."""
    recorded = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    return {what: torch.tensor(values) for what, values in recorded.items()}


def ours(target: Target, ids: Tensor) -> Tensor:  # [200]
    return log_probabilities(target, ids)[:-1].gather(1, ids[1:, None])[:, 0]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def with_another_base(file: Path, made: Path) -> Path:
    """The same file with 1.02 times its base of rotary positions."""
    data = bytearray(file.read_bytes())
    at = data.index(b".rope.freq_base" + FLOAT32) + len(b".rope.freq_base" + FLOAT32)
    (base,) = struct.unpack_from("<f", data, at)
    struct.pack_into("<f", data, at, 1.02 * base)
    made.write_bytes(data)
    return made


def test_ids_are_those_of_llama_cpp(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    from recipes.gguf.texts import PROSE

    assert load_tokenizer(files[name])(PROSE).input_ids[: len(facts["ids"])] == facts["ids"].tolist()


def test_in_fp32_they_are_the_same(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    target = load_target(files[name], dtype="float32")
    assert distance(ours(target, facts["ids"]), facts["fp32"]) <= ROUNDING


def test_packed_they_are_as_near(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    found, noise = ours(load_target(files[name]), facts["ids"]), distance(facts["plain"], facts["fp32"])
    assert distance(found, facts["fp32"]) <= NOISE * noise
    assert distance(found, facts["plain"]) <= 2 * NOISE * noise


def test_another_base_of_rotary_positions_is_seen(
    name: str, files: dict[str, Path], facts: dict[str, Tensor], tmp_path: Path
) -> None:
    target = load_target(with_another_base(files[name], tmp_path / "wrong.gguf"), dtype="float32")
    assert distance(ours(target, facts["ids"]), facts["fp32"]) > ROUNDING
