"""A request's own logits processor: the same text with speculation and without; faults end it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.core.errors import InvalidParameter, LogitsProcessorError
from speculon.decoding import sampling
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.messages import Add
from tests.tiny import test_decoder
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import VOCAB, tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.forms import FORMS, engine_of
from tests.tiny.requests import MODES, OFF, assert_same, drafting
from tests.tiny.requests import requests_of as stock_requests
from tests.tiny.scripted import (
    Key,
    Request,
    Result,
    assert_idle,
    assert_nothing_held,
    drain,
    make_engine,
    run,
    script,
)

NEVER = -float("inf")
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8]


def steer(tokens: list[int], logits: Tensor) -> Tensor:
    """Depends on each of the last tokens and on how many there are; changes its arguments."""
    logits[(7 * tokens[-1] + 3 * tokens[len(tokens) // 2] + len(tokens)) % VOCAB] += 3.0
    logits[tokens.pop()] = NEVER
    return logits


def with_processor(request: Request, processor: Any = steer) -> Request:
    return replace(request, params=request.params.model_copy(update={"logits_processor": processor}))


@cache
def requests_of(mode: str) -> tuple[Request, ...]:
    return tuple(map(with_processor, stock_requests(mode)))


@cache
def plain(mode: str) -> dict[Key, list[int]]:
    """Each of the requests alone and without speculation."""
    texts = {}
    for request in requests_of(mode):
        texts |= {key: result.tokens for key, result in run(tiny_target("llama"), [request]).items()}
    return texts


# the same text


def test_it_is_applied_to_every_token() -> None:
    """No token repeats the one before it, and the text is that of a loop over the stock model."""
    (request,) = requests_of("greedy")[:1]
    text, output = list(request.prompt), plain("greedy")["q0", 0]
    for token in output:
        out = run(
            tiny_target("llama"),
            [
                Request(
                    text, SamplingParams(temperature=0, logprobs=VOCAB, max_tokens=1, ignore_eos=True), OFF
                )
            ],
        )
        logits = torch.full((VOCAB,), NEVER)
        for id_, logprob in out["r", 0].logprobs[0].top:
            logits[id_] = logprob
        assert int(steer(list(text), logits).argmax()) == token != text[-1]
        text.append(token)
    assert output != run(tiny_target("llama"), [stock_requests("greedy")[0]])["q0", 0].tokens


def test_a_processor_that_does_not_see_the_last_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, call = plain("greedy"), sampling.call_processor
    script(truth)
    monkeypatch.setattr(
        sampling,
        "call_processor",
        lambda own, tokens, x: call(own, tokens[:-1] if len(tokens) % 3 else tokens, x),
    )
    with pytest.raises(AssertionError):
        results = run(tiny_target("llama"), drafting(requests_of("greedy"), 4))
        assert_same(requests_of("greedy"), results, truth)


def test_a_drafter_drafts_under_it() -> None:
    """The target as its own draft: all is accepted, where it would otherwise draft another text."""
    params = test_decoder.GREEDY.model_copy(update={"logits_processor": steer})
    decoder = test_decoder.make(test_decoder.SAME)
    decoder.generate(PROMPT, params)
    assert decoder.acceptance_rate == 1.0 and decoder.stats and decoder.stats.drafted > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_with_q_are_judged_under_it(rule: str) -> None:
    def three(tokens: list[int], logits: Tensor) -> Tensor:
        kept = torch.full_like(logits, NEVER)
        some = [(tokens[-1] + i) % VOCAB for i in (1, 2, 3)]
        kept[some] = logits[some]
        return kept

    decoder = test_decoder.make(test_decoder.OTHER, acceptance=rule)
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, logits_processor=three)
    text = [PROMPT[-1], *decoder.generate(PROMPT, params).token_ids]
    assert len(text) == 61 and {(b - a) % VOCAB for a, b in zip(text, text[1:], strict=False)} == {1, 2, 3}
    assert 0 < decoder.acceptance_rate < 1


def test_the_other_rules_come_after_it() -> None:
    """A grammar holds whatever it returns, and log-probabilities are the target's own."""

    def shout(tokens: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor([3, 4, 5]), 1e4)

    engine = engine_of()
    params = {"temperature": 0.0, "max_tokens": 40, "structured": FORMS["choice"], "logprobs": 1}
    engine.add_request(PROMPT, SamplingParams(**params, logits_processor=shout), None, "r")
    found = drain(engine)["r", 0]
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(found.tokens) in FORMS["choice"]["choice"]
    free = SamplingParams(temperature=0, max_tokens=4, min_tokens=4, logprobs=1)
    engine.add_request(PROMPT, free.model_copy(update={"logits_processor": shout}), None, "r")
    engine.add_request(PROMPT, free.model_copy(update={"max_tokens": 1, "min_tokens": 1}), None, "s")
    results = drain(engine)
    assert results["r", 0].tokens == [3, 3, 3, 3] and results["r", 0].logprobs[0].rank > 1
    assert results["r", 0].logprobs[0].top == results["s", 0].logprobs[0].top


