"""`verify` and `step` by a caller's logits: what the target's own calls give, and none of these is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.errors import InvalidParameter
from speculon.core.types import Draft, SpanOutcome, Verdict
from speculon.engine.outputs import StepResult
from tests.builders import spread
from tests.tiny.blocks import write_dflash
from tests.tiny.conftest import VOCAB, build, tiny_model
from tests.tiny.forms import FORMS, words
from tests.tiny.recurrent import recurrent_model
from tests.tiny.scripted import Letters, assert_nothing_held, spell
from tests.tiny.test_decoder import (
    DRAFTERS,
    GREEDY,
    MODES,
    OTHER,
    PENALISED,
    PROMPT,
    SAME,
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
    forward, seen = decoder.engine.runtime.target.forward, []

    def watched(batch: Any, view: Any) -> Any:
        out = forward(batch, view)
        seen.append(out.logits.clone())
        return out

    try:
        decoder.engine.runtime.target.forward = watched  # type: ignore[method-assign]
        verdict = decoder.verify(ids, drafts, params, prompt_len=prompt_len)
    finally:
        del decoder.engine.runtime.target.forward
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
        (decoder.engine.runtime.target, "forward"),
        (decoder.engine.runtime.space, "open"),
        (decoder.engine.runtime.space, "extend"),
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
@pytest.mark.parametrize("true", [0, 2, K])
def test_the_targets_own_logits_give_its_verdict(true: int, params: SamplingParams) -> None:
    """Without the last row, there is no bonus token."""
    drafts = true_until(true, params)
    verdict, logits = own(usual(), PROMPT, drafts, params)
    assert verdict.accepted == true and logits.shape == (K + 1, VOCAB)
    before, decoder = logits.clone(), silent()
    assert decoder.verify(PROMPT, drafts, params, target_logits=logits) == verdict
    assert torch.equal(logits, before), "they are read only"
    found = decoder.verify(PROMPT, drafts, params, target_logits=logits[:K])
    assert_nothing_held(decoder.engine)
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


# the same end


def ends() -> list[Any]:
    truth = plain(GREEDY)
    at = next(i for i in range(1, K) if truth[i] not in truth[:i])
    return [
        pytest.param({"stop_token_ids": (truth[at],)}, {}, id="stop token inside the drafts"),
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


# other logits


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
        rows(1),
        r"target_logits = \(1, 96\): must have shape \(3, 96\), or \(2, 96\) without",
        id="too few rows",
    ),
    pytest.param(rows(3)[0], r"target_logits = \(96,\): must have shape", id="one dimension"),
    pytest.param(rows(3).long(), "target_logits = torch.int64: must be a float tensor", id="integers"),
    pytest.param(rows(3, NAN), "target_logits = nan: row 1 must have a finite number", id="nan"),
    pytest.param(rows(3, INF), "target_logits = inf: row 1 must have", id="inf"),
    pytest.param(NONE, "target_logits = -inf: row 0 must have a finite number", id="no token left"),
]


@pytest.mark.parametrize(("logits", "limit"), BAD)
def test_other_logits_are_refused_by_name_and_leave_nothing(logits: Any, limit: str) -> None:
    decoder = silent()
    before = account(decoder)
    with pytest.raises(InvalidParameter, match=f"(?s){limit}") as caught:
        decoder.verify(PROMPT, [5, 6], GREEDY, target_logits=logits)
    assert caught.value.name == "target_logits" and account(decoder) == before
    assert_nothing_held(decoder.engine)


# rounds by the caller's logits

Change = Callable[[Tensor], Tensor]


def stock(text: list[int], drafts: tuple[int, ...], model: PreTrainedModel | None = None) -> Tensor:
    """The stock model's logits [K + 1, V] after the text and each draft: the caller's own target."""
    with torch.no_grad():
        logits = (model or tiny_model("llama"))(torch.tensor([[*text, *drafts]])).logits[0]
    return logits[-len(drafts) - 1 :]


def given(
    decoder: SpeculativeDecoder, text: list[int], params: SamplingParams, change: Change | None = None
) -> StepResult:
    drafts = decoder.draft(text, params=params, prompt_len=len(PROMPT)).tokens
    logits = stock(text, drafts)
    logits = logits if change is None else change(logits)
    return decoder.step(text, params, prompt_len=len(PROMPT), target_logits=logits)


def rounds(
    decoder: SpeculativeDecoder, params: SamplingParams, own: bool, change: Change | None = None
) -> list[StepResult]:
    """All rounds of one text, by the decoder's own target or by the caller's."""
    text, results = list(PROMPT), list[StepResult]()
    while not results or not results[-1].verdict.finish:
        if own:
            results.append(decoder.step(text, params, prompt_len=len(PROMPT)))
        else:
            results.append(given(decoder, text, params, change))
        text += results[-1].emitted_tokens
    return results


def seen(result: StepResult) -> tuple[Any, ...]:
    return result.draft_tokens, result.verdict, result.reason


def counts(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The account without what the clock says."""
    assert decoder.stats is not None
    timed = ("draft_ms", "verify_ms", "saved_ms", "expected", "price")
    return {name: value for name, value in decoder.stats.to_dict().items() if name not in timed}


def text_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.emitted_tokens]


@pytest.mark.parametrize(
    ("drafter", "policy", "params"), spread(DRAFTERS, ("fixed", "adaptive"), (GREEDY, SEEDED, PENALISED))
)
def test_the_rounds_are_those_of_the_own_target(
    drafter: tuple[str, int | None], policy: str, params: SamplingParams
) -> None:
    own, by_caller = make(drafter, policy=policy), make(drafter, policy=policy)
    truth, found = rounds(own, params, own=True), rounds(by_caller, params, own=False)
    assert list(map(seen, found)) == list(map(seen, truth)) and text_of(found) == plain(params)
    if drafter != ("off", None):
        assert counts(by_caller) == counts(own)
    assert_nothing_held(by_caller.engine)


