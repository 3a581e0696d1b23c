"""One `LLM` for several threads and tasks: every text is that of a call alone, and nothing is left open."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.errors import EngineError, InvalidParameter
from speculon.engine.stepper import Stepper
from tests.recording import read
from tests.tiny.checkpoint import write_checkpoint

THREADS, CALLS = 8, 10
PROMPTS = ("def add(first, second):\n    return first", "abcabcabcabc", "class Stack:", "for i in range(3):")
METHODS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "off"},
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "suffix", "policy": "fixed"},
    {"prediction": "return first + second\n"},
)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("threads") / "model")
    return LLM(str(folder), max_num_seqs=16, num_blocks=96, speculation={"policy": "fixed"})


class Planted(Exception):
    """Raised by a caller in the middle of its own call."""


def fail(*_: object) -> None:
    raise Planted


def solo(llm: LLM, prompt: str, params: SamplingParams) -> tuple[str, ...]:
    """The texts of a plain call while nothing else runs."""
    return solo_texts(llm, prompt, params.model_dump_json())


@cache
def solo_texts(llm: LLM, prompt: str, params: str) -> tuple[str, ...]:
    plain = SamplingParams.model_validate_json(params)
    (output,) = llm.generate(prompt, plain, speculation={"method": "off"})
    return tuple(one.text for one in output.outputs)


def mixed(rng: random.Random) -> tuple[str, SamplingParams]:
    prompt, tokens = rng.choice(PROMPTS), rng.choice((1, 3, 9, 14))
    more: dict[str, Any] = rng.choice(
        (
            {"temperature": 0},
            {"seed": 5},
            {"seed": 6, "n": 2},
            {"temperature": 0, "stop": "e"},
            {"top_k": 9, "seed": 1},
        )
    )
    return prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def one_call(llm: LLM, rng: random.Random) -> None:
    """A whole call, a stream, a stream that is dropped, one that fails in its caller, or a refused one."""
    prompt, params = mixed(rng)
    speculation, way = rng.choice(METHODS), rng.randrange(6)
    expected = solo(llm, prompt, params)
    if way == 0 and params.n == 1:
        assert "".join(llm.stream(prompt, params, speculation=speculation)) == expected[0]
    elif way == 1:
        stream = llm.stream(prompt, LONG, speculation=speculation)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    elif way == 2:
        with pytest.raises(Planted):
            llm.generate([prompt, "x"], LONG, speculation=speculation, on_token=fail)
    elif way == 3:
        with pytest.raises(InvalidParameter):
            llm.generate([prompt, [10**6]], params)
    else:
        outputs = llm.generate([prompt, prompt], params, speculation=speculation)
        assert [tuple(one.text for one in out.outputs) for out in outputs] == [expected] * 2


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Raises the first fault of `count` threads."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, i) for i in range(count)]:
            done.result()


def assert_whole(llm: LLM) -> None:
    assert not llm.engine.has_work and not llm.engine.open_requests
    llm.engine.check_integrity()


def many_threads(llm: LLM, seed: int, threads: int = THREADS, calls: int = CALLS) -> None:
    for i in range(400):  # now, while nothing else runs
        solo(llm, *mixed(random.Random(i)))

    def work(thread: int) -> None:
        rng = random.Random(f"{seed} {thread}")
        for _ in range(calls):
            one_call(llm, rng)

    in_threads(work, threads)
    assert_whole(llm)


def test_mixed_calls_of_many_threads_write_what_they_write_alone(llm: LLM) -> None:
    many_threads(llm, seed=0)


@contextmanager
def without_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every thread uses the engine when it likes."""

    @contextmanager
    def turn(stepper: Stepper) -> Iterator[Any]:
        yield stepper._engine

    class Open(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            return True

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "turn", turn)
        patch.setattr(
            Stepper, "_owner", property(lambda stepper: None, lambda stepper, value: None), raising=False
        )
        yield


