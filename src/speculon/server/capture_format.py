"""What is written of a request that was answered: a line of JSON per text, as trainers read chats and
completions.

The question is kept as bytes, open at its end, where each text's answer goes on: held as objects while the
answer is written, a long conversation would take many times its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from speculon.server.answer import Answer
from speculon.server.tool_calls import join
from speculon.server.request import House, text_of
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, Sampling, Tool

ENDED = ("stop", "length", "tool_calls")  # by themselves; not `abort`, not `error`


def ask_chat(body: ChatRequest, tools: list[Tool], house: House) -> tuple[bytes, ...]:
    """A conversation as it was sent, up to where the answer comes; nothing where nothing is to be kept."""
    if not may_be_kept(body, house):
        return ()
    more: dict[str, Any] = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
    more |= {"chat_template_kwargs": body.chat_template_kwargs} if body.chat_template_kwargs else {}
    return (as_json(more | {"messages": [message_of(message) for message in body.messages]})[:-2] + b", ",)


def ask_completion(body: CompletionRequest, prompts: list[list[int]], house: House) -> tuple[bytes, ...]:
    """Each prompt as text; nothing where nothing is to be kept."""
    # or the engine refuses the request
    known = all(token < house.vocab_size for ids in prompts for token in ids)
    if not known or not may_be_kept(body, house):
        return ()
    said: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(said[0], str):
        said = [house.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    return tuple(as_json({"prompt": text})[:-1] + b", " for text in said)


def may_be_kept(body: Sampling, house: House) -> bool:
    """Neither against the server's settings nor against the client's word: `store`, or a pool that is
    nobody's.
    """
    unremembered = body.speculation is not None and body.speculation.pool == ""
    return house.config.capture is not None and body.store is not False and not unremembered


def message_of(message: Message) -> dict[str, Any]:
    """Text and calls; of the fields beyond OpenAI's only what templates read as text: a field may hold
    anything, and be large.
    """
    told = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    told["content"] = None if message.content is None else text_of(message.content)
    if isinstance(thought := (message.model_extra or {}).get("reasoning_content"), str):
        told["reasoning_content"] = thought
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return told


def ended_well(answer: Answer) -> bool:
    """Whether every text ended by itself: of an aborted or failed request nothing is kept."""
    return all(text.reason in ENDED for text in answer.texts)


def lines_of(answer: Answer, key: str) -> Iterator[bytes]:
    """One line per text that says anything; `key` is what stands for the API key."""
    job = answer.job
    for i, text in enumerate(answer.texts):
        if not text.tokens:
            continue
        question, message = job.asked[i // job.params.n], join(text.said)
        meta = {
            "id": answer.id,
            "index": text.index,
            "time": answer.created,
            "model": answer.model,
            "key": key,
            "finish_reason": text.reason,
            "temperature": job.params.temperature,
            "prompt_tokens": len(job.prompts[i // job.params.n]),
            "tokens": text.tokens,
        }
        if job.kind == "chat.completion":
            yield question + as_json(message) + b"], " + as_json(meta)[1:] + b"\n"
        else:
            yield question + as_json({"completion": message["content"][text.echoed :], **meta})[1:] + b"\n"


def as_json(value: Any) -> bytes:
    """Half a surrogate pair, which names and ids may have, becomes a question mark: a line is UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
