"""What a load found is not found again; what is damaged, foreign or refused is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading import invariant, load
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import compiled, fuse, pieces, remembered
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.kernels import one_by_one, plant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which checks were computed."""
    made: list[str] = []

    def recorded(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    recorded(load, "check_logits")
    recorded(load, "logits_in_fp32")
    recorded(fuse, "check_loop")
    recorded(pieces, "measured")
    recorded(invariant, "differing")
    yield made


def test_the_second_load_checks_nothing_twice_and_computes_the_same(
    cache: Path, folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, one_by_one)  # what is refused is tried again at each load
    first = load_target(folder, dtype="bfloat16", batch_invariant=None)
    assert {"check_logits", "logits_in_fp32", "check_loop"} <= {*calls}
    calls.clear()
    second = load_target(folder, dtype="bfloat16", batch_invariant=None)
    assert calls == []
    assert str(second.runner) == str(first.runner) and second.invariance == first.invariance
    assert second.layers == first.layers, "with the same padding"
    assert torch.equal(paged_logits(first), paged_logits(second))


@pytest.mark.parametrize("what", ["weights", "config", "dtype", "code", "chip", "threads"])
def test_another_checkpoint_machine_or_code_is_checked(
    what: str, cache: Path, folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_target(folder)
    calls.clear()
    dtype = "float32"
    if what == "weights":
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(bytes(content))
    elif what == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    elif what == "dtype":
        dtype = "bfloat16"
    elif what == "code":
        monkeypatch.setattr(remembered, "code", lambda: "other code")
    elif what == "chip":
        monkeypatch.setattr(remembered, "chip_name", lambda: "another chip")
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    load_target(folder, dtype=dtype)
    assert "check_logits" in calls


def test_a_compiled_load_is_checked_though_an_uncompiled_one_was(
    cache: Path, folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load found no compiler, and its loop passed."""
    plant(monkeypatch, one_by_one)

    def no_compiler(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled, "load_or_compile", no_compiler)
    without = load_target(folder, dtype="bfloat16", compile=True, batch_invariant=None)
    assert without.runner.form == "loop", "no program is made here"
    calls.clear()
    monkeypatch.setattr(compiled, "load_or_compile", lambda _, module, *given: lambda x: [module(*x)])
    assert load_target(folder, dtype="bfloat16", compile=True, batch_invariant=None).runner.form == "compiled"
    assert "check_logits" in calls and "differing" in calls
    calls.clear()
    load_target(folder, dtype="bfloat16", compile=True, batch_invariant=None)
    assert calls == []


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"key": "x", "content": {"logits": true}}', b"\xff\xfe"])
def test_a_damaged_or_foreign_entry_is_ignored(
    content: bytes, cache: Path, folder: Path, calls: list[str]
) -> None:
    load_target(folder)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    calls.clear()
    load_target(folder)
    assert "check_logits" in calls
    assert json.loads(entry.read_text())["content"]["logits"] is True, "and written anew"


def test_a_damaged_result_is_found_anew(cache: Path, folder: Path, calls: list[str]) -> None:
    target = load_target(folder, dtype="bfloat16", batch_invariant=None)
    (entry,) = cache.iterdir()
    kept = json.loads(entry.read_text())
    kept["content"] = {name: 3 if name.startswith("rows") else x for name, x in kept["content"].items()}
    entry.write_text(json.dumps(kept))
    calls.clear()
    assert load_target(folder, dtype="bfloat16", batch_invariant=None).invariance == target.invariance
    assert not target.batch_invariant or "measured" in calls


def test_a_model_that_is_refused_is_refused_again(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(load, "stock_logits", lambda target: torch.zeros(17, target.vocab_size))
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match="differ from"):
                load_target(folder)
    assert not cache.exists()
    load_target(folder)


def test_a_folder_that_cannot_be_written_costs_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECULON_CACHE", str(tmp_path / "file" / "cache"))
    assert load_target(folder).runner is not None


def test_nothing_is_remembered_where_the_folder_is_empty(
    folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECULON_CACHE", "")
    for _ in range(2):
        calls.clear()
        load_target(folder)
        assert "check_logits" in calls
