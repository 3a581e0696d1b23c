"""For every test: a clean environment, and Hypothesis without deadlines (a busy machine is no bug)."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from speculon.core.config.file import CACHE, MODELS
from speculon.runtimes.torch.drafters import table as drafters
from speculon.speculation.proposers import registry

settings.register_profile("speculon", deadline=None, database=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("speculon")
# Of subprocesses, too. No test is to pass because an earlier run did.
os.environ |= {MODELS: str(Path(__file__).with_name("models")), CACHE: ""}

# A shell starts a background job with interrupts ignored, and children inherit it; tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: no collection of garbage looks at them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECULON_")]:
        if name not in (MODELS, CACHE):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_cache_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has downloaded is no test's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path(__file__).with_name("nowhere")))


@pytest.fixture(autouse=True)
def registered_methods() -> Iterator[None]:
    """A method that a test registers is not the next test's."""
    tables = registry.registered, drafters.registered
    before = [dict(table) for table in tables]
    yield
    for table, its in zip(tables, before, strict=True):
        table.clear()
        table.update(its)


@pytest.fixture(autouse=True, scope="session")
def short_warm_up() -> Iterator[None]:
    """Engines of this process measure their costs for a tenth of a second instead of two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speculon.engine.warm_up.SECONDS", 0.1)
        yield
