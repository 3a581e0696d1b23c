"""What one request was to its client: one line in the log, and the times that the metrics keep."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

from speculon.core import Event
from speculon.server.answer import Answer
from speculon.telemetry import log_line


@dataclass(slots=True)
class Record:
    """Times in seconds, as the server's end of the connection sees them."""

    request_id: str
    route: str  # as the metrics name it
    path: str = ""  # as it was asked for
    began: float = field(default_factory=perf_counter)
    first: float | None = None  # from the beginning to the first token
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two batches of tokens
    seconds: float = 0.0
    status: int = 0
    reason: str | None = None  # of a refusal or a fault
    answer: Answer | None = None
    done: bool = False  # whether a stream came to its end

    def hear(self, events: list[Event]) -> None:
        if not any(event.tokens for event in events):
            return
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def close(self) -> None:
        self.seconds = perf_counter() - self.began

    @property
    def finish(self) -> str:
        """How its texts ended; `abort` where the client left or the time was over."""
        if self.answer is None:
            return "refused"
        cut = "error" if self.reason else "abort"
        return "+".join(
            dict.fromkeys(text.finish.reason if text.finish else cut for text in self.answer.texts)
        )

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first batch: what reading feels like, however the tokens are bundled."""
        if self.answer is None or self.first is None or self.answer.tokens < 2 or not self.gaps:
            return None
        return (self.last - self.began - self.first) / (self.answer.tokens - 1)

    def as_text(self) -> str:
        if self.answer is None or self.reason:
            return f"{self.request_id} {self.status} {self.path} {one_line(self.reason or self.finish)}"
        first = "" if self.first is None else f" first {self.first:.3f} s"
        return f"{log_line(self.request_id, self.answer.stats, self.seconds, self.finish)} | {self.status} {self.path}{first}"

    def as_json(self) -> str:
        told: dict[str, Any] = {
            "time": round(time(), 3),
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "finish": self.finish,
        }
        if self.reason:
            told["reason"] = self.reason
        if self.answer is not None:
            usage, done = self.answer.usage(), self.answer.account()
            told |= {
                "answer_id": self.answer.id,
                "prompt_tokens": usage["prompt_tokens"],
                "tokens": usage["completion_tokens"],
            }
            told |= {"first_token_s": self.first and round(self.first, 4), "speculation": done}
        return json.dumps(told, ensure_ascii=False)


def one_line(text: str) -> str:
    """Nothing that a client has written can begin a line of its own."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
