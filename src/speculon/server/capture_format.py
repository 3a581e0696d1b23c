"""The format of captured traffic: a line of JSON per choice, as trainers read chats and completions.

A prompt is kept as bytes, open at its end, where the reply follows. As objects a long conversation would
take many times its size while the reply is generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from speculon.decoding.text.deltas import merge_deltas
from speculon.server.answer import Answer
from speculon.server.choice import Choice
from speculon.server.model import ServedModel
from speculon.server.request import text_of
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, Sampling, Tool

COMPLETE = ("stop", "length", "tool_calls")  # finish reasons; not `abort`, not `error`


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
    fields = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    fields["content"] = None if message.content is None else text_of(message.content)
    if isinstance(reasoning := (message.model_extra or {}).get("reasoning_content"), str):
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
        start, meta = request.captured_prompts[prompt], as_json(meta_of(answer, choice, key))
        if request.chat:
            yield start + as_json(message) + b"], " + meta[1:] + b"\n"
        else:
            text = as_json({"completion": message["content"][choice.echoed :]})
            yield start + text[1:-1] + b", " + meta[1:] + b"\n"


def meta_of(answer: Answer, choice: Choice, key: str) -> dict[str, Any]:
    """The fields that every line has."""
    request = answer.request
    return {
        "id": answer.id,
        "index": choice.index,
        "time": answer.created,
        "model": answer.model,
        "key": key,
        "finish_reason": choice.finish_reason,
        "temperature": request.params.temperature,
        "prompt_tokens": len(request.prompts[choice.index // request.params.n]),
        "tokens": choice.tokens,
    }


def as_json(value: Any) -> bytes:
    """As UTF-8. Half a surrogate pair, which names and ids may have, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
