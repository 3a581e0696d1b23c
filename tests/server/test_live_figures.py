"""Figures that move while a long answer is written: in `/metrics`, in the overview and in the row of the
request; and at its end they are what its account tells.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from speculon.core.config import EngineConfig
from speculon.core.telemetry import EngineCounters
from speculon.engine.build import build_engine
from speculon.engine.engine import Engine
from speculon.server.answer import IN_PROGRESS
from speculon.server.choice import Choice
from tests.server.administered import API, administered
from tests.server.inside import Inside, ScriptedLoader

TOKENS, K = 120, 2
STEP_SECONDS = 0.03  # beside the model's own: then the counters come several times
METRICS = (
    "speculon_steps_total",
    "speculon_step_rows_total",
    "speculon_generated_tokens_total",
    "speculon_target_calls_total",
    "speculon_speculative_rounds_total",
    "speculon_draft_tokens_total",
    "speculon_accepted_tokens_total",
    "speculon_span_outcomes_total",
    "speculon_proposals_total",
    "speculon_proposal_stops_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
OF_PAGE = ("emitted", "target_calls", "rounds", "drafted", "accepted")


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """Of the demo model and its draft model."""
    speculation = {
        "method": "draft_model",
        "policy": "fixed",
        "num_speculative_tokens": K,
        "draft": "demo-draft",
    }
    config = EngineConfig(model="demo", warmup=False, speculation=speculation)
    with closing(build_engine(config)) as engine:
        yield engine


@contextmanager
def slow_server(engine: Engine, folder: Path) -> Iterator[Inside]:
    """A server with its administration; its engine has counted nothing yet."""
    step = engine.step

    def slowly() -> Any:
        time.sleep(STEP_SECONDS)
        return step()

    engine.counters = EngineCounters()
    with patch.object(engine, "step", slowly):
        with administered(folder, loader=ScriptedLoader(over=engine)) as inside:
            yield inside


def figures(inside: Inside) -> dict[str, float]:
    """By name, with where they stand."""
    now = dict.fromkeys(METRICS, 0.0)
    for line in inside.client.get("/metrics").text.splitlines():
        if (name := line.partition("{")[0]) in now:  # summed over labels
            now[name] += float(line.rsplit(" ", 1)[1])
    overview = inside.client.get(f"{API}/overview").json()
    now |= {f"overview {name}": overview["totals"][name] for name in OF_PAGE}
    row = inside.client.get(f"{API}/requests").json()[0]
    now |= {
        f"row {name}": row["speculation"][name] for name in IN_PROGRESS if name != "tokens_per_target_call"
    }
    return now | {"row tokens": row["tokens"]}


def stream(inside: Inside, last: dict[str, Any], done: threading.Event) -> None:
    """The whole answer, unless it is `done` before; `last` gets its last chunk, with the account."""
    body = {
        "prompt": "import os\n",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body |= {"speculation": {"stats": True}}
    with inside.client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if done.is_set():
                return
            if line.startswith("data: {"):
                last["chunk"] = json.loads(line.removeprefix("data: "))


def check_that_figures_move(inside: Inside) -> None:
    last: dict[str, Any] = {}
    done = threading.Event()
    reading = threading.Thread(target=stream, args=(inside, last, done))
    reading.start()
    moved, still = 0, []  # how often every figure has moved, and those that had not when they were last read
    inside.eventually(lambda: inside.client.get(f"{API}/requests").json() != [])
    before = figures(inside)
    try:
        while reading.is_alive():
            now = figures(inside)
            if found := [name for name in now if now[name] <= before[name]]:
                still = found
                time.sleep(0.02)
            else:
                before, moved = now, moved + 1
        assert moved >= 3, f"{still} moved {moved} times while the answer was written"
    finally:
        done.set()
        reading.join()
    account = last["chunk"]["speculation"]
    inside.eventually(lambda: inside.metric("speculon_sequences_total") == 1)
    now = figures(inside)
    assert account["emitted"] == TOKENS and account["draft_calls"] == now["speculon_proposals_total"]
    names = dict(zip(METRICS[2:7], ("emitted", "target_calls", "rounds", "drafted", "accepted"), strict=True))
    assert {name: now[name] for name in names} == {name: account[of] for name, of in names.items()}
    for name in OF_PAGE:
        assert now[f"overview {name}"] == account[name]
    view = inside.client.get(f"{API}/requests").json()[0]["speculation"]
    assert view == account


def test_figures_move_while_an_answer_is_written(
    demo: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row has so far is what the account tells; it comes with the events, without a message more."""
    seen: list[Choice] = []
    push = Choice.push

    def kept(choice: Choice, event: Any) -> Any:
        seen.append(choice)
        return push(choice, event)

    with slow_server(demo, tmp_path) as inside:
        check_that_figures_move(inside)
        monkeypatch.setattr(Choice, "push", kept)
        body = {"prompt": "import os\n", "max_tokens": 40, "ignore_eos": True, "n": 2, "seed": 3}
        assert inside.post("completions", **body).status_code == 200
    for choice in set(seen):
        assert choice.stats is not None and choice.stats.rounds
        so_far, whole = choice.so_far.speculation(), choice.stats.speculation()
        assert all(getattr(so_far, name) == getattr(whole, name) for name in IN_PROGRESS)


def test_counters_that_move_at_the_end_are_seen(
    demo: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""
    monkeypatch.setattr(Engine, "current_counters", lambda engine: engine.counters)
    with slow_server(demo, tmp_path) as inside, pytest.raises(AssertionError, match="generated_tokens"):
        check_that_figures_move(inside)
