"""The asynchronous engine and its worker: concurrency, faults, and what may pass between processes."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest

from speculon.core import errors
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import EmptyPrompt, EngineError, InvalidParameter, InvalidRequest, SpeculonError
from speculon.core.types import row
from speculon.engine import async_engine, worker
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.messages import Abort, Add, Admitted, EngineStatistics, Outputs, Refused, Shutdown
from speculon.engine.waiting import OutputQueue
from tests.server.inside import ThreadEngine, process_of
from tests.server.scripted import ScriptedEngine

pytestmark = pytest.mark.timeout(120)


def ask(name: str, text: str = "x", **params: Any) -> Add:
    return Add(name, list(text.encode()), SamplingParams(**{"max_tokens": 6, **params}))


@asynccontextmanager
async def begun(**script: Any) -> AsyncIterator[ThreadEngine]:
    settings = script.pop("settings", {"model": "scripted"})
    engine = ThreadEngine(settings, **script)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def all_of(queue: OutputQueue) -> str:
    tokens: list[int] = []
    while events := await queue.take():
        tokens += [token for event in events for token in event.tokens]
    queue.close()
    return bytes(tokens).decode()


def running(test: Callable[[], Any]) -> Callable[[], None]:
    """An asynchronous test; whatever asyncio complains of fails it."""

    def run() -> None:
        complaints: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
            await test()

        asyncio.run(watched())
        assert not complaints

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# requests


@running
async def test_texts_come_and_end() -> None:
    async with begun() as engine:
        queues = [await engine.submit([ask(f"r-{i}", f"say:answer {i}")]) for i in range(20)]
        assert engine.open_requests == 20
        assert [await all_of(queue) for queue in queues] == ["answer"] * 20
        assert engine.open_requests == engine.open_sequences == 0
        assert engine.facts and engine.facts.method == "ngram"


@running
async def test_all_prompts_of_a_request_are_taken_or_none() -> None:
    async with begun(step_seconds=0.01) as engine:
        with pytest.raises(EmptyPrompt, match="no tokens"):
            await engine.submit([ask("a-0", max_tokens=500), ask("a-1", "", max_tokens=500)])
        assert engine.open_requests == 0
        while engine.inner.has_work:
            await asyncio.sleep(0.01)
        assert engine.inner.aborted == ["a-0"] and engine.inner.counters.finished == {"abort": 1}


@running
async def test_a_name_is_used_once_at_a_time() -> None:
    async with begun(step_seconds=0.01) as engine:
        queue = await engine.submit([ask("r")])
        with pytest.raises(InvalidParameter, match="in use"):
            await engine.submit([ask("r")])
        assert await all_of(queue) == "abcdef"
        assert await all_of(await engine.submit([ask("r")])) == "abcdef"


@running
async def test_a_request_that_is_given_up_while_it_is_submitted_leaves_nothing() -> None:
    async with begun(step_seconds=0.005) as engine:
        for pause in (0, 0.0005, 0.002, 0.01):
            task = asyncio.ensure_future(engine.submit([ask(f"r-{i}", max_tokens=900) for i in range(4)]))
            await asyncio.sleep(pause)
            task.cancel()
            for result in await asyncio.gather(task, return_exceptions=True):
                if isinstance(result, OutputQueue):
                    result.close()
        while engine.inner.has_work:
            await asyncio.sleep(0.01)
        assert engine.open_requests == 0


@running
async def test_closing_a_queue_ends_its_sequences() -> None:
    async with begun(step_seconds=0.01) as engine:
        queue = await engine.submit([ask("r", max_tokens=2000, n=3)])
        await queue.take()
        queue.close()
        queue.close()
        while engine.inner.has_work:
            await asyncio.sleep(0.01)
        assert engine.inner.aborted == ["r"] * 3


# ends


@running
async def test_stopping_ends_what_waits_and_can_be_done_twice() -> None:
    async with begun(step_seconds=0.01) as engine:
        queue = await engine.submit([ask("r", max_tokens=2000)])
        reading = asyncio.ensure_future(all_of(queue))
        await asyncio.sleep(0.05)
        await asyncio.gather(engine.stop(), engine.stop())
        with pytest.raises(EngineError, match="has been stopped"):
            await reading
        with pytest.raises(EngineError, match="has been stopped"):
            await engine.submit([ask("s")])
        queue.close()


@running
async def test_an_engine_that_never_started_can_be_stopped() -> None:
    await ThreadEngine({"model": "scripted"}).stop()


@running
async def test_submitting_while_it_stops_is_refused_by_name() -> None:
    async with begun(step_seconds=0.01) as engine:
        tasks = [asyncio.ensure_future(engine.submit([ask(f"r-{i}", max_tokens=2000)])) for i in range(50)]
        await engine.stop()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError | OutputQueue), result


@running
async def test_stopping_while_it_loads_waits_for_nothing() -> None:
    """A real process, which never gets ready."""
    engine = AsyncEngine({"model": "demo"})
    before, async_engine.run_worker = async_engine.run_worker, sleep_on  # type: ignore[assignment]
    try:
        starting = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0.3)
        process = process_of(engine)
        starting.cancel()
        began = asyncio.get_running_loop().time()
        await engine.stop()
        assert asyncio.get_running_loop().time() - began < 5 and not process.is_alive()
        await asyncio.gather(starting, return_exceptions=True)
    finally:
        async_engine.run_worker = before  # type: ignore[assignment]


def sleep_on(pipe: Any, settings: dict[str, Any]) -> None:
    import time

    time.sleep(60)


class Riddle:
    """Can be sent and not be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@running
