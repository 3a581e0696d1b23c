"""The settings file: where a wrong value is, what was probably meant, and the documented example."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import EngineConfig, SamplingParams, ServeConfig, SpeculationConfig
from speculon.core.config.file import line_of
from speculon.core.errors import ConfigError, InvalidParameter

DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
MODELS = {"": EngineConfig, "speculation": SpeculationConfig, "serve": ServeConfig}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(text: str, **keywords: Any) -> str:
    Path("speculon.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "# engine\nblock_siz = 8\n",
            "speculon.toml, line 2: block_siz = 8: unknown field; did you mean block_size?",
            id="misspelt",
        ),
        pytest.param(
            "[speculation]\n\nmetod = 'off'\n",
            "speculon.toml, line 3: speculation.metod = 'off': unknown field; did you mean method?",
            id="misspelt in a table",
        ),
        pytest.param(
            "speculation.prompt_lookup_mini = 2\n",
            "speculon.toml, line 1: speculation.prompt_lookup_mini = 2: unknown field; "
            "did you mean prompt_lookup_min?",
            id="a dotted key",
        ),
        pytest.param(
            "method = 'off'\n",
            "speculon.toml, line 1: method = 'off': unknown field here; it belongs to [speculation]",
            id="in the wrong table",
        ),
        pytest.param(
            "threads = 1\nport = 80\n",
            "speculon.toml, line 2: port = 80: unknown field here; it belongs to [serve]",
            id="of the server",
        ),
        pytest.param(
            "model = 'demo'\n[serve]\nport = 70000\n",
            "speculon.toml, line 3: serve.port = 70000: Input should be less than or equal to 65535",
            id="a value",
        ),
        pytest.param(
            "\n[speculation]\nprompt_lookup_min = 4\nprompt_lookup_max = 3\n",
            "speculon.toml, line 3: speculation.prompt_lookup_min = 4: must be at most prompt_lookup_max, 3",
            id="two values that contradict",
        ),
        pytest.param("a = 1\nb = = 2\n", "speculon.toml, line 2: Invalid value", id="no TOML"),
    ],
)
def test_a_fault_has_its_line_and_the_nearest_name(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_a_fault_elsewhere_is_not_blamed_on_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "block_size = 8\n[speculation]\nmethod = 'off'\n"
    assert refusal(text, block_size=0).startswith("block_size = 0: ")
    assert refusal(text, speculation={"policy": "x"}).startswith("speculation.policy = 'x': ")
    monkeypatch.setenv("SPECULON_BLOCK_SIZE", "0")
    assert refusal(text).startswith("block_size = '0': ")


def test_the_named_file_is_the_one_in_the_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my.toml").write_text("\nblock_size = 0\n")
    monkeypatch.setenv("SPECULON_CONFIG", "my.toml")
    assert refusal("block_size = 'many'").startswith("my.toml, line 2: block_size = 0: ")


def test_the_line_of_a_key() -> None:
    text = "a = 1\n[t]\na = 2\n[t.u]\nb = { c = 1 }\n[v]  # comment\n'a' = 3\n"
    found = {keys: line_of(text, keys.split(".")) for keys in ("a", "t.a", "t.u.b.c", "t.u.d", "v.a", "w")}
    assert found == {"a": 1, "t.a": 3, "t.u.b.c": 5, "t.u.d": 4, "v.a": 7, "w": None}


def test_the_line_of_a_quoted_key_with_dots() -> None:
    text = '[models."a/b-1.5"]\nmethod = "off"\n[ models . "a/b-1" ]\nmethod = 1\n"c.d".e = 2\n'
    found = [
        line_of(text, ["models", *keys])
        for keys in (["a/b-1.5", "method"], ["a/b-1", "method"], ["a/b-1", "5"], ["a/b-1", "c.d", "e"])
    ]
    assert found == [2, 4, 3, 5]


def test_a_field_that_is_a_table_is_taken_whole() -> None:
    Path("speculon.toml").write_text('[speculation]\nmethod = "off"\ndraft = { pard = "a" }\n')
    speculation = EngineConfig(speculation={"draft": {"eagle3": "b"}}).speculation
    assert (speculation.method, speculation.draft) == ("off", {"eagle3": "b"})


def test_nearest_names_outside_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidParameter, match=r"temprature = 1.0: unknown field; did you mean temperature\?$"
    ):
        SamplingParams(temprature=1.0)
    monkeypatch.setenv("SPECULON_SPECULATION__METOD", "off")
    with pytest.raises(ConfigError, match=r"METOD; did you mean SPECULON_SPECULATION__METHOD\?$"):
        EngineConfig()


# the documented example


def example() -> str:
    block, _ = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return block


def test_the_documented_file_has_the_defaults() -> None:
    Path("speculon.toml").write_text(example())
    assert EngineConfig() == EngineConfig.model_construct()
    assert tomllib.loads(example())["speculation"]["suffix_pools"] == SpeculationConfig().suffix_pools


def test_the_documented_file_has_every_setting_and_its_examples_are_valid() -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", example(), flags=re.MULTILINE)
    tables = tomllib.loads(text)
    named = {"": tables.keys(), "speculation": tables["speculation"].keys(), "serve": tables["serve"].keys()}
    assert {name: set(keys) for name, keys in named.items()} == {
        name: set(model.model_fields) for name, model in MODELS.items()
    }
    Path("speculon.toml").write_text(text)
    config = EngineConfig()
    assert config.speculation.draft == "/models/small" and config.serve.request_timeout == 120
