"""A record made by a known world, played again: what it says of the world, and what it must not claim."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from speculon.bench.replay import BEYOND, OTHERS, OWN, Replay
from speculon.bench.simulate import SimulationResult, simulate
from speculon.commands.replay import read_policies, replay, show, verdict
from speculon.control.cost import Costs
from speculon.control.fixed import Fixed
from speculon.control.goodput import Goodput
from speculon.control.policy import Policy
from speculon.core import Reason, SpanOutcome
from speculon.errors import RecordError
from speculon.events import Header, ProposalLine, Recording, Round, SequenceRound
from tests.pure.screens import ELLIPSIS

HEADER = Header.model_construct(part=0, run="r", time=0.0)
LENGTH = 200


def step_ms(texts: int, drafts: int) -> float:
    return 4.0 + 0.5 * texts + 0.25 * drafts


def call_ms(texts: int, k: int) -> float:
    return (0.4 + 0.03 * texts) * k


class Recorder:
    """Plays texts with a fixed K with new random numbers, and writes the record of it."""

    def __init__(self, k: int = 4, noise: float = 0.03, seed: int = 0):
        self.k, self.noise, self.random, self.rounds = k, noise, Random(seed), list[Round]()

    def texts(
        self, count: int, accept: Any, name: str = "t", length: int = LENGTH, off: bool = False
    ) -> Recorder:
        """Some at the same time, to their ends; `accept` of the tokens written so far."""
        written = [0] * count
        first = True
        while min(written) < length:
            rows, drafts = [], 0
            running = [i for i in range(count) if written[i] < length]
            for i in running:
                rows.append(self._one(f"{name}{i}", written[i], accept(written[i]), length, off, first))
                drafts += rows[-1].drafted
                written[i] += rows[-1].tokens
            ks = [first.k for row in rows for first in row.proposals[:1]]
            calls = {"model": (len(ks), max(ks), self._noisy(call_ms(len(ks), max(ks))))} if ks else {}
            ms = {"propose": sum(ms for _, _, ms in calls.values())}
            now = {"running": len(rows), "waiting": 0, "free_pages": 1, "rows": len(rows) + drafts}
            target_ms = self._noisy(step_ms(len(rows), drafts))
            self.rounds.append(
                Round(time=0.0, **now, target_ms=target_ms, ms=ms, proposals=calls, texts=tuple(rows))
            )
            first = False
        return self

    def _one(
        self, name: str, written: int, accept: float, length: int, off: bool, first: bool
    ) -> SequenceRound:
        k = 0 if off else min(self.k, length - written - 1)
        methods = ({} if off else {"model": 16}) if first else None
        if not k:
            reason = Reason.OFF_REQUEST if off else Reason.MAX_TOKENS
            end = "length" if written + 1 >= length else None
            return SequenceRound(
                id=name, policy="fixed", methods=methods, tokens=1, reason=reason, finish=end
            )
        accepted = next((i for i in range(k) if self.random.random() >= accept), k)
        proposals = (ProposalLine(method="model", k=k, found=k),)
        outcome = SpanOutcome.FULL if accepted == k else SpanOutcome.EARLY
        end = "length" if written + accepted + 1 >= length else None
        more: dict[str, Any] = {
            "proposals": proposals,
            "drafts": (("model", k),),
            "accepted": accepted,
            "outcome": outcome,
            "finish": end,
        }
        return SequenceRound(id=name, policy="fixed", methods=methods, tokens=accepted + 1, **more)

    def _noisy(self, ms: float) -> float:
        return ms * self.random.gauss(1, self.noise)

    def done(self) -> Recording:
        return Recording(HEADER, self.rounds)


def replayed(
    recording: Recording, k: int | None, policy: Policy | None = None, costs: Costs | None = None
) -> SimulationResult:
    return simulate(policy or Fixed(), Replay(recording, k), costs=costs)


@pytest.mark.parametrize("count", [1, 8, 256])
def test_the_same_policy_reaches_what_the_record_reached(count: int) -> None:
    recording = Recorder().texts(count, lambda at: 0.7, length=60 if count > 8 else LENGTH * 4).done()
    played, done = replayed(recording, 4), Replay(recording).totals
    assert played.tokens == done.tokens and played.accepted == pytest.approx(done.accepted, rel=0.05)
    assert played.rate() == pytest.approx(done.tokens / done.ms, rel=0.04)
    assert max(texts for texts, _, _ in played.rates) == count


def test_costs_are_those_of_the_record() -> None:
    recorder = Recorder()
    for count in (1, 2, 4, 16):
        recorder.texts(count, lambda at: 0.7, name=f"{count}-")
    scene = Replay(recorder.done())
    for texts, drafts in ((1, 0), (1, 4), (4, 16), (16, 64)):
        assert scene.step_ms(texts, texts * bool(drafts), drafts) == pytest.approx(
            step_ms(texts, drafts), rel=0.05
        )
    assert scene.proposal_ms("model", 8, 4) == pytest.approx(call_ms(8, 4), rel=0.1)
    assert scene.misfit < 0.05 and not scene.notes


def test_other_numbers_of_drafts_do_as_they_would_have_done() -> None:
    """Fewer drafts than recorded: everything is known. The record of those is the truth."""
    recording = Recorder(k=8).texts(2, lambda at: 0.8, length=2000).done()
    for k in (1, 2, 4):
        truth = Replay(Recorder(k=k, seed=7).texts(2, lambda at: 0.8, length=2000).done()).totals
        scene = Replay(recording, k)
        played = simulate(Fixed(), scene)
        assert played.tokens == truth.tokens and len(played.rates) == pytest.approx(truth.rounds, rel=0.05)
        assert set(scene.sources) == {OWN}
    beyond = Replay(recording, 16)
    simulate(Fixed(), beyond)
    assert beyond.sources[BEYOND] > 0.1 * beyond.sources.total(), "more than was verified is counted apart"


def halves(played: SimulationResult) -> tuple[float, float]:
    """Tokens per text and round in the first and in the second half of the work."""
    found, tokens = ([], []), 0.0
    for texts, new, _ in played.rates:
        found[2 * tokens >= played.tokens].append(new / texts)
        tokens += new
    first, second = (sum(half) / len(half) for half in found)
    return first, second


def test_what_changes_in_the_record_changes_in_the_replay() -> None:
    recording = Recorder().texts(2, lambda at: 0.9 if at < 300 else 0.0, length=600).done()
    costs = Costs()
    for policy, k in ((Fixed(), 4), (Fixed(), 2), (Goodput(costs), None)):
        first, second = halves(replayed(recording, k, policy, costs))
        assert first > 2.2 and second < 1.2, (policy, k)


def test_a_replay_in_the_wrong_order_would_be_seen() -> None:
    """The twin: the same proposals, each text's in reverse."""
    recording = Recorder().texts(2, lambda at: 0.9 if at < 300 else 0.0, length=600).done()
    scene = Replay(recording, 4)
    for past in scene.sequences:
        past.proposals["model"] = [
            type(seen)(other.at, other.work, seen.k, seen.found, seen.judged, seen.accepted, seen.confidence)
            for seen, other in zip(past.proposals["model"], reversed(past.proposals["model"]), strict=True)
        ][::-1]
    first, second = halves(simulate(Fixed(), scene))
    assert not (first > 2.2 and second < 1.2)


