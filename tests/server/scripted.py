"""An engine without a model: its prompt scripts its output, its arguments the time and faults of steps.

Everything around it is the real thing: the worker and its pipe, the asynchronous engine, the HTTP server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from speculon.core.config import EngineConfig, RequestSpeculation, SamplingParams
from speculon.core.errors import EmptyPrompt, InvalidParameter, TooLong
from speculon.core.images import ImageInput
from speculon.core.telemetry import PLAIN, EngineCounters, RequestStats
from speculon.core.types import Capability, Finish, Load, Reason, TokenLogprobs
from speculon.decoding.sequence import Event
from speculon.decoding.text.stop_strings import StopStrings
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.messages import Ready
from speculon.speculation.proposers.pools import Pools, key_of
from speculon.speculation.proposers.registry import check_method

EOS, VOCAB, CONTEXT, PAGES = 256, 257, 4096, 64
# the rest of such a prompt is the answer; other prompts are answered with LETTERS until max_tokens
SAY = b"say:"
# such prompts are refused with themselves, fail at admission, or fail every step
REFUSE, FAULT, BREAK = b"refuse:", b"fault:", b"break:"
UNREADABLE = "unreadable:"  # the tokenizer fails at such a text
HANG = b"hang:"  # the step of such a prompt never ends
# how templates that end so open a thinking, and switch it off
OPENED, SWITCHED_OFF = b"<think>\n", b"<think>\n\n</think>\n\n"
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
LP = -0.5


class Bytes:
    """A tokenizer of 256 bytes and an end, as far as `speculon.decoding.text.tokenizer` looks at one."""

    def __init__(self, chat_template: str = "{{ messages }}"):
        self.chat_template = chat_template

    def __len__(self) -> int:
        return VOCAB

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        if text.startswith(UNREADABLE):
            raise KeyError(text)
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Seq[int], **options: Any) -> str:
        return bytes(token for token in ids if token != EOS).decode(errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return None  # no name is known

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>"

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        if not self.chat_template.encode().endswith(OPENED):
            return text
        return text + (OPENED if variables.get("enable_thinking", True) else SWITCHED_OFF).decode()


@dataclass(eq=False)
class Running:
    request_id: str
    sample: int
    prompt: list[int]
    params: SamplingParams
    answer: list[int]  # without an end
    ends: bool  # whether it says all of it and stops
    stops: StopStrings
    pool: str | None = None  # the key of the pool that the answer enters
    written: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


class ScriptedEngine:
    """What `Worker` needs of an engine. Runs `max_num_seqs` sequences; the others wait."""

    def __init__(
        self, config: EngineConfig, step_seconds: float = 0.0, faults: Seq[BaseException | None] = ()
    ):
        self.config, self.tokenizer = config, Tokenizer(Bytes())
        self.step_seconds, self.faults = step_seconds, deque(faults)
        self.counters = EngineCounters()
        limits = config.speculation
        self.pools = Pools(limits.suffix_pools, limits.suffix_pool_tokens, limits.suffix_pool_ttl, VOCAB)
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.aborted: list[str] = []
        self.speculations: list[RequestSpeculation | None] = []  # of each request
        self.images: list[tuple[ImageInput, ...]] = []  # of each request
        self.adapters: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), PAGES - len(self.running))

    @property
    def open_requests(self) -> list[str]:
        return list(dict.fromkeys(text.request_id for text in self.running or self.waiting))

    def facts(self) -> Ready:
        memory = {"held": 100, "pages": 50}
        return Ready(VOCAB, CONTEXT, self.config.max_num_seqs, PAGES, 16, "ngram", memory=memory)

    def current_counters(self) -> EngineCounters:
        totals = RequestStats()
        for stats in (self.counters.totals, *(text.stats for text in self.running)):
            totals.add(stats)
        return replace(self.counters, totals=totals)

    def plain_costs(self) -> dict[int, float]:
        return {1: 2.5}

    def capabilities(self) -> dict[str, Capability]:
        context = Capability("on", "of the script", {"tokens": CONTEXT})
        return {"limits.max_context": context, "methods.ngram": Capability("on", "a lookup")}

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | None = None,
        request_id: str | None = None,
        written: Mapping[int, Seq[int]] | None = None,
        images: Seq[ImageInput] = (),
        adapter: str = "",
    ) -> str:
        assert request_id is not None, "the server names its requests"
        self.speculations.append(speculation)
        self.images.append(tuple(images))
        self.adapters.append(adapter)
        if not prompt:
            raise EmptyPrompt("the prompt has no tokens")
        if (wrong := next((token for token in prompt if token >= VOCAB), None)) is not None:
            limit = f"token ids must be from 0 to {VOCAB - 1}"
            raise InvalidParameter("prompt", wrong, limit).about("limits.vocab_size")
        if len(prompt) + (params.max_tokens or 0) > CONTEXT:
            raise TooLong(f"prompt {len(prompt)} + max_tokens {params.max_tokens} > context {CONTEXT}")
        text = bytes(token for token in prompt if token < EOS)
        if text.startswith(REFUSE):
            raise InvalidParameter("prompt", text.decode(), f"it has the word {text.decode()!r}")
        if text.startswith(FAULT):
            raise KeyError(text.decode())
        if speculation and speculation.method:
            check_method(speculation.method)
        _, says, answer = text.rpartition(SAY)
        answer = answer.removesuffix(SWITCHED_OFF).removesuffix(OPENED)
        options = speculation or RequestSpeculation()
        pool = key_of(options.pool, prompt, options.tenant)
        for sample in range(params.n) if written is None else written:
            answered = list(answer) if says else list(LETTERS)
            stops = StopStrings(params.stop, self.tokenizer)
            self.waiting.append(
                Running(request_id, sample, prompt, params, answered, bool(says), stops, pool)
            )
            self.waiting[-1].written += (written or {}).get(sample, ())
        self.counters.requests += 1
        self.counters.prompt_tokens += len(prompt)
        return request_id

    def step(self) -> list[Event]:
        time.sleep(self.step_seconds)
        if self.faults and (fault := self.faults.popleft()):
            raise fault
        self.counters.steps += 1
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        for text in self.running:
            if bytes(text.prompt[: len(BREAK)]) == BREAK:
                raise RuntimeError(bytes(text.prompt).decode())
        while any(text.prompt[: len(HANG)] == list(HANG) for text in self.running):
            time.sleep(0.01)
        return [self._advance(text) for text in list(self.running)]

    def _advance(self, text: Running) -> Event:
        """One to three tokens: a round of speculation, without the work."""
        count = 1 + len(text.written) % 3
        limit = CONTEXT - len(text.prompt) if text.params.max_tokens is None else text.params.max_tokens
        new, finish = [], None
        while len(new) < count and finish is None:
            at = len(text.written) + len(new)
            if at >= limit:
                finish = Finish("length")
            elif text.ends and at >= len(text.answer):
                finish = Finish("stop")
                text.stats.stop_tokens += 1
            else:
                new.append(text.answer[at % len(text.answer)])
                if found := text.stops.find(text.written, tuple(new)):
                    finish = Finish("stop", found[1])
                elif at + 1 >= limit:
                    finish = Finish("length")
        text.written += new
        text.stats.emitted += len(new)
        text.stats.target_calls += 1
        text.stats.reasons[Reason.NO_MATCH.value] += 1
        text.stats.changes["ngram", PLAIN, Reason.NO_MATCH.value] += 1
        tops = text.params.logprobs
        lps = (
            None
            if tops is None
            else tuple(TokenLogprobs(t, LP, 1, ((t, LP), (EOS, -2.0))[:tops]) for t in new)
        )
        if finish:
            self._end(text, finish)
        stats = text.stats if finish else None
        sources = ("ngram",) * max(0, len(new) - 1)
        drafted = (0, 1, 3)[count - 1]  # plain, then a bonus, then a correction
        return Event(
            *(text.request_id, text.sample, tuple(new), lps, finish, self._prompt_logprobs(text), stats),
            sources=sources,
            drafted=drafted,
        )

    def _prompt_logprobs(self, text: Running) -> tuple[TokenLogprobs, ...] | None:
        if text.params.prompt_logprobs is None or text.sample or text.stats.target_calls > 1:
            return None
        return tuple(TokenLogprobs(token, LP, 1, ()) for token in text.prompt[1:])

    def _end(self, text: Running, finish: Finish) -> None:
        (self.running if text in self.running else self.waiting).remove(text)
        self.counters.finished[finish.reason] += 1
        self.counters.totals.add(text.stats)
        if text.pool is not None:
            self.pools.add(text.pool, text.written)
        self._count_pools()

    def abort(self, request_id: str) -> list[Event]:
        ended = [text for text in [*self.running, *self.waiting] if text.request_id == request_id]
        finish = Finish("abort")
        for text in ended:
            self.aborted.append(request_id)
            self._end(text, finish)
        return [Event(request_id, text.sample, (), finish=finish, stats=text.stats) for text in ended]

    def forget_pools(self, pool: str | None = None, tenant: str = "") -> int:
        count = self.pools.forget(tenant, pool)
        self._count_pools()
        return count

    def _count_pools(self) -> None:
        sizes = self.pools.sizes
        self.counters.pools, self.counters.pool_tokens = len(sizes), sum(sizes.values())

    def close(self) -> None:
        """It records nothing."""

    def check_integrity(self) -> None:
        assert not self.running and not self.waiting
