"""Bodies of `/v1/responses`: OpenAI's fields as far as this server has them, and our `speculation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from speculon.server.schemas import (
    AS_WHOLE,
    FIRST,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Body,
    CacheControl,
    Common,
    Count,
    Extensible,
    ToolName,
)


class Part(Extensible):
    type: Literal["input_text", "output_text", "reasoning_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Parts = str | Annotated[list[Part], FIRST, Field(max_length=MAX_PARTS)]


class Item(Extensible):
    """A message, the thinking before it, a call of a function, or what the function returned."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None


class FunctionTool(Body):
    type: Literal["function"]  # first: of several faults the first is named
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl = None


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: str


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
