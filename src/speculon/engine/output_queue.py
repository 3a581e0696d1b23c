"""The outputs of some requests as one reader takes them, and what an engine after a lost one resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from speculon.config import Acceptance
from speculon.core import acceptance_rule
from speculon.engine.messages import Add
from speculon.errors import SpeculonError
from speculon.sequence import Event


class Progress:
    """One request, and what was written of each sample that has not ended."""

    def __init__(self, add: Add, acceptance: Acceptance = "auto"):
        self.add = add
        self.written = {sample: [*tokens] for sample, tokens in (add.written or {}).items()}
        if add.written is None:
            self.written = {sample: [] for sample in range(add.params.n)}
        own = add.speculation.rule(acceptance) if add.speculation else acceptance
        rule = acceptance_rule(own, add.params)
        # then its tokens are a function of prompt, parameters and seed
        self._repeats = rule == "matching" and (add.params.greedy or add.params.seed is not None)
        self._begun = False  # whether anything came of it
        self._resumed, self._gained = False, False  # and whether tokens came since

    @property
    def resumable(self) -> bool:
        """Whether another engine would write the rest as the lost one would have.

        Not after a second loss without a token between: such a request may be what ends the engine.
        """
        return (not self._begun or self._repeats and self._has_prompt) and (self._gained or not self._resumed)

    @property
    def _has_prompt(self) -> bool:
        """Whether all log-probabilities of the prompt came, if any are due: the first sample brings them."""
        return self.add.params.prompt_logprobs is None or self.written.get(0) != []

    def note(self, event: Event) -> None:
        self.written[event.sample] += event.tokens
        self._begun = self._gained = True
        if event.finish is not None:
            del self.written[event.sample]

    def rest(self) -> Add:
        """The message that asks for the rest."""
        self._resumed, self._gained = True, False
        if not self._begun:
            return self.add
        params = self.add.params.model_copy(update={"prompt_logprobs": None})
        return replace(self.add, params=params, written=self.written)


class Engine(Protocol):
    """The part of `AsyncEngine` that a queue calls."""

    def abort(self, request_id: str) -> None: ...
    def remove(self, request_id: str, *, abort: bool) -> None: ...


class OutputQueue:
    """The events of some requests, in batches as they come.

    Events that nobody takes wait here; there are never more than the requests' tokens.
    """

    def __init__(self, engine: Engine, adds: Seq[Add], acceptance: Acceptance = "auto"):
        self._engine = engine
        self._requests = {add.request_id: Progress(add, acceptance) for add in adds}
        self._waiting = set(self._requests)  # for admission
        self._events: list[Event] = []
        self._error: SpeculonError | None = None
        self._changed = asyncio.Event()
        self.resumed = 0  # how often another engine continued it

    @property
    def open_sequences(self) -> int:
        return sum(len(request.written) for request in self._requests.values())

    @property
    def resumable(self) -> bool:
        """Whether another engine can continue all of its requests; not after a fault."""
        return self._error is None and all(request.resumable for request in self._open)

    @property
    def _open(self) -> list[Progress]:
        return [request for request in self._requests.values() if request.written]

    def progress(self, request_id: str) -> Progress:
        return self._requests[request_id]

    async def admitted(self) -> None:
        """Returns once the engine has admitted every request; raises why it has not.

        A fault after that is raised by `take`, also if it is here already.
        """
        while self._waiting:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def take(self) -> list[Event]:
        """The events since the last call, at least one; none once all sequences have ended.

        Raises the engine's fault.
        """
        while not self._events and self._open and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def put(self, event: Event) -> None:
        request = self._requests[event.request_id]
        if event.sample not in request.written:  # of an aborted request of the same name
            return
        request.note(event)
        self._events.append(event)
        self._changed.set()

    def admit(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        self._changed.set()

    def fail(self, error: SpeculonError) -> None:
        self._error = error
        self._changed.set()

    def rest(self) -> list[Add]:
        """The messages that submit what is left of it to another engine."""
        self.resumed += 1
        return [request.rest() for request in self._open]

    def abort(self) -> None:
        """Ends the open requests; their last events are still to be taken."""
        for request in self._open:
            self._engine.abort(request.add.request_id)

    def close(self) -> None:
        """Ends the open requests; their pages are free after the running step."""
        for request_id, request in self._requests.items():
            self._engine.remove(request_id, abort=bool(request.written))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
