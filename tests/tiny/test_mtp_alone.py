"""A folder that has the MTP modules of a target and nothing else is a drafter for this target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from speculon.checkpoints.headers import read_checkpoint
from speculon.cli import app
from speculon.core.config import EngineConfig
from speculon.core.errors import ModelError, WrongPair
from speculon.runtimes.torch.drafters.choose import with_drafts
from speculon.runtimes.torch.drafters.families import family_of
from speculon.runtimes.torch.drafters.mtp.tensors import find_mtp
from speculon.runtimes.torch.drafters.pairing import check_fit
from tests.tiny.mtp_forms import written


def write_alone(form: str, folder: Path, without: str = "none") -> Path:
    """The modules of a random checkpoint, but for a tensor whose name ends with `without`."""
    at = written(form).folder
    config = find_mtp(at)
    assert config is not None
    folder.mkdir(parents=True)
    shutil.copyfile(at / "config.json", folder / "config.json")
    stored = load_file(at / "model.safetensors")
    names = {name for module in config.modules for name in module.values() if not name.endswith(without)}
    save_file({name: stored[name] for name in names}, folder / "model.safetensors", {"format": "pt"})
    return at


def test_a_folder_of_modules_is_a_drafter_for_their_target(tmp_path: Path) -> None:
    folder = tmp_path / "near" / "modules"
    target, other = write_alone("deepseek, two modules", folder), written("mimo").folder
    family = family_of(folder)
    assert (family.method, family.refusal) == ("mtp", None)
    assert family.summary.startswith("MTP, 2 modules named as DeepSeek's")
    assert check_fit(family, read_checkpoint(target)) == ()
    with pytest.raises(WrongPair, match="for deepseek_v3 of 2 layers and width 32, the target is q"):
        check_fit(family, read_checkpoint(other))
    named = with_drafts(EngineConfig(model=str(target), speculation={"draft": str(folder)}))
    assert named.speculation.drafts == {"mtp": str(folder)}
    near = {"draft": f"auto:{tmp_path / 'near'}"}
    drafts = {
        model: with_drafts(EngineConfig(model=str(model), speculation=near)).speculation.drafts
        for model in (target, other)
    }
    assert drafts == {target: {"mtp": str(folder)}, other: {"mtp": str(other)}}
    shown = CliRunner().invoke(app, ["inspect", str(folder), "--target", str(target), "--json"])
    assert (json.loads(shown.stdout)["method"], json.loads(shown.stdout)["fits"]) == ("mtp", True)


def test_inspect_says_that_modules_of_another_folder_draft(tmp_path: Path) -> None:
    modules, target = tmp_path / "modules", tmp_path / "target"
    write_alone("deepseek, two modules", modules)
    written("deepseek, two modules").stock.save_pretrained(target)  # which has none of its own
    shown, alone = (
        " ".join(CliRunner().invoke(app, ["inspect", str(target), *flags]).stdout.split())
        for flags in (["--draft", str(modules)], [])
    )
    assert "mtp: its model is loaded (" in shown and "no MTP layers" not in shown, shown
    assert "mtp: the checkpoint has no MTP layers" in alone, alone  # the twin


def test_an_incomplete_module_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    write_alone("mimo", folder, without="final_layernorm.weight")
    with pytest.raises(ModelError, match=r"tensor model\.mtp_layers\.0\.final_layernorm\.weight is missing"):
        family_of(folder)
