"""A draft model changes no token, however far its own keys and values are, and leaves no trace in the
pages.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculon.core.config import MAX_DRAFTS, SamplingParams
from speculon.core.types import CallCost, Reason, Timing
from speculon.decoding.rounds import Span
from speculon.decoding.sequence import Event
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.drafters.draft_model.proposer import DraftModel
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.target import TargetOutput
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, NoisyModel, noisy_draft, use_draft
from tests.tiny.requests import GREEDY, MODES, OFF, Texts, plain, requests_of
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, proposer_of, run, texts_of


def engine(speculation: dict[str, Any] | None = None, **settings: Any) -> Any:
    return make_engine(tiny_target("llama"), speculation={**DRAFT, **(speculation or {})}, **settings)


def write(
    requests: list[Request], speculation: dict[str, Any] | None = None, **settings: Any
) -> dict[Key, Result]:
    made = engine(speculation, **settings)
    for request in requests:
        made.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(made)


def drafted_requests(mode: str, method: str, shared: int = 0) -> list[Request]:
    """The requests, with different K beside each other."""
    ks = (4, 1, 7, 16, 4, 2, 0, 5)
    return [
        Request(r.prompt, r.params, {"method": method, "num_speculative_tokens": k}, r.id)
        for r, k in zip(requests_of(mode, shared), ks, strict=True)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_target_as_its_own_draft_is_always_right(mode: str) -> None:
    """Keyed noise is shared: where q is p, every sampled draft is the target's own token."""
    use_draft(tiny_target("llama"))
    results = write(drafted_requests(mode, "draft_model"))
    assert texts_of(results) == plain(mode)
    for result in results.values():
        done = result.stats.speculation()
        assert done.rejected == 0


def test_a_drafter_may_have_a_name_of_its_own() -> None:
    use_draft(tiny_target("llama"), "mine")
    results = write(drafted_requests("greedy", "mine"), {"draft": {"mine": "a model in memory"}})
    assert texts_of(results) == plain("greedy")
    done = [result.stats.speculation() for result in results.values()]
    assert sum(one.accepted for one in done) > 100 and not any(one.rejected for one in done)


def test_a_lag_of_five_hundred_tokens_is_caught_up_in_one_call() -> None:
    big, model = tiny_target_of(1024), None
    chance = random.Random(1)
    prompt = [chance.randrange(3, 96) for _ in range(500)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY)
    truth = run(big, [Request(prompt, params, OFF)])
    model = NoisyModel(big, error_rate=0.0)
    use_draft(model)
    made = make_engine(big, speculation=DRAFT)
    made.add_request(prompt, params, {"method": "draft_model", "num_speculative_tokens": 4}, "r")
    results = drain(made)
    assert texts_of(results) == texts_of(truth)
    assert model.calls[0] == 501, "the whole lag and the last token in the first call"
    assert max(model.calls[1:]) <= 2, (
        "after a full acceptance the last draft is caught up beside the last token"
    )
    done = results["r", 0].stats.speculation()
    assert done.rounds and done.rejected == 0


def test_what_is_caught_up_is_reported_with_the_time_it_took() -> None:
    noisy_draft("llama", error_rate=0.0)
    made = make_engine(tiny_target("llama"), speculation=DRAFT)
    params = SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY)
    for name in "ab":
        made.add_request(
            list(range(3, 33)), params, {"method": "draft_model", "num_speculative_tokens": 4}, name
        )
    calls: list[CallCost] = []
    observe = made.policy.observe

    def watched(spans: Any, timing: Timing) -> None:
        calls.extend(timing.calls.values())
        observe(spans, timing)

    made.policy.observe = watched  # type: ignore[method-assign]
    drain(made)
    first, *rest = calls
    assert first[:2] == (2, 4) and first.unread == 2 * 30, "of each text all tokens but the last"
    assert all(call.unread == call.sequences for call in rest), "after a full acceptance the last draft"
    assert made.counters.proposals["draft_model"] == sum(call.sequences for call in calls)


def test_a_batch_catches_up_in_calls_of_the_estimated_size() -> None:
    """Eight texts of a hundred tokens each, and scratch for a part of them."""
    model = noisy_draft(error_rate=0.1)
    chance = random.Random(2)
    params = SamplingParams(max_tokens=16, ignore_eos=True, **GREEDY)
    prompts = [[chance.randrange(3, 96) for _ in range(100)] for _ in range(8)]
    truth = run(
        tiny_target("llama"), [Request(prompt, params, OFF, f"q{i}") for i, prompt in enumerate(prompts)]
    )
    settings: dict[str, Any] = {"max_batch_tokens": 40, "max_num_seqs": 8}
    results = write(
        [Request(p, params, {"method": "draft_model"}, f"q{i}") for i, p in enumerate(prompts)], **settings
    )
    assert texts_of(results) == texts_of(truth)
    assert 40 < max(model.calls) <= 40 + max(8 * 4, MAX_DRAFTS)


def tiny_target_of(context: int) -> Any:
    from speculon.runtimes.torch.loading.load import wrap_model
    from tests.tiny.conftest import build

    return wrap_model(build("llama", max_position_embeddings=context), name="long")


def test_a_draft_ends_early_where_it_is_unsure() -> None:
    model = noisy_draft(error_rate=0.0)
    long = write(drafted_requests("greedy", "draft_model"))
    everything = len(model.calls)
    use_draft(model)
    short = write(drafted_requests("greedy", "draft_model"), {"draft_min_confidence": 0.9})
    assert texts_of(short) == texts_of(long) == plain("greedy")

    def drafted(results: dict[Key, Result]) -> int:
        return sum(result.stats.speculation().drafted for result in results.values())

    assert drafted(short) < drafted(long) and len(model.calls) > everything


