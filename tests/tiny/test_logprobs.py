"""Log-probabilities are those of the stock model: of accepted drafts, corrections and bonuses, and of the
prompt's tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from speculon.core.config import SamplingParams
from speculon.core.types import TokenLogprobs
from speculon.decoding import sampling, verify
from tests.rounding import rounding
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.requests import drafting, plain, requests_of
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, script, spell

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_batch_tokens": 7},
    "few pages": {"num_blocks": 40},
}
EXACT = 10 * rounding(layers=2)  # nat, of logits up to 10


def stock_logprobs(tokens: list[int]) -> torch.Tensor:  # [T - 1, V]: of each token after the first
    with torch.inference_mode():
        return tiny_model("llama")(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def error(reported: list[TokenLogprobs], tokens: list[int], stock: torch.Tensor, top: int) -> float:
    """The largest difference of any stated value; ranks and likeliest tokens must be the stock model's."""
    assert len(reported) == len(tokens) == len(stock)
    worst = 0.0
    for one, token, logp in zip(reported, tokens, stock, strict=True):
        assert one.token == token and len(one.top) == top
        assert abs(one.rank - 1 - int((logp > logp[token]).sum())) <= 1  # a tie may fall either way
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True)
        best = logp.topk(top).values
        stated = torch.tensor([one.logprob, *values, *(float(logp[i]) for i, _ in one.top)])
        worst = max(worst, float((stated - torch.cat([logp[token : token + 1], best, best])).abs().max()))
    return worst


def results_with_logprobs(mode: str, settings: dict[str, Any]) -> tuple[list[Request], dict[Key, Result]]:
    script(plain(mode))
    fields = {"logprobs": 3, "prompt_logprobs": 2}
    requests = [replace(r, params=r.params.model_copy(update=fields)) for r in drafting(requests_of(mode), 4)]
    return requests, run(tiny_target("llama"), requests, **settings)


@pytest.mark.parametrize(
    ("mode", "setting"),
    [("greedy", "roomy"), ("sampled", "roomy"), ("sampled", "chunked"), ("greedy", "few pages")],
)
def test_logprobs_are_the_stock_models(mode: str, setting: str) -> None:
    """Of the raw logits, whatever temperature, filters and penalties made of them."""
    requests, results = results_with_logprobs(mode, SETTINGS[setting])
    assert sum(r.stats.accepted for r in results.values()) > 50
    assert (sum(r.stats.preemptions for r in results.values()) > 0) == (setting == "few pages")
    for request in requests:
        result, prompt = results[request.id, 0], request.prompt
        assert result.tokens == plain(mode)[request.id, 0]
        stock = stock_logprobs(prompt + result.tokens)
        assert error(result.logprobs, result.tokens, stock[len(prompt) - 1 :], top=3) < EXACT
        assert error(result.prompt_logprobs, prompt[1:], stock[: len(prompt) - 1], top=2) < EXACT


def test_logprobs_of_the_wrong_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verify, "token_logprobs", lambda x, *rest: sampling.token_logprobs(x.roll(1, 0), *rest)
    )
    requests, results = results_with_logprobs("greedy", {})
    request = requests[0]
    stock = stock_logprobs(request.prompt + results[request.id, 0].tokens)[len(request.prompt) - 1 :]
    with pytest.raises(AssertionError):
        assert error(results[request.id, 0].logprobs, results[request.id, 0].tokens, stock, top=3) < EXACT


@pytest.mark.parametrize(
    ("length", "max_tokens", "budget"),
    [(1, 0, 512), (1, 5, 8), (2, 1, 512), (8, 5, 8), (9, 0, 8), (30, 1, 8)],
)
def test_a_prompt_is_scored_whatever_its_length(length: int, max_tokens: int, budget: int) -> None:
    prompt = list(range(20, 20 + length))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=0, n=2, ignore_eos=True)
    results = run(tiny_target("llama"), [Request(prompt, params)], max_batch_tokens=budget)
    first, second = results["r", 0], results["r", 1]
    assert len(first.tokens) == max_tokens and first.tokens == second.tokens
    assert first.finish and first.finish.reason == "length"
    if length > 1:
        assert error(first.prompt_logprobs, prompt[1:], stock_logprobs(prompt), top=0) < EXACT
    assert not second.prompt_logprobs  # they are the same for all samples


def test_scoring_a_prompt_does_not_read_the_prefix_cache_but_fills_it() -> None:
    prompt = list(range(20, 41))
    scored = Request(prompt, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1), id="a")
    again = replace(scored, id="b")
    plainly = replace(scored, id="c", params=SamplingParams(temperature=0, max_tokens=2))
    results = run(tiny_target("llama"), [scored, again, plainly], max_num_seqs=1)
    assert [results[i, 0].stats.cached_tokens for i in "abc"] == [0, 0, 20]
    assert results["a", 0].prompt_logprobs == results["b", 0].prompt_logprobs


def test_a_prompt_that_gives_way_half_scored_is_scored_once() -> None:
    """It is computed again from its beginning, in other chunks."""
    engine, prompt = make_engine(tiny_target("llama"), num_blocks=12, max_batch_tokens=5), list(range(20, 56))
    plainly = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for name in ("old", "older"):
        engine.add_request([40, 41, 42, 43], plainly, {"method": "off"}, name)
    engine.add_request(
        prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1), {"method": "off"}, "scored"
    )
    (seq,) = (seq for seq in engine.scheduler.waiting if seq.request.id == "scored")
    results: dict[Key, Result] = {}
    while not seq.stats.preemptions:
        for event in engine.step():
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    assert 0 < seq.prompt_scored < len(prompt) - 1 and seq.prompt_scored % 5
    result = drain(engine, results)["scored", 0]
    assert error(result.prompt_logprobs, prompt[1:], stock_logprobs(prompt), top=1) < EXACT


@pytest.mark.parametrize("stop", ["token", "string"])
def test_logprobs_end_with_the_sequence(stop: str) -> None:
    """Also where drafts beyond the stop were verified."""
    request, truth = requests_of("greedy")[1], plain("greedy")["q1", 0]
    script(plain("greedy"), lambda position: False)
    ends = {"stop_token_ids": (truth[4],)} if stop == "token" else {"stop": (spell(truth[3:5]),)}
    params = request.params.model_copy(update={"logprobs": 1, **ends})
    result = run(tiny_target("llama"), drafting((replace(request, params=params),), 16))["q1", 0]
    assert result.finish and result.finish.reason == "stop" and result.stats.drafted_at.total() == 16
    assert [one.token for one in result.logprobs] == result.tokens == truth[: len(result.tokens)]