# faults


class Failing:
    """Fails where the text has so many tokens."""

    def __init__(self, at: int, fault: Callable[[Tensor], Any]):
        self.at, self.fault = at, fault

    def __call__(self, tokens: list[int], logits: Tensor) -> Any:
        return self.fault(logits) if len(tokens) == self.at else steer(tokens, logits)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


def planted(logits: Tensor) -> Any:
    raise KeyError("planted")


METHODS = ("off", "scripted", "draft_model")
FAULTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (planted, r"failed at token \d+: KeyError: 'planted'"),
    (lambda x: None, r"returned None instead of a torch.float32 tensor of shape \(96,\)"),
    (lambda x: Unshowable(), r"failed at token \d+: RuntimeError: no name"),
    (lambda x: x[1:], r"torch.float32 tensor of shape \(95,\) instead of"),
    (lambda x: x.double(), "a torch.float64 tensor of shape"),
    (lambda x: x.fill_(float("nan")), "returned nan as largest number"),
    (lambda x: x.fill_(NEVER), "returned -inf as largest number"),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_ends_its_request_alone(method: str) -> None:
    """Seven requests have a fault each, at different tokens; the last one is sound."""
    noisy_draft()
    truth = plain("sampled")
    script(truth)
    sound = [replace(r, speculation={"method": method}) for r in requests_of("sampled")]
    faulty = {
        request.id: (fault, message, after)
        for request, (fault, message), after in zip(sound[:-1], FAULTS, range(4, 11), strict=True)
    }
    engine = make_engine(tiny_target("llama"), speculation=DRAFT)
    for request in sound:
        if request.id in faulty:
            fault, _, after = faulty[request.id]
            request = with_processor(request, Failing(len(request.prompt) + after, fault))
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results = drain(engine)
    for name, (fault, message, after) in faulty.items():
        failed = results[name, 0]
        assert failed.tokens == truth[name, 0][:after] and failed.finish is not None
        assert (failed.finish.reason, failed.finish.matched) == ("error", None)
        with pytest.raises(LogitsProcessorError, match=message):
            raise failed.finish.error or AssertionError
        assert isinstance(failed.finish.error.__cause__, KeyError) == (fault is planted)
    last = sound[-1].id, 0
    assert results[last].tokens == truth[last]
    stats = results[last].stats
    assert method == "off" or (stats.rounds > 0 and "error" not in stats.reasons)
    assert_nothing_held(engine)
    again = sound[0]
    engine.add_request(again.prompt, again.params, again.speculation, again.id)
    assert drain(engine)[again.id, 0].tokens == truth[again.id, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_after_a_rejected_draft_is_none(mode: str) -> None:
    """The processor knows the text, and fails on every other."""
    truth = plain(mode)
    script(truth, lies=lambda position: position % 3 == 2)
    known = {tuple(r.prompt): truth[r.id, 0] for r in requests_of(mode)}
    failures = 0

    def knows(tokens: list[int], logits: Tensor) -> Tensor:
        nonlocal failures
        for prompt, output in known.items():
            text = [*prompt, *output]
            if tokens == text[: len(tokens)] and len(tokens) >= len(prompt):
                return steer(tokens, logits)
        failures += 1
        raise LookupError("not in the text")

    requests = drafting(tuple(with_processor(r, knows) for r in requests_of(mode)), 4)
    results = run(tiny_target("llama"), requests)
    assert_same(requests_of(mode), results, truth)
    assert failures > 0 and {r.finish.reason for r in results.values() if r.finish} == {"length"}


def test_a_fault_of_one_sample_leaves_the_others() -> None:
    def fails_for_even(tokens: list[int], logits: Tensor) -> Tensor:
        if len(tokens) > len(PROMPT) and not tokens[len(PROMPT)] % 2:
            raise ValueError("even")
        return logits

    params = SamplingParams(
        temperature=2.0, seed=3, n=8, max_tokens=6, ignore_eos=True, logits_processor=fails_for_even
    )
    results: dict[Key, Result] = run(tiny_target("llama"), [Request(PROMPT, params)])
    ends = {
        result.tokens[0] % 2: (result.finish and result.finish.reason, len(result.tokens))
        for result in results.values()
    }
    assert ends == {0: ("error", 1), 1: ("length", 6)}


# how callers see it


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("llm") / "model")
    return LLM(str(folder), max_num_seqs=8, speculation={"policy": "fixed"})


