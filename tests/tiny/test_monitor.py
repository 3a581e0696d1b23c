"""The monitor replays answers without speculation. It finds planted faults and ties, and changes nothing."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.types import Finish
from speculon.engine import monitor as monitoring
from speculon.measure.check.arms import watched
from speculon.target.target import Output, Target
from tests.tiny.checkpoint_formats import write_eagle3
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.forms import engine_of as structured_engine
from tests.tiny.heads import deep_model, deep_target, folder_of
from tests.tiny.monitored import GREEDY, PROMPT, SEEDED, ask, engine_of, last, replayed, results_of, write
from tests.tiny.recurrent import TWO, recurrent_target
from tests.tiny.scripted import drain, script

METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", **DRAFT},
}


# equal answers


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_sound_answers_are_equal(method: str, mode: dict[str, Any]) -> None:
    use_draft(tiny_target("llama"))
    engine = engine_of(speculation=METHODS[method])
    write(engine, mode)
    if method == "draft_model":
        assert engine.counters.totals.accepted > 0
    assert results_of(replayed(engine)) == (4, 4, 0, 0, 0)


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_with_a_head_are_equal(tmp_path: Path, mode: dict[str, Any]) -> None:
    """The target's states are tapped meanwhile."""
    write_eagle3(tmp_path, deep_model().config)
    engine = engine_of(target=deep_target(), speculation={"method": "eagle3", **folder_of(tmp_path)})
    write(engine, mode)
    assert engine.counters.totals.drafted_from["eagle3"] > 0
    assert results_of(replayed(engine)) == (4, 4, 0, 0, 0)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_answers_of_windows_are_equal(name: str) -> None:
    engine = engine_of(name, speculation={"method": "ngram"}, max_batch_tokens=7)
    write(engine, SEEDED, max_tokens=40)
    assert results_of(replayed(engine)) == (4, 4, 0, 0, 0)


FORMS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "a bias": {"logit_bias": {40: 3.0, 50: -2.0}},
    "bad words": {"bad_words": ["A", "BC"]},
    "stop strings": {"stop": ["#", "a"], "temperature": 1.5},
    "stop tokens": {"stop_token_ids": list(range(30, 60)), "min_tokens": 4},
    "many samples": {"n": 3},
    "no prefix cache": {},
    "to the end of the context": {"max_tokens": None},
}


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_are_replayed_too(form: str, mode: dict[str, Any]) -> None:
    engine = engine_of(
        speculation={"method": "ngram"}, prefix_cache=form != "no prefix cache", max_num_seqs=3
    )
    write(engine, mode, **FORMS[form])
    many = 4 * FORMS[form].get("n", 1)
    assert results_of(replayed(engine)) == (many, many, 0, 0, 0)


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 1.2}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("form", [{"json_object": True}, {"regex": "[a-f]{3,9}x"}, {"choice": ["ab", "abc"]}])
def test_the_grammar_holds_for_the_replay_too(form: dict[str, Any], mode: dict[str, Any]) -> None:
    engine = structured_engine(speculation={"method": "ngram"}, monitor_share=1.0)
    write(engine, mode, structured=form, ignore_eos=False)
    assert results_of(replayed(engine)) == (4, 4, 0, 0, 0)


def test_predicted_outputs_and_pools_are_no_difference() -> None:
    engine = engine_of(speculation={"method": "suffix"})
    expected: tuple[int, ...] = ()
    for i in range(3):
        ask(engine, f"q{i}", speculation={"prediction": expected, "pool": "mine"})
        expected = tuple(drain(engine)[f"q{i}", 0].tokens[: 8 * i])
    assert set(engine.counters.totals.drafted_from) == {"prediction", "suffix"}
    assert results_of(replayed(engine)) == (3, 3, 0, 0, 0)


def test_preempted_answers_are_equal() -> None:
    engine = engine_of(speculation={"method": "ngram"}, num_blocks=20, max_num_seqs=8)
    write(engine, SEEDED, many=6, max_tokens=40)
    assert engine.counters.totals.preemptions > 0
    assert results_of(replayed(engine)) == (6, 6, 0, 0, 0)


@pytest.mark.parametrize("name", TWO)
def test_recurrent_states_are_the_monitors_own(name: str) -> None:
    engine = engine_of(target=recurrent_target(name), speculation={"method": "ngram"})
    write(engine, GREEDY)
    assert results_of(replayed(engine)) == (4, 4, 0, 0, 0)


