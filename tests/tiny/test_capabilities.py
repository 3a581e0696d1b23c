"""The capability table against requests to its engine, which are the independent judge of each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import EngineError, SpeculonError
from speculon.core.types import Capability, Reason, capabilities_json
from speculon.engine.engine import Engine
from speculon.runtimes.torch.kv import slots
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.speculation.proposers.registry import known_methods, register
from tests.engines import engine_on
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.forms import engine_of
from tests.tiny.kernels import one_by_one, plant
from tests.tiny.recurrent import recurrent_target
from tests.tiny.scripted import Result, drain

PROMPT = [5, 6, 7, 8] * 4
# reasons of a method that does not run at all
MISSING = {Reason.NO_DRAFTER, Reason.MEMORY, Reason.ERROR, Reason.OFF_CONFIG, Reason.OFF_REQUEST}


def with_draft(**speculation: Any) -> Engine:
    noisy_draft()
    return engine_of(speculation={**DRAFT, **speculation})


def without_tokenizer() -> Engine:
    engine = engine_of()
    return engine_on(engine.runtime.target, None, engine.config)


ENGINES: dict[str, Callable[[], Engine]] = {
    "lookups": engine_of,
    "a draft model": with_draft,
    "a draft model without memory": lambda: with_draft(memory_limit_gb=0.001),
    "no tokenizer": without_tokenizer,
    "recurrent states": lambda: engine_of(recurrent_target("lfm2")),
    "no snapshots": lambda: engine_of(recurrent_target("lfm2"), snapshot_memory_gb=0),
    "few pages": lambda: engine_of(num_blocks=8, prefix_cache=False, max_batch_tokens=8, max_num_seqs=2),
    "off": lambda: engine_of(speculation={"method": "off", "suffix_pools": 0, "policy": "solo"}),
}

OF_MEMORY = ("a draft model without memory", "no snapshots")  # whose reasons alone are others

# what a request asks for a parameter
SAMPLED: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "stop": ["an"],
    "seed": 3,
    "n": 3,
    "prompt_logprobs": 2,
    "bad_words": ["an"],
    "structured": {"choice": ["an apple", "a pear"]},
    "thinking": {"opened": True},
    "logits_processor": lambda tokens, logits: logits.roll(1),
}
OWN: dict[str, Any] = {
    "method": "suffix",
    "policy": "fixed",
    "num_speculative_tokens": 3,
    "pool": "mine",
    "prediction": [9, 10, 11, 12],
    "prediction.text": "an apple",
}
BEYOND: dict[str, Callable[[int], Any]] = {
    "n": lambda most: most + 1,
    "num_speculative_tokens": lambda most: most + 1,
    "prompt_logprobs": lambda most: most + 1,
    "stop": lambda most: ["a"] * (most + 1),
    "prediction": lambda most: [4] * (most + 1),
}


def ask(
    engine: Engine, prompt: list[int] = PROMPT, speculation: dict[str, Any] | None = None, **params: Any
) -> Result:
    """The first sample of a request, run to its end."""
    settings = {"max_tokens": 4, "ignore_eos": True, **params}
    engine.add_request(prompt, SamplingParams(**settings), speculation, "r")
    return drain(engine)["r", 0]


def ask_for(engine: Engine, name: str, value: Any) -> Result:
    if name in SAMPLED:
        return ask(engine, **{name: value})
    return ask(engine, speculation={name.partition(".")[0]: value})


def refusal(work: Callable[[], Any]) -> str | None:
    """The feature of the error that is raised."""
    with pytest.raises(SpeculonError) as refused:
        work()
    return refused.value.feature


def resolved(engine: Engine, speculation: dict[str, Any] | None = None, **params: Any) -> Any:
    return engine.admission.admit("r", PROMPT, SamplingParams(max_tokens=4, **params), speculation)[0]


# one check for each group of rows; it raises AssertionError (or pytest's failure) for a false row


def check_method(engine: Engine, name: str, row: Capability) -> None:
    reasons = ask(engine, speculation={"method": name}).stats.reasons
    assert row.status == ("off" if MISSING.intersection(reasons) else "on"), reasons
    drafts = set(resolved(engine, {"method": name}).request.max_drafts.values())
    if name in engine.admission.from_request:  # which drafts where a request brings something
        return
    assert not drafts if row.status == "off" else drafts <= {row.limits["drafts"]}


def check_parameter(engine: Engine, name: str, row: Capability) -> None:
    value = SAMPLED.get(name, OWN.get(name))
    if row.status == "refused":
        assert refusal(partial(ask_for, engine, name, value)) == f"parameters.{name}"
        return
    assert ask_for(engine, name, value).finish is not None
    if name in SAMPLED:
        assert row.status == ("changed" if is_changed(engine, name, value) else "on")
    else:
        assert row.status == ("on" if has_effect(engine, name, value) else "off")
    if name in BEYOND and row.status != "off":
        beyond = BEYOND[name](row.limits["most"])
        assert refusal(partial(ask_for, engine, name, beyond)) == f"parameters.{name}"


def is_changed(engine: Engine, name: str, value: Any) -> bool:
    """Whether speculation works otherwise for such a request."""
    plain, seq = resolved(engine), resolved(engine, **{name: value})
    draws = engine.proposers.find("draft_model") is not None  # drafts with probabilities
    return (
        (draws and seq.request.acceptance != plain.request.acceptance)
        or seq.grammar is not None
        or (cached(engine) > 0 and not cached(engine, **{name: value}))
        or (name == "n" and engine.config.speculation.policy == "solo")
    )


def has_effect(engine: Engine, name: str, value: Any) -> bool:
    field = name.partition(".")[0]
    request = resolved(engine, {"method": "suffix", field: value}).request
    if field == "prediction":
        return "prediction" in resolved(engine, {field: value}).request.max_drafts
    if field == "pool":
        engine.forget_pools()
        ask(engine, speculation={"method": "suffix", "pool": value})
        return engine.forget_pools(value) == 1
    return value in (request.policy, *request.max_drafts, *request.max_drafts.values())


def cached(engine: Engine, **params: Any) -> int:
    """Tokens that a request finds in the prefix cache after others with its prompt."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slots, "ALONE", 1)  # a hit behind a snapshot pays, however few tokens it has
        patched.setattr(slots, "FEWEST", 1)
        for _ in range(2):  # the first prompt shows what is shared, the second leaves a snapshot there
            ask(engine, max_tokens=1)
        return ask(engine, **{"max_tokens": 2, **params, "n": 1}).stats.cached_tokens


