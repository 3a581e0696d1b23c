"""From the engine's events to OpenAI's answers.

A whole answer is the sum of the pieces that a stream would have sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from speculon.core import Event, Finish, TokenLogprobs
from speculon.server.tool_calls import Delta, join
from speculon.server.request import Job
from speculon.telemetry import RequestStats
from speculon.text import Stream, Tokenizer

LOWEST = -9999.0  # how the API writes a log-probability of minus infinity


@dataclass(slots=True)
class Piece:
    """What one event adds to one text."""

    index: int
    deltas: list[Delta]  # {"content": ...} or {"tool_calls": ...}
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Text:
    """One text as it grows."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer, prompt: list[int]):
        p = job.params
        self.index, self.tokens, self.finish = index, 0, None
        self.stats: RequestStats | None = None
        self._job, self._tokenizer, self._reply = job, tokenizer, job.reply()
        self._stream = Stream(tokenizer, stops=p.stop, skip_special_tokens=p.skip_special_tokens)
        self.echoed = 0  # characters of the prompt that the answer begins with
        self.said: list[Delta] = []  # so far, where it is to be captured
        self.reason: str | None = None  # why it ended, as clients are told
        self._prompt = prompt if job.echo else []
        self._prompt_logprobs: list[TokenLogprobs] = []

    finish: Finish | None

    def hear(self, lps: Iterable[TokenLogprobs]) -> None:
        """Log-probabilities of the prompt, which come before any token."""
        self._prompt_logprobs.extend(lps)

    def push(self, event: Event) -> Piece:
        self.tokens += len(event.tokens)
        echo, logprobs = self._echo() if self._prompt else ("", None)
        text, starts = follow(self._stream, event.tokens)
        if event.finish:
            self.finish, self.stats = event.finish, event.stats
            text += self._stream.flush(event.finish.matched)
        if event.logprobs is not None or logprobs is not None:
            logprobs = self._logprobs(logprobs, event.logprobs or (), starts)
        deltas = self._reply.push(echo + text)
        if event.finish:
            deltas += self._reply.end()
            self.reason = (
                "tool_calls" if event.finish.reason == "stop" and self._reply.called else event.finish.reason
            )
        if self._job.asked:
            self.said += deltas
        return Piece(
            self.index, deltas, logprobs, self.reason, event.finish.matched if event.finish else None
        )

    def _echo(self) -> tuple[str, Any]:
        """The prompt's text and log-probabilities, once; the first token has none, since nothing precedes it."""
        ids, self._prompt = self._prompt, []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        self.echoed = len(text)
        if self._job.params.prompt_logprobs is None:
            return text, None
        _, starts = follow(Stream(self._tokenizer, skip_special_tokens=False), ids)
        table = self._table([TokenLogprobs(ids[0], 0.0, 1, ()), *self._prompt_logprobs], starts)
        table["token_logprobs"][0] = table["top_logprobs"][0] = None
        return text, table

    def _logprobs(self, echoed: Any, lps: Iterable[TokenLogprobs], starts: list[int]) -> Any:
        if self._job.kind == "chat.completion":
            return {"content": [self._token(lp) for lp in lps]}
        table = self._table(lps, [self.echoed + start for start in starts])
        return {key: echoed[key] + table[key] for key in table} if echoed else table

    def _token(self, lp: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._one(lp.token, lp.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in lp.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        known = self._tokenizer
        return {
            "token": known.token_text(token),
            "logprob": max(logprob, LOWEST),
            "bytes": known.token_bytes(token),
        }

    def _table(self, lps: Iterable[TokenLogprobs], starts: list[int]) -> dict[str, list[Any]]:
        """The completions' form: lists beside each other; of tokens that show alike the likelier one stays."""
        table: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": starts,
        }
        for lp in lps:
            shown = self._tokenizer.token_text(lp.token)
            top = {self._tokenizer.token_text(token): max(value, LOWEST) for token, value in reversed(lp.top)}
            table["tokens"].append(shown)
            table["token_logprobs"].append(max(lp.logprob, LOWEST))
            table["top_logprobs"].append({shown: max(lp.logprob, LOWEST), **top})
        return table


@dataclass(slots=True)
class Answer:
    """One HTTP answer as it grows."""

    id: str
    model: str
    job: Job
    texts: list[Text]
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def to(cls, job: Job, request_id: str, model: str, tokenizer: Tokenizer) -> Answer:
        n = job.params.n
        return cls(
            request_id, model, job, [Text(i, job, tokenizer, job.prompts[i // n]) for i in range(job.texts)]
        )

    def push(self, event: Event) -> Piece | None:
        """What an event adds; None where it has nothing to show."""
        prompt = int(event.request_id.rpartition("-")[2])
        n = self.job.params.n
        if event.prompt_logprobs:
            for text in self.texts[prompt * n : prompt * n + n]:
                text.hear(event.prompt_logprobs)
        if not event.tokens and event.finish is None:
            return None
        return self.texts[prompt * n + event.sample].push(event)

    def abort(self) -> list[Piece]:
        """The last pieces of texts that are ended from outside."""
        return [
            text.push(Event("", 0, (), finish=Finish("abort"))) for text in self.texts if text.finish is None
        ]

    @property
    def stats(self) -> RequestStats:
        """Of all texts together."""
        total = RequestStats()
        for text in self.texts:
            if text.stats is not None:
                total.add(text.stats)
        return total

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def usage(self) -> dict[str, Any]:
        prompt, stats = sum(map(len, self.job.prompts)), self.stats
        # the other samples find the first one's pages
        first = (text.stats for text in self.texts[:: self.job.params.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(found.cached_tokens for found in first if found is not None)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted_prediction_tokens,
                "rejected_prediction_tokens": stats.rejected_prediction_tokens,
            },
        }

    def account(self) -> dict[str, Any]:
        """The `speculation` object; with its reasons and changes also where no round ran."""
        stats = self.stats
        done = stats.speculation()
        why = {"reasons": dict(stats.reasons), "changes": stats.change_list(), "prompt": stats.prompt()}
        return {"method": self.job.method, **why, **(done.to_dict() if done else {})}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any token: a chat's answers name their role."""
        if self.job.kind != "chat.completion":
            return []
        return [self.chunk(Piece(text.index, [{"role": "assistant", "content": ""}])) for text in self.texts]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A piece as the stream sends it."""
        end = {
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.job.kind == "text_completion":
            text = "".join(delta["content"] for delta in piece.deltas)
            return self._chunk([{"index": piece.index, "text": text, **end}])
        delta: Delta = {}
        for part in piece.deltas:  # an event may end a text and begin a call
            for key, value in part.items():
                delta[key] = delta[key] + value if key in delta else value
        return self._chunk([{"index": piece.index, "delta": delta, **end}])

    def last(self) -> list[dict[str, Any]]:
        """What follows the texts in a stream: usage and the account, where asked for."""
        usage = {"usage": self.usage()} if self.job.usage else {}
        stats = {"speculation": self.account()} if self.job.stats else {}
        return [{**self._chunk([]), **usage, **stats}] if usage or stats else []

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = [
            self._choice([piece for piece in pieces if piece.index == text.index]) for text in self.texts
        ]
        stats = {"speculation": self.account()} if self.job.stats else {}
        return {**self._head(self.job.kind), "choices": choices, "usage": self.usage(), **stats}

    def _choice(self, pieces: list[Piece]) -> dict[str, Any]:
        logprobs = add_up([piece.logprobs for piece in pieces if piece.logprobs is not None])
        message = join([delta for piece in pieces for delta in piece.deltas])
        said = {"text": message["content"]} if self.job.kind == "text_completion" else {"message": message}
        last = pieces[-1]
        end = {"logprobs": logprobs, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        return {"index": last.index, **said, **end}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.job.kind == "chat.completion" else "text_completion"
        return {**self._head(kind), "choices": choices}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def follow(stream: Stream, tokens: Iterable[int]) -> tuple[str, list[int]]:
    """The text that tokens make certain, and where in the whole text each of them begins."""
    text, starts = "", []
    for token in tokens:
        starts.append(stream.length)
        text += stream.push([token])
    return text, starts


def add_up(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Lists of the same names, end to end."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]} if parts else None
