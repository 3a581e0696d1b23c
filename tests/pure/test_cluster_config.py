"""Settings of a cluster: one flat mapping, resolved where the application is built."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.cli import serve as command
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError
from speculon.operations.cluster.config import of_engine, read


def test_one_mapping_has_both() -> None:
    given = {"model": "demo", "replicas": "3", "speculation.method": "suffix", "serve": {"max_queue": 7}}
    cluster, settings = read({**given, "max_num_seqs": "8"})
    assert (cluster.replicas, cluster.max_replicas, cluster.cpus) == (3, None, 1.0)
    assert settings["speculation"]["method"] == "suffix" and settings["serve"]["max_queue"] == 7
    assert EngineConfig(**settings).max_num_seqs == 8


def test_a_table_and_its_fields_may_both_be_given() -> None:
    _, settings = read({"serve": {"max_queue": 7}, "serve.port": 1})
    assert (settings["serve"]["max_queue"], settings["serve"]["port"]) == (7, 1)


def test_the_environment_counts_where_the_application_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULON_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("SPECULON_SERVE__API_KEY", "secret")
    _, settings = read({"model": "demo"})
    monkeypatch.setenv("SPECULON_MAX_NUM_SEQS", "6")
    config = EngineConfig(**settings)
    assert config.max_num_seqs == 5
    assert [key.get_secret_value() for key in config.serve.api_key] == ["secret"]
    assert "secret" not in repr(settings) and "api_key" not in of_engine(settings)["serve"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas = 0"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas = 2: must be at least replicas, 4"),
        ({"replica": 4}, "unknown field"),
        ({"max_num_seqs": "many"}, "max_num_seqs = 'many'"),
        ({"speculation.methd": "suffix"}, "speculation.methd"),
        (
            {"serve": {"admin": True}},
            "admin: not supported with replicas, which serve one model without the dashboard",
        ),
        (
            {"serve.capture": "here", "ingresses": 2},
            "ingresses = 2: must be 1 with capture, which one process writes",
        ),
        ({"serve.memory_gb": 4}, "memory_gb: not supported with replicas"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(given)


def test_without_ray_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"replicas = 2: needs Ray, .* 'speculon\[ray\]'"):
        command.run_replicas({}, ["demo"], 2)
    with pytest.raises(ConfigError, match="replicas = 2: replicas serve one model"):
        command.run_replicas({}, ["demo", "other"], 2)
