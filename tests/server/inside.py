"""The server in the test's process, over a scripted engine in a thread: real sockets and pipes, no model."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import httpx2 as httpx

from speculon.cli.connections import HttpServer
from speculon.cli.serve import listen
from speculon.core.config import EngineConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.messages import Refused, Stage
from speculon.engine.worker import Worker
from speculon.operations.admin.routes import add_admin
from speculon.server.app import create_app
from speculon.server.app_state import AppState
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.loader import GB, ModelLoader, Share
from speculon.server.pool.pool import ModelPool
from tests.server.outside import LOCAL_HTTP
from tests.server.scripted import Bytes, ScriptedEngine

PATIENCE = 10.0  # seconds


class ThreadProcess:
    """A thread with the methods of a process that `AsyncEngine` calls."""

    exitcode = 0

    def __init__(self, work: Callable[[], None], pipe: Connection):
        self._thread, self._pipe = threading.Thread(target=work, daemon=True), pipe
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """Cuts the pipe, for both ends; where the thread has closed it already, it is about to end."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)


class ThreadEngine(AsyncEngine):
    """`AsyncEngine` over a scripted engine, or over another one, in a thread."""

    def __init__(self, settings: dict[str, Any], on_stage: Any = None, over: Any = None, **script: Any):
        super().__init__(settings, on_stage)
        self._new = (lambda: over) if over else partial(ScriptedEngine, EngineConfig(**settings), **script)
        self.inner = self._new()
        self.gate: threading.Event | None = None
        self.load_faults: list[Exception] = []

    def _launch(self) -> tuple[Any, Connection]:
        ours, theirs = Pipe()
        if self.restarts:
            self.inner = self._new()

        def work() -> None:
            try:
                theirs.send(Stage("reading the script"))
                if self.gate is not None:
                    self.gate.wait(PATIENCE)
                if self.load_faults:
                    return theirs.send(Refused("", self.load_faults.pop(0)))
                Worker(self.inner, theirs).run()
            except (EOFError, OSError):
                pass
            finally:
                theirs.close()

        return ThreadProcess(work, theirs), ours


def process_of(engine: AsyncEngine) -> Any:
    """What runs the engine: a process, or here a thread."""
    assert engine._process is not None
    return engine._process._process


def cut(engine: AsyncEngine) -> None:
    """Cuts the pipe of the engine's process."""
    process_of(engine).kill()


@dataclass
class Inside:
    url: str
    state: AppState
    engine: ScriptedEngine  # of the default model
    client: httpx.Client

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{route}", json=body)

    def metric(self, name: str) -> float:
        """Sum over all labels; `name` may end in a part of them."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def eventually(self, true: Callable[[], bool]) -> None:
        """Waits until it is so."""
        wait_until(true)


class ScriptedLoader(ModelLoader):
    """Makes scripted engines in threads, and tokenizers of bytes; `gigabytes` are the shares, by path,
    and `generation` are the checkpoint's defaults of sampling.
    """

    def __init__(
        self,
        template: str = "{{ messages }}",
        over: Any = None,
        gigabytes: dict[str, float] | None = None,
        generation: dict[str, Any] | None = None,
        **script: Any,
    ):
        self._template, self._over, self._script = template, over, script
        self._gigabytes, self._generation = gigabytes or {}, generation or {}
        self.engines: dict[str, ThreadEngine] = {}  # the latest of each model, by path
        self.faults: dict[str, list[Exception]] = {}  # of the next loads, by path
        self.gates: dict[str, threading.Event] = {}  # a model loads once its gate is open

    def is_idle(self) -> bool:
        return not any(engine.inner.has_work for engine in self.engines.values())

    def engine(self, settings: dict[str, Any], on_stage: Any) -> ThreadEngine:
        path = settings["model"]
        made = ThreadEngine(settings, on_stage, over=self._over, **self._script)
        made.gate, made.load_faults = self.gates.get(path), self.faults.get(path, [])
        self.engines[path] = made
        return made

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        return self._over.tokenizer if self._over else Tokenizer(Bytes(self._template))

    def sampling(self, config: EngineConfig) -> dict[str, Any]:
        return self._generation

    def device(self, config: EngineConfig) -> str:
        return "cpu" if config.device == "auto" else config.device

    def free_memory(self, config: EngineConfig) -> int:
        return 100 * GB

    def share(self, settings: dict[str, Any], total: int) -> Share:
        return Share(int(self._gigabytes.get(settings["model"], 1.0) * GB), settings)


def wait_until(true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "the condition stayed false"
        time.sleep(0.01)


class QuickServer(HttpServer):
    """Ends within milliseconds, where uvicorn looks ten times a second whether it shall, and then pauses."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(1):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            await super().shutdown(sockets)  # which ends what goes on
        else:
            await self.lifespan.shutdown()


@contextmanager
def served(
    template: str = "{{ messages }}", script: dict[str, Any] | None = None, over: Any = None, **serve: Any
) -> Iterator[Inside]:
    """A server of these settings; `script` are the scripted engine's, and `over` is one in its place."""
    max_num_seqs = serve.pop("max_num_seqs", 32)
    settings: dict[str, Any] = {"model": "scripted", "max_num_seqs": max_num_seqs, "serve": serve}
    loader = ScriptedLoader(template, over, **(script or {}))
    with serving(Catalogue.of_one(settings), loader) as inside:
        yield inside


@contextmanager
def serving(catalogue: Catalogue, loader: ScriptedLoader) -> Iterator[Inside]:
    """A server of these models."""
    state = AppState(ModelPool(catalogue, loader))
    listener = listen("127.0.0.1", 0)
    app = create_app(state, "0")
    if state.config.admin:
        add_admin(app, state)
    http = QuickServer(app, state.config, 5)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE, **LOCAL_HTTP) as client:
            key = catalogue.settings.get("serve", {}).get("api_key")
            key = key[0] if isinstance(key, list) else key
            client.headers.update({"authorization": f"Bearer {key}".encode()} if key else {})
            wait_until(lambda: client.get("/ready").status_code == 200)
            default = state.pool.default.config.model
            yield Inside(url, state, loader.engines[default].inner, client)
    finally:
        with suppress(AssertionError):  # what clients have left is being aborted
            wait_until(loader.is_idle, 1)
        http.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive(), "the server has not ended"
    assert loader.is_idle(), "an engine still has work"
