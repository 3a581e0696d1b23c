"""A choice, as OpenAI's API names it: from the engine's events to text and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest
from typing import Any, NamedTuple

from speculon.core.telemetry import RequestStats
from speculon.core.types import Finish, TokenLogprobs, shared_length
from speculon.decoding.sequence import Event
from speculon.decoding.text.deltas import Delta
from speculon.decoding.text.thinking import AnswerStart
from speculon.decoding.text.tokenizer import Stream, Tokenizer
from speculon.server.request import GenerationRequest

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

    @property
    def has_content(self) -> bool:
        """Whether it adds anything but the end."""
        return bool(self.deltas or self.tokens or any((self.logprobs or {}).values()))

    def split(self) -> tuple[ChoiceDelta, ChoiceDelta]:
        """What it adds, and the end of the choice alone."""
        end = ChoiceDelta(
            self.index,
            [],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            tokens=None if self.tokens is None else [],
        )
        return replace(self, finish_reason=None, stop_reason=None), end


class Choice:
    """One sequence of a request as its client sees it."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        prompt: list[int],
        echo: str | None = None,  # the prompt as sent, which the text begins with
    ):
        params = request.params
        self.index, self.tokens = index, 0
        self.finish: Finish | None = None
        self.stats: RequestStats | None = None  # the engine's statistics, which come with the end
        self.so_far = RequestStats()  # what is known from its events until then
        self.echoed = 0  # characters of the prompt that the text begins with
        self.deltas: list[Delta] = []  # all deltas so far, if the request is captured
        self.finish_reason: str | None = None  # in the API's words
        self._request, self._tokenizer, self._parser = request, tokenizer, request.parser()
        tags = special_tags(tokenizer, self._parser.tags) if params.skip_special_tokens else {}
        self._hidden = tuple(tags)  # tags that only the parser sees
        self._stream = TaggedStream(Stream.of(tokenizer, params, prompt), tags)
        self.reasoning_tokens = 0
        self._answer = AnswerStart(params.thinking, tokenizer) if params.thinking else None
        self._prompt, self._echo = prompt, echo  # None once it is echoed
        self._prompt_logprobs: list[TokenLogprobs] = []

    def push_prompt_logprobs(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Takes the log-probabilities of the prompt, which come before any token."""
        self._prompt_logprobs.extend(logprobs)

    def push(self, event: Event) -> ChoiceDelta:
        self.tokens += len(event.tokens)
        self.so_far.see(len(event.tokens), event.drafted, len(event.sources))
        answers = [self._answer is None or self._answer.push(token) is not None for token in event.tokens]
        self.reasoning_tokens += answers.count(False)
        echo, logprobs = self._take_echo() if self._echo is not None else ("", None)
        texts, places = decode(self._stream, event.tokens, answers)
        if event.finish:
            self.finish, self.stats = event.finish, event.stats
            texts.append(self._stream.flush(event.finish.matched))
        if event.logprobs is not None or logprobs is not None:
            logprobs = self._logprobs(logprobs, event.logprobs or (), places, answers)
        deltas = self._parse(echo, texts)
        if event.finish:
            deltas += self._without_tags(self._parser.end(cut=event.finish.reason != "stop"))
            called = event.finish.reason == "stop" and self._parser.called
            self.finish_reason = "tool_calls" if called else event.finish.reason
        if self._request.captured_prompts:
            self.deltas += deltas
        matched = event.finish.matched if event.finish else None
        tokens = self._explained(event) if self._request.explain else None
        return ChoiceDelta(self.index, deltas, logprobs, self.finish_reason, matched, tokens)

    def _parse(self, echo: str, texts: list[str]) -> list[Delta]:
        """What the parser makes of the texts of tokens. Where tags are hidden it gets them one by one: what
        is shown must not depend on how many tokens an event has.
        """
        if not self._hidden:
            return self._parser.push(echo + "".join(texts))
        return [delta for text in (echo, *texts) for delta in self._without_tags(self._parser.push(text))]

    def _without_tags(self, deltas: list[Delta]) -> list[Delta]:
        return without_tags(deltas, self._hidden) if self._hidden else deltas

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
        text, self._echo = self._echo or "", None
        self.echoed = len(text)
        if self._request.params.prompt_logprobs is None:
            return text, None
        ids, sent = self._prompt, self._tokenizer.as_sent(self._prompt)
        _, places = decode(Stream(self._tokenizer, skip_special_tokens=False), sent)
        front = len(ids) - shared_length(ids[::-1], sent[::-1])
        around = (
            [TextOffset(0, True)] * front,
            [TextOffset(len(text), False)] * (len(ids) - len(sent) - front),
        )
        table = self._table(
            [TokenLogprobs(ids[0], 0.0, 1, ()), *self._prompt_logprobs], [*around[0], *places, *around[1]]
        )
        table["token_logprobs"][0] = table["top_logprobs"][0] = None
        return text, table

    def _logprobs(
        self, echoed: Any, logprobs: Iterable[TokenLogprobs], places: list[TextOffset], answers: list[bool]
    ) -> Any:
        """The log-probabilities in the form of the endpoint. A chat reports only tokens of its answer, not of
        its thinking.
        """
        if self._request.chat:
            each = zip(logprobs, places, answers, strict=True)
            return {"content": [self._token(logprob, place) for logprob, place, answer in each if answer]}
        table = self._table(
            logprobs, [TextOffset(self.echoed + place.start, place.first) for place in places]
        )
        return {key: echoed[key] + table[key] for key in table} if echoed else table

    def _token(self, chosen: TokenLogprobs, place: TextOffset) -> dict[str, Any]:
        top = [self._token_logprob(token, logprob, place.first) for token, logprob in chosen.top]
        return {**self._token_logprob(chosen.token, chosen.logprob, place.first), "top_logprobs": top}

    def _token_logprob(self, token: int, logprob: float, first: bool) -> dict[str, Any]:
        name, data = self._tokenizer.token_name(token, first), self._tokenizer.token_bytes(token, first)
        return {"token": name, "logprob": max(logprob, MIN_LOGPROB), "bytes": data}

    def _table(self, logprobs: Iterable[TokenLogprobs], places: list[TextOffset]) -> dict[str, list[Any]]:
        """The form of completions: parallel lists."""
        tokens: list[str] = []
        chosen: list[float] = []
        tops: list[dict[str, float]] = []
        for entry, place in zip(logprobs, places, strict=True):
            values = {entry.token: entry.logprob, **dict(entry.top)}
            names = self._names(values, place.first)
            tokens.append(names[entry.token])
            chosen.append(max(entry.logprob, MIN_LOGPROB))
            tops.append({names[token]: max(value, MIN_LOGPROB) for token, value in values.items()})
        starts = [place.start for place in places]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": starts}

    def _names(self, tokens: Iterable[int], first: bool) -> dict[int, str]:
        """A name for each token; a token whose name is already taken gets its id as the name."""
        names: dict[str, int] = {}
        for token in tokens:
            name = self._tokenizer.token_name(token, first)
            names[f"token_id:{token}" if name in names else name] = token
        return {token: name for name, token in names.items()}


class TextOffset(NamedTuple):
    """Where the text of a token begins."""

    start: int  # characters before it
    first: bool  # whether nothing shown stands before it


def decode(
    stream: Stream | TaggedStream, tokens: Seq[int], answers: Iterable[bool] = repeat(True)
) -> tuple[list[str], list[TextOffset]]:
    """The text that each token makes certain, and where in the whole text it stands.

    A stop string begins in no token that is not of the answer.
    """
    texts, places = [], []
    for token, answer in zip(tokens, answers, strict=False):
        places.append(TextOffset(stream.length, stream.first))
        texts.append(stream.push([token]) + ("" if answer else stream.release()))
    return texts, places


# Tags that are special tokens: parsers see them, and the texts of an answer do not show them.


class TaggedStream:
    """A stream of a text without special tokens, in which the tags among them are written.

    Stop strings are found in the text without tags, as the engine finds them and clients see it.
    """

    def __init__(self, stream: Stream, tags: Mapping[str, int]):
        self._stream = stream
        self._tags = {token: tag for tag, token in tags.items()}
        self._held: list[tuple[int, str]] = []  # tags not returned yet, and the characters before each
        self._returned = 0  # characters, without tags

    @property
    def length(self) -> int:
        return self._stream.length

    @property
    def first(self) -> bool:
        return self._stream.first

    def push(self, ids: Seq[int]) -> str:
        return "".join(self._push(token) for token in ids)

    def release(self) -> str:
        return self._tagged(self._stream.release())

    def flush(self, stop: str | int | None = None) -> str:
        return self._tagged(self._stream.flush(stop))

    def _push(self, token: int) -> str:
        if token in self._tags:
            self._held.append((self.length + self._stream.unfinished, self._tags[token]))
        return self._tagged(self._stream.push([token]))

    def _tagged(self, text: str) -> str:
        """`text`, the continuation of what was returned, with the tags that are in it or at its ends."""
        begun, tagged = self._returned, ""
        self._returned += len(text)
        while self._held and self._held[0][0] <= self._returned:
            at, tag = self._held.pop(0)
            tagged, text, begun = tagged + text[: at - begun] + tag, text[at - begun :], at
        return tagged + text


def special_tags(tokenizer: Tokenizer, tags: Iterable[str]) -> dict[str, int]:
    """The ids of those tags that are special tokens, which texts leave out."""
    ids = {tag: tokenizer.token_id(tag) for tag in tags}
    return {tag: token for tag, token in ids.items() if token in tokenizer.special_ids}


def without_tags(deltas: list[Delta], tags: Seq[str]) -> list[Delta]:
    """The deltas without special tokens in their texts."""
    for delta in deltas:
        for key in delta.keys() & {"content", "reasoning_content"}:
            for tag in tags:
                delta[key] = delta[key].replace(tag, "")
    return [delta for delta in deltas if any(delta.values())]
