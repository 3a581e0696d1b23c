"""`step` with the caller's logits: the round is that of the decoder's own target, in its output and its
accounts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.errors import InvalidParameter
from speculon.core.types import Reason
from speculon.engine.outputs import StepResult
from tests.tiny.conftest import VOCAB, build, tiny_model
from tests.tiny.dflash_checkpoints import write_dflash
from tests.tiny.forms import FORMS, words
from tests.tiny.recurrent import recurrent_model
from tests.tiny.scripted import Scripted, assert_nothing_held, script
from tests.tiny.test_decoder import (
    DRAFTERS,
    GREEDY,
    MODES,
    OTHER,
    PROMPT,
    SAME,
    SEEDED,
    K,
    account,
    make,
    plain,
)

NAN, INF = float("nan"), float("inf")
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


@pytest.mark.parametrize("params", MODES)
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
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
    scored, forward = [], decoder.engine.target.forward

    def watched(batch: Any, view: Any) -> Any:
        scored.append(len(batch.score_rows))
        return forward(batch, view)

    decoder.engine.target.forward = watched  # type: ignore[method-assign]
    rounds(decoder, GREEDY, own=False)
    assert scored and not any(scored)
    decoder.step(PROMPT, GREEDY)
    assert scored[-1] == K + 1, "planted: a step of its own"


@pytest.mark.parametrize("drafter", [SAME, OTHER], ids=str)
def test_the_controller_learns_the_same(drafter: tuple[str, int | None]) -> None:
    learned = []
    for own in (True, False):
        decoder = make(drafter, policy="adaptive", num_speculative_tokens=None)
        rounds(decoder, SEEDED, own=own)
        assert decoder.adaptive is not None
        controller = decoder.adaptive
        learned.append((controller.observations, controller.mean_accepted, controller.lookahead))
    assert learned[0] == learned[1] and learned[0][0] > 2


def test_proposers_observe_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: dict[bool, list[Any]] = {True: [], False: []}
    for own, calls in reports.items():
        proposer = script({("round", 0): plain(GREEDY)})

        def observe(self: Scripted, seqs: Any, verdicts: Any, taps: Any, calls: list[Any] = calls) -> None:
            calls.append(([list(seq.tokens) for seq in seqs], verdicts))

        monkeypatch.setattr(Scripted, "observe", observe)
        decoder = make(("scripted", None))
        same = again(proposer)
        monkeypatch.setattr(proposer, "draft_of", same.draft_of)
        assert text_of(rounds(decoder, GREEDY, own=own)) == plain(GREEDY)
        assert not proposer.known
    assert reports[True] == reports[False] and len(reports[True]) > 2


def again(proposer: Scripted) -> Scripted:
    """One that drafts the same each time it is asked, as `draft` and `step` need it."""
    return Scripted(proposer.truth, lambda position: position % 3 == 2)


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


def test_without_the_bonus_row_there_is_no_bonus_token() -> None:
    decoder = make(SAME)
    result = given(decoder, PROMPT, GREEDY, lambda logits: logits[:K])
    assert result.emitted_tokens == tuple(plain(GREEDY)[:K]) and result.verdict.accepted == K


def test_k_is_that_of_the_draft() -> None:
    decoder = make(SAME)
    drafts = decoder.draft(PROMPT, 2, GREEDY).tokens
    result = decoder.step(PROMPT, GREEDY, k=2, target_logits=stock(PROMPT, drafts))
    assert result.draft_tokens == drafts and len(result.emitted_tokens) == 3
    with pytest.raises(InvalidParameter, match=r"target_logits = \(3, 96\): needs shape \(5, 96\)"):
        decoder.step(PROMPT, GREEDY, target_logits=stock(PROMPT, drafts))


def test_a_grammar_masks_the_callers_logits() -> None:
    settings = {"tokenizer": words().inner}
    params = SamplingParams(max_tokens=40, seed=3, structured=FORMS["nested"])
    truth = make(("off", None), **settings).generate(PROMPT, params).token_ids
    assert text_of(rounds(make(SAME, **settings), params, own=False)) == truth


def test_a_failing_drafter_costs_its_draft_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(self: Scripted, seq: Any, k: int) -> Any:
        raise RuntimeError("planted")

    script({})
    decoder = make(("scripted", None))
    monkeypatch.setattr(Scripted, "draft_of", fail)
    result = decoder.step(PROMPT, GREEDY, target_logits=stock(PROMPT, ()))
    assert (result.reason, result.emitted_tokens) == (Reason.ERROR, tuple(plain(GREEDY)[:1]))


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


# what is refused


def rows(k: int, value: float = 0.0) -> Tensor:
    logits = torch.zeros(k, VOCAB)
    logits[1, 5] = value
    return logits


BAD: list[Any] = [
    pytest.param(rows(K - 1), rf"\({K - 1}, 96\): needs shape \({K + 1}, 96\)", id="too few rows"),
    pytest.param(rows(K + 2), r"needs shape", id="too many rows"),
    pytest.param(rows(K + 1)[:, 1:], r"\(5, 95\): needs shape \(5, 96\)", id="vocabulary"),
    pytest.param(rows(K + 1)[None], r"needs shape", id="dimensions"),
    pytest.param(rows(K + 1).long(), "torch.int64: takes a float tensor", id="integers"),
    pytest.param(rows(K + 1).tolist(), "takes a float tensor", id="a list"),
    pytest.param(rows(K + 1, NAN), "nan: row 1 takes finite numbers and -inf", id="nan"),
    pytest.param(rows(K + 1, INF), "inf: row 1 takes finite numbers", id="inf"),
]


@pytest.mark.parametrize(("logits", "limit"), BAD)
def test_other_logits_are_refused_by_name_and_counted_nowhere(logits: Any, limit: str) -> None:
    decoder = make(SAME, policy="adaptive")
    decoder.step(PROMPT, GREEDY)
    assert decoder.adaptive is not None
    before, observed = account(decoder), decoder.adaptive.observations
    with pytest.raises(InvalidParameter, match=f"(?s)target_logits = .*{limit}") as caught:
        decoder.step(PROMPT, GREEDY, k=K, target_logits=logits)
    assert caught.value.name == "target_logits" and account(decoder) == before
    assert decoder.adaptive.observations == observed
    assert_nothing_held(decoder.engine)
    decoder.reset_stats()
    assert text_of(rounds(decoder, GREEDY, own=True)) == plain(GREEDY)


def test_a_draft_that_nobody_can_repeat_is_refused() -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=30)
    with pytest.raises(InvalidParameter, match="seed = None: with target_logits, drafts of draft_model need"):
        make(OTHER).step(PROMPT, drawn, target_logits=rows(K + 1))
    lookup = make(("ngram", None))
    drafts = lookup.draft(PROMPT, params=drawn).tokens
    assert drafts, "a lookup finds the same again"
    assert lookup.step(PROMPT, drawn, target_logits=stock(PROMPT, drafts)).draft_tokens == drafts


def test_log_probabilities_of_the_prompt_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="prompt_logprobs = 1: .* no rows of the prompt"):
        make().step(PROMPT, SamplingParams(temperature=0, prompt_logprobs=1), target_logits=rows(K + 1))