async def test_a_message_that_cannot_be_read_ends_the_engine() -> None:
    async with begun() as engine:
        queue = await engine.submit([ask("r", max_tokens=2000)])
        process_of(engine)._pipe.send(Riddle())
        with pytest.raises(EngineError, match="could not be read"):
            await all_of(queue)
        queue.close()


# faults of a step


@running
async def test_a_step_that_fails_once_harms_no_request() -> None:
    async with begun(faults=[None, MemoryError("planted"), None, ValueError("planted")]) as engine:
        assert await all_of(await engine.submit([ask("r", max_tokens=26)])) == "abcdefghijklmnopqrstuvwxyz"


@running
async def test_a_step_that_fails_again_ends_the_running_requests_alone() -> None:
    settings = {"model": "scripted", "max_num_seqs": 1}
    async with begun(
        faults=[None, MemoryError("planted"), MemoryError("planted")], settings=settings
    ) as engine:
        first, second = (
            await engine.submit([ask("a", max_tokens=99)]),
            await engine.submit([ask("b", max_tokens=26)]),
        )
        with pytest.raises(EngineError, match="the step failed: MemoryError$"):
            await all_of(first)
        first.close()
        assert await all_of(second) == "abcdefghijklmnopqrstuvwxyz"
        assert engine.alive


@running
async def test_a_step_that_always_fails_ends_every_request() -> None:
    """Waiting requests, too: none ever gets to run."""
    async with begun(faults=[RuntimeError("planted")] * 1000) as engine:
        for i in range(3):
            with pytest.raises(EngineError, match="the step failed: RuntimeError"):
                queue = await engine.submit([ask(f"r-{i}"), ask(f"s-{i}")])
                try:
                    await all_of(queue)
                finally:
                    queue.close()
        assert engine.alive and engine.open_requests == 0


@running
async def test_the_server_learns_what_an_engine_can_do_by_now() -> None:
    """Programs may take the place of the loop while it runs."""
    async with begun() as engine:
        assert engine.facts is not None
        now = {"compiled": row("on", "compiled")}
        engine.inner.capabilities = lambda: now
        await all_of(await engine.submit([ask("r", max_tokens=3)]))
        while engine.facts.capabilities != now:
            await asyncio.sleep(0.01)


class WorkerAlone:
    """A worker over a pipe, in this thread: all messages are sent before it runs."""

    def __init__(self, **script: Any):
        self.engine = ScriptedEngine(EngineConfig(model="scripted"), **script)
        self.ours, self.theirs = Pipe()

    def run(self, *messages: Any) -> list[Any]:
        for message in (*messages, Shutdown()):
            self.ours.send(message)
        worker.Worker(self.engine, self.theirs).run()  # type: ignore[arg-type]
        replies = []
        while self.ours.poll():
            replies.append(self.ours.recv())
        return replies


def test_what_a_worker_sends() -> None:
    alone = WorkerAlone()
    first, *replies = alone.run(
        ask("r"), ask("empty", ""), Abort("nobody"), ask("wrong", "x", max_tokens=10**6)
    )
    assert first == replace(alone.engine.facts(), capabilities=alone.engine.capabilities())
    assert isinstance(replies[0], EngineStatistics)
    assert [m.request_id for m in replies if isinstance(m, Admitted)] == ["r"]
    assert {m.request_id: type(m.error).__name__ for m in replies if isinstance(m, Refused)} == {
        "empty": "EmptyPrompt",
        "wrong": "TooLong",
    }


def test_a_worker_whose_server_is_gone_ends() -> None:
    alone = WorkerAlone()
    alone.ours.send(ask("r"))
    alone.ours.close()
    with pytest.raises((EOFError, OSError)):  # `main` knows them
        worker.Worker(alone.engine, alone.theirs).run()  # type: ignore[arg-type]


def test_a_fault_at_admission_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise KeyError("planted")

    alone = WorkerAlone()
    monkeypatch.setattr(alone.engine, "add_request", fail)
    (refused,) = [message for message in alone.run(ask("r")) if isinstance(message, Refused)]
    assert isinstance(refused.error, EngineError) and "KeyError" in str(refused.error)


def test_a_lost_event_is_seen() -> None:
    """The twin: an engine that loses a last event leaves its request open, and the tests above would hang."""

    class Mute(ScriptedEngine):
        def step(self) -> list[Any]:
            return [event for event in super().step() if event.finish is None]

    async def lose() -> None:
        async with begun() as engine:
            engine.inner.__class__ = Mute
            await asyncio.wait_for(all_of(await engine.submit([ask("r")])), 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(lose())


# what passes between processes

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, SpeculonError)]
MADE: dict[str, Callable[[type], SpeculonError]] = {
    "InvalidParameter": lambda cls: cls("stop", ["x" * 500], "too long"),
    "MemoryExceeded": lambda cls: cls("draft_model", {"estimate": 3}),
}


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_passes_between_processes(cls: type[SpeculonError]) -> None:
    error = MADE.get(cls.__name__, lambda cls: cls("a message"))(cls)
    error.__cause__ = ValueError("why")
    again = pickle.loads(pickle.dumps(Refused("r", error))).error
    assert type(again) is cls and str(again) == str(error) and again.__dict__ == error.__dict__
    assert isinstance(again, InvalidRequest) == isinstance(error, InvalidRequest)


def test_requests_and_outputs_pass_unchanged() -> None:
    add = ask("r", "\x00é🙂", stop=("a", "🙂"), seed=2**63 - 1, logit_bias={5: -1.5}, logprobs=3)
    assert pickle.loads(pickle.dumps(add)) == add
    engine = ScriptedEngine(EngineConfig(model="scripted"))
    engine.add_request(add.prompt, add.params, None, "r")
    outputs = Outputs(engine.step())
    assert pickle.loads(pickle.dumps(outputs)) == outputs and outputs.events
