"""`verify` with the caller's logits: the verdict is the one that the target's own call gives, and no call is
made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.errors import InvalidParameter, TooLong
from speculon.core.types import Draft, SpanOutcome, Verdict
from speculon.decoding.verify import read_logits
from tests.tiny.conftest import CONTEXT, VOCAB, tiny_model
from tests.tiny.forms import FORMS, words
from tests.tiny.scripted import Letters, assert_nothing_held, spell
from tests.tiny.test_decoder import (
    GREEDY,
    MODES,
    OTHER,
    PROMPT,
    SEEDED,
    K,
    account,
    lie,
    make,
    plain,
)

INF, NAN = float("inf"), float("nan")
Drafts = list[int] | Draft


def own(
    decoder: SpeculativeDecoder,
    ids: list[int],
    drafts: Drafts,
    params: SamplingParams,
    prompt_len: int | None = None,
) -> tuple[Verdict, Tensor]:
    """The verdict of a call, and the logits [K + 1, V] that the target gave."""
    forward, seen = decoder.engine.target.forward, []

    def watched(batch: Any, view: Any) -> Any:
        out = forward(batch, view)
        seen.append(out.logits.clone())
        return out

    try:
        decoder.engine.target.forward = watched  # type: ignore[method-assign]
        verdict = decoder.verify(ids, drafts, params, prompt_len=prompt_len)
    finally:
        del decoder.engine.target.forward
    return verdict, seen[-1]


@cache
def usual() -> SpeculativeDecoder:
    return make()


@cache
def silent(**settings: Any) -> SpeculativeDecoder:
    """One whose target must not be called and whose pages must not be taken."""
    decoder = make(("off", None), **settings)

    def refuse(*_: Any) -> Any:
        raise AssertionError("the target's call or a page was asked for")

    for owner, name in (
        (decoder.engine.target, "forward"),
        (decoder.engine.pool, "attach"),
        (decoder.engine.pool, "extend"),
    ):
        setattr(owner, name, refuse)
    return decoder


def true_until(n: int, params: SamplingParams) -> list[int]:
    """K drafts, the first `n` of which the target samples, too."""
    truth = plain(params)
    return [*truth[:n], *map(lie, truth[n:K])]


LOGPROBS = SEEDED.model_copy(update={"logprobs": 3})
BANNED = GREEDY.model_copy(update={"logit_bias": {plain(GREEDY)[1]: -100.0}})
PARAMS = [*MODES, pytest.param(LOGPROBS, id="logprobs"), pytest.param(BANNED, id="bias")]


# the same verdict


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("true", range(K + 1))
def test_the_targets_own_logits_give_its_verdict(true: int, params: SamplingParams) -> None:
    drafts = true_until(true, params)
    verdict, logits = own(usual(), PROMPT, drafts, params)
    assert verdict.accepted == true and logits.shape == (K + 1, VOCAB)
    before, decoder = logits.clone(), silent()
    assert decoder.verify(PROMPT, drafts, params, target_logits=logits) == verdict
    assert torch.equal(logits, before), "they are read only"
    assert_nothing_held(decoder.engine)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("true", range(K + 1))
def test_without_the_last_row_there_is_no_bonus_token(true: int, params: SamplingParams) -> None:
    drafts = true_until(true, params)
    verdict, logits = own(usual(), PROMPT, drafts, params)
    found = silent().verify(PROMPT, drafts, params, target_logits=logits[:K])
    if true < K:
        assert found == verdict
        return
    assert (found.tokens, found.accepted, found.outcome, found.finish) == (
        tuple(drafts),
        K,
        SpanOutcome.FULL,
        None,
    )
    assert found.logprobs == (verdict.logprobs and verdict.logprobs[:K])


@pytest.mark.parametrize("params", MODES)
def test_inside_a_sequence_the_prompts_length_counts(params: SamplingParams) -> None:
    truth = plain(params)
    written = [*PROMPT, *truth[:5]]
    verdict, logits = own(usual(), written, truth[5:7], params, len(PROMPT))
    assert verdict.tokens == tuple(truth[5:8])
    assert (
        silent().verify(written, truth[5:7], params, target_logits=logits, prompt_len=len(PROMPT)) == verdict
    )


def test_without_drafts_one_row_gives_one_token_and_no_row_none() -> None:
    verdict, logits = own(usual(), PROMPT, [], SEEDED)
    assert silent().verify(PROMPT, [], SEEDED, target_logits=logits) == verdict and len(verdict.tokens) == 1
    assert silent().verify(PROMPT, [], SEEDED, target_logits=logits[:0]) == Verdict(())


def by_logits(own_rule: str, rule: str) -> list[tuple[Verdict, Verdict, Verdict]]:
    """Of drafts with q, for some seeds: the target's verdict under `own_rule`, and those by its logits under
    `rule`, with and without a bonus.
    """
    decoder, judge, found = make(OTHER, acceptance=own_rule), silent(acceptance=rule), []
    for seed in range(12):
        params = SamplingParams(temperature=2.0, seed=seed)
        draft = decoder.draft(PROMPT, params=params)
        assert draft.probs is not None
        verdict, logits = own(decoder, PROMPT, draft, params)
        given = [judge.verify(PROMPT, draft, params, target_logits=x) for x in (logits, logits[:K])]
        found.append((verdict, *given))
    return found


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_with_q_are_judged_with_it(rule: str) -> None:
    found = by_logits(rule, rule)
    assert all(given == verdict for verdict, given, _ in found)
    assert all(short == verdict for verdict, _, short in found if verdict.accepted < K)
    assert {0, 1} < {verdict.accepted for verdict, _, _ in found}
    other = by_logits(rule, "matching")
    assert any(given != verdict for verdict, given, _ in other), "planted: the other rule"


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("rows", [K, K + 1])
def test_where_q_is_p_all_drafts_are_accepted(rows: int, rule: str) -> None:
    params, decoder = SamplingParams(temperature=1.0, seed=1), silent(acceptance=rule)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = tuple(logits[:K].argmax(-1).tolist())
    verdict = decoder.verify(
        PROMPT, Draft(tokens, ("x",) * K, logits[:K].softmax(-1)), params, target_logits=logits
    )
    assert verdict.tokens[:K] == tokens and (verdict.accepted, len(verdict.tokens)) == (K, rows)


# the same end


def ends() -> list[Any]:
    truth = plain(GREEDY)
    at = next(i for i in range(1, K) if truth[i] not in truth[:i])
    late = next(token for token in truth[K:] if token not in truth[:K])
    return [
        pytest.param({"stop_token_ids": (truth[at],)}, {}, id="stop token inside the drafts"),
        pytest.param({"stop_token_ids": (late,)}, {}, id="stop token beyond"),
        pytest.param({"max_tokens": K + 1}, {}, id="max_tokens with the bonus token"),
        pytest.param({"stop": (spell(truth[at : at + 2]),)}, {"tokenizer": Letters()}, id="stop string"),
    ]


@pytest.mark.parametrize(("change", "settings"), ends())
def test_a_sequence_ends_at_the_same_token(change: dict[str, Any], settings: dict[str, Any]) -> None:
    params, drafts = GREEDY.model_copy(update=change), plain(GREEDY)[:K]
    verdict, logits = own(make(**settings), PROMPT, drafts, params)
    assert silent(**settings).verify(PROMPT, drafts, params, target_logits=logits) == verdict
    found = silent(**settings).verify(PROMPT, drafts, params, target_logits=logits[:K])
    if verdict.outcome is SpanOutcome.STOP:
        assert found == verdict
    else:
        assert (found.tokens, found.finish) == (tuple(drafts), None), "the bonus token ended it"


def test_a_full_context_ends_without_a_token() -> None:
    params = GREEDY.model_copy(update={"max_tokens": 0})
    verdict, logits = own(usual(), [5] * CONTEXT, [], params)
    assert (
        verdict.tokens == () and silent().verify([5] * CONTEXT, [], params, target_logits=logits) == verdict
    )


def test_a_grammar_masks_the_callers_logits() -> None:
    settings = {"tokenizer": words().inner}
    params, prompt = SamplingParams(max_tokens=60, seed=3, structured=FORMS["nested"]), [1, 30, 31]
    truth = make(("off", None), **settings).generate(prompt, params).token_ids
    for drafts in (truth[:K], [truth[0], lie(truth[1]), *truth[2:K]]):
        verdict, logits = own(make(("off", None), **settings), prompt, drafts, params)
        assert silent(**settings).verify(prompt, drafts, params, target_logits=logits) == verdict
        assert verdict.tokens == tuple(truth[: len(verdict.tokens)]) and verdict.accepted == (
            K if drafts == truth[:K] else 1
        )


# any logits


def stock(drafts: list[int]) -> Tensor:
    """The stock model's logits [K + 1, V] after the prompt and each draft."""
    with torch.no_grad():
        logits = tiny_model("llama")(torch.tensor([[*PROMPT, *drafts]])).logits[0]
    return logits[-len(drafts) - 1 :]


