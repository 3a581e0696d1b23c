"""Captured traffic: a server's own requests and answers, as lines to train drafters on.

A line is JSON, one per choice, as trainers read chats and completions. A prompt is kept as bytes, open at its
end, where the reply follows: as objects a long conversation would take many times its size meanwhile. Each
API key has a folder, named by a digest of the key. A fault here loses lines and never an answer. Half a line,
which a kill may leave, is cut off at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import Future
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import ConfigError
from speculon.core.media.parts import IMAGE, read_messages
from speculon.decoding.text.deltas import merge_deltas
from speculon.server.answer import Answer
from speculon.server.line_files import Files
from speculon.server.middleware import tenant_of
from speculon.server.model import ServedModel
from speculon.server.request import template_message
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, Sampling, Tool

GB = 2**30
# of answers that wait for a slow disk, roughly; beyond that they are lost, and counted
PENDING_BYTES = 2**26
COMPLETE = ("stop", "length", "tool_calls")  # finish reasons; not `abort`, not `error`

log = logging.getLogger("speculon.server")

Written = tuple[int, int, int]  # choices written, their bytes, choices lost


def label_of(tenant: str) -> str:
    """Stands for an API key in file names and lines."""
    return tenant[:32]


class Capture:
    """Writes answers to files in a thread of its own; its counters change on the event loop alone."""

    @classmethod
    def of(cls, config: ServeConfig) -> Capture | None:
        """None without the setting. Raises `ConfigError` for a folder that cannot be used."""
        if config.capture is None:
            return None
        try:
            files = Files(config.capture, int(config.capture_gb * GB))
        except OSError as error:
            raise ConfigError(
                f"capture: {error.filename or config.capture}: {error.strerror or error}"
            ) from None
        return cls(files, frozenset(tenant_of(key.get_secret_value().encode()) for key in config.capture_key))

    def __init__(self, files: Files, only: frozenset[str] = frozenset()):
        self._files, self._only = files, only  # tenants; empty: all
        self.writer = ThreadPoolExecutor(1, "speculon-capture")
        self._pending = 0  # bytes that wait for the disk
        self.open = True
        self.written = self.bytes = self.lost = 0

    @property
    def disk_bytes(self) -> int:
        """In blocks."""
        return self._files.disk_bytes

    def take(self, answer: Answer) -> None:
        """Has the choices of a complete answer written, where they are to be captured."""
        request, label = answer.request, label_of(answer.tenant)
        excluded = self._only and answer.tenant not in self._only
        if not request.captured_prompts or excluded or not is_complete(answer):
            return
        size = sum(map(len, request.captured_prompts)) * request.params.n + answer.tokens
        if not self.open or (self._pending and self._pending + size > PENDING_BYTES):
            self.lost += request.sequences
            return
        self._pending += size
        writing = asyncio.get_running_loop().run_in_executor(self.writer, self._write, answer, label)
        writing.add_done_callback(partial(self._count, size))

    async def forget(self, tenant: str) -> int:
        """Deletes all of a tenant, after the lines that still wait are written; returns how many files."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.writer, self._files.forget, label_of(tenant))

    async def close(self) -> None:
        """Writes the lines that still wait."""
        await asyncio.get_running_loop().run_in_executor(self.writer, lambda: None)
        self.open = False
        self.writer.shutdown(wait=False)

    def _write(self, answer: Answer, label: str) -> Written:
        written = size = lost = 0
        for line in lines_of(answer, label):
            if self.open and self._append(label, line):
                written, size = written + 1, size + len(line)
            else:
                lost += 1
        return written, size, lost

    def _append(self, label: str, line: bytes) -> bool:
        try:
            return self._files.append(label, line)
        except OSError as error:
            self.open = False
            path, why = error.filename or self._files.root, error.strerror or error
            log.warning("capture has ended: %s: %s", path, why)
            return False

    def _count(self, size: int, writing: Future[Written]) -> None:
        self._pending -= size
        if fault := writing.exception():
            self.open = False
            log.error("capture has ended because of a fault in its own code", exc_info=fault)
            return
        written, size, lost = writing.result()
        self.written, self.bytes, self.lost = self.written + written, self.bytes + size, self.lost + lost


# the format of lines


def chat_prompt(body: ChatRequest, tools: list[Tool], model: ServedModel) -> tuple[bytes, ...]:
    """A conversation as it was sent, up to where the reply comes; empty where it is not captured."""
    as_sent = body.messages and body.add_generation_prompt is not False
    if not as_sent or not may_be_captured(body, model):
        return ()
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    fields["messages"] = [message_fields(message) for message in body.messages or ()]
    return (as_json(fields)[:-2] + b", ",)


def completion_prompts(
    body: CompletionRequest, prompts: list[list[int]], model: ServedModel
) -> tuple[bytes, ...]:
    """Each prompt as text; empty where they are not captured."""
    # with unknown ids the engine refuses the request
    known = all(token < model.vocab_size for ids in prompts for token in ids)
    if not known or not may_be_captured(body, model):
        return ()
    texts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt or [None]
    if body.suffix or not isinstance(texts[0], str):
        texts = [model.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    return tuple(as_json({"prompt": text})[:-1] + b", " for text in texts)


def may_be_captured(body: Sampling, model: ServedModel) -> bool:
    """Whether settings and client allow it: `store` is not false, `speculation.pool` not empty."""
    refused = body.store is False or (body.speculation is not None and body.speculation.pool == "")
    return model.config.capture is not None and not refused


def message_fields(message: Message) -> dict[str, Any]:
    """Text and tool calls. Of the fields beyond OpenAI's only `reasoning_content`: others may be large."""
    (read,), images = read_messages([template_message(message)])
    fields = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    no_content = message.content is None and message.refusal is None
    fields["content"] = None if no_content else read["content"].replace(IMAGE, "")
    if images:  # no pixels are kept
        fields["images"] = len(images)
    if isinstance(reasoning := read.get("reasoning_content"), str):
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return fields


def is_complete(answer: Answer) -> bool:
    """Whether every choice ended by itself; aborted and failed requests are not captured."""
    return all(choice.finish_reason in COMPLETE for choice in answer.choices)


def lines_of(answer: Answer, key: str) -> Iterator[bytes]:
    """One line per choice that has tokens; `key` is the label of the API key."""
    request = answer.request
    for choice in answer.choices:
        if not choice.tokens:
            continue
        prompt, message = choice.index // request.params.n, merge_deltas(choice.deltas)
        meta = {
            "id": answer.id,
            "index": choice.index,
            "time": answer.created,
            "model": answer.model,
            "key": key,
            "finish_reason": choice.finish_reason,
            "temperature": request.params.temperature,
            "prompt_tokens": len(request.prompts[prompt]),
            "tokens": choice.tokens,
        }
        start, end = request.captured_prompts[prompt], as_json(meta)[1:] + b"\n"
        if request.chat:
            yield start + as_json(message) + b"], " + end
        else:
            text = as_json({"completion": message["content"][choice.echoed :]})
            yield start + text[1:-1] + b", " + end


def as_json(value: Any) -> bytes:
    """As UTF-8. Half a surrogate pair, which names and ids may have, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
