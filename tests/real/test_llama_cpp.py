"""Log-probabilities of GGUF files beside those of llama.cpp, which `recipes/gguf/expected.py` recorded.

llama.cpp rounds activations to 8 bits where weights are quantised. By that alone its log-probabilities of
these 200 tokens are 0.054 nat (SmolLM2) and 0.073 nat (Gemma 3) from those that it computes of the same
weights as numbers of 32 bits. Between its plain kernels and those for packed weights are 0.059 nat (Gemma 3);
it does not pack SmolLM2's weights, which are of Q4_1.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from recipes.gguf.texts import PROSE
from recipes.quantized.quality import log_probabilities
from torch import Tensor

from speculon.checkpoints.reading import load_tokenizer
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.model.target import Target

# nat, in fp32: 1e-5 (SmolLM2) and 6e-4 (Gemma 3, whose GELU llama.cpp looks up in fp16) were seen
ROUNDING = 2e-3
NOISE = 1.5  # times the distance within llama.cpp: 1.13 (SmolLM2) and 1.28 (Gemma 3) were seen on an AMD EPYC
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
    """The same file with a tenth of its base of rotary positions."""
    data = bytearray(file.read_bytes())
    at = data.index(b".rope.freq_base" + FLOAT32) + len(b".rope.freq_base" + FLOAT32)
    (base,) = struct.unpack_from("<f", data, at)
    struct.pack_into("<f", data, at, base / 10)
    made.write_bytes(data)
    return made


def within(facts: dict[str, Tensor]) -> float:
    """The distance within llama.cpp: between its kernels, or else of the one from fp32."""
    return distance(facts["plain"], facts["packed"]) or distance(facts["plain"], facts["fp32"])


def test_ids_are_those_of_llama_cpp(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    ids = load_tokenizer(files[name])(PROSE).input_ids
    assert ids[: len(facts["ids"])] == facts["ids"].tolist()


def test_in_fp32_they_are_the_same(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    target = load_target(files[name], dtype="float32")
    assert distance(ours(target, facts["ids"]), facts["fp32"]) <= ROUNDING


def test_by_default_they_are_as_near(name: str, files: dict[str, Path], facts: dict[str, Tensor]) -> None:
    found = ours(load_target(files[name]), facts["ids"])
    assert distance(found, facts["plain"]) <= NOISE * within(facts)
    assert distance(found, facts["fp32"]) < distance(facts["plain"], facts["fp32"])


@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_another_base_of_rotary_positions_is_seen(
    name: str, precision: str, files: dict[str, Path], facts: dict[str, Tensor], tmp_path: Path
) -> None:
    target = load_target(with_another_base(files[name], tmp_path / "wrong.gguf"), dtype=precision)
    found = ours(target, facts["ids"])
    assert distance(found, facts["fp32"]) > 10 * ROUNDING
    assert distance(found, facts["plain"]) > NOISE * within(facts)
