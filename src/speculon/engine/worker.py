"""The engine's process: takes requests from a pipe, steps the engine, sends outputs and statistics."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any

from speculon.core.config import EngineConfig
from speculon.core.errors import EngineError, SpeculonError
from speculon.core.garbage import kept_for_good
from speculon.core.logs import LogFormatter
from speculon.core.types import Capabilities
from speculon.decoding.sequence import Event
from speculon.engine.messages import (
    Abort,
    Add,
    Admitted,
    EngineStatistics,
    ForgetPools,
    FromServer,
    Outputs,
    PoolsForgotten,
    Refused,
    Shutdown,
    Stage,
)

if TYPE_CHECKING:
    from speculon.engine.engine import Engine

Build = Callable[[EngineConfig, Callable[[str], None]], "Engine"]

STATISTICS_SECONDS = 0.25  # between two messages with the counters; `serve.engine_timeout` is longer
# without work before the pages are counted: a request that comes soon must not wait for that
IDLE_SECONDS = 1.0
RETRIES = 1  # of a step that failed; it left everything as it was

log = logging.getLogger("speculon")


def main(pipe: Connection, settings: dict[str, Any], build: Build | None = None) -> None:
    """Builds the engine of `settings` (fields of `EngineConfig`) and runs it until the server stops it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server finishes running requests first
        signal.signal(number, signal.SIG_IGN)
    try:
        with kept_for_good():
            if build is None:
                from speculon.engine.build import build_engine  # takes seconds: not in the server's process

                build = build_engine
            engine = build(EngineConfig(**settings), lambda stage: pipe.send(Stage(stage)))
        with closing(engine):  # processes of multiprocessing run no finalisers
            run(Worker(engine, pipe))
    except SpeculonError as error:
        pipe.send(Refused("", error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.warning("the server's process has ended")
    finally:
        gc.freeze()  # else Python's end looks through every object of torch and transformers: a second


def run(worker: Worker) -> None:
    """Runs to the end. A fault ends the process; multiprocessing would print its message."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        worker.run()
    except (SpeculonError, EOFError, OSError):
        raise
    except Exception:
        log.exception("the engine has failed")
        sys.exit(1)


class Worker:
    """Steps one engine. No step waits for a client: the server reads all messages at once."""

    def __init__(self, engine: Engine, pipe: Connection):
        self.engine, self._pipe = engine, pipe
        self._statistics_at = 0.0  # when they were sent last
        self._failures = 0  # steps that failed in a row
        self._read = 0  # messages so far
        self._checked = False  # whether the pages were counted since the last message

    def run(self) -> None:
        engine = self.engine
        self._pipe.send(replace(engine.facts(), capabilities=engine.capabilities()))
        self._send_statistics()
        while self._read_messages():
            if engine.has_work:
                self._step()
            if not engine.has_work or monotonic() - self._statistics_at > STATISTICS_SECONDS:
                self._send_statistics()

    def _read_messages(self) -> bool:
        """Handles what has come; without work, waits for a message. False after `Shutdown`."""
        while not self.engine.has_work or self._pipe.poll():
            if not self.engine.has_work:
                self._check_when_idle()
            message: FromServer = self._pipe.recv()
            self._read += 1
            self._checked = False
            match message:
                case Add():
                    self._add(message)
                case Abort(request_id):
                    self._send_outputs(self.engine.abort(request_id))
                case ForgetPools(number, tenant, pool):
                    self._pipe.send(PoolsForgotten(number, self.engine.forget_pools(pool, tenant)))
                case Shutdown():
                    return False
            # after an abort the engine may be without work, which the statistics have to show
            if not self._pipe.poll():
                break
        return True

    def _check_when_idle(self) -> None:
        """Once, after `IDLE_SECONDS` without a message: every page must be accounted for. The server is told
        what the engine can do by now, because programs may have replaced the loop; the table takes some ms.
        """
        if not self._checked and not self._pipe.poll(IDLE_SECONDS):
            self.engine.check_integrity()
            self.engine.counters.checks += 1
            self._checked = True
            self._send_statistics(self.engine.capabilities())

    def _add(self, add: Add) -> None:
        try:
            more: dict[str, Any] = {"images": add.images, "adapter": add.adapter}
            self.engine.add_request(
                add.prompt, add.params, add.speculation, add.request_id, add.written, **more
            )
        except SpeculonError as error:
            self._pipe.send(Refused(add.request_id, error))
        except Exception as error:
            log.exception("%s could not be admitted", add.request_id)
            fault = EngineError(
                f"the request could not be admitted, because of a fault in the engine: {type(error).__name__}"
            )
            self._pipe.send(Refused(add.request_id, fault))
        else:
            self._pipe.send(Admitted(add.request_id))

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            log.exception("a step failed")
            self._failures += 1
            if self._failures > RETRIES:
                self._end_failing(error)
            return
        self._failures = 0
        self._send_outputs(events)

    def _end_failing(self, error: Exception) -> None:
        """Ends the running requests with the fault; the waiting ones only where none runs."""
        self._failures = 0
        fault = EngineError(f"the step failed: {type(error).__name__}")
        for request_id in self.engine.open_requests:
            self.engine.abort(request_id)
            self._pipe.send(Refused(request_id, fault))

    def _send_outputs(self, events: list[Event]) -> None:
        if events:
            self._pipe.send(Outputs(events))

    def _send_statistics(self, capabilities: Capabilities | None = None) -> None:
        self._statistics_at = monotonic()
        engine = self.engine
        counters, costs = engine.current_counters(), engine.plain_costs()
        self._pipe.send(EngineStatistics(counters, engine.load, self._read, costs, capabilities))