def check_limit(engine: Engine, name: str, row: Capability) -> None:
    most = next(iter(row.limits.values()), 0)  # none of `max_request_tokens`, which is the server's
    if name == "vocab_size":
        assert refusal(partial(ask, engine, [most])) == "limits.vocab_size"
        assert ask(engine, [most - 1]).finish is not None
    elif name == "max_num_seqs":
        for i in range(most + 1):
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            engine.add_request([4], params, {"method": "off"}, f"r{i}")
        engine.step()
        assert (engine.load.running, engine.load.waiting) == (most, 1)
        drain(engine)
    elif name in ("pool", "max_context"):
        tokens = {
            each: engine.capabilities()[f"limits.{each}"].limits["tokens"] for each in ("pool", "max_context")
        }
        tokens[name] = row.limits["tokens"]
        first = min(tokens, key=lambda each: (tokens[each], each == "pool"))
        assert refusal(partial(ask, engine, [4] * tokens[first], max_tokens=1)) == f"limits.{first}"
        assert ask(engine, [4] * (tokens[first] - 1), max_tokens=1).finish is not None


def check(engine: Engine, feature: str, row: Capability) -> None:
    group, _, name = feature.partition(".")
    assert row.reason
    if group == "methods":
        check_method(engine, name, row)
    elif group == "parameters" and (name in SAMPLED or name in OWN):
        check_parameter(engine, name, row)
    elif group == "limits":
        check_limit(engine, name, row)
    elif feature == "prefix_cache":
        assert row.status == ("on" if cached(engine) else "off")


