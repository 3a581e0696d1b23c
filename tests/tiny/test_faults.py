"""Aborts, errors within a step and bad input: the pool stays whole, other sequences stay right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.errors import (
    EmptyPrompt,
    InvalidParameter,
    InvalidRequest,
    NeverFits,
    TooLong,
    UnknownMethod,
)
from speculon.engine import engine as engine_module
from speculon.engine.engine import Engine
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.step import TorchStep
from tests.tiny.account import check_account
from tests.tiny.conftest import CONTEXT, build, tiny_target
from tests.tiny.requests import mixed, plain, requests_of
from tests.tiny.scripted import (
    Key,
    Request,
    Result,
    assert_nothing_held,
    drain,
    make_engine,
    run,
    script,
    store_of,
)


def engine_with_requests(mode: str, **settings: Any) -> Engine:
    script(plain(mode))
    engine = make_engine(tiny_target("llama"), **settings)
    for request in mixed(requests_of(mode), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return engine


def step_into(engine: Engine, results: dict[Key, Result]) -> None:
    for event in engine.step():
        results.setdefault((event.request_id, event.sample), Result()).take(event)


# aborts


@pytest.mark.parametrize(
    ("settings", "moment"),
    [
        ({}, 0),
        ({}, 12),
        ({"num_blocks": 40}, 2),
        ({"num_blocks": 40}, 12),
        ({"max_num_seqs": 3, "max_batch_tokens": 9}, 2),
    ],
    ids=str,
)
def test_an_abort_frees_its_pages_at_once_and_touches_nobody(settings: dict[str, Any], moment: int) -> None:
    truth = plain("sampled")
    engine, results = engine_with_requests("sampled", **settings), {}
    for _ in range(moment):
        step_into(engine, results)
    for name in ("q0", "q3", "q7"):
        if (name, 0) in results and results[name, 0].finish:
            assert engine.abort(name) == []
            continue
        (event,) = engine.abort(name)
        assert event.finish and event.finish.reason == "abort" and event.stats
        results.setdefault((name, 0), Result()).take(event)
        engine.check_integrity()
        assert engine.abort(name) == []
    drain(engine, results)
    assert results.keys() == truth.keys()
    for key, result in results.items():
        assert result.finish and result.tokens == truth[key][: len(result.tokens)]
        assert result.finish.reason == "abort" or result.tokens == truth[key]
        check_account(result)
    assert engine.counters.finished == {"abort": 3, "length": 5}
    assert engine.counters.totals.emitted == sum(len(r.tokens) for r in results.values())


@pytest.mark.parametrize("moment", range(4))
def test_an_abort_ends_every_sample(moment: int) -> None:
    engine = make_engine(tiny_target("llama"), max_batch_tokens=16)
    engine.add_request(
        list(range(20, 44)), SamplingParams(n=4, max_tokens=9, seed=1, ignore_eos=True), request_id="many"
    )
    engine.add_request(
        list(range(20, 44)), SamplingParams(max_tokens=9, seed=1, ignore_eos=True), request_id="other"
    )
    for _ in range(moment):
        engine.step()
    assert sorted(event.sample for event in engine.abort("many")) == [0, 1, 2, 3]
    assert {seq.request.id for seq in [*engine.scheduler.running, *engine.scheduler.waiting]} == {"other"}
    engine.check_integrity()
    drain(engine)
    assert engine.abort("never heard of") == []


def test_proposers_forget_what_has_ended() -> None:
    proposer = script(plain("greedy"))
    engine = make_engine(tiny_target("llama"), num_blocks=40)
    for request in requests_of("greedy"):
        engine.add_request(request.prompt, request.params, {"method": "scripted"}, request.id)
    for _ in range(10):
        engine.step()
    assert proposer.known
    engine.abort("q1")
    drain(engine)
    assert not proposer.known
    assert_nothing_held(engine)


# errors in the middle of a step


def state_of(engine: Engine) -> Any:
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    return {
        seq.request.id: (
            list(seq.tokens),
            seq.committed if seq in running else 0,
            seq.stats.emitted,
            seq.stats.rounds,
        )
        for seq in [*running, *waiting]
    }


def test_an_error_while_drafts_are_trimmed_leaves_every_sequence_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a step that has drafts gets there."""
    truth = plain("sampled")
    engine, results, failed = engine_with_requests("sampled"), {}, 0
    trim = engine.policy.trim

    def fail_sometimes(*args: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed % 5 == 1:
            raise MemoryError("planted")
        return trim(*args)

    monkeypatch.setattr(engine.policy, "trim", fail_sometimes)
    for _ in range(800):
        if not engine.has_work:
            break
        before = copy.deepcopy(state_of(engine))
        try:
            step_into(engine, results)
        except MemoryError:
            assert {name: tokens for name, (tokens, *_) in state_of(engine).items()} == {
                n: t for n, (t, *_) in before.items()
            }
            engine.check_integrity()
    assert failed > 10
    assert {key: r.tokens for key, r in results.items()} == truth


def fail_in(monkeypatch: pytest.MonkeyPatch, place: str, engine: Engine) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("planted")

    where: dict[str, tuple[Any, str]] = {
        "pack": (Batch, "pack"),
        "view": (store_of(engine), "view"),
        "forward": (engine.runtime.target, "forward"),
        "verify": (engine_module, "verify"),
        "commit": (TorchStep, "commit"),
        "decide": (engine.policy, "decide"),
    }
    monkeypatch.setattr(*where[place], fail)


@pytest.mark.parametrize(
    ("place", "few_pages"),
    list(zip(["decide", "pack", "view", "forward", "verify", "commit"], [False, True] * 3, strict=True)),
)
def test_an_error_leaves_every_sequence_as_it_was(place: str, few_pages: bool) -> None:
    settings = {"num_blocks": 40, "max_batch_tokens": 20} if few_pages else {}
    truth = plain("sampled")
    engine, results = engine_with_requests("sampled", **settings), {}
    for step in range(400):
        if not engine.has_work:
            break
        if step % 3 == 0:
            before = copy.deepcopy(state_of(engine))
            with pytest.MonkeyPatch.context() as monkeypatch:
                fail_in(monkeypatch, place, engine)
                with pytest.raises(MemoryError, match="planted"):
                    engine.step()
            after = state_of(engine)
            assert after.keys() == before.keys()
            for name, (tokens, committed, *counts) in after.items():
                assert [tokens, *counts] == [before[name][0], *before[name][2:]]
                # started, or gave way
                assert committed == before[name][1] or before[name][1] == 0 or committed == 0
            engine.check_integrity()
        step_into(engine, results)
    assert {key: r.tokens for key, r in results.items()} == truth
    for result in results.values():
        check_account(result)


@pytest.mark.parametrize("place", ["policy.observe", "events.round"])
def test_an_error_after_the_commit_loses_no_token(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, results = engine_with_requests("sampled", events=tmp_path / "events.jsonl"), {}
    owner, name = place.split(".")
    monkeypatch.setattr(getattr(engine, owner), name, lambda *_: 1 / 0)
    drain(engine, results)
    assert {key: result.tokens for key, result in results.items()} == plain("sampled")
    assert "not in the statistics" in caplog.text


def test_pages_that_a_failed_step_keeps_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a step that does not give back the pages beyond what is committed."""
    engine = engine_with_requests("sampled")
    for _ in range(3):
        engine.step()
    pages = engine.runtime.space.available
    monkeypatch.setattr(engine.runtime.space, "cut_to_committed", lambda seq: None)
    fail_in(monkeypatch, "forward", engine)
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.runtime.space.available < pages


# bad input


def test_an_end_of_text_id_outside_the_vocabulary_is_no_danger() -> None:
    """Small models often carry the ids of a larger tokenizer."""
    for outside in (5000, -1):
        model = build("llama")
        model.config.eos_token_id = model.generation_config.eos_token_id = [outside, 2]
        target = wrap_model(model)
        params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12, logit_bias={95: 50.0, 2: 80.0})
        assert run(target, [Request([5, 6, 7], params)])["r", 0].tokens == [95] * 12


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        pytest.param({"prompt": []}, EmptyPrompt, "no tokens", id="empty"),
        pytest.param(
            {"prompt": [96]},
            InvalidParameter,
            "prompt = 96: token ids must be from 0 to 95",
            id="unknown token",
        ),
        pytest.param(
            {"prompt": [5] * (CONTEXT + 1)}, TooLong, "prompt 129 > context 128", id="beyond the context"
        ),
        pytest.param(
            {"max_tokens": CONTEXT}, TooLong, "prompt 3 .* max_tokens 128 > context 128", id="answer too long"
        ),
        pytest.param(
            {"max_tokens": 90},
            NeverFits,
            "93 tokens need 24 KV pages of 4 tokens, but the pool has 20",
            id="no pages",
        ),
        pytest.param(
            {"logit_bias": {96: 1.0}},
            InvalidParameter,
            "logit_bias = 96: token ids must be from 0 to 95",
            id="bias",
        ),
        pytest.param({"stop_token_ids": (-3,)}, InvalidParameter, "stop_token_ids = -3", id="stop id"),
        pytest.param(
            {"logprobs": 97}, InvalidParameter, "logprobs = 97: the vocabulary has 96", id="logprobs"
        ),
        pytest.param({"prompt_logprobs": 97}, InvalidParameter, "prompt_logprobs = 97", id="prompt logprobs"),
        pytest.param(
            {"speculation": {"method": "eagle9"}},
            UnknownMethod,
            "method = 'eagle9': must be one of",
            id="method",
        ),
        pytest.param(
            {"speculation": {"method": ""}}, UnknownMethod, "method = '': must be one of", id="no method"
        ),
        pytest.param(
            {"speculation": {"num_speculative_tokens": 65}},
            InvalidParameter,
            "= 65: .* 64",
            id="too many drafts",
        ),
        pytest.param(
            {"speculation": {"tokens": 3}}, InvalidParameter, "tokens = 3: unknown field", id="unknown field"
        ),
        pytest.param(
            {"request_id": "taken"}, InvalidParameter, "request_id = 'taken': is in use", id="id in use"
        ),
    ],
)
def test_bad_input_is_refused_by_name_and_starts_nothing(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make_engine(tiny_target("llama"), num_blocks=20)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0), request_id="taken")
    call: dict[str, Any] = {"prompt": [5, 6, 7], "speculation": None, "request_id": "new"}
    settings = {"max_tokens": 4, "temperature": 0} | {k: v for k, v in change.items() if k not in call}
    with pytest.raises(error, match=message):
        call |= {k: v for k, v in change.items() if k in call}
        engine.add_request(
            call["prompt"], SamplingParams(**settings), call["speculation"], call["request_id"]
        )
    assert issubclass(error, InvalidRequest) and issubclass(error, ValueError)
    assert engine.counters.requests == 1 and engine.open_requests == ["taken"]
    assert list(drain(engine)) == [("taken", 0)]


def test_a_request_without_a_name_is_never_refused_for_the_name_it_is_given() -> None:
    engine, params = make_engine(tiny_target("llama")), SamplingParams(temperature=0, max_tokens=2)
    named = [engine.add_request([5], params, request_id=f"r-{i}") for i in (1, 2, 4)]
    assert len({*named, *(engine.add_request([5], params) for _ in range(5))}) == 8
    assert len(drain(engine)) == 8


@pytest.mark.parametrize("prompt", [1, 128])
def test_a_prompt_may_fill_the_context(prompt: int) -> None:
    result = run(
        tiny_target("llama"), [Request([7] * prompt, SamplingParams(temperature=0, ignore_eos=True))]
    )["r", 0]
    assert len(result.tokens) == CONTEXT - prompt and result.finish and result.finish.reason == "length"
