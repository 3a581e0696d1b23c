"""`speculon bench --advise`: what it writes is used by the next command, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from speculon.core.config import EngineConfig
from tests.pure.screens import ELLIPSIS
from tests.tiny.bench.plans import bench, sizes

MODES = ["--modes", "ngram:2,draft_model:2,auto"]


def test_what_it_writes_is_what_it_advises(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of the measured mode, without the pools of the benchmark, in a file with others."""
    mine = tmp_path / "mine.toml"
    mine.write_text("block_size = 8\n[serve]\nport = 9000\n")
    more = ["--draft", str(folder), "--concurrency", "1,2", "--write", str(mine), "--out", "new", "--json"]
    code, out, err = bench(folder, *sizes(prompts=4), *MODES, *more)
    assert (code, err) == (0, "")
    report = json.loads(out)
    advice, cells = report["advice"], {cell["mode"]: cell for cell in report["cells"]}
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == report
    assert advice["answer"][0].startswith(("Yes: use ", "No: leave speculation off. "))
    assert "at concurrency 1" in advice["answer"][0] and advice["answer"][1].startswith("At concurrency 2: ")
    assert advice["answer"][0] in (tmp_path / "new" / "bench.md").read_text()
    assert advice["mode"] in cells and (advice["mode"] == "off") == advice["answer"][0].startswith("No")
    assert not (tmp_path / "new" / "speculon.toml").exists()
    assert tomllib.loads(mine.read_text()) == {**advice["settings"], "serve": {"port": 9000}}
    monkeypatch.setenv("SPECULON_CONFIG", str(mine))
    config, found = EngineConfig(), advice["settings"]["speculation"]
    assert (config.block_size, config.serve.port, config.model) == (16, 9000, str(folder))
    assert {name: getattr(config.speculation, name) for name in found} == found
    assert config.speculation.suffix_pools == type(config.speculation)().suffix_pools


@pytest.mark.parametrize("width", ["80", "200"])
def test_for_a_person_it_is_an_answer_settings_and_a_command(
    folder: Path, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.delenv("SPECULON_CONFIG", raising=False)
    Path("speculon-bench").mkdir()
    Path("speculon-bench/speculon.toml").write_text("[serve]\nport = 9000 # mine\n")
    code, out, err = bench(folder, *sizes(), "--modes", "ngram:2", "--advise")
    assert code == 0 and out.startswith("No: leave speculation off.") and ELLIPSIS not in out
    assert "port = 9000 # mine" in Path("speculon-bench/speculon.toml").read_text()
    assert '[speculation]\nmethod = "off"\n' in out and "code, concurrency 1" in out
    assert "next: SPECULON_CONFIG=speculon-bench/speculon.toml speculon serve" in out
    assert "wrote speculon-bench/speculon.toml" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--advise", "--modes", "off"], "modes = 'off': name one that drafts", id="no mode"),
        pytest.param(["--advise", "--widen", "3"], "widen = 3: is no model to advise on", id="another model"),
        pytest.param(["--write", "no/such/x.toml"], "there is no such folder", id="nowhere to write"),
        pytest.param(["--write", "."], "is no file", id="a folder"),
        pytest.param(["--advise", "--options", '{"a": null}'], "cannot be written as TOML", id="no TOML"),
    ],
)
def test_what_cannot_be_advised_is_refused_before_anything_is_loaded(
    folder: Path, arguments: list[str], message: str
) -> None:
    code, out, err = bench(folder / "none", *arguments)
    assert (code, out) == (2, "") and err.startswith(("InvalidParameter: ", "ConfigError: "))
    assert message in err
