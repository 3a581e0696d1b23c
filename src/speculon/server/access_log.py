"""The access log: one line per request, and the times that the metrics keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

from speculon.core.telemetry import log_line
from speculon.decoding.sequence import Event
from speculon.server.answer import Answer


@dataclass(slots=True)
class AccessRecord:
    """One request. Times in seconds, as the server's end of the connection sees them."""

    request_id: str
    route: str  # as the metrics name it
    path: str = ""  # as the client wrote it, but parts that no route has are replaced by their length
    started: float = field(default_factory=perf_counter)
    first_token: float | None = None  # seconds from the start
    last: float = 0.0  # when the latest tokens came
    gaps: list[float] = field(default_factory=list)  # between two batches of tokens
    seconds: float = 0.0
    status: int = 0
    reason: str | None = None  # of a refusal or a fault, without text of the request
    answer: Answer | None = None
    watch: Callable[[list[Event]], None] | None = None  # set by the administration, to follow the request
    complete: bool = False  # whether a stream came to its end

    def receive(self, events: list[Event]) -> None:
        if self.watch is not None:
            self.watch(events)
        if not any(event.tokens for event in events):
            return
        now = perf_counter()
        if self.first_token is None:
            self.first_token = now - self.started
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def close(self) -> None:
        self.seconds = perf_counter() - self.started

    @property
    def finish(self) -> str:
        """How its choices ended; `abort` if the client left or the time limit was reached."""
        if self.answer is None:
            return "refused"
        cut = "error" if self.reason else "abort"
        reasons = [choice.finish.reason if choice.finish else cut for choice in self.answer.choices]
        return "+".join(dict.fromkeys(reasons))

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first batch, however the tokens are bundled."""
        if self.answer is None or self.first_token is None or self.answer.tokens < 2 or not self.gaps:
            return None
        return (self.last - self.started - self.first_token) / (self.answer.tokens - 1)

    def as_text(self) -> str:
        if self.answer is None or self.reason:
            return f"{self.request_id} {self.status} {self.path} {one_line(self.reason or self.finish)}"
        line = log_line(self.request_id, self.answer.stats, self.seconds, self.finish)
        first = "" if self.first_token is None else f" first {self.first_token:.3f} s"
        return f"{line} | {self.status} {self.path}{first}"

    def as_json(self) -> str:
        fields: dict[str, Any] = {
            "time": round(time(), 3),
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "finish": self.finish,
        }
        if self.reason:
            fields["reason"] = self.reason
        if self.answer is not None:
            usage = self.answer.usage()
            fields |= {
                "answer_id": self.answer.id,
                "prompt_tokens": usage["prompt_tokens"],
                "tokens": usage["completion_tokens"],
                "first_token_s": self.first_token and round(self.first_token, 4),
                "speculation": self.answer.speculation(),
            }
        return json.dumps(fields, ensure_ascii=False)


def one_line(text: str) -> str:
    """Escapes line ends, so that no text of a client can begin a line of the log."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