def test_a_missing_lock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without turns texts differ or the engine breaks."""
    llm = LLM(str(write_checkpoint(tmp_path / "model")), speculation={"policy": "fixed"})
    with without_turns(monkeypatch), pytest.raises(BaseException):  # noqa: B017
        for seed in range(20):
            many_threads(llm, seed, threads=4, calls=10)


def test_four_threads_are_a_batch_of_four(llm: LLM) -> None:
    before = llm.engine.counters.steps
    llm.generate("class", LONG, speculation={"method": "off"})
    alone = llm.engine.counters.steps - before
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        llm.generate(PROMPTS[i], LONG, speculation={"method": "off"})

    before = llm.engine.counters.steps
    in_threads(work, 4)
    assert llm.engine.counters.steps - before < 3 * alone


def test_an_interrupt_of_the_main_thread_harms_no_other(llm: LLM) -> None:
    expected = solo(llm, PROMPTS[0], LONG)
    texts: list[tuple[str, ...]] = []
    main = threading.main_thread().ident
    assert main is not None

    def others() -> None:
        for _ in range(4):
            (output,) = llm.generate(PROMPTS[0], LONG)
            texts.append((output.text,))
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=others)
    interrupts = 0
    thread.start()
    while thread.is_alive() or interrupts < 4:
        try:
            for _ in llm.stream("abc", LONG):
                pass
        except KeyboardInterrupt:
            interrupts += 1
    thread.join()
    assert texts == [expected] * 4
    assert_whole(llm)


def test_a_stream_that_is_collected_inside_a_step_is_ended_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in any thread, also in the one that steps."""

    class Cycle:
        def __init__(self) -> None:
            self.me, self.stream = self, llm.stream(PROMPTS[1], LONG)
            next(self.stream)

    plan, steps = llm.engine.scheduler.plan, 0

    def collecting() -> Any:
        nonlocal steps
        steps += 1
        if steps == 1:  # a collection takes long where many modules are loaded
            gc.collect()
        return plan()

    Cycle()
    assert llm.engine.has_work
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "plan", collecting)
        assert llm.generate(PROMPTS[0], LONG)[0].text == solo(llm, PROMPTS[0], LONG)[0]
    assert_whole(llm)


