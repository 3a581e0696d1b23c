"""The synchronous front door."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

import torch

from speculon.config import EngineConfig, RequestSpeculation, SamplingParams, SpeculationConfig
from speculon.core import Event, FinishReason, TokenLogprobs
from speculon.engine.engine import Engine
from speculon.errors import InvalidParameter, InvalidRequest
from speculon.models.load import load_target, load_tokenizer
from speculon.telemetry import RequestStats, SpeculationStats
from speculon.text import Stream, Tokenizer, final_text

Prompt = str | Seq[int]
Message = Mapping[str, Any]
Speculation = RequestSpeculation | Mapping[str, Any] | None


@dataclass(slots=True)
class Completion:
    """One text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # without the stop token
    finish_reason: FinishReason | None = None
    stop: str | int | None = None  # the stop string or token that ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def reasons(self) -> dict[str, int]:
        """Why rounds were not speculative, and how often each."""
        return dict(self.stats.reasons)

    @property
    def speculation(self) -> SpeculationStats | None:
        """What speculation did; None when no round ran."""
        return self.stats.speculation()


@dataclass(slots=True)
class RequestOutput:
    """All n texts of one prompt; the first one's fields are also here."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token, which nothing precedes

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def reasons(self) -> dict[str, int]:
        return self.outputs[0].reasons

    @property
    def speculation(self) -> SpeculationStats | None:
        return self.outputs[0].speculation

    def to_dict(self) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = [
            {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop": one.stop,
                "logprobs": one.logprobs and [asdict(lp) for lp in one.logprobs],
                "reasons": one.reasons,
                "speculation": one.speculation and one.speculation.to_dict(),
            }
            for one in self.outputs
        ]
        prompt_logprobs: list[Any] | None = self.prompt_logprobs and [lp and asdict(lp) for lp in self.prompt_logprobs]
        return {"prompt_token_ids": self.prompt_token_ids, "prompt_logprobs": prompt_logprobs, "outputs": outputs}


class LLM:
    """A model with its engine.

    >>> llm = LLM("demo")
    >>> llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))[0].text

    Keywords are the fields of `EngineConfig`. Raises `ModelError` for a checkpoint that cannot be used, `ConfigError`
    for a setting that is wrong.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ):
        if model is not None:
            settings["model"] = model
        if speculation is not None:
            settings["speculation"] = speculation
        self.config = with_own_draft(EngineConfig(**settings))
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        target = load_target(
            self.config.model,
            dtype=self.config.dtype,
            device=self.config.device,
            trust_remote_code=self.config.trust_remote_code,
            allow_pickle=self.config.allow_pickle,
            max_context=self.config.max_context,
            fused=self.config.fuse,
            compile=self.config.compile,
            progress=progress,
        )
        self.tokenizer = Tokenizer(load_tokenizer(self.config.model, trust_remote_code=self.config.trust_remote_code))
        self.engine = Engine(target, self.tokenizer, self.config)
        self._unread: dict[str, list[Event]] = {}  # news by request: who steps the engine brings them to everybody

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: Speculation | Seq[Speculation] = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt (text, or token ids), all at once, in the order given.

        `params` and `speculation` are one for all or one per prompt. `on_token(prompt index, new tokens)` is called
        as texts grow. When one prompt is refused nothing is written for any.
        """
        many = as_list(prompts)
        each = one_per_prompt("params", SamplingParams() if params is None else params, len(many), SamplingParams)
        asked = one_per_prompt("speculation", speculation, len(many), (RequestSpeculation, Mapping, type(None)))
        ids = [self._encode(prompt) for prompt in many]
        outputs = [RequestOutput(i, [Completion() for _ in range(p.n)]) for i, p in zip(ids, each, strict=True)]
        place: dict[str, int] = {}
        unfinished = sum(p.n for p in each)
        try:
            for i, (prompt, p, s) in enumerate(zip(ids, each, asked, strict=True)):
                place[self._begin(prompt, p, s)] = i
            while unfinished:
                self._step()
                for request_id, at in place.items():
                    for event in self._news(request_id):
                        absorb(outputs[at], event)
                        unfinished -= event.finish is not None
                        if on_token and event.tokens:
                            on_token(at, len(event.tokens))
        finally:
            for request_id in place:
                self._end(request_id)
        if not self.engine.has_work:
            self.engine.check_integrity()
        for output, p in zip(outputs, each, strict=True):
            self._write_text(output, p)
        return outputs

    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation = None,
    ) -> RequestOutput:
        """Answers a conversation through the checkpoint's chat template."""
        return self.generate([self.tokenizer.apply_chat(messages)], params, speculation=speculation)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Speculation = None) -> Iterator[str]:
        """Yields the text of one prompt as it is written. Closing the iterator aborts the request."""
        params = params or SamplingParams()
        text = Stream(self.tokenizer, stops=params.stop, skip_special_tokens=params.skip_special_tokens)
        with closing(self.events(prompt, params, speculation=speculation)) as events:
            for event in events:
                new = text.push(event.tokens) + (text.flush(event.finish.matched) if event.finish else "")
                if new:
                    yield new

    def events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: Speculation = None
    ) -> Generator[Event, None, None]:
        """Yields what each step brings to one prompt. Closing the generator aborts the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidParameter("n", params.n, "a stream carries one text")
        request_id = self._begin(self._encode(prompt), params, speculation)
        try:
            finished = False
            while not finished:
                if not self._unread[request_id]:
                    self._step()
                for event in self._news(request_id):
                    finished = event.finish is not None
                    yield event
        finally:
            self._end(request_id)

    def session(self, params: SamplingParams | None = None, *, system: str | None = None) -> Session:
        """A conversation whose earlier turns stay in pages."""
        return Session(self, params or SamplingParams(), system)

    def _begin(self, prompt: list[int], params: SamplingParams, speculation: Speculation) -> str:
        request_id = self.engine.add_request(prompt, params, speculation)
        self._unread[request_id] = []
        return request_id

    def _step(self) -> None:
        for event in self.engine.step():
            if event.request_id in self._unread:
                self._unread[event.request_id].append(event)

    def _news(self, request_id: str) -> list[Event]:
        """What came since the last call."""
        news, self._unread[request_id] = self._unread[request_id], []
        return news

    def _end(self, request_id: str) -> None:
        del self._unread[request_id]
        self.engine.abort(request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not is_list(prompt) or not all(isinstance(token, int) for token in prompt):
            raise InvalidParameter("prompt", prompt, "a string or a list of token ids")
        return list(prompt)

    def _write_text(self, output: RequestOutput, params: SamplingParams) -> None:
        for one in output.outputs:
            one.text = final_text(self.tokenizer, one.token_ids, one.stop, params.skip_special_tokens)


def with_own_draft(config: EngineConfig) -> EngineConfig:
    """The shipped model comes with a draft; one that is set stays."""
    if config.model != "demo" or config.speculation.draft is not None:
        return config
    return config.model_copy(update={"speculation": config.speculation.model_copy(update={"draft": "demo-draft"})})


class Session:
    """A conversation. The tokens of earlier turns are sent again as they were, so their pages are found again."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None):
        self.llm, self.params = llm, params
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._tokens: list[int] = []
        self._rendered = ""  # the template's text that `_tokens` stand for

    def send(self, content: str, params: SamplingParams | None = None, *, speculation: Speculation = None) -> RequestOutput:
        """Adds a user's turn and returns the answer; a refused turn leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt = self._prompt(messages)
        output = self.llm.generate([prompt], params or self.params, speculation=speculation)[0]
        self.messages = [*messages, {"role": "assistant", "content": output.text}]
        self._tokens = [*prompt, *output.token_ids]
        # a stop string is in the tokens but not in the text: the next prompt is then made from the text again
        ended_by_string = isinstance(output.outputs[0].stop, str)
        self._rendered = "" if ended_by_string else self.llm.tokenizer.render_chat(messages) + output.text
        return output

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.llm.tokenizer.render_chat(messages)
        if self._rendered and text.startswith(self._rendered):
            return [*self._tokens, *self.llm.tokenizer.encode(text[len(self._rendered) :], add_special_tokens=False)]
        return self.llm.tokenizer.apply_chat(messages)


def absorb(output: RequestOutput, event: Event) -> None:
    """Adds one event to the result it belongs to."""
    one = output.outputs[event.sample]
    one.token_ids.extend(event.tokens)
    if event.logprobs is not None:
        one.logprobs = [*(one.logprobs or ()), *event.logprobs]
    if event.prompt_logprobs is not None and event.sample == 0:
        known = output.prompt_logprobs or [None]
        output.prompt_logprobs = [*known, *event.prompt_logprobs]
    if event.finish:
        one.finish_reason, one.stop = event.finish.reason, event.finish.matched
    if event.stats is not None:
        one.stats = event.stats


def is_list(value: object) -> TypeGuard[Seq[Any]]:
    return isinstance(value, Seq) and not isinstance(value, str | bytes | bytearray)


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Several prompts as they are; a single string, or a single list of token ids, as a list of one."""
    if isinstance(prompts, str) or (is_list(prompts) and len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    if not is_list(prompts):
        raise InvalidParameter("prompts", prompts, "a string, a list of token ids, or a list of these")
    return list(prompts)


def one_per_prompt(name: str, value: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    if not is_list(value) or not all(isinstance(one, kind) for one in value):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise InvalidParameter(name, value, f"takes {kinds}, or a list with one per prompt")
    if len(value) != count:
        raise InvalidRequest(f"{name}: {len(value)} given for {count} prompts")
    return list(value)
