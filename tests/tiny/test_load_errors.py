"""A checkpoint that cannot be used is refused with a typed error that names path and reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from speculon.checkpoints.headers import read_checkpoint
from speculon.core.config import EngineConfig
from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    MissingWeights,
    ModelError,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from speculon.runtimes.torch.drafters.choose import fits
from speculon.runtimes.torch.loading import load
from speculon.runtimes.torch.loading.load import load_target
from tests.tiny.conftest import CONTEXT, VOCAB, build, tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "llama"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def test_a_good_folder_loads(folder: Path) -> None:
    stages: list[str] = []
    target = load_target(folder, progress=stages.append)
    assert (target.vocab_size, target.max_context, target.eos_ids, target.notes) == (
        VOCAB,
        CONTEXT,
        frozenset({2}),
        (),
    )
    assert target.num_parameters == sum(p.numel() for p in tiny_model("llama").parameters())
    assert target.num_bytes == 4 * target.num_parameters
    assert len(stages) == 3


def test_a_checkpoint_is_read_from_its_headers(folder: Path) -> None:
    found = read_checkpoint(folder)
    assert (found.architecture, found.num_layers, found.hidden_size, found.vocab_size) == (
        "LlamaForCausalLM",
        2,
        32,
        VOCAB,
    )
    assert (found.dtype, found.max_context, found.pickled, found.remote_code) == (
        "float32",
        CONTEXT,
        False,
        False,
    )
    assert found.num_parameters == sum(p.numel() for p in tiny_model("llama").parameters())
    assert found.num_bytes == (folder / WEIGHTS).stat().st_size


def test_reading_headers_does_not_import_torch() -> None:
    code = (
        "import sys, speculon.checkpoints.headers; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def truncate(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def break_header(folder: Path, old: bytes, new: bytes) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    assert len(old) == len(new)
    assert old in raw
    (folder / WEIGHTS).write_bytes(raw.replace(old, new, 1))


SHARDS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
INDEX = f"{WEIGHTS}.index.json"

BROKEN: dict[str, tuple[Callable[[Path], object], type[ModelError], str]] = {
    "gone": (shutil.rmtree, ModelNotFound, "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFound, "no config.json"),
    "config is not json": (
        lambda f: (f / "config.json").write_text("{"),
        ModelError,
        "config.json: not readable as JSON",
    ),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ModelError, "not a JSON object"),
    "invalid config": (
        lambda f: edit_config(f, num_attention_heads="four"),
        ModelError,
        "config.json",
    ),
    "unknown architecture": (
        lambda f: edit_config(f, model_type="nonsuch"),
        UnsupportedModel,
        "model_type 'nonsuch'",
    ),
    "encoder-decoder": (lambda f: edit_config(f, model_type="t5"), UnsupportedModel, "encoder-decoder"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), MissingWeights, "no safetensors file"),
    "gguf": (lambda f: (f / WEIGHTS).rename(f / "model.gguf"), UnsupportedModel, "GGUF"),
    "shards missing": (
        lambda f: (f / INDEX).write_text(json.dumps(SHARDS)),
        MissingWeights,
        "2 of 2 weight files are missing",
    ),
    "index is not json": (lambda f: (f / INDEX).write_text("["), CorruptWeights, "not readable as JSON"),
    "index leaves the folder": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        CorruptWeights,
        "outside of the folder",
    ),
    "empty file": (lambda f: truncate(f, 0), CorruptWeights, "truncated"),
    "truncated header": (lambda f: truncate(f, 200), CorruptWeights, "truncated"),
    "one byte short": (
        lambda f: truncate(f, (f / WEIGHTS).stat().st_size - 1),
        CorruptWeights,
        r"truncated|bytes, but its header says",
    ),
    "header is noise": (
        lambda f: break_header(f, b'{"__meta', b"{{{{{{{{"),
        CorruptWeights,
        "header is not JSON",
    ),
    "invalid entry": (lambda f: break_header(f, b'"shape":[', b'"shapf":['), CorruptWeights, "is invalid"),
    "tensor missing": (
        lambda f: edit_weights(f, lambda w: w.pop("model.norm.weight")),
        MissingWeights,
        "1 tensors are missing, first model.norm",
    ),
    "wrong shape": (
        lambda f: edit_config(f, intermediate_size=64),
        CorruptWeights,
        r"first model\.layers\.0\.mlp\.down_proj\.weight: \[\d+, \d+\] instead of \[\d+, 64\]",
    ),
    "wrong config": (
        lambda f: edit_config(f, layer_types=["foo"]),
        ModelError,
        r"config.json: .*validate_layer_type.*: ValueError: ",
    ),
    "pickle": (as_pickle, UnsafeCheckpoint, "pytorch_model.bin: pickle weights"),
    "remote code": (
        lambda f: edit_config(f, model_type="theirs", auto_map={"AutoConfig": "theirs.Config"}),
        UnsafeCheckpoint,
        "trust_remote_code=True",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(case: str, folder: Path) -> None:
    break_it, error, reason = BROKEN[case]
    break_it(folder)
    with pytest.raises(error, match=reason) as caught:
        load_target(folder)
    assert type(caught.value) is error
    assert str(folder) in str(caught.value)


def test_files_are_checked_before_the_model_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(folder, 20000)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(CorruptWeights):
        load_target(folder)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    target = load_target(tmp_path)
    assert target.num_parameters == read_checkpoint(tmp_path).num_parameters  # counted once


def test_a_pickle_loads_with_allow_pickle(folder: Path) -> None:
    as_pickle(folder)
    assert load_target(folder, allow_pickle=True).vocab_size == VOCAB


def test_a_pickle_that_runs_code_does_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpoint, match="pytorch_model.bin: not loaded, since it is") as caught:
        load_target(folder, allow_pickle=True)
    assert "trust" not in str(caught.value) and "\033" not in str(caught.value), "torch's advice to run it"
    assert not (tmp_path / "ran").exists()


class Trap:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (str(self.path),)


def test_shards_load(saved: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    found = read_checkpoint(tmp_path)
    assert len(found.files) > 1
    assert found.num_parameters == read_checkpoint(saved).num_parameters
    assert load_target(tmp_path).vocab_size == VOCAB


def test_an_unknown_hub_id_is_not_found() -> None:
    with pytest.raises(
        ModelNotFound, match="nobody/nothing: no such folder, and the model hub has no model of this name"
    ):
        load_target("nobody/nothing")


def test_a_hub_id_is_fetched_without_pickles_or_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[str] = []
    local: list[bool] = []

    def snapshot_download(
        name: str, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        patterns.extend(allow_patterns)
        local.append(local_files_only)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_target("org/tiny").name == "org/tiny"
    assert "*.safetensors" in patterns
    assert not {"*.bin", "*.py"} & set(patterns) and not any(local)
    local.clear()
    fits(EngineConfig(model="org/tiny"), ["org/drafter"])
    assert local == [True, True], "a look at what fits fetches nothing"


def test_a_context_beyond_the_model_is_a_config_error(folder: Path) -> None:
    assert load_target(folder, max_context=64).max_context == 64
    with pytest.raises(ConfigError, match=f"max_context = {CONTEXT + 1}"):
        load_target(folder, max_context=CONTEXT + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_numbers_are_refused(folder: Path, dtype: str) -> None:
    edit_weights(folder, lambda w: w["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelError, match="nan"):
        load_target(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("requested", "stored", "native", "expected"),
    [
        ("auto", "float32", True, torch.float32),
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.float32),
        ("auto", None, True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
    ],
)
def test_dtype_on_a_cpu(
    requested: str, stored: str | None, native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "native_bf16", lambda: native)
    assert load.pick_dtype(requested, stored, torch.device("cpu")) is expected
