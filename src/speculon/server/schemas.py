"""Bodies of the HTTP surface: OpenAI's fields, the sampling fields that other servers added, and our
`speculation`.

What is unknown is refused by name. What OpenAI takes without any effect on the text is taken and ignored
(`Ignored`). Ranges are judged once, by `SamplingParams`; here stand the types and what bounds a list.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from speculon.config import MAX_BIASES, MAX_DRAFTS, MAX_LOGPROBS, MAX_SAMPLES, Acceptance

MAX_PROMPTS = 64  # of one completions request
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128  # as OpenAI
MAX_TOP_LOGPROBS = 20  # as OpenAI, in a chat

Finite = Annotated[float, Field(allow_inf_nan=False)]
# 5.0 is 5
AS_WHOLE = BeforeValidator(lambda said: int(said) if isinstance(said, float) and said.is_integer() else said)
Whole = Annotated[int, AS_WHOLE]
Count = Annotated[int, Field(ge=0, le=2**31), AS_WHOLE]
TokenId = Count
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES), AS_WHOLE]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

# of a list's faults: a list of a million would hold up every stream while its errors are written
FIRST = Field(fail_fast=True)


def few(said: Any) -> Any:
    """Of too many biases none is looked at."""
    if isinstance(said, dict) and len(said) > MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {most} of them", {"most": MAX_BIASES})
    return said


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def first_unknown(cls, said: Any) -> Any:
        """Of many unknown fields one is enough to refuse a body."""
        if not isinstance(said, dict) or len(said) <= len(cls.model_fields):
            return said
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {*known, next(name for name in said if name not in known)}
        return {name: value for name, value in said.items() if name in kept}


class Open(BaseModel):
    """Carries more than is read of it."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], FIRST, Field(max_length=MAX_PARTS)]


class Prediction(Body):
    """What the client expects the answer to be (OpenAI's Predicted Outputs)."""

    type: Literal["content"]
    content: Content


class Speculation(Body):
    """What this request wants of speculation."""

    method: str | None = Field(None, description="what drafts: `off`, `auto`, `ngram`, `draft_model`, ...")
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFTS), AS_WHOLE] | None = Field(
        None, description="drafts per round; 0 is off"
    )
    acceptance: Acceptance | None = None
    chained_drafts: bool | None = Field(
        None, description="whether lookups continue the draft of another method"
    )
    policy: str | None = Field(
        None, description="how far to speculate: `goodput`, `fixed`, `adaptive`, `solo`, `shadow`"
    )
    pool: str | None = Field(
        None,
        max_length=256,
        description="whose earlier answers may be drafted from, among those to this API key; in place of the caller's name "
        "(`safety_identifier`, `user`, `prompt_cache_key`); without any: those to the same prompt; empty: nobody's",
    )
    stats: bool = Field(False, description="answer with the account of what speculation did")


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: there is none


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Ignored(Body):
    """Taken for the sake of clients that always send them; they have no effect on the text.

    The first of `safety_identifier`, `user` and `prompt_cache_key` that is not blank says whose earlier
    answers drafts may come from.
    """

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = Field(
        None, description="false: this request is not captured, where the server captures its traffic"
    )
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class Sampling(Ignored):
    model: str | None = Field(None, description="as `/v1/models` lists it")
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    min_p: Finite | None = None
    n: Samples | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | Annotated[list[str], FIRST] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    ignore_eos: bool | None = None
    seed: Whole | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    logit_bias: Annotated[dict[str, Finite], BeforeValidator(few)] | None = Field(None, max_length=MAX_BIASES)
    bad_words: Annotated[list[str], FIRST] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None


TokenIds = Annotated[list[TokenId], FIRST, Field(min_length=1)]


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], FIRST, Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], FIRST, Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), AS_WHOLE] | None = None
    best_of: Samples | None = Field(None, description="must equal n")
    suffix: None = Field(None, description="not supported")


class FunctionCall(Open):
    name: str
    arguments: str


class MessageToolCall(Open):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FIRST] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    messages: Annotated[list[Message], FIRST] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), AS_WHOLE] | None = None
    tools: Annotated[list[Tool], FIRST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], FIRST] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the checkpoint's template"
    )


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = Field(None, description="this or `messages`")
    messages: Annotated[list[Message], FIRST] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None


class TokenizeResponse(Body):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST]


class DetokenizeResponse(Body):
    prompt: str


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[TokenLogprob]


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptDetails(Body):
    cached_tokens: int = Field(description="found in the prefix cache")


class CompletionDetails(Body):
    accepted_prediction_tokens: int = Field(description="of the client's prediction alone")
    rejected_prediction_tokens: int


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Change(Open):
    """Rounds that went another way than the text's last one: plain, or by that method."""

    before: str = Field(alias="from")
    to: str
    reason: str
    count: int


class SpeculationAccount(Open):
    """What speculation did for this request; there are no counts where no round ran and none was watched,
    `reasons` say why.
    """

    method: str
    reasons: dict[str, int]
    changes: list[Change]


FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]  # the last two are not OpenAI's


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(description="the stop string or token id that ended the text")


class Answer(Body):
    id: str
    created: int
    model: str
    usage: Usage
    speculation: SpeculationAccount | None = None


class CompletionResponse(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Body):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatResponse(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Body):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Body):
    error: ErrorDetail


class Health(Body):
    status: str
