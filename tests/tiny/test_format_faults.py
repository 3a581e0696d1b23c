"""A recorded checkpoint with a planted fault is refused by a typed error that names what is wrong.

The faults are those of `refused` in tests/formats/tables.json: form, changes, error, words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculon.checkpoints.adapter_config import read_adapter
from speculon.core import errors
from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.drafters.families import family_of
from speculon.runtimes.torch.loading.adapters import add_adapters
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from tests.formats.writer import change_checkpoint, record, write_checkpoint
from tests.tiny import assistant_forms, mtp_forms
from tests.tiny.adapter_files import linear_shapes
from tests.tiny.conftest import tiny_model
from tests.tiny.heads import deep_model, deep_target
from tests.tiny.scripted import make_engine

PLANTED = ("config", "tensors", "rename")


def read_drafter(name: str, changes: dict[str, Any], folder: Path) -> None:
    """Its config and headers alone; without the fault, the same form is read."""
    sizes = {key: value for key, value in changes.items() if key not in PLANTED}
    if sizes != changes:
        assert family_of(write_checkpoint(folder / "whole", name, **sizes)).refusal is None
    family_of(write_checkpoint(folder / "faulty", name, **changes))


def load_drafter(name: str, changes: dict[str, Any], folder: Path) -> None:
    """In an engine, with `options` that correct the config."""
    planted = {key: value for key, value in changes.items() if key != "options"}
    path = write_checkpoint(folder, name, deep_model().config, **planted)
    options = changes.get("options", {})
    speculation = {"draft": {name.partition("/")[0]: str(path)}, "options": options}
    make_engine(deep_target(), speculation=speculation)


def load_prediction_layers(form: str, changes: dict[str, Any], folder: Path) -> None:
    change_checkpoint(mtp_forms.written(form).folder, folder, **changes)
    make_engine(load_target(folder, dtype="float32", device="cpu"), speculation={"method": "mtp"})


def load_assistant(form: str, changes: dict[str, Any], folder: Path) -> None:
    change_checkpoint(assistant_forms.folder_of(form), folder, **changes)
    make_engine(assistant_forms.target_of(form), speculation={"draft": {"gemma4_assistant": str(folder)}})


def load_adapter(name: str, changes: dict[str, Any], folder: Path) -> None:
    write_checkpoint(folder, name, linears=linear_shapes(tiny_model("llama")), **changes)
    try:
        adapter = read_adapter("sql", folder)
    except errors.ModelError as error:
        assert str(error).startswith(f"adapter 'sql': {folder}")
        raise
    add_adapters(wrap_model(tiny_model("llama"), name="tiny", share=False), [adapter])


READERS: dict[str, Callable[[str, dict[str, Any], Path], None]] = {
    "drafter": read_drafter,
    "engine": load_drafter,
    "mtp": load_prediction_layers,
    "gemma4_assistant": load_assistant,
    "lora": load_adapter,
}
FAULTS = [
    pytest.param(kind, *row, id=f"{row[0]}: {row[3]}")
    for kind, rows in record("tables")["refused"].items()
    for row in rows
]


@pytest.mark.parametrize(("kind", "form", "changes", "error", "words"), FAULTS)
def test_a_fault_is_refused_by_name(
    kind: str, form: str, changes: dict[str, Any], error: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(getattr(errors, error), match=words) as caught:
        READERS[kind](form, changes, tmp_path)
    assert type(caught.value).__name__ == error


def test_a_table_of_masks_is_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, "dflash/z-lab") / "mask_embedding.pt").touch()
    with pytest.raises(UnsupportedModel, match="mask_embedding.pt is not supported"):
        family_of(tmp_path)