class Padded(NoisyModel):
    """A model whose head has `more` rows than the target's, or fewer."""

    def __init__(self, more: int):
        super().__init__(tiny_target("llama", 1))
        self.more = more

    def forward(self, batch: Batch, view: View) -> TargetOutput:
        out = super().forward(batch, view)
        extra = torch.full((len(out.logits), max(0, self.more)), 99.0)
        return TargetOutput(torch.cat([out.logits, extra], -1)[:, : 96 + self.more])


@pytest.mark.parametrize(("acceptance", "more"), [("matching", 7), ("rejection", -3), ("block", 7)])
def test_a_padded_vocabulary_is_no_difference(acceptance: str, more: int) -> None:
    use_draft(Padded(more))
    requests = [
        Request(r.prompt, r.params, {"method": "draft_model", "acceptance": acceptance}, r.id)
        for r in requests_of("sampled")
    ]
    results = write(requests)
    assert all(not result.stats.reasons[Reason.ERROR] for result in results.values())
    assert (texts_of(results) == plain("sampled")) == (acceptance == "matching")


def test_beyond_the_drafts_context_decoding_is_plain() -> None:
    short = NoisyModel(tiny_target("llama"))
    short.max_context = 40
    made = use_draft(short)
    requests = drafted_requests("greedy", "draft_model")
    results = write(requests)
    assert texts_of(results) == plain("greedy") and made[0].needs.max_context == 40
    assert any(result.stats.reasons[Reason.CONTEXT_LIMIT] for result in results.values())


def test_a_draft_that_fails_costs_the_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NoisyModel):
        def forward(self, batch: Any, view: Any) -> Any:
            if len(self.calls) > 6:
                super().forward(batch, view)
                raise MemoryError("planted")
            return super().forward(batch, view)

    use_draft(Failing(tiny_target("llama")))
    results = write(drafted_requests("greedy", "draft_model"))
    assert texts_of(results) == plain("greedy")
    assert any(result.stats.reasons[Reason.ERROR] for result in results.values()) and "planted" in caplog.text


def test_pages_of_drafts_are_promised_first_and_taken_when_they_are_written() -> None:
    use_draft(tiny_target("llama"))
    made = engine(block_size=4)
    fields = {"method": "draft_model", "num_speculative_tokens": 16}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    made.add_request([5, 6, 7], params, fields, "r")
    made.step()
    (seq,), space = made.scheduler.running, made.runtime.space
    with made.runtime.reserve([Span.of(seq, 3, 1)]) as step:
        assert step.grants[0].drafts == 16 and space.held(seq) == 1
        proposer_of(made, "draft_model").propose([seq], [14])  # the last draft is not read
        assert space.held(seq) == 5
    assert space.held(seq) == 1
    made.check_integrity()


class Steps:
    """An engine with the requests, stepped by hand."""

    def __init__(self, **settings: Any):
        self.engine = engine(**settings)
        self.results: dict[Key, Result] = {}
        for request in drafted_requests("greedy", "draft_model"):
            self.engine.add_request(request.prompt, request.params, request.speculation, request.id)

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.results.setdefault((event.request_id, event.sample), Result()).take(event)

    def finish(self) -> Texts:
        """What was written by those that were not aborted."""
        drain(self.engine, self.results)
        return {
            key: result.tokens
            for key, result in self.results.items()
            if result.finish and result.finish.reason != "abort"
        }


def test_an_interrupt_in_the_middle_of_a_draft_leaves_the_engine_whole() -> None:
    model = noisy_draft()
    steps, forward = Steps(), NoisyModel.forward
    interrupted = 0
    while steps.engine.has_work:
        if len(model.calls) % 4 == 3:

            def interrupt(batch: Batch, view: View) -> TargetOutput:
                forward(model, batch, view)
                raise KeyboardInterrupt

            model.forward = interrupt  # type: ignore[method-assign]
        try:
            steps.take(steps.engine.step())
        except KeyboardInterrupt:
            interrupted += 1
            del model.forward
            steps.engine.check_integrity()
    assert interrupted > 3 and steps.finish() == plain("greedy")


# planted errors


def test_rows_that_are_not_caught_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the missing row after a full acceptance the target as its own draft would be wrong."""
    view = DraftPages.view

    def forgetful(self: DraftPages, ranges: list[Any]) -> Any:
        for _, start, end in ranges:
            if end - start == 2:  # the row of the last draft is written somewhere else
                made = view(self, ranges)
                made.slots = (
                    slice(made.slots.stop, made.slots.stop + 2)
                    if isinstance(made.slots, slice)
                    else made.slots + 2
                )
                return made
        return view(self, ranges)

    use_draft(tiny_target("llama"))
    monkeypatch.setattr(DraftPages, "view", forgetful)
    results = write(drafted_requests("greedy", "draft_model"), block_size=64)
    done = [result.stats.speculation() for result in results.values()]
    assert sum(one.rejected for one in done if one) > 0


def test_layers_of_the_target_under_the_draft_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that wrote into the target's layers would change the text."""
    use_draft(tiny_target("llama", 1))
    bind = DraftModel.bind
    monkeypatch.setattr(DraftModel, "bind", lambda self, pages: bind(self, replace(pages, first_layer=0)))
    assert texts_of(write(drafted_requests("greedy", "draft_model"))) != plain("greedy")
