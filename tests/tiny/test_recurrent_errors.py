"""Errors inside a step change no state, and planted errors in the states are seen."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from torch import Tensor

from speculon.core.errors import UnsupportedModel
from speculon.engine import engine as engine_module
from speculon.engine.engine import Engine
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model import recurrent
from speculon.runtimes.torch.model.recurrent import Mixer
from tests.tiny.recurrent import TWO, generated, recurrent_model, recurrent_target, requests, wrong
from tests.tiny.requests import drafting
from tests.tiny.scripted import Key, Result, drain, make_engine, script

# errors inside a step


@pytest.mark.parametrize(
    ("place", "name"), list(zip(("forward", "verify", "replay", "replay"), cycle(TWO), strict=False))
)
def test_a_step_that_fails_changes_no_state(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begin(name)
    results: dict[Key, Result] = {}
    failed = 0
    for step in range(300):
        if not engine.has_work:
            break
        with monkeypatch.context() as planted:
            if step % 3 == 1:
                fail_at(planted, place, engine)
            try:
                events = engine.step()
            except MemoryError:
                failed += 1
                continue
        for event in events:
            results.setdefault((event.request_id, event.sample), Result()).take(event)
        engine.check_integrity()
    assert failed > 5 and results.keys() == generated(name).keys() and not wrong(name, results)


def fail_at(monkeypatch: pytest.MonkeyPatch, place: str, engine: Engine) -> None:
    """The forward fails in its last mixer, the replay after its first, `verify` at once."""
    last, inner = engine.runtime.target.mixers[-1], Mixer.run

    def failing(mixer: Mixer, step: StateStep, call: Any) -> Tensor:
        replays = not any(span.drafted for span in step.spans)
        if mixer is last and (place == "forward" or replays):
            raise MemoryError("planted")
        return inner(mixer, step, call)

    def fail(*args: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(recurrent, "KEPT_BYTES", 0)
    if place == "verify":
        monkeypatch.setattr(engine_module, "verify", fail)
    else:
        monkeypatch.setattr(Mixer, "run", failing)


def begin(name: str) -> Engine:
    """An engine with all requests, four drafts each."""
    script(generated(name))
    engine = make_engine(recurrent_target(name))
    for request in drafting(requests(), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return engine


def test_an_abort_gives_the_slots_back() -> None:
    engine = begin("mamba2")
    for _ in range(3):
        engine.step()
    free = len(engine.runtime.space.slots.free)
    engine.abort("q1")
    assert len(engine.runtime.space.slots.free) == free + 2
    engine.check_integrity()
    for request in requests():
        engine.abort(request.id)
    slots = engine.runtime.space.slots
    assert len(slots.free) + len(slots.snapshot_slots) == slots.count, "snapshots hold the others"


# planted errors


def nothing_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states stay as they are after all drafts."""
    monkeypatch.setattr(StateStep, "roll_back", lambda step, kept: False)


def one_row_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """One accepted row is not replayed."""
    keep = StateStep.roll_back

    def short(step: StateStep, kept: list[int]) -> bool:
        return keep(step, [n - (1 < n < s.rows) for s, n in zip(step.spans, kept, strict=True)])

    monkeypatch.setattr(StateStep, "roll_back", short)


def convolution_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored convolution states are those of one position earlier."""
    ask = Mixer.ask

    def shifted(mixer: Mixer, arguments: dict[str, Any], states: list[Tensor]) -> Any:
        keys = list(mixer.states)
        states = [s.roll(1, -1) if key[0] == "conv" else s for key, s in zip(keys, states, strict=False)]
        return ask(mixer, arguments, states)

    monkeypatch.setattr(Mixer, "ask", shifted)


def states_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several sequences have a state, each is given that of its neighbour."""
    ask = Mixer.ask

    def rolled(mixer: Mixer, arguments: dict[str, Any], states: list[Tensor]) -> Any:
        return ask(mixer, arguments, [state.roll(1, 0) for state in states])

    monkeypatch.setattr(Mixer, "ask", rolled)


PLANTS = [nothing_restored, one_row_less, convolution_off_by_one, states_exchanged]


CHOSEN = list(zip(PLANTS, cycle(TWO), strict=False))


@pytest.mark.parametrize(("plant", "name"), CHOSEN)
def test_a_planted_error_changes_texts(name: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begin(name)
    plant(monkeypatch)
    assert wrong(name, drain(engine))


@pytest.mark.parametrize(("plant", "name"), CHOSEN)
def test_a_planted_error_is_seen_at_load(name: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(UnsupportedModel, match="differ"):
        wrap_model(recurrent_model(name))


def test_a_way_to_continue_that_is_not_exact_is_seen_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "exact_in_one_call", lambda mixer: True)
    monkeypatch.setattr(recurrent, "faster_by_row", lambda mixer, sequences: 1)
    with pytest.raises(UnsupportedModel, match="differ from the stock model"):
        wrap_model(recurrent_model("jamba"))
