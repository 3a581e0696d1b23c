"""One HTTP answer: the engine's events become OpenAI's choices, as chunks of a stream or as a whole.

A whole answer is the sum of the chunks that a stream would have sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from speculon.core.errors import InvalidParameter
from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Event
from speculon.decoding.text.deltas import Delta, merge_deltas
from speculon.engine.client import EngineClient
from speculon.engine.messages import Add
from speculon.engine.waiting import OutputQueue
from speculon.server.choice import Choice, ChoiceDelta
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest

# guess: seconds that an aborted request waits for the engine's last events; a slow step may take as long
ABORT_SECONDS = 5.0
# of `SpeculationStats`, what is known before the end
IN_PROGRESS = ("rounds", "drafted", "accepted", "target_calls", "tokens_per_target_call")


class Answer:
    """One HTTP answer as it grows. It owns its requests in the engine, one per prompt."""

    DONE = b"data: [DONE]\n\n"  # the end of its stream

    def __init__(self, answer_id: str, request: GenerationRequest, model: ServedModel, tenant: str = ""):
        self.id, self.request, self.model, self.tenant = answer_id, request, model.name, tenant
        self.adapter = model.adapter
        self.tokenizer, self.created = model.tokenizer, int(time.time())
        self.choices: list[Choice] = []
        self._choices_of: dict[str, list[Choice]] = {}  # id of a request in the engine -> its choices
        for i, prompt in enumerate(request.prompts):
            first = i * request.params.n
            echo = request.echo[i] if request.echo else None
            choices = [
                Choice(first + sample, request, model.tokenizer, prompt, echo)
                for sample in range(request.params.n)
            ]
            self.choices += choices
            self._choices_of[f"{answer_id}-{i}"] = choices
        self._outputs: OutputQueue | None = None
        self._deadline: float | None = None
        self._time_limit = model.config.request_timeout

    @property
    def base(self) -> str:
        """The name of the model, without the name of an adapter."""
        return self.model.removesuffix(f":{self.adapter}") if self.adapter else self.model

    def adds(self) -> list[Add]:
        """The messages that submit its prompts. The tenant is the API key's, whatever the body says."""
        request = self.request
        speculation = request.speculation.model_copy(update={"tenant": self.tenant})
        return [
            Add(
                request_id,
                prompt,
                request.params,
                speculation,
                images=request.images,
                adapter=self.adapter,
            )
            for request_id, prompt in zip(self._choices_of, request.prompts, strict=True)
        ]

    async def submit(self, engine: EngineClient) -> None:
        """Submits all prompts or none. Errors name the fields of the client's body."""
        try:
            self._outputs = await engine.submit(self.adds())
        except InvalidParameter as error:
            raise self.request.renamed(error) from None
        if self._time_limit:
            self._deadline = asyncio.get_running_loop().time() + self._time_limit

    async def deltas(self, on_events: Callable[[list[Event]], None]) -> AsyncIterator[list[ChoiceDelta]]:
        """Yields what is new of the choices, in batches. At the time limit the last batch has finish reason
        `abort`.
        """
        assert self._outputs is not None, "submit() comes first"
        aborted = False
        while True:
            try:
                # the timeout must not enclose a yield, because it would cancel the reader of the answer
                async with asyncio.timeout_at(self._deadline):
                    events = await self._outputs.take()
            except TimeoutError:
                if aborted:
                    self.close()
                    yield self.abort()
                    return
                aborted, self._deadline = True, asyncio.get_running_loop().time() + ABORT_SECONDS
                self._outputs.abort()  # the last events carry the statistics
                continue
            if not events:
                return
            on_events(events)
            yield [delta for event in events if (delta := self.push(event)) is not None]

    def close(self) -> None:
        """Ends the open requests in the engine."""
        if self._outputs is not None:
            self._outputs.close()

    def push(self, event: Event) -> ChoiceDelta | None:
        """What an event adds to its choice; None if there is nothing to show."""
        choices = self._choices_of[event.request_id]
        if event.prompt_logprobs:
            for choice in choices:
                choice.push_prompt_logprobs(event.prompt_logprobs)
        if not event.tokens and event.finish is None:
            return None
        return choices[event.sample].push(event)

    def choice_of(self, event: Event) -> Choice:
        return self._choices_of[event.request_id][event.sample]

    def abort(self) -> list[ChoiceDelta]:
        """The last deltas of all choices that have not ended."""
        return [choice.abort() for choice in self.choices if choice.finish is None]

    @property
    def stats(self) -> RequestStats:
        """The statistics of all choices together; of one that has not ended, what is known of it."""
        total = RequestStats()
        for choice in self.choices:
            total.add(choice.stats or choice.so_far)
        return total

    def progress(self) -> dict[str, Any]:
        """The figures of `speculation` that are known while the answer is still being generated."""
        done = self.stats.speculation()
        figures = {name: getattr(done, name) for name in IN_PROGRESS}
        return {"method": self.request.method, **figures}

    @property
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        prompt, stats = sum(map(len, self.request.prompts)), self.stats
        # only of the first sample, because the others find its pages in the cache
        first = [choices[0].stats for choices in self._choices_of.values()]
        cached = sum(sample.cached_tokens for sample in first if sample is not None)
        reasoning = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted_prediction_tokens,
                "rejected_prediction_tokens": stats.rejected_prediction_tokens,
                **(reasoning if self.request.params.thinking else {}),
            },
        }

    def speculation(self) -> dict[str, Any]:
        """The `speculation` object."""
        stats = self.stats
        why = {"reasons": dict(stats.reasons), "changes": stats.change_list(), "prompt": stats.prompt()}
        resumed = {"resumed": self._outputs.resumed} if self._outputs and self._outputs.resumed else {}
        return {"method": self.request.method, **why, **stats.speculation().to_dict(), **resumed}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Before any token: the role of a chat's message."""
        if not self.request.chat:
            return []
        role: Delta = {"role": "assistant", "content": ""}
        return [self.chunk(ChoiceDelta(choice.index, [role])) for choice in self.choices]

    def chunks(self, new: ChoiceDelta) -> list[dict[str, Any]]:
        """The chunks for what an event added. The finish reason has a chunk of its own, because
        some clients ignore the text beside it.
        """
        if new.finish_reason is None or not new.has_content:
            return [self.chunk(new)]
        content, end = new.split()
        return [self.chunk(content), self.chunk(end)]

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that a fault ends; `body` is that of an error."""
        return body

    def chunk(self, new: ChoiceDelta) -> dict[str, Any]:
        end = choice_end(new.logprobs, new, new.tokens)
        if not self.request.chat:
            text = "".join(delta["content"] for delta in new.deltas)
            return self._chunk([{"index": new.index, "text": text, **end}])
        merged: Delta = {}
        for delta in new.deltas:  # an event may end a text and begin a tool call
            for key, value in delta.items():
                merged[key] = merged[key] + value if key in merged else value
        return self._chunk([{"index": new.index, "delta": merged, **end}])

    def last_chunks(self) -> list[dict[str, Any]]:
        """After all tokens: usage and speculation, where requested."""
        usage = {"usage": self.usage()} if self.request.include_usage else {}
        stats = {"speculation": self.speculation()} if self.request.include_stats else {}
        return [{**self._chunk([]), **usage, **stats}] if usage or stats else []

    def whole(self, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choices = [
            self._whole_choice([delta for delta in deltas if delta.index == choice.index])
            for choice in self.choices
        ]
        stats = {"speculation": self.speculation()} if self.request.include_stats else {}
        name = "chat.completion" if self.request.chat else "text_completion"
        return {**self._head(name), "choices": choices, "usage": self.usage(), **stats}

    def _whole_choice(self, parts: list[ChoiceDelta]) -> dict[str, Any]:
        message, last = merge_deltas([delta for part in parts for delta in part.deltas]), parts[-1]
        content = {"message": message} if self.request.chat else {"text": message["content"]}
        logprobs = concatenate([part.logprobs for part in parts if part.logprobs is not None])
        tokens = [token for part in parts for token in part.tokens or ()] if self.request.explain else None
        end = choice_end(logprobs, last, tokens)
        return {"index": last.index, **content, **end}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        request = self.request
        chunk = {
            **self._head("chat.completion.chunk" if request.chat else "text_completion"),
            "choices": choices,
        }
        if request.include_usage:  # before the last chunk what is counted so far, or null
            chunk["usage"] = self.usage() if request.continuous_usage else None
        return chunk

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def choice_end(logprobs: Any, last: ChoiceDelta, tokens: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The fields of a choice after its text."""
    end = {"logprobs": logprobs, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
    return end if tokens is None else {**end, "speculation": {"tokens": tokens}}


def concatenate(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Lists of the same names, end to end."""
    return {key: [value for table in tables for value in table[key]] for key in tables[0]} if tables else None