def test_later_rows_of_another_position_are_seen() -> None:
    """Planted: each row is that of its neighbour."""
    found = rounds(make(OTHER), GREEDY, own=False, change=lambda logits: logits.roll(1, 0))
    assert text_of(found) != plain(GREEDY)


def test_the_target_scores_nothing() -> None:
    """It may compute the context, which drafters read."""
    decoder = make(SAME)
    scored, forward = [], decoder.engine.runtime.target.forward

    def watched(batch: Any, view: Any) -> Any:
        scored.append(len(batch.score_rows))
        return forward(batch, view)

    decoder.engine.runtime.target.forward = watched  # type: ignore[method-assign]
    rounds(decoder, GREEDY, own=False)
    assert scored and not any(scored)
    decoder.step(PROMPT, GREEDY)
    assert scored[-1] == K + 1, "planted: a step of its own"


def test_by_default_the_policy_learns_acceptance_and_no_target_time(caplog: Any) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), tiny_model("llama", 1), method="draft_model")
    costs, policy = decoder.engine.policy.costs, decoder.engine.policy
    assert text_of(rounds(decoder, GREEDY, own=False)) == plain(GREEDY)
    assert not costs.known and decoder.speedup_estimate == 1.0 and decoder.acceptance_rate > 0
    decoder.generate(PROMPT, GREEDY)  # without costs the policy compares nothing
    goodput: Any = policy.of("goodput")
    measured, judged = costs.plain_steps(), goodput._methods["draft_model"].seen
    rounds(decoder, GREEDY, own=False)
    assert goodput._methods["draft_model"].seen > judged and costs.plain_steps() == measured != {}
    assert not caplog.records


def test_k_is_that_of_the_draft() -> None:
    decoder = make(SAME)
    drafts = decoder.draft(PROMPT, 2, GREEDY).tokens
    result = decoder.step(PROMPT, GREEDY, k=2, target_logits=stock(PROMPT, drafts))
    assert result.draft_tokens == drafts and len(result.emitted_tokens) == 3
    with pytest.raises(InvalidParameter, match=r"target_logits = \(3, 96\): must have shape \(5, 96\)"):
        decoder.step(PROMPT, GREEDY, target_logits=stock(PROMPT, drafts))


OTHERS: dict[str, Callable[[Path], tuple[PreTrainedModel, dict[str, Any]]]] = {
    "recurrent states": lambda folder: (recurrent_model("lfm2"), {"method": "ngram"}),
    "a window": lambda folder: (
        tiny_model("mistral"),
        {"draft": tiny_model("mistral", 1), "method": "draft_model"},
    ),
    "taps": lambda folder: (deep(), {"draft": str(block(folder)), "method": "dflash"}),
}


def deep() -> PreTrainedModel:
    return build("qwen3", num_hidden_layers=8)


def block(folder: Path) -> Path:
    facts = {"hidden_size": 32, "vocab_size": VOCAB, "num_hidden_layers": 8}
    target = SimpleNamespace(**facts, architectures=["Qwen3ForCausalLM"])
    path: Path = write_dflash(folder / "block", target, "deepspec", taps=(1, 3, 5))
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_drafters(name: str, tmp_path: Path) -> None:
    model, settings = OTHERS[name](tmp_path)
    texts, drafted = [], 0
    for own in (True, False):
        decoder = SpeculativeDecoder(
            model, block_size=4, policy="fixed", num_speculative_tokens=K, **settings
        )
        text = list(PROMPT)
        for _ in range(8):
            drafts = () if own else decoder.draft(text, params=GREEDY, prompt_len=len(PROMPT)).tokens
            logits = None if own else stock(text, drafts, model)
            result = decoder.step(text, GREEDY, prompt_len=len(PROMPT), target_logits=logits)
            text += result.emitted_tokens
            drafted += len(drafts)
        texts.append(text)
        assert_nothing_held(decoder.engine)
    assert texts[0] == texts[1] and drafted >= K


def test_wrong_logits_are_counted_nowhere() -> None:
    decoder = make(SAME, policy="adaptive")
    decoder.step(PROMPT, GREEDY)
    assert decoder.adaptive is not None
    before, observed = account(decoder), decoder.adaptive.observations
    for logits in (rows(K - 1), rows(K + 1, NAN)):
        with pytest.raises(InvalidParameter, match="target_logits = "):
            decoder.step(PROMPT, GREEDY, k=K, target_logits=logits)
    with pytest.raises(InvalidParameter, match="prompt_logprobs = 1: .* no rows of the prompt"):
        params = SamplingParams(temperature=0, prompt_logprobs=1)
        decoder.step(PROMPT, params, target_logits=rows(K + 1))
    assert account(decoder) == before and decoder.adaptive.observations == observed
    assert_nothing_held(decoder.engine)


def test_a_draft_that_nobody_can_repeat_is_refused() -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=30)
    with pytest.raises(
        InvalidParameter,
        match="seed = None: must be set, or temperature = 0: with target_logits, drafts of draft_model need",
    ):
        make(OTHER).step(PROMPT, drawn, target_logits=rows(K + 1))
    lookup = make(("ngram", None))
    drafts = lookup.draft(PROMPT, params=drawn).tokens
    assert drafts, "a lookup finds the same again"
    assert lookup.step(PROMPT, drawn, target_logits=stock(PROMPT, drafts)).draft_tokens == drafts
