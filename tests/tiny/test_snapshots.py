"""Snapshots of recurrent states: prefixes are found again, texts stay those of generate, and errors that are
planted in the snapshots show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speculon import SpeculativeDecoder
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import ConfigError
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.runtimes.torch.kv import slots
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.slots import StateSlots
from speculon.runtimes.torch.model.recurrent import Mixer
from tests.engines import engine_on
from tests.tiny.recurrent import (
    DIFFERENT,
    ROW_BY_ROW,
    TWO,
    generated,
    mixed,
    recurrent_model,
    recurrent_target,
    requests,
    wrong,
)
from tests.tiny.requests import accepted_lengths, drafting
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, script, states_of

SIZE = 4  # tokens of a page, in make_engine


@pytest.fixture(autouse=True)
def every_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix is used, whatever the speed of small mixers."""
    monkeypatch.setattr(slots, "ALONE", 1)


def wave(engine: Engine, batch: list[Request]) -> dict[Key, Result]:
    """All of these at once, to their end; the pool is checked on the way."""
    for request in batch:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


def cached(results: dict[Key, Result]) -> dict[Key, int]:
    return {key: result.stats.cached_tokens for key, result in results.items()}


def later(name: str, request: Request, written: int) -> Request:
    """The same text as a longer prompt, with so many tokens of its answer."""
    prompt = request.prompt + generated(name)[request.id, 0][:written]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return Request(prompt, params, {"method": "off"}, request.id)


def wrong_later(name: str, results: dict[Key, Result], written: int) -> list[tuple[Key, int, float]]:
    """`wrong` of what follows so many tokens of the answers; tokens that were not batch for are right."""
    truth = generated(name)
    whole = {
        key: Result(truth[key][:written] + result.tokens + truth[key][written + len(result.tokens) :])
        for key, result in results.items()
    }
    return wrong(name, whole)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(preemptions so far, tokens found) of each sequence that takes its pages."""
    seen: list[tuple[int, int]] = []
    open_pages = BlockPool.open

    def spied(pool: BlockPool, seq: Sequence) -> int:
        tokens = open_pages(pool, seq)
        seen.append((seq.stats.preemptions, tokens))
        return tokens

    monkeypatch.setattr(BlockPool, "open", spied)
    return seen


# one architecture of each class of mixer; the soak has the others


def check_found_again(name: str) -> None:
    """The third time up to its last page boundary, which the second has found shared; so is a longer text."""
    engine, request = make_engine(recurrent_target(name)), requests()[1]
    first, second, third = (wave(engine, [request]) for _ in range(3))
    assert [cached(results)["q1", 0] for results in (first, second, third)] == [0, 0, 28]
    assert not any(wrong(name, results) for results in (first, second, third))
    results = wave(engine, [later(name, request, 20)])
    assert cached(results)["q1", 0] >= len(request.prompt) and not wrong_later(name, results, 20)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_prompt_is_found_again(name: str) -> None:
    check_found_again(name)


# where a snapshot is made


@pytest.mark.parametrize("name", TWO)
def test_samples_of_a_prompt_share_its_state(name: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=3, ignore_eos=True)
    request = replace(requests()[1], params=params)
    plain = wave(make_engine(recurrent_target(name), snapshot_memory_gb=0), [request])
    results = wave(make_engine(recurrent_target(name)), [request])
    assert [result.tokens for result in results.values()] == [result.tokens for result in plain.values()]
    assert sorted(cached(results).values()) == [0, 28, 28] and not any(cached(plain).values())


@pytest.mark.parametrize("name", TWO)
def test_prompts_that_part_share_what_they_have_in_common(name: str) -> None:
    """The second prompt marks where they part, the third goes on from there, alone or in a batch."""
    engine, request = make_engine(recurrent_target(name)), requests()[1]
    text = request.prompt + generated(name)["q1", 0]
    turns = [Request(text[:end], request.params, {"method": "off"}, "q1") for end in (26, 26, 26)]
    for i, turn in enumerate(turns):
        turn.prompt[24:] = [50 + i, 60 + i]
    results = [cached(wave(engine, [turn]))["q1", 0] for turn in turns]
    assert results == [0, 0, 24]
    again = wave(engine, [replace(turn, id=f"p{i}") for i, turn in enumerate(turns)])
    alone = make_engine(recurrent_target(name), snapshot_memory_gb=0)
    expected = [wave(alone, [turn])["q1", 0].tokens for turn in turns]
    assert [again[f"p{i}", 0].tokens for i in range(3)] == expected
    assert set(cached(again).values()) == {24}


@pytest.mark.parametrize("name", sorted({"falcon_h1", "lfm2", *TWO} - ROW_BY_ROW))
def test_a_cut_beside_drafted_spans(name: str) -> None:
    """A prompt that is cut shares a step with drafts that are partly rejected."""
    script(generated(name))
    engine, batch = make_engine(recurrent_target(name), max_num_seqs=3), drafting(requests(), 4)
    wave(engine, batch)
    cuts = 0
    split_point = StateSlots.split_point

    def counted(held: StateSlots, seq: Sequence, end: int) -> tuple[int, int] | None:
        nonlocal cuts
        at = split_point(held, seq, end)
        cuts += at is not None
        return at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateSlots, "split_point", counted)
        results = wave(engine, batch)
    assert cuts > 1 and not wrong(name, results) and accepted_lengths(results) >= set(range(5))


def test_an_unrepeated_prompt_runs_no_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mixers are called as often as without snapshots; when it is repeated it is cut."""
    target, calls = recurrent_target("qwen3_next"), []
    ask = Mixer.ask

    def counted(mixer: Mixer, *arguments: Any) -> Any:
        calls[-1] += 1
        return ask(mixer, *arguments)

    monkeypatch.setattr(Mixer, "ask", counted)
    request = replace(requests()[1], params=SamplingParams(temperature=0, max_tokens=1))
    without, with_ = (make_engine(target, snapshot_memory_gb=memory) for memory in (0.0, None))
    for engine in (without, with_, with_):
        calls.append(0)
        wave(engine, [request])
    assert 0 < calls[0] == calls[1] < calls[2]


