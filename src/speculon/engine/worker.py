"""The process that owns the device: an inbox of requests, a step for everybody, news to the serving side."""

from __future__ import annotations

import logging
import signal
from contextlib import closing
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any

from speculon.engine.messages import (
    Abort,
    Add,
    Began,
    ForgetPools,
    FromServer,
    News,
    PoolsForgotten,
    Pulse,
    Ready,
    Refused,
    Stage,
    Stop,
)
from speculon.errors import EngineError, SpeculonError
from speculon.llm import LLM

if TYPE_CHECKING:
    from speculon.engine.engine import Engine

PULSE = 0.25  # seconds between two readings of the counters
# seconds without work after which the pool is checked: a request that comes at once must not wait for that
REST = 1.0
RETRIES = 1  # of a step that failed; it left everything as it was

log = logging.getLogger("speculon")


def main(inbox: Connection, settings: dict[str, Any]) -> None:
    """Loads the model of `settings` (fields of `EngineConfig`) and serves until told to stop or left alone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the serving side ends what runs first
        signal.signal(number, signal.SIG_IGN)
    try:
        llm = LLM(progress=lambda stage: inbox.send(Stage(stage)), **settings)
        with closing(llm.engine):  # what a process of multiprocessing leaves behind is not finalised
            Worker(llm.engine, inbox).run()
    except SpeculonError as error:
        inbox.send(Refused("", error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.warning("the serving side is gone")


class Worker:
    """Steps one engine.

    Whatever a client does, a step waits for nobody: the serving side reads all the time.
    """

    def __init__(self, engine: Engine, inbox: Connection):
        self.engine, self._inbox = engine, inbox
        self._told = 0.0  # when the counters were sent last
        self._failures = 0  # steps that failed in a row
        self._checked = False  # whether the pool has been since the last message

    def run(self) -> None:
        engine = self.engine
        self._inbox.send(
            Ready(
                vocab_size=engine.target.vocab_size,
                max_context=engine.max_context,
                max_num_seqs=engine.config.max_num_seqs,
                pages=engine.pool.num_blocks,
                page_tokens=engine.pool.block_size,
                method=engine.proposers.default,
            )
        )
        self._pulse()
        while self._read_inbox():
            if engine.has_work:
                self._step()
            if not engine.has_work or monotonic() - self._told > PULSE:
                self._pulse()

    def _read_inbox(self) -> bool:
        """Takes in what has come, and waits for it while there is nothing to do; False when that is the end."""
        while not self.engine.has_work or self._inbox.poll():
            if not self.engine.has_work:
                self._rest()
            message: FromServer = self._inbox.recv()
            self._checked = False
            match message:
                case Add():
                    self._add(message)
                case Abort(request_id):
                    self._tell(self.engine.abort(request_id))
                case ForgetPools(number, tenant, pool):
                    self._inbox.send(PoolsForgotten(number, self.engine.forget_pools(pool, tenant)))
                case Stop():
                    return False
            # an abort may have left nothing to do, which the counters have to tell
            if not self._inbox.poll():
                break
        return True

    def _rest(self) -> None:
        """Waits for a message; after a while without one it checks, once, that every page is accounted for."""
        if not self._checked and not self._inbox.poll(REST):
            self.engine.check_integrity()
            self.engine.counters.checks += 1
            self._checked = True
            self._pulse()

    def _add(self, asked: Add) -> None:
        try:
            self.engine.add_request(asked.prompt, asked.params, asked.speculation, asked.request_id)
        except SpeculonError as error:
            self._inbox.send(Refused(asked.request_id, error))
        except Exception as error:
            log.exception("%s could not be admitted", asked.request_id)
            self._inbox.send(Refused(asked.request_id, EngineError(f"{type(error).__name__}: {error}")))
        else:
            self._inbox.send(Began(asked.request_id))

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            log.exception("a step failed")
            self._failures += 1
            if self._failures > RETRIES:
                self._give_up(error)
            return
        self._failures = 0
        self._tell(events)

    def _give_up(self, error: Exception) -> None:
        """Ends those who run, with the fault as the answer; those who wait get their chance, unless nobody
        runs.
        """
        self._failures = 0
        scheduler = self.engine.scheduler
        for request_id in dict.fromkeys(seq.request_id for seq in scheduler.running or scheduler.waiting):
            self.engine.abort(request_id)
            self._inbox.send(
                Refused(request_id, EngineError(f"the step failed: {type(error).__name__}: {error}"))
            )

    def _tell(self, events: list[Any]) -> None:
        if events:
            self._inbox.send(News(events))

    def _pulse(self) -> None:
        self._told = monotonic()
        self._inbox.send(Pulse(self.engine.counters, self.engine.scheduler.load))
