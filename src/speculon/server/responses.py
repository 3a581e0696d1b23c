"""`/v1/responses`: OpenAI's fields as far as this server has them; a body is read as that of a chat."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

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
    AllowedResponseTools,
    AllowedTools,
    Arguments,
    Body,
    ChatRequest,
    Common,
    Count,
    Extensible,
    FewTools,
    FunctionCall,
    HostedTool,
    JsonSchema,
    Message,
    MessagePart,
    MessageToolCall,
    NamedFunction,
    NamedResponseTool,
    NamedTool,
    OverlappingForms,
    ResponseFormat,
    ResponseTool,
    ResponseToolChoice,
    Tool,
    custom_arguments,
)
from speculon.server.tools import (
    OfferedTool,
    hosted_tools,
    log_left_out,
    offered_name,
    offered_tools,
)

NOT_STORED = "responses are not stored on this server: send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
# fields that a chat has under the same name
SAME = (*Common.model_fields, "parallel_tool_calls", "chat_template_kwargs", "store")
ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools", "user")  # by `ResponseAnswer`
TEXT = (*TEXT_PARTS, "reasoning_text", "summary_text", "refusal")
# items of calls that a client runs -> the field with what is called; the items of results have the same name
# and _output
CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
RESULTS = [f"{call}_output" for call in CALLS]
LOCAL_SHELL = "local_shell"  # the name of this tool as the model sees it
# field of a chat -> field of a response; longer names first
NAMES = {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tool_choice.function.name": "tool_choice.name",
}


class ResponsePart(Extensible):
    type: PartType | Literal["reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


Parts = str | Annotated[list[ResponsePart], FIRST, Field(max_length=MAX_PARTS)]


class Item(Extensible):
    """A message, the thinking before it, a call of a tool, or what the tool returned."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    summary: Annotated[list[ResponsePart], FIRST, Field(max_length=MAX_PARTS)] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Arguments = "{}"
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Parts | None = None


class OtherItem(Extensible):
    """An item of a tool that a server runs, or that only its server can read. It is left out."""

    type: str


def item_class(value: Any) -> str:
    """A message has a role, whatever its type is called."""
    kind, role = (
        (value.get("type", "message"), value.get("role"))
        if isinstance(value, dict)
        else (getattr(value, "type", None), getattr(value, "role", None))
    )
    known = kind in ("message", "reasoning", *CALLS, *RESULTS) or role is not None
    return "Item" if known else "OtherItem"


AnyItem = Annotated[
    Annotated[Item, Tag("Item")] | Annotated[OtherItem, Tag("OtherItem")], OverlappingForms(item_class)
]


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


# but for the first, of what this server does not have
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseRequest(Common):
    input: str | Annotated[list[AnyItem], FIRST, Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), AS_WHOLE] | None = None
    include: Annotated[list[Include], FIRST] | None = Field(None, max_length=8)
    tools: Annotated[list[ResponseTool], FIRST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
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
    client_metadata: dict[str, Any] | None = None
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
        raise InvalidParameter("stream_options", body.stream_options.model_dump(), "needs stream = true")
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
    fields = [field for field, _ in read_messages(body, offered_tools(body.tools or ()))]
    return ".".join([fields[int(number)], *filter(None, rest)])


def check_echo(body: ResponseRequest) -> None:
    """Raises for what the answer shows again, and JSON cannot hold: NaN, halves of surrogate pairs."""
    for name in ECHOED:
        try:
            json.dumps(body.model_dump(include={name}), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise InvalidParameter(name, None, "has a value that JSON cannot express") from None


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The same request as a chat. Its parts were checked with the body, so they are not checked again."""
    with_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    log_left_out("items", (item.type for item in body.input if isinstance(item, OtherItem)))
    offered = offered_tools(body.tools or ())
    tools: list[Any] = [Tool(type="function", function=tool.function) for tool in offered]
    tools += hosted_tools(body.tools or ())
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in SAME},
        messages=[message for _, message in read_messages(body, offered)],
        max_completion_tokens=body.max_output_tokens,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs,
        tools=tools or None,
        tool_choice=read_choice(body.tool_choice, offered),
        response_format=read_format(body.text.format) if body.text and body.text.format else None,
    )


def read_choice(choice: Any, offered: list[OfferedTool]) -> Any:
    """A choice of tools in the form of a chat."""

    def named(tool: Any) -> Any:
        if isinstance(tool, HostedTool):
            return tool
        function = NamedFunction(name=offered_name(offered, tool.name, tool.namespace))
        return NamedTool(type="function", function=function)

    if isinstance(choice, AllowedResponseTools):
        few = FewTools(mode=choice.mode, tools=[named(tool) for tool in choice.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=few)
    return named(choice) if isinstance(choice, NamedResponseTool) else choice


def read_messages(body: ResponseRequest, offered: list[OfferedTool]) -> list[tuple[str, Message]]:
    """The messages of a response, each with the field that begins it."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    fields = ["instructions"] * len(messages)
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
        fields.append("input")
    items = body.input if isinstance(body.input, list) else []
    for i, item in enumerate(items):
        if isinstance(item, Item):
            add_item(messages, item, f"input.{i}", offered)
            fields += [f"input.{i}"] * (len(messages) - len(fields))
    return list(zip(fields, messages, strict=True))


def add_item(messages: list[Message], item: Item, name: str, offered: list[OfferedTool]) -> None:
    """Adds an item to a conversation. A call belongs to an assistant's message right before it, and a
    thinking to what comes right after it.
    """
    if item.type == "reasoning":
        if text := plain_text(item.content or item.summary or ""):
            messages.append(Message(role="assistant", reasoning_content=text))
    elif item.type in CALLS:
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        last, call = messages[-1], read_call(item, name, offered)
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})
    elif item.type in RESULTS:
        content = content_of(needed(item, "output", name), f"{name}.output")
        messages.append(Message(role="tool", tool_call_id=call_id_of(item, name), content=content))
    else:
        role, content = needed(item, "role", name), needed(item, "content", name)
        content = content_of(content, f"{name}.content")
        if role == "assistant" and messages and is_thinking(messages[-1]):
            messages[-1] = messages[-1].model_copy(update={"content": content})
        else:
            messages.append(Message(role=role, content=content))


def is_thinking(message: Message) -> bool:
    """Whether a message has nothing but thinking so far."""
    return message.content is None and not message.tool_calls and bool(message.model_extra)


def read_call(item: Item, name: str, offered: list[OfferedTool]) -> MessageToolCall:
    """A call as that of a function, under the name that the model was offered."""
    called = needed(item, CALLS[item.type], name)
    if item.type == "local_shell_call":
        function, arguments = LOCAL_SHELL, json.dumps(called, ensure_ascii=False)
    else:
        function = offered_name(offered, needed(item, "name", name), item.namespace)
        arguments = custom_arguments(called) if item.type == "custom_tool_call" else called
    return MessageToolCall(
        id=call_id_of(item, name), function=FunctionCall(name=function, arguments=arguments)
    )


def call_id_of(item: Item, name: str) -> str:
    """The id that a call and its result share; a local shell may use that of the item."""
    if item.type.startswith("local_shell") and item.call_id is None:
        return str(needed(item, "id", name))
    return str(needed(item, "call_id", name))


def needed(item: Item, field: str, name: str) -> Any:
    if (value := getattr(item, field)) is None:
        raise InvalidParameter(f"{name}.{field}", None, f"is needed in an item of type {item.type}")
    return value


def content_of(parts: Parts, name: str) -> str | list[MessagePart]:
    """The content of a message: a text, or its parts if it has images. Refuses other media under `name`."""
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