def test_texts_come_when_as_much_work_is_done_as_in_the_record() -> None:
    recorder = (
        Recorder().texts(2, lambda at: 0.8, "a").texts(6, lambda at: 0.8, "b").texts(1, lambda at: 0.8, "c")
    )
    recording = recorder.done()
    assert [past.begins for past in Replay(recording).sequences] == [0] * 2 + [2 * LENGTH] * 6 + [8 * LENGTH]
    for k in (0, 1, 4, 16):
        sizes = [texts for texts, _, _ in replayed(recording, k).rates]
        assert sizes[0] == 2 and max(sizes) == 6 and sizes[-1] == 1, k
        assert replayed(recording, k).tokens == 9 * LENGTH


def test_a_text_that_wanted_no_drafts_gets_none() -> None:
    recording = Recorder().texts(1, lambda at: 0.8, "on").texts(1, lambda at: 0.8, "off", off=True).done()
    scene = Replay(recording, 4)
    assert [text.off for text in (scene.sequence(i) for i in range(2))] == [None, Reason.OFF_REQUEST]
    played = simulate(Fixed(), scene)
    assert sum(bool(drafted) for drafted in played.drafted) < LENGTH < len(played.rates)


def test_a_text_that_was_not_asked_borrows_from_others() -> None:
    def silent(rows: SequenceRound) -> SequenceRound:
        return (
            rows
            if rows.id == "t0"
            else rows.model_copy(update={"proposals": (), "drafts": (), "reason": Reason.COST})
        )

    rounds = Recorder().texts(2, lambda at: 0.8).rounds
    silent_rounds = [r.model_copy(update={"texts": tuple(map(silent, r.texts))}) for r in rounds]
    scene = Replay(Recording(HEADER, silent_rounds), 4)
    simulate(Fixed(), scene)
    assert 0.3 < scene.sources[OTHERS] / scene.sources.total() < 0.7


