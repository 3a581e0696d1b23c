"""Requests as they run, and the latest that have ended: bounded in number and in tokens."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import NamedTuple

from speculon.core.errors import InvalidRequest, UnknownRequest
from speculon.decoding.sequence import Event
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.operations.admin.schemas import RequestView, TokenRow, TokenView
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer

RECENT = 200  # requests that have ended
MOST_TOKENS = 4096  # of each request, whose prompt and answer can be shown
WINDOW = 5.0  # seconds of a rate
SAMPLES = 64


class KeptToken(NamedTuple):
    """A token as it is kept: `TokenRow` without its text."""

    id: int
    fate: str
    source: str | None
    position: int | None
    logprob: float | None
    rank: int | None


@dataclass
class Entry:
    """A request, and what is kept of its text."""

    tokenizer: Tokenizer
    prompt: list[int]  # its beginning; empty: texts are not kept
    running: tuple[AccessRecord, Answer] | None  # until its end: they hold the whole texts
    rows: dict[int, list[KeptToken]] = field(default_factory=dict)  # of each choice
    dropped: int = 0
    began: float = field(default_factory=time)
    ended: RequestView | None = None  # the account at its end

    def note(self, events: list[Event]) -> None:
        assert self.running is not None
        room, answer = MOST_TOKENS - sum(map(len, self.rows.values())), self.running[1]
        for event in events:
            rows = token_rows(event)
            kept = rows[:room]
            self.rows.setdefault(answer.choice_of(event).index, []).extend(kept)
            self.dropped += len(rows) - len(kept)
            room -= len(kept)


class RequestLog:
    """Follows every answer of the server. Texts are kept only where `texts` says so."""

    def __init__(self, texts: bool, recent: int = RECENT):
        self.texts = texts
        self._running: dict[str, Entry] = {}  # by the answer's id
        self._recent: deque[Entry] = deque(maxlen=recent)
        self._ended_tokens: Counter[str] = Counter()  # by model
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=SAMPLES)

    def begin(self, record: AccessRecord) -> None:
        """The record has its answer, which the engine has admitted."""
        answer = record.answer
        assert answer is not None
        prompt = answer.request.prompts[0][:MOST_TOKENS] if self.texts else []
        entry = Entry(answer.tokenizer, prompt, (record, answer))
        if self.texts:
            record.watch = entry.note
        self._running[answer.id] = entry

    def end(self, record: AccessRecord) -> None:
        answer = record.answer
        if answer is None or (entry := self._running.pop(answer.id, None)) is None:
            return
        self._ended_tokens[answer.base] += answer.tokens
        entry.ended = self._view(entry)
        entry.running = record.watch = None
        self._recent.appendleft(entry)

    def tokens_by_model(self) -> dict[str, int]:
        tokens = Counter(self._ended_tokens)
        for entry in self._running.values():
            if entry.running is not None:
                tokens[entry.running[1].base] += entry.running[1].tokens
        return tokens

    def rates(self) -> dict[str, float]:
        """Tokens per second by model since the oldest sample of the last seconds; each call adds one."""
        now, totals = perf_counter(), self.tokens_by_model()
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        rates = {}
        if self._samples and (seconds := now - self._samples[0][0]) > 0:
            before = self._samples[0][1]
            rates = {name: (total - before.get(name, 0)) / seconds for name, total in totals.items()}
        if not self._samples or now - self._samples[-1][0] >= WINDOW / (SAMPLES - 2):
            self._samples.append((now, totals))
        return rates

    def views(self) -> list[RequestView]:
        """Those that run, then the latest that have ended, each newest first."""
        return [self._view(entry) for entry in (*reversed(self._running.values()), *self._recent)]

    def find(self, request_id: str) -> Entry:
        """By the answer's id, or by that of the header. Raises `UnknownRequest`."""
        for entry in (*self._running.values(), *self._recent):
            view = self._view(entry)
            if request_id in (view.id, view.request_id):
                return entry
        raise UnknownRequest(f"request {request_id!r}: it is neither running nor among the latest requests")

    def view(self, request_id: str) -> RequestView:
        """With the beginning of the prompt and the answer, where texts are kept. Raises `UnknownRequest`."""
        entry = self.find(request_id)
        view = self._view(entry)
        if not self.texts:
            return view
        tokenizer = entry.tokenizer
        context = tokenizer.context(entry.prompt)
        answers = [tokenizer.continuation(context, [row.id for row in rows]) for rows in entry.rows.values()]
        return view.model_copy(
            update={"prompt": tokenizer.decode(entry.prompt), "answer": "\n".join(answers)}
        )

    def tokens(self, request_id: str) -> TokenView:
        """The tokens of a request that asked for `speculation.explain`. Raises `InvalidRequest`."""
        entry = self.find(request_id)
        if not self.texts:
            raise InvalidRequest("texts are not shown, because admin_texts is off")
        view = self._view(entry)
        if not view.explained:
            raise InvalidRequest(
                f"request {request_id!r} has no token details: it did not set speculation.explain"
            )
        return TokenView(
            id=view.id,
            model=view.model,
            complete=view.state == "ended",
            choices=[with_texts(entry.rows[index], entry.tokenizer) for index in sorted(entry.rows)],
            dropped=entry.dropped,
        )

    def _view(self, entry: Entry) -> RequestView:
        if entry.ended is not None:
            return entry.ended
        assert entry.running is not None
        record, answer = entry.running
        ended = answer.id not in self._running
        return RequestView(
            id=answer.id,
            request_id=record.request_id,
            model=answer.model,
            route=record.route,
            state="ended" if ended else "running",
            started=entry.began,
            seconds=record.seconds if ended else perf_counter() - record.started,
            first_token_seconds=record.first_token,
            status=record.status,
            finish=record.finish if ended else None,
            prompt_tokens=sum(map(len, answer.request.prompts)),
            images=len(answer.request.images),
            tokens=answer.tokens,
            explained=answer.request.explain,
            speculation=answer.speculation() if ended else answer.progress(),
        )


def token_rows(event: Event) -> list[KeptToken]:
    """The tokens of an event: a correction has the position of the draft that it replaces."""
    accepted, rows = len(event.sources), list[KeptToken]()
    logprobs = event.logprobs or ()
    for i, (token, fate) in enumerate(zip(event.tokens, event.fates, strict=True)):
        source = event.sources[i] if i < accepted else None
        position = i if i < accepted or fate == "correction" else None
        logprob, rank = (logprobs[i].logprob, logprobs[i].rank) if i < len(logprobs) else (None, None)
        rows.append(KeptToken(token, fate, source, position, logprob, rank))
    return rows


def with_texts(rows: list[KeptToken], tokenizer: Tokenizer) -> list[TokenRow]:
    """With the texts of the tokens."""
    return [TokenRow(text=tokenizer.token_text(row.id), **row._asdict()) for row in rows]
