"""Requests as they run, and the latest that have ended: bounded in number and in tokens."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter, time

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

Row = tuple[int, str, str | None, int | None, float | None, int | None]


@dataclass
class Kept:
    """A request, and what is kept of its text."""

    id: str
    request_id: str
    model: str
    tokenizer: Tokenizer
    explained: bool
    prompt: list[int]  # its beginning; empty: texts are not kept
    running: tuple[AccessRecord, Answer] | None  # until its end: they hold the whole texts
    rows: dict[int, list[Row]] = field(default_factory=dict)  # of each choice
    dropped: int = 0
    began: float = field(default_factory=time)
    ended: RequestView | None = None  # the account at its end

    def note(self, events: list[Event]) -> None:
        assert self.running is not None
        kept, answer = sum(map(len, self.rows.values())), self.running[1]
        for event in events:
            rows = rows_of(event)
            room = max(0, MOST_TOKENS - kept)
            self.rows.setdefault(answer.choice_of(event).index, []).extend(rows[:room])
            self.dropped += len(rows) - len(rows[:room])
            kept += len(rows[:room])


class RequestLog:
    """Follows every answer of the server. Texts are kept only where `texts` says so."""

    def __init__(self, texts: bool, recent: int = RECENT):
        self.texts = texts
        self._running: dict[str, Kept] = {}  # by the answer's id
        self._recent: deque[Kept] = deque(maxlen=recent)
        self._ended_tokens: Counter[str] = Counter()  # by model
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=SAMPLES)

    def begin(self, record: AccessRecord) -> None:
        """The record has its answer, which the engine has admitted."""
        answer = record.answer
        assert answer is not None
        prompt = answer.request.prompts[0][:MOST_TOKENS] if self.texts else []
        explain, id = answer.request.explain, answer.id
        names = (id, record.request_id, answer.model)
        kept = Kept(*names, answer.tokenizer, explain, prompt, (record, answer))
        if self.texts:
            record.watch = kept.note
        self._running[answer.id] = kept

    def end(self, record: AccessRecord) -> None:
        answer = record.answer
        kept = None if answer is None else self._running.pop(answer.id, None)
        if kept is None:
            return
        self._ended_tokens[kept.model] += record.answer.tokens if record.answer is not None else 0
        kept.ended = self._view(kept)
        kept.running = record.watch = None
        self._recent.appendleft(kept)

    def tokens_by_model(self) -> dict[str, int]:
        found = Counter(self._ended_tokens)
        for kept in self._running.values():
            found[kept.model] += kept.running[1].tokens if kept.running is not None else 0
        return found

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
        running = [self._view(kept) for kept in reversed(self._running.values())]
        return running + [kept.ended for kept in self._recent if kept.ended is not None]

    def find(self, request_id: str) -> Kept:
        """By the answer's id, or by that of the header. Raises `UnknownRequest`."""
        for kept in (*self._running.values(), *self._recent):
            if request_id in (kept.id, kept.request_id):
                return kept
        raise UnknownRequest(f"request {request_id!r}: neither running nor among the latest")

    def view(self, request_id: str) -> RequestView:
        """With the beginning of the prompt and the answer, where texts are kept. Raises `UnknownRequest`."""
        kept = self.find(request_id)
        view = kept.ended or self._view(kept)
        if not self.texts:
            return view
        tokenizer = kept.tokenizer
        context = tokenizer.context(kept.prompt)
        answers = [tokenizer.continuation(context, [row[0] for row in rows]) for rows in kept.rows.values()]
        return view.model_copy(update={"prompt": tokenizer.decode(kept.prompt), "answer": "\n".join(answers)})

    def tokens(self, request_id: str) -> TokenView:
        """The tokens of a request that asked for `speculation.explain`. Raises `InvalidRequest`."""
        kept = self.find(request_id)
        if not self.texts:
            raise InvalidRequest("texts are not shown: admin_texts is off")
        if not kept.explained:
            raise InvalidRequest(f"request {request_id!r} did not set speculation.explain")
        text = kept.tokenizer.token_text
        choices = [
            [
                TokenRow(id=i, text=text(i), fate=fate, source=source, position=at, logprob=lp, rank=rank)
                for i, fate, source, at, lp, rank in kept.rows[index]
            ]
            for index in sorted(kept.rows)
        ]
        return TokenView(
            id=kept.id,
            model=kept.model,
            complete=kept.ended is not None,
            choices=choices,
            dropped=kept.dropped,
        )

    def _view(self, kept: Kept) -> RequestView:
        assert kept.running is not None
        record, answer = kept.running
        ended = answer.id not in self._running
        return RequestView(
            id=answer.id,
            request_id=record.request_id,
            model=answer.model,
            route=record.route,
            state="ended" if ended else "running",
            started=kept.began,
            seconds=record.seconds if ended else perf_counter() - record.started,
            first_token_seconds=record.first_token,
            status=record.status,
            finish=record.finish if ended else None,
            prompt_tokens=sum(map(len, answer.request.prompts)),
            tokens=answer.tokens,
            explained=answer.request.explain,
            speculation=answer.speculation() if ended else None,
        )


def rows_of(event: Event) -> list[Row]:
    """The tokens of an event: a correction has the position of the draft that it replaces."""
    accepted, rows = len(event.sources), list[Row]()
    logprobs = event.logprobs or ()
    for i, (token, fate) in enumerate(zip(event.tokens, event.fates, strict=True)):
        source = event.sources[i] if i < accepted else None
        position = i if i < accepted or fate == "correction" else None
        found = logprobs[i] if i < len(logprobs) else None
        logprob, rank = (None, None) if found is None else (found.logprob, found.rank)
        rows.append((token, fate, source, position, logprob, rank))
    return rows
