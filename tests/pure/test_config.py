"""Wrong settings are named with their value and limit.

Request > keyword > environment > file > default.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import EngineConfig, RequestSpeculation, SamplingParams, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter, InvalidRequest, SpeculonError
from speculon.core.types import acceptance_rule

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "bad", "limit"),
    [
        ("temperature", -0.01, "greater than or equal to 0"),
        ("temperature", 101.0, "less than or equal to 100"),
        ("temperature", NAN, "finite"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.0001, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("min_p", -0.1, "greater than or equal to 0"),
        ("min_p", 1.1, "less than or equal to 1"),
        ("max_tokens", -1, "greater than or equal to 0"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("stop", ("x",) * 65, "at most 64 items"),
        ("stop", "", "1 to 256 characters|each string"),
        ("stop", "x" * 257, "each string must have from 1 to 256 characters"),
        ("stop_token_ids", (1,) * 65, "at most 64 items"),
        ("seed", -(2**63) - 1, f"from {-(2**63)} to {2**63 - 1}"),
        ("seed", 2**63, f"from {-(2**63)} to {2**63 - 1}"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 65, "less than or equal to 64"),
        ("logprobs", -1, "greater than or equal to 0"),
        ("logprobs", 129, "less than or equal to 128"),
        ("prompt_logprobs", 129, "less than or equal to 128"),
        ("presence_penalty", -2.1, "greater than or equal to -2"),
        ("frequency_penalty", 2.1, "less than or equal to 2"),
        ("repetition_penalty", 0.0, "greater than 0"),
        ("repetition_penalty", INF, "finite|less than"),
        ("logit_bias", dict.fromkeys(range(4097), 1.0), "at most 4096 items"),
        ("logit_bias", {"the": 1.0}, "integer"),
        ("bad_words", ("",), "each string"),
        ("bad_words", ("x",) * 257, "at most 256 items"),
        (
            "structured",
            {"regex": "a*", "choice": ["b"]},
            "exactly one of json_schema, json_object, regex, choice, grammar",
        ),
        ("structured", {"json_schema": False}, "no text"),
        (
            "structured",
            {"json_schema": {"enum": ["x" * 2**16]}},
            "must have at most 65536 characters as JSON, and has",
        ),
        ("structured", {"json_schema": {"enum": {1}}}, "must be JSON"),
        ("structured", {"regex": ""}, "at least 1"),
        ("structured", {"regex": "x" * (2**16 + 1)}, "at most 65536"),
        ("structured", {"grammar": "x" * (2**16 + 1)}, "at most 65536"),
        ("structured", {"choice": ()}, "at least 1"),
        ("structured", {"choice": ("x",) * 1025}, "at most 1024"),
        ("structured", {"choice": ("x" * 2**16,)}, "at most 65536 characters as JSON"),
        ("temprature", 1.0, "unknown field"),
    ],
)
def test_a_bad_sampling_parameter_is_named_with_its_value_and_limit(name: str, bad: Any, limit: str) -> None:
    with pytest.raises(InvalidParameter, match=limit) as caught:
        SamplingParams(**{name: bad})
    error = caught.value
    assert error.name.split(".")[0] == name and str(error).startswith(f"{error.name} = ")
    assert isinstance(error, InvalidRequest) and isinstance(error, ValueError)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 100},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_tokens": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 64},
        {"stop": ("x" * 256,) * 64},
        {"min_tokens": 5, "max_tokens": 5},
        {"logit_bias": {"17": 1}},
        {"frequency_penalty": -2},
        {"structured": {"json_schema": True}},
        {"structured": {"regex": "x" * 2**16}},
        {"structured": {"choice": ["x"] * 1024, "json_object": False, "regex": None}},
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(good: dict[str, Any]) -> None:
    SamplingParams(**good)


@pytest.mark.parametrize("seed", [-1, -1.0, "-1", None])
def test_a_seed_of_minus_one_is_none(seed: Any) -> None:
    params = SamplingParams(seed=seed)
    assert params.seed is None and acceptance_rule("auto", params) == "block"
    assert SamplingParams(seed=-2).seed == -2


def test_one_string_is_a_list_of_one() -> None:
    params = SamplingParams(stop="end", bad_words="bad")
    assert params.stop == ("end",) and params.bad_words == ("bad",)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="min_tokens = 9: must be at most max_tokens, 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        (SpeculationConfig, {"num_speculative_tokens": 65}, "num_speculative_tokens = 65: .* 64"),
        (
            SpeculationConfig,
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "^prompt_lookup_min = 4: must be at most prompt_lookup_max, 3$",
        ),
        (SpeculationConfig, {"synthetic_acceptance": 1.5}, "synthetic_acceptance = 1.5"),
        (SpeculationConfig, {"policy": "reckless"}, "policy = 'reckless': .*must be one of fixed"),
        (SpeculationConfig, {"k": 3}, "k = 3: unknown field"),
        (RequestSpeculation, {"draft": "x"}, "draft = 'x': unknown field"),
    ],
)
def test_bad_speculation_settings_are_refused_by_name(
    model: type, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        model(**values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"block_sise": 8}, "block_sise = 8: unknown field"),
        ({"block_size": 0}, "block_size = 0: .*greater than or equal to 1"),
        ({"dtype": "int8"}, "dtype = 'int8': .*'float32'"),
        ({"kv_memory_gb": 0}, "kv_memory_gb = 0"),
        ({"max_context": 1}, "max_context = 1"),
        ({"speculation": {"k": 3}}, "^speculation.k = 3: unknown field$"),
        (
            {"speculation": {"prompt_lookup_min": 6}},
            "^speculation.prompt_lookup_min = 6: must be at most prompt_lookup_max, 5$",
        ),
    ],
    ids=str,
)
def test_a_bad_engine_setting_is_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        EngineConfig(**values)
    assert isinstance(caught.value, SpeculonError) and isinstance(caught.value, ValueError)


# environment and file


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my.toml"
    path.write_text("")
    monkeypatch.setenv("SPECULON_CONFIG", str(path))
    return path


def test_keyword_beats_environment_beats_file_beats_default(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = EngineConfig()
    assert (default.block_size, default.max_num_seqs, default.max_batch_tokens) == (16, 32, 512)
    settings_file.write_text("block_size = 1\nmax_num_seqs = 1\nmax_batch_tokens = 1\n")
    monkeypatch.setenv("SPECULON_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("SPECULON_MAX_BATCH_TOKENS", "2")
    config = EngineConfig(max_batch_tokens=3)
    assert (config.block_size, config.max_num_seqs, config.max_batch_tokens) == (1, 2, 3)


def test_nested_settings_are_merged_field_by_field(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_file.write_text(
        '[speculation]\nmethod = "off"\nprompt_lookup_min = 1\nnum_speculative_tokens = 1\n'
    )
    monkeypatch.setenv("SPECULON_SPECULATION__NUM_SPECULATIVE_TOKENS", "2")
    monkeypatch.setenv("SPECULON_SPECULATION__PROMPT_LOOKUP_MAX", "7")
    spec = EngineConfig(speculation={"method": "ngram"}).speculation
    assert (spec.method, spec.num_speculative_tokens, spec.prompt_lookup_min, spec.prompt_lookup_max) == (
        "ngram",
        2,
        1,
        7,
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SPECULON_BLOCK_SIZ", "8", "unknown setting in the environment: SPECULON_BLOCK_SIZ"),
        ("SPECULON_SPECULATION__K", "8", "unknown setting in the environment: SPECULON_SPECULATION__K"),
        ("SPECULON_BLOCK_SIZE", "many", "block_size = 'many': .*integer"),
        ("SPECULON_SPECULATION", '{"k": 3}', "k = 3: unknown field"),
        ("SPECULON_CONFIG", "/nowhere/at.toml", "SPECULON_CONFIG = '/nowhere/at.toml': no such file"),
        ("SPECULON_SPECULATION", "{", 'field "speculation"'),
        ("SPECULON_CONFIG", "/", "SPECULON_CONFIG = '/': no such file"),
        ("SPECULON_CONFIG", sys.executable, sys.executable),
        ("SPECULON_KV_MEMORY_GB", "inf", "kv_memory_gb = 'inf': .*finite"),
    ],
)
def test_a_bad_environment_is_named(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        EngineConfig()


class Model:
    """What settings know of a model object."""

    device = "cpu"

    def get_input_embeddings(self) -> None: ...


def test_a_draft_is_a_path_an_object_or_a_table_of_them() -> None:
    model = Model()
    assert SpeculationConfig().drafts == {}
    assert SpeculationConfig(draft="x").drafts == {"draft_model": "x"}
    assert SpeculationConfig(draft=model).drafts["draft_model"] is model
    assert SpeculationConfig(draft={"mine": model, "draft_model": "x"}).drafts == {
        "mine": model,
        "draft_model": "x",
    }
    assert EngineConfig(speculation={"draft": model}).speculation.drafts["draft_model"] is model
    for wrong in (3, object(), {"mine": 3}):
        with pytest.raises(InvalidParameter, match="draft"):
            SpeculationConfig(draft=wrong)
