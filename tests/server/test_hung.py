"""An engine that hangs or dies: what the server sees, what it tells, and how it starts another."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2 as httpx
import pytest

from speculon.engine.async_engine import EngineProcess
from tests.server.inside import served, wait_until
from tests.server.outside import LOCAL_HTTP, Outside, started
from tests.server.scripted import HANG, LETTERS
from tests.server.test_life import Reader, check_clean, gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

HANGING = HANG.decode()
SOON = ("--engine-timeout", "1")
AGAIN = (*SOON, "--restart-engine")


def get(url: str, method: str = "GET") -> httpx.Response:
    return httpx.request(method, url, timeout=5, **LOCAL_HTTP)


def status(url: str) -> int:
    return get(url).status_code


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json={"prompt": "x"} | body, timeout=20, **LOCAL_HTTP)


def text_of(reader: Reader) -> str:
    return "".join(choice["text"] for line in reader.lines for choice in line.get("choices", ()))


def readers_of(server: Outside, url: str, count: int, **body: Any) -> list[Reader]:
    """Streams that have begun."""
    readers = [Reader(url, **body) for _ in range(count)]
    server.wait_for(lambda: all(reader.begun() for reader in readers))
    return readers


def lines_of(server: Outside, start: str) -> list[str]:
    return [line for line in server.stderr.splitlines() if line.startswith(start)]


def check_served_again(server: Outside, url: str, old: int, restarts: int) -> None:
    """Another process serves, and the old one has ended."""
    server.wait_for(lambda: status(url + "/ready") == 200)
    assert complete(url, max_tokens=26).json()["choices"][0]["text"] == LETTERS.decode()
    (new,) = server.children()
    assert gone(old) and new != old
    assert f'speculon_engine_restarts_total{{model="demo"}} {restarts}.0' in get(url + "/metrics").text
    assert len(lines_of(server, "the engine serves again")) == restarts


def test_an_engine_that_is_silent_is_a_fault_if_it_has_work_and_the_server_does_not_stand_still(
    tmp_path: Path,
) -> None:
    """Neither a long load, nor an engine without work, nor a stop of both processes is one; the server is
    alive meanwhile.
    """
    flags = (*SOON, "--drain-timeout", "0")
    with started(tmp_path, *flags, SCRIPTED_LOAD="1.2", SCRIPTED_STEP="0.02") as server:
        url = server.url()
        server.wait_for(lambda: status(url + "/live") == 200)
        check_unhealthy(url, "the model is being loaded")
        server.ready()
        for path in ("/live", "/health", "/ready"):
            head = get(url + path, "HEAD")
            assert (status(url + path), head.status_code, head.content) == (200, 200, b"")
        (engine,) = server.children()
        both = (engine, server.process.pid)
        time.sleep(1.2)  # without work
        (reader,) = readers_of(server, url, 1, max_tokens=100)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in both:
                os.kill(pid, number)
            time.sleep(1.2 if number == signal.SIGSTOP else 0)
        assert status(url + "/health") == 200 and "has not answered" not in server.stderr
        reader.join(60)
        readers = readers_of(server, url, 24, max_tokens=400)
        os.kill(engine, signal.SIGSTOP)
        server.wait_for(lambda: status(url + "/health") == 503, 5)
        check_unhealthy(url, "the engine has not answered for")
        assert complete(url).status_code == 503
        assert status(url + "/live") == 200
        os.kill(engine, signal.SIGCONT)
        server.wait_for(lambda: status(url + "/health") == status(url + "/ready") == 200, 5)
        for reader in readers:
            reader.join(60)
            assert (text_of(reader), reader.finish) == ((LETTERS * 16).decode()[:400], "length")
        assert server.children() == [engine]
        (line,) = lines_of(server, "the engine has not answered for")
        assert "24 requests" in line and len(lines_of(server, "the engine answers again")) == 1
        readers_of(server, url, 2, max_tokens=4000)
        os.kill(engine, signal.SIGSTOP)
        server.wait_for(lambda: status(url + "/health") == 503, 5)
        began = time.monotonic()
        check_clean(server)
        assert time.monotonic() - began < 20 and gone(engine)


def check_unhealthy(url: str, why: str) -> None:
    for path in ("/health", "/ready"):
        assert get(url + path).json()["error"]["message"].startswith(why)
        assert (get(url + path, "HEAD").status_code, get(url + path, "HEAD").content) == (503, b"")


def test_another_process_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """It goes on with the streams whose rest is determined; the other requests are lost."""
    with started(tmp_path, *AGAIN, SCRIPTED_LOAD="2") as server:
        url = server.ready()
        waiting = [Reader(url, max_tokens=4000, stream=False) for _ in range(6)]
        server.wait_for(lambda: 'speculon_requests_open{model="demo"} 6' in get(url + "/metrics").text)
        streams = readers_of(server, url, 6, max_tokens=4000)
        greedy = readers_of(server, url, 6, max_tokens=800, temperature=0)
        seeded = readers_of(server, url, 6, max_tokens=800, seed=1, n=2)
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        for reader in (*streams, *waiting):
            reader.join(60)
            error = reader.lines[-1]["error"]
            assert error["code"] == "not_ready" and "this request is lost" in error["message"]
        assert all(reader.done for reader in streams)
        loading = get(url + "/health")
        assert loading.status_code == 503 and "is being loaded again" in loading.json()["error"]["message"]
        assert complete(url).status_code == 503 and status(url + "/live") == 200
        check_served_again(server, url, engine, 1)
        for reader in (*greedy, *seeded):
            reader.join(60)
            texts: dict[int, str] = defaultdict(str)
            for line in reader.lines:
                for choice in line["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert set(texts.values()) == {(LETTERS * 31).decode()[:800]} and reader.done
        assert len(texts) == 2
        assert 'speculon_requests_resumed_total{model="demo"} 12.0' in get(url + "/metrics").text
        (line,) = [
            line for line in server.stderr.splitlines() if line.endswith("started again (restart 1 of demo)")
        ]
        assert line.startswith("the engine's process")
        check_clean(server)


def test_a_step_without_an_end_costs_the_open_requests_alone_and_a_quick_restart_waits(
    tmp_path: Path,
) -> None:
    with started(tmp_path, *AGAIN) as server:
        url = server.ready()
        (engine,) = server.children()
        lost = complete(url, prompt=HANGING)  # resumed once: nothing of it was written
        assert lost.status_code == 503 and lost.headers["retry-after"]
        check_served_again(server, url, engine, 2)
        (tmp_path / "broken").touch()  # then the model does not load again
        began = time.monotonic()
        os.kill(server.children()[0], signal.SIGKILL)
        assert server.process.wait(20) == 2
        assert time.monotonic() - began > 3.0, "the third restart within seconds"
        assert server.stderr.splitlines()[-1] == "NotReady: demo could not be loaded again: planted"
        assert "stopped" not in server.stderr


def look_for_a_hung_engine(seconds: float) -> None:
    """A step that does not end, in the test's process."""
    with served(engine_timeout=1) as inside:
        asking = Thread(target=lambda: inside.post("completions", prompt=HANGING, max_tokens=3))
        asking.start()
        try:
            wait_until(lambda: inside.client.get("/health").status_code == 503, seconds)
        finally:
            inside.engine.running[0].prompt = [0]  # the step ends
            asking.join()


def test_silence_is_counted() -> None:
    look_for_a_hung_engine(5)


def test_a_heartbeat_that_nobody_looks_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(EngineProcess, "count_silence", lambda process, seconds: None)
    with pytest.raises(AssertionError, match="stayed false"):
        look_for_a_hung_engine(2)


def test_a_full_pipe_blocks_neither_the_loop_nor_the_end() -> None:
    ours, theirs = Pipe()

    class Deaf:
        """A process that reads nothing."""

        alive, exitcode = True, None

        def is_alive(self) -> bool:
            return self.alive

        def join(self, timeout: float | None = None) -> None:
            assert not self.alive, "nothing waits for it"

        def kill(self) -> None:
            self.alive = False
            theirs.close()

    async def fill() -> None:
        process = EngineProcess(Deaf(), ours, lambda message: None, lambda fault: None)
        sends: Any = [asyncio.ensure_future(process.send(["x" * 10**6])) for _ in range(4)]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert not any(send.done() for send in sends)
        process.count_silence(3.0)
        assert process.silent == 3.0
        await asyncio.wait_for(process.end(by_itself=False), 2)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert all(isinstance(result, OSError | RuntimeError) for result in results)

    asyncio.run(asyncio.wait_for(fill(), 10))