# what is planted is found


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_wrong_draft_that_is_kept_is_a_fault(
    mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    script({}, lies=lambda position: True)
    engine = engine_of(speculation={"method": "scripted"})
    with watched(engine, 1.0, random.Random(0)) as work:
        write(engine, mode)
    with caplog.at_level(logging.INFO):
        counts = replayed(engine)
    assert work.planted >= 4 and results_of(counts) == (4, 0, 0, 4, 0)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sorted(line.split()[2] for line in errors) == ["q0,", "q1,", "q2,", "q3,"]
    assert all("differs from plain decoding at token 1: a fault, regret" in line for line in errors)


def test_a_planted_change_of_any_token_is_a_fault() -> None:
    engine = engine_of(speculation={"method": "ngram"})
    for at in (0, 11, 23):
        ask(engine, f"at {at}")
        drain(engine)
        answer = last(engine)
        answer.tokens[len(PROMPT) + at] = (answer.tokens[len(PROMPT) + at] + 1) % 96
        before = engine.counters.monitor.faults
        assert replayed(engine).faults == before + 1


@pytest.mark.parametrize(
    "change",
    [
        {"finish": Finish("stop", 40)},  # a stop token that was not there
        {"finish": Finish("stop")},
        {"tokens": 23, "finish": Finish("stop", "#")},  # ended too early
        {"tokens": 23, "finish": Finish("length")},
    ],
)
def test_a_planted_end_is_a_fault(change: dict[str, Any]) -> None:
    engine = engine_of(speculation={"method": "ngram"})
    ask(engine)
    drain(engine)
    answer = last(engine)
    tokens = answer.tokens[: len(PROMPT) + change.get("tokens", 24)]
    engine.monitor.waiting[0] = replace(answer, tokens=tokens, finish=change["finish"])
    assert results_of(replayed(engine)) == (1, 0, 0, 1, 0)


def test_a_stop_string_that_was_missed_is_a_fault() -> None:
    engine = engine_of(speculation={"method": "off"})
    ask(engine)
    drain(engine)
    answer = last(engine)
    text = engine.tokenizer.decode(answer.tokens[len(PROMPT) :])
    params = answer.request.params.model_copy(update={"stop": (text[5:8],)})
    (seq,) = engine.admission.admit("x", PROMPT, params, {})
    engine.monitor.waiting[0] = replace(answer, request=seq.request)
    assert results_of(replayed(engine)) == (1, 0, 0, 1, 0)


class Twins:
    """A target whose tokens 2i and 2i + 1 have nearly equal logits."""

    def __init__(self, target: Target, gap: float):
        self.target, self.gap = target, gap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, batch: Any, view: Any) -> Output:
        logits = self.target.forward(batch, view).logits.clone()
        logits[:, 1::2] = logits[:, 0::2] + self.gap
        return Output(logits)


@pytest.mark.parametrize(("gap", "ties"), [(2e-5, 1), (0.0, 1), (2e-3, 0)])
def test_a_planted_tie_is_a_tie(gap: float, ties: int, caplog: pytest.LogCaptureFixture) -> None:
    """One token of the answer is exchanged for another whose logit is lower by `gap` nat."""
    engine = engine_of(target=Twins(tiny_target("llama"), gap), speculation={"method": "off"})
    ask(engine)
    drain(engine)
    last(engine).tokens[len(PROMPT) + 6] ^= 1
    with caplog.at_level(logging.INFO):
        assert results_of(replayed(engine)) == (1, 0, ties, 1 - ties, 0)
    assert caplog.records[-1].levelno == (logging.INFO if ties else logging.ERROR)


def test_where_rows_are_invariant_no_difference_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Twins(tiny_target("llama"), 2e-5)
    target.batch_invariant = True
    engine = engine_of(target=target, speculation={"method": "off"})
    ask(engine)
    drain(engine)
    last(engine).tokens[-1] ^= 1
    counts = replayed(engine)
    assert counts.limit == 0 and results_of(counts) == (1, 0, 0, 1, 0)


def test_in_a_coarse_dtype_the_first_difference_is_judged_by_a_measured_limit() -> None:
    """Its first token differs, so nothing of the answer itself measures a limit."""
    engine = engine_of(speculation={"method": "off"})
    assert engine.monitor is not None
    engine.monitor.coarse = True
    ask(engine)
    drain(engine)
    last(engine).tokens[len(PROMPT)] ^= 1
    counts = replayed(engine)
    assert engine.monitor.positions > 8
    assert counts.ties + counts.faults == 1


def test_in_a_coarse_dtype_the_limit_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MEASURED", 60)
    engine = engine_of(speculation={"method": "ngram"})
    assert engine.monitor is not None
    engine.monitor.coarse, moves = True, []
    target, forward = engine.monitor.lane, engine.target.forward

    class Coarse:
        """Rows of a prompt are off by up to 0.05 nat from those of generated tokens."""

        device = engine.target.device

        def forward(self, batch: Any, view: Any) -> Output:
            logits = forward(batch, view).logits
            moves.append(len(logits))
            noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
            return Output(logits + 0.05 * noise * (len(logits) > 1))

    target._target = Coarse()
    write(engine, GREEDY)
    counts = replayed(engine)
    assert counts.equal == 4 and 0.01 < counts.limit < 0.05
    assert engine.monitor.positions == 72, "measured until it is known: three answers of 24 tokens"
    assert max(moves) == len(PROMPT) + 1 + 24


def test_answers_of_a_forgotten_pool_are_not_replayed() -> None:
    engine = engine_of()
    for name, pool in (("a", "x"), ("b", "y")):
        ask(engine, name, speculation={"pool": pool})
    drain(engine)
    engine.forget_pools("x")
    assert results_of(replayed(engine)) == (1, 1, 0, 0, 0)
    ask(engine, "c", speculation={"pool": "x"})
    drain(engine)
    engine.forget_pools()
    assert results_of(replayed(engine)) == (1, 1, 0, 0, 0)
