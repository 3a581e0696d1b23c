"""`/v1/responses`: its body as that of a chat, or a refusal by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from speculon.core.errors import InvalidParameter
from speculon.server.completions import read_chat
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest
from speculon.server.response_schemas import (
    FunctionTool,
    Item,
    NamedFunctionTool,
    Parts,
    ResponseRequest,
    TextFormat,
)
from speculon.server.schemas import (
    ChatRequest,
    Common,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
)

NOT_STORED = "responses are not stored on this server: send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
# fields that a chat has under the same name
SAME = (*Common.model_fields, "parallel_tool_calls", "chat_template_kwargs", "store")
ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools", "user")  # by `ResponseAnswer`
# a chat's fields -> those of a response; longer names first
NAMES = {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tool_choice.function.name": "tool_choice.name",
}


def read_response(body: ResponseRequest, model: ServedModel) -> GenerationRequest:
    for name in ("previous_response_id", "conversation"):
        if (value := getattr(body, name)) is not None:
            raise InvalidParameter(name, value, NOT_STORED)
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", body.stream_options.model_dump(), "only with stream = true")
    check_echo(body)
    try:
        request = read_chat(chat_of(body), model)
    except InvalidParameter as error:
        raise error.renamed(NAMES.get(error.name, error.name)) from None
    form, prompt_name = request.form, NAMES.get(request.prompt_name, request.prompt_name)
    form = form and form._replace(name=NAMES.get(form.name, form.name))
    return replace(request, form=form, prompt_name=prompt_name)


def check_echo(body: ResponseRequest) -> None:
    """Raises for what the answer shows again, and JSON cannot hold: NaN, halves of surrogate pairs."""
    for name in ECHOED:
        try:
            json.dumps(body.model_dump(include={name}), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise InvalidParameter(name, None, "has a value that JSON cannot hold") from None


def chat_of(body: ResponseRequest) -> ChatRequest:
    """The same request as a chat. Its parts were checked with the body, so they are not checked again."""
    with_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SAME},
        messages=messages_of(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs,
        tools=[tool_of(tool) for tool in body.tools] if body.tools else None,
        tool_choice=choice_of(body.tool_choice),
        response_format=format_of(body.text.format) if body.text and body.text.format else None,
    )


def messages_of(body: ResponseRequest) -> list[Message]:
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    for i, item in enumerate(items):
        add_item(messages, item, f"input.{i}")
    return messages


def add_item(messages: list[Message], item: Item, name: str) -> None:
    """Adds an item to a conversation. A call belongs to an assistant's message right before it, and a
    thinking to what comes right after it.
    """
    if item.type == "reasoning":
        if text := text_of(item.content or ""):
            messages.append(Message(role="assistant", reasoning_content=text))
    elif item.type == "function_call":
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        last = messages[-1]
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call_of(item, name)]})
    elif item.type == "function_call_output":
        content = text_of(needed(item, "output", name))
        messages.append(Message(role="tool", tool_call_id=needed(item, "call_id", name), content=content))
    else:
        role, content = needed(item, "role", name), text_of(needed(item, "content", name))
        if role == "assistant" and messages and is_thinking(messages[-1]):
            messages[-1] = messages[-1].model_copy(update={"content": content})
        else:
            messages.append(Message(role=role, content=content))


def is_thinking(message: Message) -> bool:
    """Whether a message has a thinking alone so far."""
    return message.content is None and not message.tool_calls and bool(message.model_extra)


def call_of(item: Item, name: str) -> MessageToolCall:
    function, arguments = needed(item, "name", name), needed(item, "arguments", name)
    return MessageToolCall(
        id=needed(item, "call_id", name), function=FunctionCall(name=function, arguments=arguments)
    )


def needed(item: Item, field: str, name: str) -> Any:
    if (value := getattr(item, field)) is None:
        raise InvalidParameter(f"{name}.{field}", None, f"is needed in a {item.type}")
    return value


def text_of(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "".join(part.text or part.refusal or "" for part in parts)


def tool_of(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def choice_of(choice: str | NamedFunctionTool | None) -> Any:
    if not isinstance(choice, NamedFunctionTool):
        return choice
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def format_of(form: TextFormat) -> ResponseFormat:
    if form.schema_ is None:
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=JsonSchema(name=form.name, schema=form.schema_))