FORMATS: list[Any] = [
    pytest.param(lambda x: x, id="as they are"),
    pytest.param(lambda x: x.double(), id="float64"),
    pytest.param(lambda x: x.clone().requires_grad_(), id="with a gradient"),
    pytest.param(lambda x: x.T.contiguous().T, id="by columns"),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("params", MODES)
def test_logits_of_the_stock_model_will_do(params: SamplingParams, form: Callable[[Tensor], Tensor]) -> None:
    drafts = true_until(2, params)
    verdict = silent().verify(PROMPT, drafts, params, target_logits=form(stock(drafts)))
    assert verdict == make().verify(PROMPT, drafts, params) and verdict.accepted == 2


def test_they_are_read_without_a_gradient() -> None:
    assert not read_logits(torch.zeros(2, VOCAB, requires_grad=True), 1, VOCAB).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", MODES[:2])
def test_minus_infinity_removes_tokens(params: SamplingParams, dtype: torch.dtype) -> None:
    tokens = [9, 8, 7]
    logits = torch.full((3, VOCAB), -INF, dtype=dtype)
    logits[range(3), tokens] = 0.5
    assert silent().verify(PROMPT, [9, 8], params, target_logits=logits).tokens == (9, 8, 7)
    assert silent().verify(PROMPT, [9, 3], params, target_logits=logits).tokens == (9, 8)


PLANTED: list[Any] = [
    pytest.param(lambda x: x.roll(1, 0), id="one row off"),
    pytest.param(lambda x: x.roll(1, 1), id="one token off"),
    pytest.param(lambda x: -x, id="sign"),
    pytest.param(lambda x: torch.cat([x[:2], x[2:].flip(-1)]), id="later rows"),
]


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("params", MODES)
def test_wrong_logits_give_another_verdict(
    params: SamplingParams, planted: Callable[[Tensor], Tensor]
) -> None:
    drafts = true_until(K, params)
    verdict, logits = own(usual(), PROMPT, drafts, params)
    assert silent().verify(PROMPT, drafts, params, target_logits=planted(logits)) != verdict


# what is refused


def rows(k: int, value: float = 0.0) -> Tensor:
    logits = torch.zeros(k, VOCAB)
    logits[min(1, k - 1), 5] = value
    return logits


NONE = torch.full((3, VOCAB), -INF)
BAD: list[Any] = [
    pytest.param(
        rows(1), r"target_logits = \(1, 96\): needs shape \(3, 96\), or \(2, 96\) without", id="too few rows"
    ),
    pytest.param(rows(4), r"target_logits = \(4, 96\): needs shape", id="too many rows"),
    pytest.param(
        rows(3)[:, 1:], r"target_logits = \(3, 95\): needs shape \(3, 96\)", id="a smaller vocabulary"
    ),
    pytest.param(torch.zeros(3, 97), r"target_logits = \(3, 97\): needs shape", id="a larger vocabulary"),
    pytest.param(rows(3)[None], r"target_logits = \(1, 3, 96\): needs shape", id="three dimensions"),
    pytest.param(rows(3)[0], r"target_logits = \(96,\): needs shape", id="one dimension"),
    pytest.param(rows(3).long(), "target_logits = torch.int64: takes a float tensor", id="integers"),
    pytest.param(rows(3).bool(), "target_logits = torch.bool: takes a float tensor", id="booleans"),
    pytest.param(rows(3).cfloat(), "target_logits = torch.complex64: takes a float tensor", id="complex"),
    pytest.param(rows(3).tolist(), r"target_logits = \[\[.*: takes a float tensor", id="a list"),
    pytest.param(rows(3).numpy(), r"target_logits = array.*: takes a float tensor", id="an array"),
    pytest.param(rows(3, NAN), "target_logits = nan: row 1 takes finite numbers and -inf", id="nan"),
    pytest.param(rows(2, NAN), "target_logits = nan: row 1 takes", id="nan without a bonus row"),
    pytest.param(rows(3, INF), "target_logits = inf: row 1 takes", id="inf"),
    pytest.param(
        rows(3).double().mul(1).index_fill(1, torch.tensor([4]), 1e300),
        "= inf: row 0 takes",
        id="beyond float32",
    ),
    pytest.param(NONE, "target_logits = -inf: row 0 takes .* not -inf alone", id="no token left"),
]


@pytest.mark.parametrize(("logits", "limit"), BAD)
def test_other_logits_are_refused_by_name_and_leave_nothing(logits: Any, limit: str) -> None:
    decoder = silent()
    before = account(decoder)
    with pytest.raises(InvalidParameter, match=f"(?s){limit}") as caught:
        decoder.verify(PROMPT, [5, 6], GREEDY, target_logits=logits)
    assert caught.value.name == "target_logits" and account(decoder) == before
    assert_nothing_held(decoder.engine)


CALLS: list[Any] = [
    pytest.param({"drafts": [5, VOCAB]}, InvalidParameter, "drafts = 96: token ids go from 0", id="draft id"),
    pytest.param({"ids": [5, VOCAB]}, InvalidParameter, "prompt = 96", id="id"),
    pytest.param({"ids": [5] * 126}, TooLong, r"126 tokens \+ 2 drafts \+ 1 > 128", id="context"),
    pytest.param({"params": SamplingParams(n=2)}, InvalidParameter, "n = 2", id="n"),
    pytest.param({"prompt_len": 0}, InvalidParameter, "prompt_len = 0", id="prompt_len"),
    pytest.param(
        {"params": SamplingParams(prompt_logprobs=1)},
        InvalidParameter,
        "prompt_logprobs = 1: .* no rows",
        id="prompt",
    ),
]


@pytest.mark.parametrize(("change", "error", "limit"), CALLS)
def test_all_other_checks_are_made(change: dict[str, Any], error: type[Exception], limit: str) -> None:
    call: dict[str, Any] = {
        "ids": [5, 6, 7],
        "drafts": [5, 6],
        "params": SamplingParams(temperature=0),
        **change,
    }
    with pytest.raises(error, match=limit):
        silent().verify(call.pop("ids"), call.pop("drafts"), target_logits=rows(3), **call)
