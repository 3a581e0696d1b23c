"""The record of real rounds adds up with what the engine counts, whatever happens in between; and it changes
no text.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.speculation.control.policy import Trimmed
from tests.recording import Recording, SequenceRound, read
from tests.tiny.conftest import tiny_target
from tests.tiny.requests import assert_same, mixed, plain, requests_of
from tests.tiny.scripted import Key, Result, drain, make_engine, script

Faults = dict[int, str]  # step -> which request is aborted


def record(
    path: Path, mode: str = "sampled", faults: Faults | None = None, **settings: Any
) -> tuple[Engine, dict[Key, Result]]:
    script(plain(mode))
    engine = make_engine(tiny_target("llama"), events=path, **settings)
    for request in mixed(requests_of(mode), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results: dict[Key, Result] = {}
    for step in range(max(faults or [0])):
        for event in [*engine.step(), *engine.abort((faults or {}).get(step, "nobody"))]:
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    drain(engine, results)
    engine.close()
    return engine, results


def add_up(entries: list[SequenceRound]) -> dict[str, Any]:
    """What the lines of a text say, in the words of its stats."""
    ended = Counter(
        (proposal.method, proposal.stop) for one in entries for proposal in one.proposals if proposal.stop
    )
    matched = Counter(
        (proposal.method, proposal.match) for one in entries for proposal in one.proposals if proposal.match
    )
    drafted = [one for one in entries if one.drafts]
    sources = Counter[str]()
    for one in drafted:
        sources.update(dict(one.drafts))
    return {
        "target_calls": len(entries),
        "emitted": sum(one.tokens for one in entries),
        "rounds": len(drafted),
        "accepted": sum(one.accepted for one in drafted),
        "draft_calls": sum(len(one.proposals) for one in entries),
        "drafted_from": sources,
        "outcomes": Counter(one.outcome for one in drafted),
        "reasons": Counter(one.reason for one in entries if one.reason),
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
    by_text: dict[Key, list[SequenceRound]] = {key: [] for key in results}
    for entry in (entry for round_ in recording.rounds for entry in round_.texts):
        by_text[entry.key].append(entry)
    for key, entries in by_text.items():
        stats: RequestStats = results[key].stats
        found += [f"{key} {name}" for name, value in add_up(entries).items() if value != getattr(stats, name)]
        ends = [one.finish for one in entries if one.finish]
        if ends != [f.reason for f in [results[key].finish] if f and f.reason != "abort"]:
            found.append(f"{key} finish")
    whole = add_up([entry for of in by_text.values() for entry in of])
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
    if not faults:
        assert_same(requests_of("sampled"), results, plain("sampled"))
    recording = read(tmp_path / "e.jsonl")
    assert not disagreements(recording, engine, results)
    assert engine.counters.totals.rounds and recording.header.pages == engine.runtime.space.num_blocks
    for round_ in recording.rounds:
        assert (
            round_.prompt_rows + sum(1 + entry.drafted for entry in round_.texts if not entry.prompt)
            == round_.rows
        )
        for entry in round_.texts:
            assert (
                entry.drafted <= (entry.proposals[-1].found if entry.proposals else 0)
                and entry.accepted <= entry.drafted
            )
            assert all(proposal.found <= proposal.k for proposal in entry.proposals)


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
    proposals = [
        tuple(a.model_copy(update={name: None if name == "stop" else 0}) for a in t.proposals)
        for t in round_.texts
    ]
    return tuple(t.model_copy(update={"proposals": a}) for t, a in zip(round_.texts, proposals, strict=True))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine, dict[Key, Result]]:
    path = tmp_path_factory.mktemp("events") / "e.jsonl"
    return path, *record(path)


@pytest.mark.parametrize(("lie", "found"), LIES)
def test_a_record_that_does_not_add_up_is_found_out(
    recorded: tuple[Path, Engine, dict[Key, Result]], lie: Any, found: str
) -> None:
    path, engine, results = recorded
    recording = read(path)
    recording.rounds = lie(recording.rounds)
    assert found in disagreements(recording, engine, results)


def test_a_failing_drafter_and_failing_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = script(plain("sampled"))
    engine, results, calls, steps = (
        make_engine(tiny_target("llama"), events=tmp_path / "e.jsonl"),
        dict[Key, Result](),
        0,
        0,
    )
    draft, forward = proposer.draft_of, engine.runtime.target.forward

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

    proposer.draft_of = fail_once  # type: ignore[method-assign]
    monkeypatch.setattr(engine.runtime.target, "forward", fail_at_times)
    for request in mixed(requests_of("sampled"), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
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
    assert_same(requests_of("sampled"), results, plain("sampled"))


def test_the_record_separates_proposed_from_verified_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script({}, lambda position: True)
    engine = make_engine(tiny_target("llama"), events=tmp_path / "e.jsonl")
    monkeypatch.setattr(engine.policy, "trim", lambda method, drafts: dict.fromkeys(drafts, Trimmed(1)))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    engine.add_request([5] * 6, params, {"method": "scripted", "num_speculative_tokens": 3})
    drain(engine)
    engine.close()
    entries = [
        entry for round_ in read(tmp_path / "e.jsonl").rounds for entry in round_.texts if entry.drafts
    ]
    assert entries and all(
        (one.proposals[0].found, one.drafted) in ((3, 1), (2, 1), (1, 1)) for one in entries
    )