@pytest.mark.parametrize("name", TWO)
def test_rounds_of_a_decoder_go_on_from_snapshots(name: str, found: list[tuple[int, int]]) -> None:
    request, truth = requests()[1], generated(name)["q1", 0]
    decoder = SpeculativeDecoder(
        recurrent_model(name), method="ngram", block_size=4, policy="fixed", num_speculative_tokens=4
    )
    text = list(request.prompt)
    while len(text) < len(request.prompt) + 12:
        text += decoder.step(text, request.params, prompt_len=len(request.prompt)).emitted_tokens
    written = text[len(request.prompt) :]
    assert written == truth[: len(written)]
    assert all(tokens >= 28 for _, tokens in found[1:]) and len(found) > 2
    verdict = decoder.verify(request.prompt, [*truth[:3], (truth[3] + 1) % 96], request.params)
    assert (verdict.accepted, verdict.tokens) == (3, tuple(truth[:4]))
    decoder.engine.check_integrity()


# how many there are


def test_snapshots_are_part_of_the_memory_estimate() -> None:
    target = recurrent_target("falcon_h1")
    each = target.state_bytes
    engine = make_engine(target, max_num_seqs=3, snapshot_memory_gb=2.5 * each / 2**30)
    held = sum(state.nbytes for layer in states_of(engine).states for state in layer)
    assert (engine.runtime.estimate.states, engine.runtime.estimate.snapshots) == (6 * each, 2 * each)
    assert held == 8 * each and "snapshots" in str(engine.runtime.estimate)
    other = engine_on(target, None, engine.config)
    assert engine.runtime.estimate.snapshots == other.runtime.estimate.snapshots