def notes(*rounds: Round, cut: bool = False) -> str:
    return "\n".join(Replay(Recording(HEADER, list(rounds), cut)).notes)


def test_a_note_names_what_a_record_cannot_tell() -> None:
    plain = Recorder().texts(1, lambda at: 0.5, off=True).rounds
    assert "what drafts would have gained is unknown" in notes(*plain)
    assert "what a draft costs is unknown" in notes(*plain)
    rounds = Recorder().texts(1, lambda at: 0.5).rounds
    able = rounds[0].texts[0].model_copy(update={"methods": {"model": 4, "other": 4}})
    assert "other was never asked" in notes(rounds[0].model_copy(update={"texts": (able,)}), *rounds[1:])
    assert "model was always asked for 4" in notes(
        *[r for r in rounds if "model" not in r.proposals or r.proposals["model"][1] == 4]
    )
    assert "no proposal of model was timed" in notes(
        *[r.model_copy(update={"proposals": {}}) for r in rounds]
    )
    assert "3 rounds are not in the record" in notes(*rounds[:-1], rounds[-1].model_copy(update={"lost": 3}))
    assert "not complete" in notes(*rounds, cut=True) and not notes(*rounds)
    wild = [r.model_copy(update={"target_ms": r.target_ms * (1 + 3 * (i % 2))}) for i, r in enumerate(rounds)]
    assert "the machine was not quiet" in notes(*wild)


def test_a_record_without_decoding_is_refused() -> None:
    with pytest.raises(RecordError, match="no round of decoding alone"):
        Replay(Recording(HEADER))
    prompts = [r.model_copy(update={"prompt_rows": 3}) for r in Recorder().texts(1, lambda at: 0.5).rounds]
    with pytest.raises(RecordError, match="no round of decoding alone"):
        Replay(Recording(HEADER, prompts))


def test_the_command_has_a_verdict_and_a_table_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = Recorder().texts(2, lambda at: 0.8).done()
    rows = [replay(recording, name, k, 0) for name, k in read_policies("fixed:4,goodput")]
    recorded = replace(rows[0], policy="as recorded", others=None, beyond=None)
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        show([recorded, recorded, *rows], ["a note"])
        text = capsys.readouterr().out
        assert text.startswith("Fastest policy: ") and ELLIPSIS not in text
        assert "as recorded" in text and "fixed:4" in text and "a note" in text
    assert verdict([recorded, recorded, rows[0]]) == "No policy is faster than plain decoding in this record."
