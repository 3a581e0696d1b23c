"""What an advice writes: the settings of a mode as TOML, and the next command."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.measure.bench.plan import parse_mode
from speculon.measure.bench.settings import as_toml, merged, next_command, settings, whole, write


def loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> SpeculationConfig:
    monkeypatch.setenv("SPECULON_CONFIG", str(path))
    return EngineConfig().speculation


def test_what_is_written_loads_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = SpeculationConfig(
        draft={"draft_model": 'odd "name" \\ é 🙂'}, memory_limit_gb=2.5, options={"x": [1, True]}
    )
    found = settings(base, parse_mode("auto:3"), ("suffix", "draft_model"))
    path = tmp_path / "speculon.toml"
    path.write_text(
        'block_size = 32\nevents = "x.jsonl" # kept\nmodel = "old"\n[speculation]\nmethod = "ngram"\n'
        "[speculation.options]\ny = 1\n[serve]\nport = 9000\n"
    )
    write(path, whole(EngineConfig(model="some/model", dtype="bfloat16", threads=2), found))
    read = loads(path, monkeypatch)
    assert read == base.model_copy(update={"method": "auto", "policy": "fixed", "num_speculative_tokens": 3})
    config = EngineConfig()
    assert (config.model, config.dtype, config.threads, config.block_size) == (
        "some/model",
        "bfloat16",
        2,
        EngineConfig.model_fields["block_size"].default,
    ), "a setting that was not measured is no part of the advice"
    assert config.serve.port == 9000 and "# kept" in path.read_text()
    write(path, {"model": "demo", "speculation": {"method": "off"}})
    assert loads(path, monkeypatch) == SpeculationConfig(method="off") and EngineConfig().model == "demo"
    assert [*tmp_path.iterdir()] == [path]


def test_the_model_is_in_the_file_though_it_is_the_default() -> None:
    values = whole(
        EngineConfig(events="x.jsonl"),
        settings(SpeculationConfig(draft="d"), parse_mode("auto"), ("draft_model",)),
    )
    speculation = {"method": "auto", "policy": "goodput", "draft": "d"}
    assert values == {"model": "smollm2", "speculation": speculation}
    assert as_toml(values).startswith('model = "smollm2"\n\n[speculation]\nmethod = "auto"\n')


@pytest.mark.parametrize(
    ("mode", "methods", "expected"),
    [
        pytest.param("off", (), {"method": "off"}, id="off"),
        pytest.param(
            "suffix:8",
            ("suffix",),
            {"method": "suffix", "policy": "fixed", "num_speculative_tokens": 8, "draft": {}},
            id="without the drafter, which would be loaded",
        ),
        pytest.param(
            "eagle3:4/block",
            ("eagle3",),
            {"method": "eagle3", "policy": "fixed", "num_speculative_tokens": 4, "acceptance": "block"},
            id="one of two drafters",
        ),
        pytest.param(
            "auto/adaptive",
            ("suffix", "eagle3", "draft_model"),
            {"method": "auto", "policy": "adaptive", "num_speculative_tokens": 2},
            id="K of the engine",
        ),
    ],
)
def test_settings_are_those_of_the_mode(
    mode: str, methods: tuple[str, ...], expected: dict[str, object]
) -> None:
    drafts = {"draft_model": "d", "eagle3": "e"}
    base = SpeculationConfig(policy="solo", num_speculative_tokens=2, draft=drafts)
    found = settings(base, parse_mode(mode), methods)
    own = {name: one for name, one in drafts.items() if name in methods}
    assert found == ({"draft": own} if methods else {}) | expected


def test_the_next_command_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECULON_CONFIG", raising=False)
    elsewhere = "SPECULON_CONFIG='a folder/speculon.toml' speculon serve"
    assert next_command(Path("a folder/speculon.toml")) == elsewhere
    assert next_command(Path("speculon.toml")) == "speculon serve"
    monkeypatch.setenv("SPECULON_CONFIG", "other.toml")
    assert next_command(Path("speculon.toml")) == "SPECULON_CONFIG=speculon.toml speculon serve"


@pytest.mark.parametrize(
    "text",
    [
        'speculation = { method = "off", chained_drafts = [\n1] }\n# kept\n',
        'speculation.method = "off"\nspeculation.policy = "solo"\n# kept\n[serve]\nport = 9000\n',
        '[speculation]\nmethod = "off"\n# kept\n[serve]\nport = 9000\n[speculation.options]\ny = 1\n',
    ],
)
def test_settings_are_replaced_however_they_are_spelled(tmp_path: Path, text: str) -> None:
    path = tmp_path / "speculon.toml"
    path.write_text(text)
    values = {"model": "demo", "speculation": {"method": "suffix"}}
    write(path, values)
    serve = {"serve": {"port": 9000}} if "serve" in text else {}
    assert tomllib.loads(path.read_text()) == values | serve


def test_a_file_that_cannot_be_merged_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "speculon.toml"
    for text in (b"no toml =", b"\xff"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="speculon.toml"):
            write(path, {"model": "demo", "speculation": {"method": "suffix"}})
        assert path.read_bytes() == text
    for wrong in (tmp_path, tmp_path / "none" / "x.toml"):
        with pytest.raises(InvalidParameter, match="^write = "):
            merged(wrong, {"model": "demo", "speculation": {"method": "off"}})


@given(st.dictionaries(st.sampled_from(["method", "draft"]), st.text(max_size=8), min_size=1))
def test_any_string_survives_toml(values: Mapping[str, str]) -> None:
    assert tomllib.loads(as_toml({"model": "x", "speculation": values})) == {
        "model": "x",
        "speculation": values,
    }


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        as_toml({"speculation": {"options": {"x": None}}})
