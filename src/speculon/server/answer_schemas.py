"""Bodies of answers: OpenAI's fields, and our `speculation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculon.core.types import Status
from speculon.decoding.sequence import Fate
from speculon.server.schemas import Body, Extensible


class TokenizeResponse(Body):
    tokens: list[int]
    count: int
    max_model_len: int


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
    reasoning_tokens: int = Field(0, description="before the answer, with the tags; of a model that thinks")


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class MethodChange(Extensible):
    """Rounds whose method differs from that of the sequence's last round; without drafts it is `plain`."""

    before: str = Field(alias="from")
    to: str
    reason: str
    count: int


class SpeculationAccount(Extensible):
    """Statistics of speculation for this request; rounds and drafts are 0 where no round ran."""

    method: str
    reasons: dict[str, int]
    changes: list[MethodChange]


class ExplainedToken(Body):
    id: int
    token: str
    source: str | None = Field(description="the method that drafted it; null: the target itself")
    fate: Fate = Field(
        description="`accepted`: a draft. The target's own: `correction` of a rejected draft, `bonus` after "
        "an accepted one, `plain` without a draft"
    )


class Explanation(Body):
    """With `speculation.explain`."""

    tokens: list[ExplainedToken]


AnswerFinishReason = Literal[
    "stop", "length", "tool_calls", "abort", "error"
]  # the last two are not OpenAI's


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerFinishReason | None
    stop_reason: str | int | None = Field(description="the stop string or token id at the end of the text")
    speculation: Explanation | None = None


class AnswerBody(Body):
    id: str
    created: int
    model: str
    usage: Usage
    speculation: SpeculationAccount | None = None


class CompletionResponse(AnswerBody):
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
    reasoning_content: str | None = Field(None, description="the thinking before the answer")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerFinishReason
    stop_reason: str | int | None
    speculation: Explanation | None = None


class ChatResponse(AnswerBody):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="null until the model was loaded")
    state: Literal["unloaded", "loading", "loaded", "draining", "failed", "drafter"]
    parent: str | None = Field(None, description="for an adapter, the model that it belongs to")
    default: bool = Field(False, description="whether requests without `model` use it")
    pinned: bool = Field(False, description="whether it is never ended to make room for others")
    drafters: dict[str, str] = Field({}, description="its drafters by method, once it was loaded")
    method: str | None = Field(None, description="that drafts for a request which names none")
    speculation: dict[str, str | int | bool | None] | None = Field(
        None, description="what requests have that set nothing else"
    )
    drafter: str | None = Field(None, description="for a drafter, its method; it takes no requests")
    error: str | None = Field(None, description="why it was not loaded last")


class ModelList(Body):
    object: Literal["list"]
    data: list[ModelCard]


class CapabilityRow(Body):
    status: Status = Field(
        description="`on`: as requested. `changed`: served, and speculation works otherwise. `off`: served "
        "without it. `refused`: an error with the row's key in `feature`"
    )
    reason: str
    limits: dict[str, int] = Field(description="by name, as docs/serving.md explains them")


class CapabilityTable(Body):
    object: Literal["speculation.capabilities"]
    model: str
    capabilities: dict[str, CapabilityRow] = Field(description="by feature")


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None
    feature: str = Field("", description="the row of the capability table that denies it; else left out")


class ErrorResponse(Body):
    error: ErrorDetail


class Health(Body):
    status: str


class Version(Body):
    version: str
