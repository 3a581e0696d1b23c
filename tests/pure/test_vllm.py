"""The plug-in for vLLM beside a simulated runner: whose row it is, what it drafts, counts and refuses."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from speculon.core.errors import ConfigError, InvalidParameter, SpeculonError
from speculon.core.types import Draft, SpanOutcome
from speculon.speculation.vllm import Proposer, drafter, statistics
from speculon.speculation.vllm.drafter import VllmDrafter, verdict_of
from speculon.speculation.vllm.requests import ABSENT, KnownRequest
from speculon.speculation.vllm.settings import VllmSettings
from tests.vllm_runner import EOS, FakeRequest, FakeRunner, vllm_config

PERIOD = 24


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


class Plugin:
    """The proposer in the virtual time of a runner."""

    def __init__(self, runner: FakeRunner, **config: Any) -> None:
        self.drafter = VllmDrafter(VllmSettings.of(vllm_config(**config)), runner.clock)

    def propose(self, new: Any, lengths: Any, table: Any, slot_mappings: Any = None) -> list[list[int]]:
        return self.drafter.step(new, lengths, table)


def repeats(tokens: list[int]) -> int:
    """A text that repeats its first tokens."""
    return tokens[len(tokens) % PERIOD]


def wanders(seed: int) -> Any:
    """A text in which nothing repeats."""
    return lambda tokens: 1 + hash((seed, *tokens[-3:])) % 997


def prompt(chance: Random, length: int = PERIOD) -> list[int]:
    return [chance.randrange(1, 999) for _ in range(length)]


# whose row it is


def confused(rounds: int, seed: int) -> list[str]:
    """Plays arrivals, ends, preemptions, swaps and chunked prompts; returns what was recognised wrongly.

    Prompts come from a few templates, so rows are often alike in length and at their ends.
    """
    chance, runner = Random(seed), FakeRunner()
    plugin, away = Plugin(runner), list[tuple[FakeRequest, int]]()
    templates, owners, found = [prompt(chance, 40) for _ in range(3)], dict[Any, FakeRequest](), list[str]()
    for number in range(rounds):
        if len(runner.rows) < 8 and chance.random() < 0.3:
            tokens = [*chance.choice(templates)]
            tokens[chance.randrange(5)] = chance.randrange(1, 999)
            most = len(tokens) + chance.randrange(1, 60)
            runner.rows.append(FakeRequest(tokens, wanders(seed), most, chunks=chance.randrange(1, 4)))
        if runner.rows and chance.random() < 0.1:
            away.append((runner.leave(chance.randrange(len(runner.rows))), number))
        if away and chance.random() < 0.2:
            one, since = away.pop(chance.randrange(len(away)))
            one.chunks = chance.randrange(1, 3)
            runner.rows.append(one)
            if number - since > ABSENT:
                owners = {known: other for known, other in owners.items() if other is not one}
        if chance.random() < 0.1:
            chance.shuffle(runner.rows)
        runner.step(plugin)
        rows = plugin.drafter.requests.rows
        for known, one in zip(rows, runner.rows, strict=True):
            if known is not None and known.seq.tokens != one.tokens:
                found.append(f"call {number}: another request's tokens")
            if known is not None and owners.setdefault(known, one).tokens != one.tokens:
                found.append(f"call {number}: the row of another request")
    return found


@pytest.mark.parametrize("seed", range(3))
def test_requests_are_recognised_wherever_their_rows_are(seed: int) -> None:
    assert confused(300, seed) == []


PLANTED = {
    "by row": lambda self, row, length: True,
    "by length": lambda self, row, length: len(self.tokens) == length,
    "by length and end": lambda self, row, length: (
        len(self.tokens) == length and self.tokens[-4:].tolist() == row[length - 4 : length].tolist()
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wrong_recognition_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownRequest, "is_in", PLANTED[name])
    assert any(confused(300, seed) for seed in range(6))


def test_a_preempted_request_goes_on_and_one_away_for_long_begins_anew() -> None:
    runner = FakeRunner()
    plugin = Plugin(runner)
    other, one = (FakeRequest(prompt(Random(i)), wanders(i)) for i in range(2))
    runner.rows += [other, one]
    seen = []
    for away in (3, ABSENT + 2):
        runner.step(plugin)
        seen.append(plugin.drafter.requests.rows[1])
        runner.leave(1)
        for _ in range(away):
            runner.step(plugin)
        runner.rows.append(one)
    runner.step(plugin)
    first, second, third = (*seen, plugin.drafter.requests.rows[1])
    assert first is second and second is not third
    assert third.seq.tokens == one.tokens and third.seq.request.prompt_len == len(one.tokens) - 1


def test_batches_that_alternate_in_a_pipeline_are_drafted_for() -> None:
    runner = FakeRunner()
    plugin = Plugin(runner, pipeline_parallel_size=2)
    batches = [[FakeRequest(prompt(Random(10 * i + j)), repeats) for j in range(2)] for i in range(2)]
    first = []
    for number in range(60):
        runner.rows = batches[number % 2]
        runner.step(plugin)
        first.append(plugin.drafter.requests.rows[0])
    assert runner.drafted > 200
    assert len(set(first)) == 2


def test_the_next_turn_of_a_conversation_is_another_request() -> None:
    runner = FakeRunner()
    plugin = Plugin(runner)
    runner.rows.append(FakeRequest(prompt(Random(0)), lambda tokens: EOS if len(tokens) == 40 else 5))
    while not runner.rows[0].done:
        runner.step(plugin)
    first = plugin.drafter.requests.rows[0]
    turn = [*runner.rows[0].tokens, *prompt(Random(1))]
    runner.rows = [FakeRequest(turn, wanders(0))]
    runner.step(plugin)
    second = plugin.drafter.requests.rows[0]
    assert second is not first and second.seq.request.prompt_len == len(turn)
    assert plugin.drafter.proposers.remembered[0] == 1  # the first one is in its pool


# what it drafts


def speeds(target: Any, rounds: int = 300, most: int = 10**9) -> tuple[float, float]:
    """Tokens per ms with drafts, and without any."""
    found = []
    for silent in (False, True):
        runner = FakeRunner()
        plugin = Plugin(runner)
        if silent:
            plugin.propose = lambda new, *more, **others: [[] for _ in new]  # type: ignore[method-assign]
        starts = [prompt(Random(i)) for i in range(2)]
        runner.rows = [FakeRequest(start, target, most) for start in starts]
        for _ in range(rounds):
            runner.step(plugin)
        found.append(sum(len(one.tokens) - PERIOD for one in runner.rows) / runner.now)
    return found[0], found[1]


def test_texts_that_repeat_are_drafted() -> None:
    ours, plain = speeds(repeats, rounds=60)
    assert ours > 2.5 * plain


def test_drafts_that_do_not_pay_end_and_come_back() -> None:
    """A text whose pairs of tokens repeat and then go on otherwise, then one that repeats itself."""
    runner = FakeRunner(lambda rows, drafts: 4 + 3.0 * drafts)
    plugin = Plugin(runner)
    misleads = lambda tokens: 1 + (hash((7, len(tokens))) % 12)  # noqa: E731
    one = FakeRequest(prompt(Random(1)), lambda tokens: misleads(tokens) if len(tokens) < 400 else tokens[-5])
    runner.rows.append(one)
    drafts = Counter[str]()
    while len(one.tokens) < 900:
        at, before = len(one.tokens), runner.drafted
        runner.step(plugin)
        drafts["misled" if 150 < at < 400 else "repeating" if at > 500 else "other"] += (
            runner.drafted - before
        )
    assert drafts["misled"] < 0.1 * 250
    assert drafts["repeating"] > 0.5 * 400


def test_a_step_has_no_more_rows_than_vllm_has_room_for() -> None:
    runner = FakeRunner()
    plugin = Plugin(runner)
    settings = plugin.drafter.settings
    runner.rows = [FakeRequest(prompt(Random(i)), repeats) for i in range(60)]
    for _ in range(40):
        runner.step(plugin)
        assert 60 + sum(len(one.drafts) for one in runner.rows) <= settings.max_rows
    assert runner.drafted


def test_answers_of_the_same_prompt_are_drafted_from() -> None:
    runner = FakeRunner()
    plugin = Plugin(runner)
    target = lambda tokens: EOS if len(tokens) > 150 else 1 + hash((3, *tokens[-3:])) % 997  # noqa: E731
    rounds = []
    for _ in range(2):
        runner.rows = [FakeRequest(prompt(Random(5)), target)]
        began = runner.now
        while not runner.rows[0].done:
            runner.step(plugin)
        rounds.append(runner.now - began)
    assert rounds[1] < 0.5 * rounds[0]


@pytest.mark.parametrize(
    ("drafts", "new", "accepted", "outcome"),
    [
        pytest.param((), [1], 0, None, id="no draft"),
        pytest.param((1, 2), [1, 2, 3], 2, SpanOutcome.FULL, id="all and a bonus"),
        pytest.param((1, 2), [1, 3], 1, SpanOutcome.TAIL, id="the last one rejected"),
        pytest.param((1, 2, 3), [9], 0, SpanOutcome.EARLY, id="the first one rejected"),
        pytest.param((1, 2, 3), [1, 2], 2, SpanOutcome.STOP, id="vLLM verified one of them"),
    ],
)
def test_what_a_step_says_of_a_draft(drafts: Any, new: Any, accepted: int, outcome: Any) -> None:
    verdict = verdict_of(Draft(drafts, ("suffix",) * len(drafts)), new)
    assert (verdict.tokens, verdict.accepted, verdict.outcome) == (tuple(new), accepted, outcome)


def test_a_step_with_a_prompt_in_it_tells_no_cost() -> None:
    runner = FakeRunner(lambda rows, drafts: 5.0)
    plugin = Plugin(runner)
    runner.rows.append(FakeRequest(prompt(Random(0)), wanders(0)))
    for _ in range(20):
        runner.step(plugin)
    runner.ms = lambda rows, drafts: 500.0
    runner.rows.append(FakeRequest(prompt(Random(1)), wanders(1), chunks=3))
    for _ in range(3):
        runner.step(plugin)
    assert plugin.drafter.policy.costs.step(1) < 10


# ranks


def test_one_tensor_parallel_rank_drafts() -> None:
    found = []
    for rank in range(4):
        runner = FakeRunner()
        proposer = Proposer(vllm_config(rank=rank, ranks=2))
        runner.rows.append(FakeRequest(prompt(Random(0)), repeats))
        for _ in range(40):
            runner.step(proposer)
        found.append(runner.drafted > 0)
    assert found == [True, False, True, False]


def test_ranks_that_schedule_by_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="external_launcher"):
        Proposer(vllm_config(ranks=2, distributed_executor_backend="external_launcher"))


# settings, errors, counters


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('method = "eagle3"', "speculation.method = 'eagle3'.*auto, off, suffix, ngram"),
        ('draft = "some/folder"', "speculation.draft"),
        ("num_speculative_tokens = 17", "speculation.num_speculative_tokens = 17.*16"),
        ('options = {lookup = ["ngram"]}', "speculation.options.lookup .*did you mean lookups"),
        ('options = {lookups = ["grammar"]}', "speculation.options.lookups = 'grammar'.*suffix, ngram"),
        ("options = {log_seconds = 0}", "speculation.options.log_seconds = 0"),
        ("suffix_min_hits = 0", "line 2.*speculation.suffix_min_hits = 0"),
    ],
)
def test_bad_settings_end_the_start(text: str, complaint: str) -> None:
    Path("speculon.toml").write_text(f"[speculation]\n{text}\n", encoding="utf-8")
    with pytest.raises(SpeculonError, match=complaint):
        Proposer(vllm_config())


@pytest.mark.parametrize(
    ("text", "methods", "most"),
    [
        ("", ("suffix", "ngram"), 16),
        ('method = "off"', (), 16),
        ('method = "ngram"\nnum_speculative_tokens = 3', ("ngram",), 3),
        ('method = "suffix"\npolicy = "fixed"', ("suffix",), 4),
    ],
)
def test_settings(text: str, methods: tuple[str, ...], most: int) -> None:
    Path("speculon.toml").write_text(f"[speculation]\n{text}\n", encoding="utf-8")
    settings = VllmSettings.of(vllm_config())
    assert (settings.methods, settings.most) == (methods, most)


def test_the_environment_sets_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULON_SPECULATION__METHOD", "everything")
    with pytest.raises(InvalidParameter, match="everything"):
        Proposer(vllm_config())


def test_an_error_costs_the_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*rows: Any) -> Any:
        raise RuntimeError("planted")

    proposer, runner = Proposer(vllm_config()), FakeRunner()
    runner.rows.append(FakeRequest(prompt(Random(0)), repeats))
    monkeypatch.setattr(drafter.VllmDrafter, "step", fail)
    for _ in range(5):
        runner.step(proposer)
    assert len(runner.rows[0].tokens) == PERIOD + 5
    assert [record.message for record in caplog.records] == [
        "drafting failed; this engine goes on without drafts"
    ]


def counted() -> dict[str, float]:
    return {
        sample.name.removeprefix("speculon_vllm_") + str([*sample.labels.values()]): sample.value
        for counter in statistics.COUNTERS.values()
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def test_counters_and_the_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Path("speculon.toml").write_text("[speculation.options]\nlog_seconds = 2\n", encoding="utf-8")
    caplog.set_level(logging.INFO, "vllm.speculon")
    before, runner = counted(), FakeRunner()
    plugin, one = Plugin(runner), FakeRequest(prompt(Random(0)), repeats)
    runner.verified = 5  # the other drafts are neither accepted nor rejected
    runner.rows.append(one)
    while runner.now < 2_050:
        runner.step(plugin)
        if len(one.tokens) > 900:
            one.tokens[-1] = EOS
            one = FakeRequest(prompt(Random(0)), repeats)
            runner.rows.append(one)
    after = {name: value - before.get(name, 0) for name, value in counted().items()}
    assert 0 < after["accepted_tokens_total['suffix']"] <= after["draft_tokens_total['suffix']"]
    calls, tokens = after["target_calls_total[]"], after["output_tokens_total[]"]
    accepted = sum(value for name, value in after.items() if name.startswith("accepted_tokens"))
    assert tokens == calls + accepted
    assert sum(value for name, value in after.items() if name.startswith("plain_rounds")) < calls
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1 and "tokens per target call" not in lines[0]
    assert "per target call | suffix " in lines[0] and "| plain " in lines[0]


def test_nothing_is_drafted_when_it_is_off() -> None:
    Path("speculon.toml").write_text('[speculation]\nmethod = "off"\n', encoding="utf-8")
    runner, before = FakeRunner(), counted().get("plain_rounds_total['off_config']", 0)
    plugin = Plugin(runner)
    runner.rows.append(FakeRequest(prompt(Random(0)), repeats))
    for _ in range(30):
        runner.step(plugin)
    assert not runner.drafted
    assert counted()["plain_rounds_total['off_config']"] - before > 20