@pytest.mark.timeout(120)
def test_no_thread_waits_for_ever_while_it_is_closed(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model"))
    for _ in range(3):
        closing = LLM(folder, speculation={"policy": "fixed"})

        def work(i: int, closing: LLM = closing) -> None:
            try:
                for _ in range(20):
                    closing.generate("abc", SamplingParams(max_tokens=5, ignore_eos=True))
                    if i == 0:
                        closing.close()
            except EngineError as error:
                assert "closed" in str(error)

        in_threads(work, 6)
        assert_whole(closing)


# event loops


def test_tasks_are_one_batch_and_write_what_they_write_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    async def work() -> list[str]:
        whole = [llm.agenerate(prompt, params) for prompt in PROMPTS]

        async def streamed(prompt: str) -> str:
            return "".join([text async for text in llm.astream(prompt, params)])

        outputs = await asyncio.gather(*whole)
        texts = await asyncio.gather(*map(streamed, PROMPTS))
        assert texts == [out[0].text for out in outputs]
        return texts

    expected = [solo(llm, prompt, params)[0] for prompt in PROMPTS]
    before = llm.engine.counters.steps
    assert asyncio.run(work()) == expected
    assert llm.engine.counters.steps - before < 4 * 30
    assert_whole(llm)


def test_cancelled_tasks_and_closed_streams_leave_the_others_whole(llm: LLM) -> None:
    async def work() -> str:
        whole = asyncio.create_task(llm.agenerate(PROMPTS[0], LONG))
        dropped = [asyncio.create_task(llm.agenerate(prompt, LONG)) for prompt in PROMPTS]
        stream = llm.astream(PROMPTS[1], LONG)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        for task in dropped:
            task.cancel()
            await asyncio.sleep(0.001)
        gone = await asyncio.gather(*dropped, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in gone)
        with pytest.raises(InvalidParameter):
            await llm.agenerate([PROMPTS[0], [10**6]], LONG)
        with pytest.raises(InvalidParameter, match="n = 2"):
            await anext(llm.astream("x", SamplingParams(n=2)))
        return (await whole)[0].text

    assert (asyncio.run(work()),) == solo(llm, PROMPTS[0], LONG)
    assert_whole(llm)


def test_a_step_that_fails_is_an_error_of_the_task(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", broken)
        with pytest.raises(MemoryError, match="planted"):
            asyncio.run(llm.agenerate("abc", LONG))
    assert_whole(llm)
    assert asyncio.run(llm.agenerate(PROMPTS[0], LONG))[0].text == solo(llm, PROMPTS[0], LONG)[0]


# what an LLM is not


def test_it_is_closed_at_the_end_of_a_block(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with LLM(str(write_checkpoint(tmp_path / "model")), warmup=False, events=events) as llm:
        stream = llm.stream("abc", LONG)
        next(stream)
        llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(read(events).rounds) >= 4
    assert_whole(llm)
    assert len(llm.tokenizer.encode("".join(stream))) < 120, "it has ended with the block"
    with pytest.raises(EngineError, match="closed"):
        llm.generate("abc")
    in_threads(lambda _: llm.close(), 3)


def test_a_call_that_waits_while_it_is_closed_is_refused_or_aborted(tmp_path: Path) -> None:
    llm, free = LLM(str(write_checkpoint(tmp_path / "model")), warmup=False), threading.Event()
    shared = llm._stepper

    def holder(_: int) -> None:
        with shared.turn():
            free.wait(30)

    with ThreadPoolExecutor(3) as pool:
        holding = pool.submit(holder, 0)
        while shared._owner is None:
            pass
        closing = pool.submit(llm.close)
        while not shared._calling:
            pass
        late = pool.submit(llm.generate, "abc", LONG)
        while shared._calling < 2:
            pass
        free.set()
        for done in (holding, closing):
            done.result(30)
        refused = isinstance(late.exception(30), EngineError)
        assert refused or late.result()[0].finish_reason == "abort"
    assert_whole(llm)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(llm: LLM, take: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        take(llm)


def refused_in_child(llm: LLM, reply: Any) -> None:
    try:
        llm.generate("abc")
    except EngineError as error:
        reply.put(str(error))


def test_a_forked_process_is_told_to_make_its_own(llm: LLM) -> None:
    context = multiprocessing.get_context("fork")
    reply = context.SimpleQueue()
    child = context.Process(target=refused_in_child, args=(llm, reply))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and "make an engine in each process" in reply.get()


def test_a_stream_that_is_left_when_its_loop_ends_is_closed(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    streams = []

    async def leave() -> None:
        streams.append(llm.astream(PROMPTS[1], LONG))
        await anext(streams[-1])

    for _ in range(5):
        asyncio.run(leave())
    assert not caplog.records and not llm.engine.has_work


def test_a_task_reads_the_events_before_a_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step, failed = 0, llm.engine.step, threading.Event()

    def failing() -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            failed.set()
            raise Planted
        return step()

    async def read_slowly() -> list[str]:
        pieces = []
        with pytest.raises(Planted):
            async for piece in llm.astream(PROMPTS[0], LONG, speculation={"method": "off"}):
                pieces.append(piece)
                failed.wait(30)
        return pieces

    monkeypatch.setattr(llm.engine, "step", failing)
    assert len(asyncio.run(read_slowly())) > 1
    monkeypatch.undo()
    llm.engine.check_integrity()


def test_an_interrupt_in_an_abort_leaves_no_queue(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, abort, checks = llm.engine.step, llm.engine.abort, list[int]()

    def interrupted(call: Callable[..., Any], *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    monkeypatch.setattr(llm.engine, "step", lambda: interrupted(step))
    monkeypatch.setattr(llm.engine, "abort", lambda request_id: interrupted(abort, request_id))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], LONG)
    monkeypatch.undo()
    monkeypatch.setattr(llm.engine, "check_integrity", lambda: checks.append(1))
    llm.generate("x", SamplingParams(max_tokens=2))
    assert checks  # it is made only while no queue is left
