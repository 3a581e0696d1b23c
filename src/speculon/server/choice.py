"""A choice, as OpenAI's API names it: from the engine's events to text and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from speculon.core import Finish, TokenLogprobs
from speculon.sequence import Event
from speculon.server.deltas import Delta
from speculon.server.request import GenerationRequest
from speculon.server.tags import ShownTags, special_tags, without_tags
from speculon.telemetry import RequestStats
from speculon.text import Stream, Tokenizer
from speculon.thinking import AnswerStart

MIN_LOGPROB = -9999.0  # the API's form of minus infinity


@dataclass(slots=True)
class ChoiceDelta:
    """What one event adds to one choice."""

    index: int
    deltas: list[Delta]  # {"content": ...} or {"tool_calls": ...}
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[dict[str, Any]] | None = None  # explained, where the client asks for that


class Choice:
    """One sequence of a request as its client sees it."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer, prompt: list[int]):
        params = request.params
        self.index, self.tokens = index, 0
        self.finish: Finish | None = None
        self.stats: RequestStats | None = None
        self.echoed = 0  # characters of the prompt that the text begins with
        self.deltas: list[Delta] = []  # all so far, where they are captured
        self.finish_reason: str | None = None  # in the API's words
        self._request, self._tokenizer, self._parser = request, tokenizer, request.parser()
        tags = special_tags(tokenizer, self._parser.tags) if params.skip_special_tokens else {}
        self._hidden = tuple(tags)  # of the text that the parser sees
        self._stream = Stream.of(ShownTags(tokenizer, tags.values()) if tags else tokenizer, params)
        self.reasoning_tokens = 0
        self._answer = AnswerStart(params.thinking, tokenizer) if params.thinking else None
        self._echo = prompt if request.echo else []  # still to be echoed
        self._prompt_logprobs: list[TokenLogprobs] = []

    def push_prompt_logprobs(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """They come before any token."""
        self._prompt_logprobs.extend(logprobs)

    def push(self, event: Event) -> ChoiceDelta:
        self.tokens += len(event.tokens)
        if self._answer is not None:
            self.reasoning_tokens += [self._answer.push(token) for token in event.tokens].count(None)
        echo, logprobs = self._take_echo() if self._echo else ("", None)
        text, starts = decode(self._stream, event.tokens)
        if event.finish:
            self.finish, self.stats = event.finish, event.stats
            text += self._stream.flush(event.finish.matched)
        if event.logprobs is not None or logprobs is not None:
            logprobs = self._logprobs(logprobs, event.logprobs or (), starts)
        deltas = self._parser.push(echo + text)
        if event.finish:
            deltas += self._parser.end(cut=event.finish.reason != "stop")
            called = event.finish.reason == "stop" and self._parser.called
            self.finish_reason = "tool_calls" if called else event.finish.reason
        if self._hidden:
            deltas = without_tags(deltas, self._hidden)
        if self._request.captured_prompts:
            self.deltas += deltas
        matched = event.finish.matched if event.finish else None
        tokens = self._explained(event) if self._request.explain else None
        return ChoiceDelta(self.index, deltas, logprobs, self.finish_reason, matched, tokens)

    def abort(self) -> ChoiceDelta:
        """The last delta of a choice whose sequence the server ends by itself."""
        return self.push(Event("", 0, (), finish=Finish("abort")))

    def _explained(self, event: Event) -> list[dict[str, Any]]:
        """Which method drafted each token, and what became of the draft."""
        parts = zip_longest(event.tokens, event.sources, event.fates)
        return [
            {"id": token, "token": self._tokenizer.token_text(token), "source": source, "fate": fate}
            for token, source, fate in parts
        ]

    def _take_echo(self) -> tuple[str, Any]:
        """The prompt's text and log-probabilities, once; the first token has none."""
        ids, self._echo = self._echo, []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        self.echoed = len(text)
        if self._request.params.prompt_logprobs is None:
            return text, None
        _, starts = decode(Stream(self._tokenizer, skip_special_tokens=False), ids)
        table = self._table([TokenLogprobs(ids[0], 0.0, 1, ()), *self._prompt_logprobs], starts)
        table["token_logprobs"][0] = table["top_logprobs"][0] = None
        return text, table

    def _logprobs(self, echoed: Any, logprobs: Iterable[TokenLogprobs], starts: list[int]) -> Any:
        if self._request.chat:
            return {"content": [self._token(one) for one in logprobs]}
        table = self._table(logprobs, [self.echoed + start for start in starts])
        return {key: echoed[key] + table[key] for key in table} if echoed else table

    def _token(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._token_logprob(token, logprob) for token, logprob in one.top]
        return {**self._token_logprob(one.token, one.logprob), "top_logprobs": top}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": data}

    def _table(self, logprobs: Iterable[TokenLogprobs], starts: list[int]) -> dict[str, list[Any]]:
        """The form of completions: parallel lists. Of tokens with the same text the likelier one stays."""
        tokens: list[str] = []
        chosen: list[float] = []
        tops: list[dict[str, float]] = []
        for one in logprobs:
            text, logprob = self._tokenizer.token_text(one.token), max(one.logprob, MIN_LOGPROB)
            top = {self._tokenizer.token_text(token): max(p, MIN_LOGPROB) for token, p in reversed(one.top)}
            tokens.append(text)
            chosen.append(logprob)
            tops.append({text: logprob, **top})
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": starts}


def decode(stream: Stream, tokens: Iterable[int]) -> tuple[str, list[int]]:
    """The text that tokens make certain, and where in the whole text each of them begins."""
    text, starts = "", []
    for token in tokens:
        starts.append(stream.length)
        text += stream.push([token])
    return text, starts