def params_of(processor: Any, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processor=processor, **more)


def test_generate_gives_each_text_and_its_own_fault(llm: LLM) -> None:
    many = [params_of(steer), params_of(Failing(len(PROMPT) + 5, planted)), params_of(None)]
    outputs = llm.generate([PROMPT] * 3, many)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == outputs[0].token_ids[:5] and outputs[0].error is None
    assert isinstance(outputs[1].error, LogitsProcessorError) and outputs[2].token_ids != outputs[0].token_ids
    again = asyncio.run(llm.agenerate([PROMPT] * 3, many))
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert isinstance(again[1].error, LogitsProcessorError)
    assert_idle(llm)


def test_streams_raise_it_after_the_text_before_it(llm: LLM) -> None:
    failing, prompt = params_of(Failing(len(PROMPT) + 5, planted)), list(PROMPT)
    whole = llm.generate([prompt], failing)[0]
    pieces: list[str] = []
    with pytest.raises(LogitsProcessorError, match="KeyError"):
        for piece in llm.stream(prompt, failing):
            pieces.append(piece)
    assert "".join(pieces) == whole.text and whole.text

    async def read() -> None:
        async for piece in llm.astream(prompt, failing):
            pieces.append(piece)

    with pytest.raises(LogitsProcessorError):
        asyncio.run(read())
    assert "".join(pieces) == 2 * whole.text
    session = llm.session(params_of(lambda tokens, logits: None), raw=True)
    with pytest.raises(LogitsProcessorError):
        session.send("def add")
    assert session.turns == []
    assert_idle(llm)


def test_one_that_calls_its_own_engine_is_a_fault(llm: LLM) -> None:
    output = llm.generate([PROMPT], params_of(lambda tokens, logits: llm.generate([[5]])))[0]
    with pytest.raises(LogitsProcessorError, match="from inside its own step"):
        raise output.error or AssertionError
    assert_idle(llm)


def test_a_round_of_a_model_object_says_so() -> None:
    result = test_decoder.make().step(PROMPT, params_of(planted))
    assert result.emitted_tokens == () and result.verdict.finish
    assert isinstance(result.verdict.finish.error, LogitsProcessorError)


# where it cannot be


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="logits_processor"):
        SamplingParams(logits_processor="a name")


def test_a_process_of_its_own_refuses_it_by_name() -> None:
    async def submit(params: SamplingParams) -> None:
        await AsyncEngine({"model": "demo"}).submit([Add("r", PROMPT, params)])

    with pytest.raises(InvalidParameter, match="logits_processor = .*cannot be sent") as refused:
        asyncio.run(submit(params_of(steer)))
    assert refused.value.feature == "parameters.logits_processor"
