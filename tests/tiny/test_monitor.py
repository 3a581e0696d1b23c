"""The monitor replays answers without speculation: equal ones, planted faults and ties; nothing else changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon import LLM
from speculon.check.arms import watched
from speculon.config import RequestSpeculation, SamplingParams
from speculon.core import Finish
from speculon.engine import monitor as monitoring
from speculon.engine.engine import Engine
from speculon.models.target import Output, Target
from speculon.proposers import registry
from speculon.telemetry import MonitorCounts
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.folders import make_folder
from tests.tiny.heads import deep_target, folder_of
from tests.tiny.recurrent import recurrent_target
from tests.tiny.scripted import drain, make_engine, script

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "ignore_eos": True}
PROMPT = [5, 9, 14, 5, 9, 14, 5, 9]
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", **DRAFT},
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The table of methods as it was."""
    yield
    for name in ("draft_model", "scripted", "eagle3"):
        registry._registered.pop(name, None)


def engine_of(name: str = "llama", target: Target | None = None, **settings: Any) -> Engine:
    return make_engine(target or tiny_target(name), **{"monitor_share": 1.0, **settings})


def ask(engine: Engine, name: str = "a", prompt: list[int] = PROMPT, **given: Any) -> None:
    speculation = given.pop("speculation", None)
    params = SamplingParams(**{"max_tokens": 24, **GREEDY, **given})
    engine.add_request(prompt, params, speculation, name)


def replayed(engine: Engine, most: int = 5000) -> MonitorCounts:
    """The counts after all replays; every page of the monitor is free again."""
    for _ in range(most):
        if not engine.has_replays:
            break
        engine.replay()
    assert not engine.has_replays
    engine.check_integrity()
    assert engine.monitor is not None
    pool = engine.monitor._lane.pool
    assert pool.available == pool.num_blocks
    return engine.counters.monitor


def results_of(counts: MonitorCounts) -> tuple[int, int, int, int, int]:
    return counts.replayed, counts.equal, counts.ties, counts.faults, counts.dropped


def write(engine: Engine, mode: dict[str, Any], many: int = 4, **given: Any) -> None:
    for i in range(many):
        ask(engine, f"q{i}", [*PROMPT, 20 + i % 2], seed=7 + i, **{**mode, **given})
    drain(engine)


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
    head = folder_of(tmp_path)
    engine = engine_of(target=deep_target(), speculation={"method": "eagle3", **head})
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
    "a choice": {"structured": {"choice": ["AAB", "ABBA", "BB"]}},
    "a regex": {"structured": {"regex": "[A-F]{3,9}x"}},
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


def test_predicted_outputs_and_pools_are_no_difference() -> None:
    engine = engine_of(speculation={"method": "suffix"})
    for i in range(3):
        ask(engine, f"q{i}", speculation={"prediction": tuple(PROMPT), "pool": "mine"})
        drain(engine)
    assert engine.counters.totals.drafted_from["prediction"] > 0
    assert results_of(replayed(engine)) == (3, 3, 0, 0, 0)


def test_preempted_answers_are_equal() -> None:
    engine = engine_of(speculation={"method": "ngram"}, num_blocks=20, max_num_seqs=8)
    write(engine, SEEDED, many=6, max_tokens=40)
    assert engine.counters.totals.preemptions > 0
    assert results_of(replayed(engine)) == (6, 6, 0, 0, 0)


def test_recurrent_states_are_the_monitors_own() -> None:
    engine = engine_of(target=recurrent_target(), speculation={"method": "ngram"})
    write(engine, GREEDY)
    counts = replayed(engine)
    assert counts.replayed == 4 and counts.faults == 0


# what is planted is found


@pytest.mark.parametrize("mode", [GREEDY, {**SEEDED, "top_k": 0}], ids=["greedy", "seeded"])
def test_a_wrong_draft_that_is_kept_is_a_fault(
    mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    script({}, lies=lambda position: True)
    engine = engine_of(speculation={"method": "scripted"})
    with watched(engine, 1.0, __import__("random").Random(0)) as work, caplog.at_level(logging.INFO):
        write(engine, mode)
        caplog.clear()
        counts = replayed(engine)
    assert work.planted >= 4 and results_of(counts) == (4, 0, 0, 4, 0)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 4 and all("a fault" in line and "q" in line for line in errors)
    assert all(len(line) < 160 for line in errors)
