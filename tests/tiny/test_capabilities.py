"""The capability table against its engine: each row has a request that shows it, and a false row is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import EngineError, SpeculonError
from speculon.core.types import Capability, capabilities_json
from speculon.engine import capabilities
from speculon.loading.load import wrap_model
from speculon.speculation.proposers.registry import known_methods, register
from tests.tiny.capability_rows import ENGINES, OF_MODELS, OF_REQUESTS, ask, check, refusal, with_draft
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.forms import engine_of
from tests.tiny.recurrent import recurrent_target


@pytest.mark.parametrize("name", ENGINES)
def test_each_row_is_true(name: str) -> None:
    engine = ENGINES[name]()
    for feature, row in engine.capabilities().items():
        if name in OF_MODELS and feature.startswith(OF_REQUESTS):
            continue
        try:
            check(engine, feature, row)
        except BaseException as error:
            error.add_note(f"{feature}: {row}")
            raise
    json.dumps(capabilities_json(engine.capabilities()))
    assert not engine.has_work and engine.pool.available == engine.pool.num_blocks


OTHER = {"on": "off", "off": "on", "changed": "on", "refused": "on"}


@pytest.mark.parametrize("name", ["lookups", "a draft model", "no tokenizer", "off"])
def test_a_planted_lie_is_found(name: str) -> None:
    engine = ENGINES[name]()
    for feature, row in engine.capabilities().items():
        lie = replace(row, status=OTHER[row.status])
        with pytest.raises((AssertionError, SpeculonError, pytest.fail.Exception)):
            check(engine, feature, lie)
            raise RuntimeError(f"{feature}: {lie} was not found")
        while engine.has_work:
            engine.step()
        for request in engine.open_requests:
            engine.abort(request)


LIMITS = ("pool", "max_context", "vocab_size", "page", "max_num_seqs", "max_batch_tokens")


@pytest.mark.parametrize("limit", LIMITS)
def test_a_planted_limit_is_found(limit: str) -> None:
    engine = ENGINES["few pages"]()
    row = engine.capabilities()[f"limits.{limit}"]
    for more in (-1, 1):
        lie = replace(row, limits={name: most + more for name, most in row.limits.items()})
        with pytest.raises((AssertionError, SpeculonError, pytest.fail.Exception)):
            check(ENGINES["few pages"](), f"limits.{limit}", lie)


def test_the_rows_are_those_of_the_parameters_and_the_registry() -> None:
    """A new parameter or method needs a row; `tenant` is the server's, and no client can set it."""
    table = engine_of().capabilities()
    fields = {*SamplingParams.model_fields, *RequestSpeculation.model_fields} - {"tenant", "defaults"}
    assert fields <= {feature.removeprefix("parameters.") for feature in table}
    assert {f"methods.{name}" for name in known_methods() if name != "off"} <= set(table)
    defaults = SamplingParams()
    for name, value in capabilities.EXAMPLES.items():
        assert getattr(SamplingParams(**{name: value}), name) != getattr(defaults, name)


def test_recurrent_classes_have_a_row_each() -> None:
    for name in ("qwen3_next", "jamba", "lfm2"):
        target = recurrent_target(name)
        rows = {feature for feature in engine_of(target).capabilities() if "states" in feature}
        assert rows == {f"rollback.states.{type(mixer.module).__name__}" for mixer in target.mixers}


@pytest.mark.parametrize(
    ("field", "value"),
    [("method", "none"), ("policy", "none"), ("acceptance", "typical"), ("num_speculative_tokens", 65)],
)
def test_what_no_row_allows_names_its_parameter(field: str, value: Any) -> None:
    engine = engine_of()
    assert refusal(lambda: ask(engine, speculation={field: value})) == f"parameters.{field}"
    assert engine.capabilities()[f"parameters.{field}"].status == "on"


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"min_tokens": 9}, {"stop": [""]}])
def test_other_faults_of_a_request_are_about_no_row(wrong: dict[str, Any]) -> None:
    assert refusal(lambda: ask(engine_of(), **wrong)) is None


def test_a_plug_in_that_cannot_be_made_is_refused() -> None:
    def fail(config: Any, target: Any) -> Any:
        raise KeyError("planted")

    register("broken", fail)
    engine = engine_of()
    row = engine.capabilities()["methods.broken"]
    assert row == Capability("refused", "KeyError")
    check(engine, "methods.broken", row)
    with pytest.raises(EngineError, match="method broken cannot be made: KeyError"):
        ask(engine, speculation={"method": "broken"})


def test_a_batch_invariant_target_says_so() -> None:
    target = wrap_model(tiny_model("llama"), share=False, batch_invariant=True)
    row = engine_of(target).capabilities()["batch_invariant"]
    assert row.status == "on" and "in every batch" in row.reason


def test_reasons_are_those_of_the_settings() -> None:
    few = ENGINES["few pages"]().capabilities()
    assert few["limits.pool"].reason == "set by num_blocks"
    for settings in ({"prefix_cache": False}, {}):
        windows = engine_of(tiny_target("mistral"), max_num_seqs=2, max_batch_tokens=8, **settings)
        assert windows.capabilities()["limits.pool"].reason == "a full context for each of max_num_seqs"
    assert few["prefix_cache"].reason == "setting prefix_cache is off"
    assert "not configured" in few["methods.draft_model"].reason
    small = ENGINES["a draft model without memory"]().capabilities()["methods.draft_model"]
    assert small.reason.startswith("memory: estimate ") and small.reason.endswith("fallback: plain")
    assert ENGINES["no snapshots"]().capabilities()["prefix_cache"].reason.startswith("recurrent states")
    assert ENGINES["recurrent states"]().capabilities()["prefix_cache"].limits["snapshots"] > 0
    assert "draft_model" in with_draft().capabilities()["methods.auto"].reason


# inspect


def test_inspect_shows_the_table_of_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "bare")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "bare"), "--json"])
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["supported"], facts["tokenizer"]) == (0, True, "none, token ids only")
    assert "no usable tokenizer" in facts["tokenizer_error"]
    table = facts["capabilities"]
    assert table["tokenizer"] == {"status": "off", "reason": "none, token ids only", "limits": {}}
    of_text = [table[f"parameters.{name}"] for name in ("stop", "bad_words", "structured", "prediction.text")]
    assert {row["status"] for row in of_text} == {"refused"}
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(tmp_path / "bare")]).stdout.split())
    assert "tokenizer none, token ids only fused" in shown and "parameters.stop refused texts need" in shown