CHECKED = {
    *(f"parameters.{name}" for name in (*SAMPLED, *OWN)),
    *(f"methods.{name}" for name in ("auto", "suffix", "ngram", "draft_model", "eagle3", "mtp")),
    *("prefix_cache", "limits.vocab_size", "limits.max_num_seqs"),
}


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in OF_MEMORY])
def test_each_row_is_true(name: str) -> None:
    engine = ENGINES[name]()
    for feature, row in engine.capabilities().items():
        try:
            check(engine, feature, row)
        except BaseException as error:
            error.add_note(f"{feature}: {row}")
            raise
    json.dumps(capabilities_json(engine.capabilities()))
    assert not engine.has_work and engine.runtime.space.available == engine.runtime.space.num_blocks


OTHER = {"on": "off", "off": "on", "changed": "on", "refused": "on"}


@pytest.mark.parametrize("name", ["a draft model", "no tokenizer", "off"])
def test_a_planted_lie_is_found(name: str) -> None:
    engine = ENGINES[name]()
    table = engine.capabilities()
    for feature in CHECKED:
        row = table[feature]
        lie = replace(row, status=OTHER[row.status])
        if feature.startswith("limits"):
            lie = replace(row, limits={limit: most + 1 for limit, most in row.limits.items()})
        with pytest.raises((AssertionError, SpeculonError, KeyError, pytest.fail.Exception)):
            check(engine, feature, lie)
            raise RuntimeError(f"{feature}: {lie} was not found")
        for request in [*engine.open_requests]:
            engine.abort(request)
        drain(engine)


def test_the_rows_are_those_of_the_parameters_and_the_registry() -> None:
    """A new parameter or method needs a row; `tenant` is the server's, and no client can set it."""
    table = engine_of().capabilities()
    fields = {*SamplingParams.model_fields, *RequestSpeculation.model_fields} - {"tenant", "defaults"}
    assert fields <= {feature.removeprefix("parameters.") for feature in table}
    assert {f"methods.{name}" for name in known_methods() if name != "off"} <= set(table)
    target = recurrent_target("qwen3_next")
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
    assert engine.capabilities()["methods.broken"] == Capability("refused", "KeyError")
    with pytest.raises(
        EngineError, match="method broken could not be started: its code raised KeyError"
    ) as refused:
        ask(engine, speculation={"method": "broken"})
    assert refused.value.feature == "methods.broken"


def test_reasons_are_those_of_the_model_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, one_by_one)
    few = ENGINES["few pages"]().capabilities()
    assert (
        few["limits.pool"].reason == "set by num_blocks"
        and few["prefix_cache"].reason == "prefix_cache is false"
    )
    windows = engine_of(tiny_target("mistral"), max_num_seqs=2, max_batch_tokens=8).capabilities()
    assert windows["limits.pool"].reason == "a full context for each of max_num_seqs"
    assert few["methods.draft_model"].reason == "no drafter is configured (set --draft)"
    small = ENGINES["a draft model without memory"]().capabilities()["methods.draft_model"]
    assert "memory limit: estimate " in small.reason and small.reason.endswith("fallback: plain")
    assert "no room for snapshots" in ENGINES["no snapshots"]().capabilities()["prefix_cache"].reason
    assert "draft_model" in with_draft().capabilities()["methods.auto"].reason
    invariant = engine_of(wrap_model(tiny_model("llama"), share=False, batch_invariant=True)).capabilities()
    assert (
        invariant["batch_invariant"].status == "on"
        and "in every batch" in invariant["batch_invariant"].reason
    )


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