@pytest.mark.parametrize(("name", "room"), list(zip(TWO, (1, 2), strict=True)))
def test_so_few_snapshots_that_they_replace_each_other(name: str, room: int) -> None:
    script(generated(name))
    each = recurrent_target(name).state_bytes
    engine = make_engine(recurrent_target(name), snapshot_memory_gb=room * each / 2**30)
    most = 0
    for batch in (mixed(), mixed(), [requests()[1]]):
        for request in batch:
            engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results: dict[Key, Result] = {}
        while engine.has_work:
            for event in engine.step():
                results.setdefault((event.request_id, event.sample), Result()).take(event)
            engine.check_integrity()
            most = max(most, len(engine.runtime.space.slots.pages))
        assert not wrong(name, results)
    assert most == room


@pytest.mark.parametrize("settings", [{"snapshot_memory_gb": 0}, {"prefix_cache": False}])
def test_without_snapshots_there_is_no_prefix_cache(settings: dict[str, float]) -> None:
    engine = make_engine(recurrent_target("lfm2"), **settings)
    assert (engine.runtime.estimate.snapshots, engine.runtime.space.prefix_cache) == (0, False)
    waves = [wave(engine, [requests()[1]]) for _ in range(3)]
    assert not any(cached(results)["q1", 0] for results in waves)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (1e-9, r"snapshot_memory_gb = 1e-09: one snapshot takes \d+ bytes"),
        (1e6, "snapshot_memory_gb = 1000000.0: the snapshots need .* are free"),
    ],
)
def test_given_memory_must_hold_a_snapshot_and_be_free(memory: float, reason: str) -> None:
    config = EngineConfig(snapshot_memory_gb=memory, max_num_seqs=4096, max_context=64, num_blocks=1 << 40)
    with pytest.raises(ConfigError, match=reason):
        engine_on(recurrent_target("mamba"), None, config)


# planted errors


def repeated(name: str) -> list[tuple[Key, int, float]]:
    """What is wrong where prompts come three times over, alone and in a batch with drafts."""
    script(generated(name))
    engine = make_engine(recurrent_target(name))
    errors = [error for _ in range(3) for error in wrong(name, wave(engine, drafting(requests(), 4)))]
    results = wave(engine, [later(name, request, 20) for request in requests()])
    return errors + wrong_later(name, results, 20)


@pytest.mark.parametrize("name", TWO)
def test_a_snapshot_of_the_wrong_boundary_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, pages = StateSlots.keep, dict[tuple[int, int], int]()
    assert not repeated(name)

    def misplaced(states: StateSlots, seq: Sequence, position: int, page: int) -> None:
        keep(states, seq, position, page)
        pages[seq.id, position] = page
        if page in states.pages and (before := pages.get((seq.id, position - SIZE))) is not None:
            states.snapshot_slots[before] = states.snapshot_slots.pop(page)

    monkeypatch.setattr(StateSlots, "keep", misplaced)
    with pytest.raises(AssertionError):
        assert not repeated(name)


@pytest.mark.parametrize("name", TWO)
def test_a_snapshot_of_another_sequence_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not repeated(name)

    def another(states: StateSlots, seq: Sequence, position: int, page: int) -> None:
        held = states.held[seq.id]
        if held.position == position and page not in states.snapshot_slots:
            others = [other.committed for other in states.held.values() if other is not held]
            states.snapshot_slots[page] = states.share(others[0] if others else held.committed)

    monkeypatch.setattr(StateSlots, "keep", another)
    assert repeated(name)


def test_a_snapshot_that_outlives_its_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(recurrent_target("lfm2"), num_blocks=30)
    wave(engine, list(requests()))
    monkeypatch.setattr(StateSlots, "forget", lambda states, page: None)
    with pytest.raises(AssertionError, match="a snapshot without its page"):
        for _ in range(3):
            wave(engine, [later("lfm2", request, 20) for request in requests()])
