"""Loading in a process of speculon's own is not interrupted by searches for unreachable objects."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from speculon.cli.screen import load_llm
from speculon.core.errors import ModelNotFound
from speculon.core.garbage import kept_for_good
from speculon.engine import worker


@pytest.fixture(autouse=True, scope="module")
def not_for_good() -> Iterator[None]:
    """What `tests/conftest.py` has frozen stays so; garbage of earlier tests does not."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def searched() -> list[bool]:
    """Whether Python searched for unreachable objects while a model was loaded."""
    return []


def test_what_is_made_within_is_never_searched() -> None:
    before: list[Any] = [[]]
    with pytest.raises(ModelNotFound), kept_for_good():
        assert not gc.isenabled()
        made: list[Any] = [[]]
        raise ModelNotFound("planted")
    after: list[Any] = [[]]
    assert gc.isenabled()
    found = {id(one) for one in gc.get_objects()}
    assert id(after) in found and not found & {id(before), id(made)}


def test_a_block_within_another_does_not_end_it() -> None:
    with kept_for_good():
        with kept_for_good():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_command_loads_within_it(searched: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(LLM=lambda **_: searched.append(gc.isenabled()))
    monkeypatch.setitem(sys.modules, "speculon.engine.llm", loaded)
    load_llm({}, as_json=True)
    assert searched == [False] and gc.isenabled()


def test_the_engines_process_loads_within_it(searched: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> Any:
        searched.append(gc.isenabled())
        raise ModelNotFound("planted")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours, theirs = Pipe()
    worker.main(theirs, {"model": "any"}, build)
    assert searched == [False] and gc.isenabled() and "planted" in str(ours.recv().error)
