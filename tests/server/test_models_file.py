"""Models of one server with settings of their own, in a file: names, pins, sampling."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speculon.checkpoints.locate import locate
from speculon.cli.serve import catalogue_of
from speculon.core.config import EngineConfig
from speculon.core.config.models import ModelSettingsFile
from speculon.core.errors import ConfigError
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.loader import GB
from speculon.speculation.proposers.registry import methods
from tests.server.inside import ScriptedLoader, serving
from tests.server.test_several_models import PATHS, Pool

pytestmark = pytest.mark.timeout(60)

TABLES = """
[models.a]
aliases = ["first"]
max_tokens = 2

[models.b]
model = "path-b"
pinned = true
max_tokens = 5
stop = ["d"]
"""


@contextmanager
def with_tables(folder: Path, tables: str = TABLES) -> Iterator[Pool]:
    path, loader = folder / "models.toml", ScriptedLoader()
    path.write_text(tables)
    file = ModelSettingsFile(path, methods())
    with serving(Catalogue({"model": "path-a"}, PATHS, {}, file), loader) as inside:
        yield Pool(inside, loader)


def answered(pool: Pool, name: str, **body: Any) -> tuple[str, str]:
    answer = pool.inside.post("completions", **{"prompt": "say:abcdefgh", "model": name, **body}).json()
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]


def test_a_model_has_names_a_pin_and_sampling_of_its_own(tmp_path: Path) -> None:
    with with_tables(tmp_path) as pool:
        assert answered(pool, "first") == answered(pool, "a") == ("ab", "length")
        assert answered(pool, "b") == ("abc", "stop")
        assert answered(pool, "b", stop=["f"]) == ("abcde", "length"), "a request's own values come first"
        assert answered(pool, "b", stop=["f"], max_tokens=9) == ("abcde", "stop")
        assert len(answered(pool, "c")[0]) > 5, "a model without a table"
        assert pool.model("b").pinned and not pool.model("a").pinned
        assert set(pool.states()) == {"a", "b", "c"}, "another name is no other model"


def test_the_served_name_of_a_table_is_one_more_alias(tmp_path: Path) -> None:
    with with_tables(tmp_path, '[models.a]\nserved_model_name = "shown"\nmax_tokens = 2\n') as pool:
        assert answered(pool, "shown") == answered(pool, "a") == ("ab", "length")
        listed = [one["id"] for one in pool.inside.client.get("/v1/models").json()["data"]]
        assert "a" in listed and "shown" not in listed


def check_that_devices_have_accounts_of_their_own(folder: Path, loader: ScriptedLoader) -> None:
    """Two models fit into the memory of neither device, and `b` is alone on its own."""
    (folder / "models.toml").write_text('[models.b]\nmodel = "path-b"\ndevice = "cuda:0"\n')
    file = ModelSettingsFile(folder / "models.toml", methods())
    settings = {"model": "path-a", "serve": {"memory_gb": 10}}
    with serving(Catalogue(settings, PATHS, {}, file), loader) as inside:
        pool = Pool(inside, loader)
        for name in "abc":
            pool.text(name)
        assert pool.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert [inside.state.pool.free(device) for device in ("cpu", "cuda:0")] == [4 * GB, 4 * GB]


def test_devices_have_accounts_of_their_own(tmp_path: Path) -> None:
    loader = ScriptedLoader(gigabytes=dict.fromkeys(PATHS.values(), 6.0))
    check_that_devices_have_accounts_of_their_own(tmp_path, loader)


def test_one_account_for_two_devices_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(ScriptedLoader, "device", lambda loader, config: "cpu")
    loader = ScriptedLoader(gigabytes=dict.fromkeys(PATHS.values(), 6.0))
    with pytest.raises(AssertionError):
        check_that_devices_have_accounts_of_their_own(tmp_path, loader)


def test_a_name_of_two_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'c' is a name of two models, c and a"):
        with with_tables(tmp_path, '[models.a]\naliases = ["c"]\n'):
            pass


def test_the_file_names_the_models_unless_the_command_line_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert catalogue_of({}, EngineConfig(), []).file is None
    (tmp_path / "speculon-models.toml").write_text(
        '[models.one]\nmodel = "demo"\n[models.two]\nmodel = "demo"\naliases = ["second"]\n'
    )
    assert catalogue_of({}, EngineConfig(), []).paths == {"one": "demo", "two": "demo"}
    found = catalogue_of({"model": "second"}, EngineConfig(model="second"), ["second"])
    assert found.paths == {"two": "demo"} and found.settings_of("two").keywords["model"] == "demo"
    with pytest.raises(ConfigError, match="no such file"):
        catalogue_of({}, EngineConfig(serve={"models_file": tmp_path / "other.toml"}), [])


def test_the_first_model_that_is_given_is_the_default(tmp_path: Path) -> None:
    """Also where another one has a table."""
    (tmp_path / "models.toml").write_text('[models.one]\nmodel = "demo"\n')
    config = EngineConfig(serve={"models_file": tmp_path / "models.toml"})
    assert list(catalogue_of({}, config, ["demo-draft", "one"]).paths) == ["demo-draft", "one"]


def test_a_table_is_about_the_subfolder_of_its_name(tmp_path: Path) -> None:
    """A model is found once, under the settings of its table; others of the folder have none."""
    for name in ("one", "two"):
        shutil.copytree(locate("demo-draft"), tmp_path / "models" / name)
    (tmp_path / "models.toml").write_text("[models.one]\npinned = true\n")
    serve = {"models_file": tmp_path / "models.toml", "models_dir": tmp_path / "models"}
    found = catalogue_of({}, EngineConfig(serve=serve), [])
    assert found.paths == {name: str(tmp_path / "models" / name) for name in ("one", "two")}
    assert found.settings_of("one").pool.pinned and not found.settings_of("two").pool.pinned


def test_an_empty_file_serves_the_model_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("")
    config = EngineConfig(serve={"models_file": tmp_path / "models.toml"})
    assert catalogue_of({"model": config.model}, config, []).paths == {config.model: config.model}


def test_a_table_is_about_the_model_of_the_settings_with_its_name(tmp_path: Path) -> None:
    """As the administration writes it for a server of one model."""
    (tmp_path / "models.toml").write_text("[models.mine]\nmax_tokens = 2\n")
    shutil.copytree(locate("demo-draft"), tmp_path / "mine")
    config = EngineConfig(model=str(tmp_path / "mine"), serve={"models_file": tmp_path / "models.toml"})
    for models in ([], [config.model]):
        found = catalogue_of({"model": config.model}, config, models)
        assert found.paths == {"mine": config.model} and found.settings_of("mine").sampling == {
            "max_tokens": 2
        }


def test_a_name_for_a_model_with_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[models.one]\n")
    serve = {"models_file": tmp_path / "models.toml", "served_model_name": "other"}
    with pytest.raises(ConfigError, match=r"served_model_name = 'other': 'one' has a table in "):
        catalogue_of({}, EngineConfig(serve=serve), [])


def test_defaults_give_way_to_what_a_request_sets(tmp_path: Path) -> None:
    tables = "[models.a]\nmin_tokens = 6\nlogprobs = 1\n"
    with with_tables(tmp_path, tables) as pool:
        assert answered(pool, "a", max_tokens=2) == ("ab", "length"), "no conflict with max_tokens"
        chat = {"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 7}
        choices = [
            pool.inside.post("chat/completions", **chat, **more).json()["choices"][0]
            for more in ({}, {"logprobs": False})
        ]
        assert choices[0]["logprobs"] and choices[1].get("logprobs") is None
