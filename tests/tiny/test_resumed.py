"""What another engine writes after a part of an output is the rest of the whole, whatever was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.decoding.sequence import Event
from speculon.engine.messages import Add
from speculon.engine.progress import RequestProgress
from tests.tiny.forms import FORMS, engine_of
from tests.tiny.scripted import Key, Result, drain

SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 11, "max_tokens": 40}
PROMPT = [5, 20, 33, 20, 33, 41]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 2},
    "samples": {**SEEDED, "n": 3, "logprobs": 0},
    "penalties": {**SEEDED, "frequency_penalty": 1.5, "presence_penalty": 0.5, "min_tokens": 20},
    "stop strings": {**SEEDED, "ignore_eos": True, "stop": ["a", "e"], "n": 3},
    "prompt": {**SEEDED, "prompt_logprobs": 1},
    "bad words": {**SEEDED, "bad_words": ["an", "e"], "top_p": 0.9, "min_p": 0.01},
    **{f"form: {name}": {**SEEDED, "structured": FORMS[name]} for name in ("nested", "regex")},
}


def ask(add: Add) -> list[Event]:
    engine = engine_of()
    engine.add_request(add.prompt, add.params, add.speculation, add.request_id, add.written)
    events = []
    while engine.has_work:
        events += engine.step()
    drain(engine)  # checks the pool
    return events


def results_of(events: list[Event]) -> dict[Key, Result]:
    results: dict[Key, Result] = {}
    for event in events:
        results.setdefault((event.request_id, event.sample), Result()).take(event)
    return results


def check_resumed(params: dict[str, Any], method: str) -> None:
    """Cuts the events of one engine at every step; another one writes the rest."""
    speculation = RequestSpeculation(method=method, num_speculative_tokens=3)
    add = Add("r", PROMPT, SamplingParams(**params), speculation)
    events = ask(add)
    whole = results_of(events)
    cuts = [at for at in range(1, len(events)) if events[at].tokens]
    for at in cuts[:: max(1, len(cuts) // 3)]:
        progress = RequestProgress(add)
        for event in events[:at]:
            progress.note(event)
        parts = results_of([*events[:at], *ask(progress.rest())])
        assert parts.keys() == whole.keys()
        for key, result in parts.items():
            assert (result.tokens, result.finish) == (whole[key].tokens, whole[key].finish)
            assert [one.token for one in result.logprobs] == [one.token for one in whole[key].logprobs]
            assert result.prompt_logprobs == whole[key].prompt_logprobs


@pytest.mark.parametrize("case", CASES)
def test_the_parts_make_the_whole(case: str) -> None:
    check_resumed(CASES[case], "suffix")


@pytest.mark.parametrize("case", ["samples", "prompt"])
def test_a_token_that_was_not_noted_is_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: one token of those that came is forgotten."""
    monkeypatch.setattr(RequestProgress, "rest", forgetful(RequestProgress.rest))
    with pytest.raises(AssertionError):
        check_resumed(CASES[case], "off")


def forgetful(rest: Any) -> Any:
    def forget(progress: RequestProgress) -> Add:
        add: Add = rest(progress)
        for tokens in (add.written or {}).values():
            del tokens[-1:]
        return add

    return forget
