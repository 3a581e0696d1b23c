"""`/v1/responses`: OpenAI's fields as far as this server has them; a body is read as that of a chat."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from speculon.core.errors import InvalidParameter
from speculon.core.media.parts import TEXT_PARTS, PartType, read_content
from speculon.server.completions import read_chat
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest
from speculon.server.schemas import (
    AS_WHOLE,
    FIRST,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Arguments,
    Body,
    ChatRequest,
    Common,
    Count,
    Extensible,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    MessagePart,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    OfFunction,
    ResponseFormat,
    Tool,
)

NOT_STORED = "responses are not stored on this server: send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
# fields that a chat has under the same name
SAME = (*Common.model_fields, "parallel_tool_calls", "chat_template_kwargs", "store")
ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools", "user")  # by `ResponseAnswer`
TEXT = (*TEXT_PARTS, "reasoning_text", "refusal")
# a chat's fields -> those of a response; longer names first
NAMES = {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tool_choice.function.name": "tool_choice.name",
}


class Part(Extensible):
    type: PartType | Literal["reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


Parts = str | Annotated[list[Part], FIRST, Field(max_length=MAX_PARTS)]


class Item(Extensible):
    """A message, the thinking before it, a call of a function, or what the function returned."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Arguments = "{}"
    output: Parts | None = None


# `type` is the first field of both: of several faults the first is named
class FunctionTool(Function, OfFunction):
    pass


class NamedFunctionTool(NamedFunction, OfFunction):
    pass


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False  # ignored


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponseRequest(Common):
    input: str | Annotated[list[Item], FIRST, Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), AS_WHOLE] | None = None
    include: Annotated[list[Include], FIRST] | None = Field(None, max_length=8)
    tools: Annotated[list[FunctionTool], FIRST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = Field(None, description="no response is stored; false: it is not captured either")
    previous_response_id: str | None = Field(None, description="refused: no response is stored")
    conversation: str | dict[str, Any] | None = Field(None, description="refused: no response is stored")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # without an effect on the text
    metadata: dict[str, str] | None = Field(None, max_length=16)
    reasoning: dict[str, Any] | None = None
    max_tool_calls: Count | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None


class ResponseObject(Extensible):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


def read_response(body: ResponseRequest, model: ServedModel) -> GenerationRequest:
    for name in ("previous_response_id", "conversation"):
        if (value := getattr(body, name)) is not None:
            raise InvalidParameter(name, value, NOT_STORED)
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", body.stream_options.model_dump(), "only with stream = true")
    check_echo(body)
    try:
        request = read_chat(as_chat(body), model)
    except InvalidParameter as error:
        raise error.renamed(name_in(body, error.name)) from None
    form, prompt_name = request.form, NAMES.get(request.prompt_name, request.prompt_name)
    form = form and form._replace(name=NAMES.get(form.name, form.name))
    return replace(request, form=form, prompt_name=prompt_name)


def name_in(body: ResponseRequest, name: str) -> str:
    """The field of a response that is a field of the same request as a chat."""
    messages, number, *rest = f"{name}..".split(".")
    if messages != "messages" or not number:
        return NAMES.get(name, name)
    fields = [field for field, _ in read_messages(body)]
    return ".".join([fields[int(number)], *filter(None, rest)])


def check_echo(body: ResponseRequest) -> None:
    """Raises for what the answer shows again, and JSON cannot hold: NaN, halves of surrogate pairs."""
    for name in ECHOED:
        try:
            json.dumps(body.model_dump(include={name}), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise InvalidParameter(name, None, "has a value that JSON cannot hold") from None


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The same request as a chat. Its parts were checked with the body, so they are not checked again."""
    with_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    functions = [Function(**tool.model_dump(exclude={"type"})) for tool in body.tools or ()]
    tools = [Tool(type="function", function=function) for function in functions] or None
    choice: Any = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SAME},
        messages=[message for _, message in read_messages(body)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=choice,
        response_format=read_format(body.text.format) if body.text and body.text.format else None,
    )


def read_messages(body: ResponseRequest) -> list[tuple[str, Message]]:
    """The messages of a response, each with the field that begins it."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    fields = ["instructions"] * len(messages)
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
        fields.append("input")
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        add_item(messages, item, f"input.{i}")
        fields += [f"input.{i}"] * (len(messages) - len(fields))
    return list(zip(fields, messages, strict=True))


def add_item(messages: list[Message], item: Item, name: str) -> None:
    """Adds an item to a conversation. A call belongs to an assistant's message right before it, and a
    thinking to what comes right after it.
    """
    if item.type == "reasoning":
        if text := plain_text(item.content or ""):
            messages.append(Message(role="assistant", reasoning_content=text))
    elif item.type == "function_call":
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        last = messages[-1]
        messages[-1] = last.model_copy(
            update={"tool_calls": [*(last.tool_calls or ()), read_call(item, name)]}
        )
    elif item.type == "function_call_output":
        content = content_of(needed(item, "output", name), f"{name}.output")
        messages.append(Message(role="tool", tool_call_id=needed(item, "call_id", name), content=content))
    else:
        role, content = needed(item, "role", name), needed(item, "content", name)
        content = content_of(content, f"{name}.content")
        if role == "assistant" and messages and is_thinking(messages[-1]):
            messages[-1] = messages[-1].model_copy(update={"content": content})
        else:
            messages.append(Message(role=role, content=content))


def is_thinking(message: Message) -> bool:
    """Whether a message has a thinking alone so far."""
    return message.content is None and not message.tool_calls and bool(message.model_extra)


def read_call(item: Item, name: str) -> MessageToolCall:
    function = FunctionCall(name=needed(item, "name", name), arguments=item.arguments)
    return MessageToolCall(id=needed(item, "call_id", name), function=function)


def needed(item: Item, field: str, name: str) -> Any:
    if (value := getattr(item, field)) is None:
        raise InvalidParameter(f"{name}.{field}", None, f"is needed in a {item.type}")
    return value


def content_of(parts: Parts, name: str) -> str | list[MessagePart]:
    """The content of a message: a text, or with images its parts. Refuses those of other media by `name`."""
    if isinstance(parts, str) or all(part.type in TEXT for part in parts):
        return plain_text(parts)
    blank = {"type": "text", "text": ""}
    read_content([blank if part.type in TEXT else part.model_dump() for part in parts], name)
    return [
        MessagePart(type="text", text=plain_text([part]))
        if part.type in TEXT
        else MessagePart(type="input_image", image_url=part.image_url)
        for part in parts
    ]


def plain_text(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "".join(part.text or part.refusal or "" for part in parts)


def read_format(form: TextFormat) -> ResponseFormat:
    if form.schema_ is None:
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=JsonSchema(name=form.name, schema=form.schema_))
