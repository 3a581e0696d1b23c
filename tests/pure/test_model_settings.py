"""Settings of each model: precedence, origins, conflicts, and what is healed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import IN_PYTHON, EngineConfig, SamplingParams, ServeConfig, SpeculationConfig
from speculon.core.config.engine import TABLES
from speculon.core.config.models import (
    FILE,
    HOMES,
    ModelSettings,
    ModelSettingsFile,
    PoolSettings,
    models_file,
    needs_new_worker,
)
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.speculation.proposers.registry import methods

METHODS = methods()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    return tmp_path


def settings(text: str = "", name: str = "m", others: str = "", **given: Any) -> ModelSettings:
    Path(FILE).write_text(text)
    Path("speculon.toml").write_text(others)
    return ModelSettingsFile(Path(FILE), METHODS).settings_of(name, given)


def refusal(text: str = "", others: str = "", **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(text, others=others, **given)
    return str(caught.value)


# precedence and origins


def test_flag_beats_environment_beats_model_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("max_context", "max_num_seqs", "max_batch_tokens", "num_blocks", "block_size")
    for number, name in enumerate(names[:2]):
        monkeypatch.setenv(f"SPECULON_{name.upper()}", str(200 + number))
    own = "[models.m]\n" + "".join(f"{name} = 300\n" for name in names[:3])
    found = settings(own, others="".join(f"{name} = 400\n" for name in names[:4]), max_context=100)
    assert [getattr(found.config, name) for name in names] == [100, 201, 300, 400, 16]
    assert [found.origin(name) for name in names] == [
        *("flag", "environment", f"model's settings: {FILE}, line 4", "speculon.toml, line 4", "default")
    ]
    assert EngineConfig(**found.keywords) == found.config


def test_in_tables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULON_SPECULATION__POLICY", "solo")
    monkeypatch.setenv("SPECULON_SPECULATION", '{"num_speculative_tokens": 7, "chained_drafts": true}')
    text = "[models.m]\nacceptance = 'block'\nnum_speculative_tokens = 3\nsuffix_pools = 1\n"
    others = "[speculation]\nacceptance = 'matching'\nsuffix_min_hits = 2\n"
    found = settings(text, others=others, speculation={"chained_drafts": False})
    values = {
        "policy": "solo",
        "num_speculative_tokens": 7,
        "chained_drafts": False,
        "acceptance": "block",
    }
    assert {name: found.value(name) for name in values} == values
    own = f"model's settings: {FILE}, line"
    assert {name: found.origin(name) for name in (*values, "suffix_min_hits")} == {
        "policy": "environment",
        "num_speculative_tokens": "environment",
        "chained_drafts": "flag",
        "acceptance": f"{own} 2",
        "suffix_min_hits": "speculon.toml, line 3",
    }


def test_a_table_is_found_by_any_of_its_names() -> None:
    text = "[models.'a/b-1.5']\naliases = ['c', 'd']\nserved_model_name = 'e'\npinned = true\n[models.f]\n"
    for name in ("a/b-1.5", "c", "d", "e"):
        found = settings(text, name)
        assert (found.name, found.config.model, found.pool.pinned) == ("a/b-1.5", "a/b-1.5", True)
        assert found.config.serve.served_model_name == "e"
    assert (settings(text, "f").pool, settings(text, "g").name) == (PoolSettings(), "g")


def test_the_model_of_a_table_is_not_that_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULON_MODEL", "b")
    text = "[models.m]\nmodel = 'there'\n[models.n]\n"
    assert [settings(text, name, model="a").config.model for name in "mn"] == ["there", "n"]
    assert settings(text, "other", model="a").config.model == "a"
    assert settings(text, "other").config.model == "b"


def test_sampling_has_what_is_set_and_no_more() -> None:
    found = settings("[models.m]\ntemperature = 0.5\nstop = 'x'\n", sampling={"top_k": 5})
    assert found.sampling == {"temperature": 0.5, "stop": "x", "top_k": 5}
    assert SamplingParams(**found.sampling | {"temperature": 0}).greedy
    assert [found.origin(name) for name in ("top_k", "stop", "min_p")] == [
        *("flag", f"model's settings: {FILE}, line 3", "default")
    ]


def test_what_has_changed() -> None:
    old = settings("[models.m]\ntemperature = 1\nblock_size = 16\n")
    new = settings("[models.m]\ntemperature = 0\npinned = false\n")
    assert old.changed(new) == {"temperature"} and old.changed(old) == frozenset()


def test_where_the_file_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_file(ServeConfig()) == Path(FILE)
    monkeypatch.setenv("SPECULON_CONFIG", "there/my.toml")
    Path("there/my.toml").write_text("")
    assert models_file(ServeConfig()) == Path("there") / FILE
    assert models_file(ServeConfig(models_file="mine.toml")) == Path("mine.toml")
    with pytest.raises(InvalidParameter, match="models_file .* in an existing folder"):
        ServeConfig(models_file="nowhere/mine.toml")


# the fields


def test_every_field_has_one_home_and_an_answer() -> None:
    sampling = {*SamplingParams.model_fields} - {*IN_PYTHON}
    homes = [sampling, *(set(model.model_fields) for model in (SpeculationConfig, PoolSettings))]
    homes += [set(EngineConfig.model_fields) - TABLES.keys(), {"served_model_name"}]
    assert sum(map(len, homes)) == len(HOMES) and set.union(*homes) == set(HOMES)
    answers = {field: needs_new_worker(field) for field in HOMES}
    assert set(answers.values()) == {True, False}
    now = {field for field, answer in answers.items() if not answer}
    speculation = {
        "method",
        "policy",
        "num_speculative_tokens",
        "draft_depth",
        "acceptance",
        "chained_drafts",
    }
    pool = {"pinned", "aliases", "served_model_name"}
    assert now == sampling | speculation | pool
    assert all(answers[field] for field in ("model", "dtype", "draft", "memory_limit_gb", "suffix_pools"))


@pytest.mark.parametrize("field", ["temprature", "speculation"])
def test_an_unknown_field_has_no_answer(field: str) -> None:
    for ask in (needs_new_worker, settings().origin):
        with pytest.raises(InvalidParameter, match=f"{field} = None: unknown field"):
            ask(field)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[models.m]\n\nmetod = 'off'\n",
            "line 3: models.m.metod = 'off': unknown field; did you mean method?",
        ),
        (
            "[models.'a.b']\ntop_p = 2\n",
            "line 2: models.a.b.top_p = 2: Input should be less than or equal to 1",
        ),
        ("[models.m]\nport = 1\n", "line 2: models.m.port = 1: unknown field: it is about the whole server"),
        (
            "[models.m.speculation]\nmethod = 'off'\n",
            "line 1: models.m.speculation = {'method': 'off'}: unknown",
        ),
        ("[models.m]\nmethod = 'sufix'\n", "line 2: models.m.method = 'sufix': must be one of auto, "),
        ("[models.m]\nstop = ['']\n", "line 2: models.m.stop"),
        (
            "[models.m]\naliases = ['n']\n[models.n]\n",
            "line 3: name = 'n': two models have this name, n and m",
        ),
        ("[models.m]\nmethod = \n", "line 2: Invalid value"),
        ("[model.m]\n", 'line 1: model: unknown; this file has only tables of the form [models."NAME"]'),
        ("[models]\nm = 3\n", "line 2: m: unknown; this file has only tables"),
    ],
)
def test_a_fault_of_the_file_has_its_line(text: str, expected: str) -> None:
    assert refusal(text).startswith(f"{FILE}, {expected}")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SPECULON_BLOCK_SIZE", "0", "block_size = '0': Input"),
        ("SPECULON_SPECULATION", '{"k": 3}', "speculation.k = 3: unknown field"),
    ],
)
def test_a_wrong_environment_is_refused(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal("[models.m]\n").startswith(expected)


def test_a_wrong_flag_or_other_file_is_refused() -> None:
    assert refusal(block_size=0).startswith("block_size = 0: Input")
    assert refusal(others="\nblock_size = 0\n").startswith("speculon.toml, line 2: block_size = 0")


# conflicts

LOOKUP = "[models.m]\nprompt_lookup_max = 4\n"


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        pytest.param(
            LOOKUP,
            {"prompt_lookup_min": 6},
            "prompt_lookup_min = 6 (flag), prompt_lookup_max = 4 "
            f"(model's settings: {FILE}, line 2): prompt_lookup_min = 6: must be at most "
            "prompt_lookup_max, 4",
            id="two numbers",
        ),
        pytest.param(
            "[models.m]\nmethod = 'off'\n",
            {"num_speculative_tokens": 4},
            "num_speculative_tokens = 4 (flag): it has no effect with method = 'off' "
            f"(model's settings: {FILE}, line 2)",
            id="K of a method that is off",
        ),
        pytest.param(
            "[models.m]\nmethod = 'suffix'\n",
            {"draft": "there"},
            "draft = 'there' (flag): it has no effect with method = 'suffix' "
            f"(model's settings: {FILE}, line 2)",
            id="a drafter of a method without",
        ),
        pytest.param(
            "[models.m]\ndraft = { pard = 'there' }\n",
            {"method": "eagle3"},
            "method = 'eagle3' (flag): it needs a drafter, and draft = {'pard': 'there'} "
            f"(model's settings: {FILE}, line 2)",
            id="a drafter of another method",
        ),
        pytest.param(
            "[models.m]\ndraft = '/gone'\n",
            {"method": "eagle3"},
            "method = 'eagle3' (flag): it needs a drafter, and draft = None (default); /gone: no such folder",
            id="a drafter that is not there",
        ),
    ],
)
def test_a_conflict_with_a_flag_names_both_fields_and_both_origins(
    text: str, given: dict[str, Any], expected: str
) -> None:
    assert refusal(text, speculation=given).startswith(expected)


def test_a_conflict_with_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULON_SPECULATION__PROMPT_LOOKUP_MIN", "6")
    assert "prompt_lookup_min = '6' (environment), prompt_lookup_max = 4 (model's" in refusal(LOOKUP)


def test_a_flag_may_turn_off_what_a_file_sets() -> None:
    text = "[models.m]\nmethod = 'eagle3'\ndraft = 'there'\nnum_speculative_tokens = 4\n"
    found = settings(text, speculation={"method": "off"})
    assert (found.config.speculation.method, found.warnings) == ("off", ())


@pytest.mark.parametrize("method", ["off", "suffix", "mtp"])
def test_a_drafter_beside_any_method_is_for_requests_that_choose_it(method: str) -> None:
    found = settings(f"[models.m]\nmethod = '{method}'\ndraft = 'there'\nnum_speculative_tokens = 2\n")
    assert (found.config.speculation.draft, found.warnings) == ("there", ())


# healing


@pytest.mark.parametrize(
    ("text", "others", "healed", "warning"),
    [
        pytest.param(
            "[models.m]\ndraft = '/gone'\nmethod = 'eagle3'\n",
            "",
            {"draft": None, "method": "auto"},
            f"draft = '/gone' (model's settings: {FILE}, line 2) left out: /gone: no such folder",
            id="a drafter that is gone",
        ),
        pytest.param(
            "[models.m]\ndraft = '/gone'\n",
            "[speculation]\ndraft = 'there'\n",
            {"draft": None},
            "no such folder",
            id="the drafter of other models does not take its place",
        ),
        pytest.param(
            "[models.m]\ndraft = { eagle3 = '/gone', pard = 'there' }\n",
            "",
            {"draft": {"pard": "there"}},
            "left out: /gone: no such folder; what is left is {'pard': 'there'}",
            id="one drafter of two",
        ),
        pytest.param(
            "[models.m]\ndraft = 'auto:/gone'\n", "", {"draft": None}, "/gone: no such folder", id="a search"
        ),
        pytest.param(
            "[models.m]\nmethod = 'pard'\n",
            "",
            {"method": "auto"},
            "line 2) left out: it needs a drafter, and draft = None (default)",
            id="a method without its drafter",
        ),
        pytest.param(
            "[models.m]\nprompt_lookup_min = 6\npolicy = 'fixed'\n",
            "[speculation]\nprompt_lookup_max = 4\n",
            {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "policy": "fixed"},
            "speculon.toml, line 2) left out: prompt_lookup_min = 6: must be at most prompt_lookup_max, 4",
            id="two numbers",
        ),
        pytest.param(
            "[models.m]\nadaptive_initial = 20\n",
            "",
            {"adaptive_initial": 5},
            "left out: adaptive_initial = 20: must be from min, 2, to max, 12",
            id="a number and a default",
        ),
        pytest.param(
            "[models.m]\nnum_speculative_tokens = 4\ndraft = 'there'\n",
            "[speculation]\nmethod = 'off'\n",
            {"num_speculative_tokens": None, "draft": None, "method": "off"},
            "left out: it has no effect with method = 'off' (speculon.toml, line 2)",
            id="a method that excludes both",
        ),
    ],
)
def test_a_conflict_of_files_is_healed_with_a_warning(
    text: str, others: str, healed: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = settings(text, others=others)
    assert {name: getattr(found.config.speculation, name) for name in healed} == healed
    assert any(warning in one for one in found.warnings), found.warnings
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(found.warnings)
    assert EngineConfig(**found.keywords) == found.config
    assert Path(FILE).read_text() == text


def test_nothing_right_is_healed() -> None:
    text = "[models.m]\nmethod = 'eagle3'\ndraft = 'there'\nprompt_lookup_min = 6\nprompt_lookup_max = 8\n"
    found = settings(text, others="[speculation]\nadaptive_initial = 3\n")
    assert found.warnings == () and found.config.speculation.adaptive_initial == 3
    assert settings("[models.m]\nmodel = 'demo'\nmethod = 'draft_model'\n").warnings == ()
    assert settings("[models.m]\ndraft = 'auto'\nmethod = 'pard'\n").warnings == ()


# changes that are tried


def test_a_change_that_would_be_left_out_names_its_field() -> None:
    file = ModelSettingsFile(Path(FILE), METHODS)
    with pytest.raises(InvalidParameter, match="needs a drafter") as caught:
        file.settings_after("m", {"temperature": 0, "method": "eagle3"})
    assert (caught.value.name, caught.value.value) == ("method", "eagle3")


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        ({"draft": "there"}, {"method": "off"}, "draft = 'there' (flag): it has no effect with method"),
        ({"num_speculative_tokens": 4}, {"method": "off"}, "tokens = 4 (flag): it has no effect with method"),
        ({"prompt_lookup_min": 3}, {"prompt_lookup_max": 2}, "must be at most prompt_lookup_max, 2"),
    ],
)
def test_a_change_that_a_flag_contradicts_names_its_field(
    flags: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    file = ModelSettingsFile(Path(FILE), METHODS)
    with pytest.raises(InvalidParameter) as caught:
        file.settings_after("m", changes, {"speculation": flags})
    assert caught.value.name in changes and expected in str(caught.value)


def test_a_conflict_with_a_flag_that_was_there_is_none_of_a_change(folder: Path) -> None:
    (folder / FILE).write_text("[models.m]\nmethod = 'off'\n")
    file = ModelSettingsFile(folder / FILE, METHODS)
    flags = {"speculation": {"num_speculative_tokens": 4}}
    with pytest.raises(ConfigError, match="no effect with method"):
        file.settings_after("m", {"temperature": 0}, flags)
    assert file.settings_after("m", {"method": "auto"}, flags).left_out == {}
