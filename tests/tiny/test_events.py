"""The record of real rounds adds up with what the engine counts, whatever happens in between; and it changes
no text.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from speculon.config import SamplingParams
from speculon.core import Reason
from speculon.engine.engine import Engine
from speculon.events import Recording, TextRound, read
from speculon.sequence import Sequence
from speculon.telemetry import RequestStats
from tests.tiny.conftest import tiny_target
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, script
from tests.tiny.test_parity import assert_same, crowd, mixed, plain

Faults = dict[int, str]  # step -> which request is aborted


def record(
    path: Path, mode: str = "sampled", faults: Faults | None = None, **settings: Any
) -> tuple[Engine, dict[Key, Result]]:
    script(plain(mode))
    engine = make_engine(tiny_target("llama"), events=path, **settings)
    for asked in mixed(crowd(mode), 4):
        engine.add_request(asked.prompt, asked.params, asked.speculation, asked.id)
    results: dict[Key, Result] = {}
    for step in range(max(faults or [0])):
        for event in [*engine.step(), *engine.abort((faults or {}).get(step, "nobody"))]:
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    drain(engine, results)
    engine.close()
    return engine, results


def add_up(told: list[TextRound]) -> dict[str, Any]:
    """What the lines of a text say, in the words of its stats."""
    ended = Counter((asked.method, asked.stop) for one in told for asked in one.asked if asked.stop)
    matched = Counter((asked.method, asked.match) for one in told for asked in one.asked if asked.match)
    drafted = [one for one in told if one.drafts]
    sources = Counter[str]()
    for one in drafted:
        sources.update(dict(one.drafts))
    return {
        "target_calls": len(told),
        "emitted": sum(one.tokens for one in told),
        "rounds": len(drafted),
        "accepted": sum(one.accepted for one in drafted),
        # a call that failed made no draft
        "draft_calls": sum(bool(one.asked) and one.reason != Reason.ERROR for one in told),
        "drafted_from": sources,
        "outcomes": Counter(one.outcome for one in drafted),
        "reasons": Counter(one.reason for one in told if one.reason),
        "stops": by_method(ended),
        "matches": by_method(matched),
    }


def by_method(counts: Counter[tuple[str, Any]]) -> dict[str, dict[Any, int]]:
    found: dict[str, dict[Any, int]] = {}
    for (method, what), count in counts.items():
        found.setdefault(method, {})[what] = count
    return found


def disagreements(recording: Recording, engine: Engine, results: dict[Key, Result]) -> list[str]:
    """Where the record and the counters differ: nowhere."""
    found = []
    by_text: dict[Key, list[TextRound]] = {key: [] for key in results}
    for told in (told for round_ in recording.rounds for told in round_.texts):
        by_text[told.key].append(told)
    for key, told in by_text.items():
        stats: RequestStats = results[key].stats
        found += [f"{key} {name}" for name, value in add_up(told).items() if value != getattr(stats, name)]
        ends = [one.finish for one in told if one.finish]
        if ends != [f.reason for f in [results[key].finish] if f and f.reason != "abort"]:
            found.append(f"{key} finish")
    whole = add_up([told for of in by_text.values() for told in of])
    found += [
        f"all {name}" for name, value in whole.items() if value != getattr(engine.counters.totals, name)
    ]
    rounds = recording.rounds
    if len(rounds) != engine.counters.steps or sum(round_.rows for round_ in rounds) != engine.counters.rows:
        found.append("steps and rows")
    if (
        abs(sum(sum(round_.ms.values()) for round_ in rounds) - engine.counters.step_ms)
        > 0.1 * engine.counters.step_ms
    ):
        found.append("time")
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few pages": {"num_blocks": 40},
    "chunked": {"max_batch_tokens": 7, "max_num_seqs": 3},
    "goodput": {"speculation": {"policy": "goodput", "method": "ngram"}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("faults", [{}, {2: "q0", 5: "q3", 9: "q7"}], ids=["calm", "aborts"])
def test_the_record_adds_up_with_the_accounts(
    tmp_path: Path, settings: dict[str, Any], faults: Faults
) -> None:
    engine, results = record(tmp_path / "e.jsonl", faults=faults, **settings)
    recording = read(tmp_path / "e.jsonl")
    assert not disagreements(recording, engine, results)
    assert engine.counters.totals.rounds and recording.header.pages == engine.pool.num_blocks
    for round_ in recording.rounds:
        assert (
            round_.prompt_rows + sum(1 + told.drafted for told in round_.texts if not told.prompt)
            == round_.rows
        )
        for told in round_.texts:
            assert (
                told.drafted <= (told.asked[-1].found if told.asked else 0) and told.accepted <= told.drafted
            )
            assert all(asked.found <= asked.k for asked in told.asked)


LIES = [
    pytest.param(lambda rounds: rounds[:-1], "steps and rows", id="a line is missing"),
    pytest.param(lambda rounds: [*rounds, rounds[-1]], "steps and rows", id="a line twice"),
    pytest.param(lambda rounds: [without_reasons(r) for r in rounds], "all reasons", id="no reasons"),
    pytest.param(
        lambda rounds: [r.model_copy(update={"texts": without("stop", r)}) for r in rounds],
        "all stops",
        id="no stops",
    ),
    pytest.param(
        lambda rounds: [r.model_copy(update={"texts": without("match", r)}) for r in rounds],
        "all matches",
        id="no matches",
    ),
    pytest.param(
        lambda rounds: [r.model_copy(update={"texts": r.texts[::2]}) for r in rounds],
        "all emitted",
        id="texts left out",
    ),
]


def without_reasons(round_: Any) -> Any:
    return round_.model_copy(
        update={"texts": tuple(t.model_copy(update={"reason": None}) for t in round_.texts)}
    )


def without(name: str, round_: Any) -> tuple[Any, ...]:
    """Its sequences, whose proposals lack this field."""
    asked = [
        tuple(a.model_copy(update={name: None if name == "stop" else 0}) for a in t.asked)
        for t in round_.texts
    ]
    return tuple(t.model_copy(update={"asked": a}) for t, a in zip(round_.texts, asked, strict=True))


@pytest.mark.parametrize(("lie", "found"), LIES)
def test_a_record_that_does_not_add_up_is_found_out(tmp_path: Path, lie: Any, found: str) -> None:
    engine, results = record(tmp_path / "e.jsonl")
    recording = read(tmp_path / "e.jsonl")
    recording.rounds = lie(recording.rounds)
    assert found in disagreements(recording, engine, results)


def test_a_drafter_that_fails_and_steps_that_fail_are_told_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = script(plain("sampled"))
    engine, results, calls, steps = (
        make_engine(tiny_target("llama"), events=tmp_path / "e.jsonl"),
        dict[Key, Result](),
        0,
        0,
    )
    draft, forward = proposer._draft, engine.target.forward

    def fail_once(seq: Sequence, k: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("planted")
        return draft(seq, k)

    def fail_at_times(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 7 == 3:
            raise MemoryError("planted")
        return forward(*args)

    proposer._draft = fail_once  # type: ignore[method-assign]
    monkeypatch.setattr(engine.target, "forward", fail_at_times)
    for asked in mixed(crowd("sampled"), 4):
        engine.add_request(asked.prompt, asked.params, asked.speculation, asked.id)
    for _ in range(400):
        try:
            for event in engine.step():
                results.setdefault((event.request_id, event.sample), Result()).take(event)
        except MemoryError:
            continue
    assert not engine.has_work and steps > 20
    engine.close()
    recording = read(tmp_path / "e.jsonl")
    assert not disagreements(recording, engine, results)
    assert engine.counters.totals.reasons["error"] > 10
    assert_same(crowd("sampled"), results, plain("sampled"))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_record_changes_no_text(tmp_path: Path, mode: str) -> None:
    _, results = record(tmp_path / "e.jsonl", mode)
    assert_same(crowd(mode), results, plain(mode))


def test_what_was_proposed_and_what_was_kept_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script({}, lambda position: True)
    engine = make_engine(tiny_target("llama"), events=tmp_path / "e.jsonl")
    monkeypatch.setattr(engine.policy, "trim", lambda seq, method, draft: draft.cut(1))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    engine.add_request([5] * 6, params, {"method": "scripted", "num_speculative_tokens": 3})
    drain(engine)
    engine.close()
    told = [told for round_ in read(tmp_path / "e.jsonl").rounds for told in round_.texts if told.drafts]
    assert told and all((one.asked[0].found, one.drafted) in ((3, 1), (2, 1), (1, 1)) for one in told)


def test_without_a_record_a_round_asks_for_none() -> None:
    engine = make_engine(tiny_target("llama"))
    assert engine.events is None
    engine.close()
    assert run(tiny_target("llama"), [Request([5], SamplingParams(max_tokens=2))])
