"""Bodies of requests: OpenAI's fields, sampling fields of other servers, and our `speculation`.

Unknown fields are refused by name, unless they are null. Fields without an effect on the text are accepted
(`Ignored`, `Hints`), those of other servers where they mean the same or have a neutral value (`NEUTRAL`).
Here are types and the lengths of lists; the ranges of values are checked once, by `SamplingParams`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from speculon.core.config import MAX_BIASES, MAX_DRAFTS, MAX_LOGPROBS, MAX_SAMPLES, AcceptanceSetting
from speculon.core.media.parts import PartType

MAX_PROMPTS = 64  # of one completions request
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128  # as OpenAI
MAX_DOCUMENTS = 1024  # of a chat
MAX_TOP_LOGPROBS = 20  # as OpenAI, in a chat

INPUT = "input"  # the argument of a function that stands for a custom tool
LEVELS = ("low", "medium", "high")  # of thinking, as Ollama has them

Finite = Annotated[float, Field(allow_inf_nan=False)]
# 5.0 is 5
AS_WHOLE = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)
AS_NO_LIMIT = BeforeValidator(
    lambda value: None if value == -1 else value,
    json_schema_input_type=Annotated[int, Field(ge=-1, le=2**31)] | None,
)
AS_SWITCH = BeforeValidator(
    lambda value: value in LEVELS or value, json_schema_input_type=bool | Literal[LEVELS]
)
Whole = Annotated[int, AS_WHOLE]
Count = Annotated[int, Field(ge=0, le=2**31), AS_WHOLE]
TokenId = Count
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES), AS_WHOLE]
# fields of vLLM, llama.cpp, OpenRouter, Mistral and Groq, and the values with which they change nothing
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "priority": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "id_slot": (-1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "n_probs": (0,),
    "min_keep": (0,),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "grammar": ("",),
    "lora": ([],),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "return_tokens": (False,),
    "timings_per_token": (False,),
    "t_max_predict_ms": (0,),
    "models": ([],),
    "plugins": ([],),
    "provider": ({},),
    "transforms": ([],),
    "safe_prompt": (False,),
}

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

# report the first fault of a list: a million of them would block every stream while they are written
FIRST = Field(fail_fast=True)


def few(value: Any) -> Any:
    """Refuses too many biases before each is validated."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "must have at most {most} entries", {"most": MAX_BIASES})
    return value


def use_tools(value: Any) -> Any:
    """Refuses the fields that OpenAI had before tools."""
    if value is not None:
        raise PydanticCustomError("legacy", "not supported: use tools, tool_choice and tool_calls")
    return value


Legacy = Annotated[None, BeforeValidator(use_tools)]


# a hint of Anthropic's clients; no part of what a template is given
CacheControl = Annotated[dict[str, Any] | None, Field(exclude=True)]


def as_arguments(value: Any) -> Any:
    """The arguments of a tool call as JSON; clients also send the object, or nothing."""
    if isinstance(value, str):
        return value
    return "{}" if value is None else json.dumps(value, ensure_ascii=False)


Arguments = Annotated[str, BeforeValidator(as_arguments, json_schema_input_type=Any)]


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def first_unknown(cls, value: Any) -> Any:
        """Leaves out unknown fields that are null or neutral, and of all other unknown fields all but one,
        which is enough to refuse a body.
        """
        known = field_names(cls)
        if not isinstance(value, dict) or value.keys() <= known:
            return value
        others = {name: part for name, part in value.items() if name not in known and part is not None}
        unknown = next((name for name, part in others.items() if part not in cls.neutral.get(name, ())), None)
        return {name: part for name, part in value.items() if name in known or name == unknown}


@cache
def field_names(body: type[BaseModel]) -> frozenset[str]:
    """Of its fields, as clients send them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


class Extensible(BaseModel):
    """May have fields that are not read."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: CacheControl = None


class ImageUrl(Body):
    url: str
    detail: str | None = None  # without an effect


class MessagePart(Body):
    """A text, an image, or of an answer a refusal or a thinking. Other media are refused by their type."""

    type: PartType
    text: str | None = None
    image_url: str | ImageUrl | None = Field(None, description="a data URL; others where they are fetched")
    detail: str | None = None  # without an effect
    cache_control: CacheControl = None
    refusal: str | None = None
    thinking: str | Annotated[list[TextPart], FIRST, Field(max_length=MAX_PARTS)] | None = None
    reasoning: str | None = None
    signature: Any = Field(None, exclude=True)  # of a thinking, for the server that wrote it
    data: Any = Field(None, exclude=True)  # the same, of a redacted one
    closed: bool | None = Field(None, exclude=True)  # the same, of Mistral's
    annotations: Any = Field(None, exclude=True)  # sources of an answer
    file_id: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None


TokenIds = Annotated[list[TokenId], FIRST, Field(min_length=1)]
MessageContent = str | Annotated[list[MessagePart], FIRST, Field(max_length=MAX_PARTS)]
Content = str | Annotated[list[TextPart], FIRST, Field(max_length=MAX_PARTS)]


class Prediction(Body):
    """What the client expects the answer to be (OpenAI's Predicted Outputs)."""

    type: Literal["content"]
    content: Content | None = None
    token_ids: TokenIds | None = Field(None, description="in place of `content`")


class Speculation(Body):
    """Speculation of this request."""

    method: str | None = Field(None, description="`off`, `auto`, `ngram`, `draft_model`, ...")
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFTS), AS_WHOLE] | None = Field(
        None, description="drafts per round; 0 is off"
    )
    acceptance: AcceptanceSetting | None = Field(
        None,
        description="test of a model's drafts where tokens are sampled: `matching`, `rejection`, `block` or "
        "`auto` (`block` without a seed, else `matching`)",
    )
    chained_drafts: bool | None = Field(
        None, description="whether lookups continue the draft of another method"
    )
    draft_depth: Annotated[int, Field(ge=0, le=MAX_DRAFTS), AS_WHOLE] | None = Field(
        None, description="most drafts in a row: others branch off, as a tree; 0: chains"
    )
    policy: str | None = Field(
        None, description="decides how much is drafted: `goodput`, `fixed`, `adaptive`, `solo`, `shadow`"
    )
    pool: str | None = Field(
        None,
        max_length=256,
        description="the pool of this API key's earlier answers to draft from; in place of the user's name "
        "(`safety_identifier`, `user`, `prompt_cache_key`). Without any: that of prompts with the same "
        "beginning. Empty: none",
    )
    stats: bool = Field(False, description="add statistics of speculation to the answer")
    explain: bool = Field(False, description="add the source and the fate of each token to the answer")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="with `include_usage`: usage so far in each chunk"
    )
    include_obfuscation: bool = False  # ignored


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The form of the text, under vLLM's names. Exactly one field is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], FIRST] | None = None
    grammar: str | None = Field(None, description="a grammar in Lark's form")


class Ignored(Body):
    """Accepted because clients always send them; they have no effect on the text.

    The first of `safety_identifier`, `user` and `prompt_cache_key` that is not blank names the pool of
    earlier answers to draft from.
    """

    metadata: dict[str, Any] | None = None
    store: bool | None = Field(
        None, description="false: this request is not captured, where the server captures its traffic"
    )
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    cache_control: CacheControl = None
    cache_prompt: bool | None = None
    num_ctx: Count | None = None


class OllamaOptions(Body):
    """Ollama's options about how a model is loaded and computed. Its other options change the text."""

    num_ctx: Count | None = None
    num_batch: Count | None = None
    num_gpu: Whole | None = None
    main_gpu: Count | None = None
    num_thread: Count | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class Hints(Body):
    """Fields of Ollama, LM Studio and vLLM that are not about the text, and have no effect here."""

    neutral = NEUTRAL

    keep_alive: str | Finite | None = None
    ttl: Finite | None = None
    request_id: str | None = None
    options: OllamaOptions | None = None


class Common(Hints):
    """What chats, completions and responses have under the same names."""

    model: str | None = Field(None, description="as `/v1/models` lists it")
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    min_p: Finite | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], FIRST] | None = None
    stream: bool | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ReasoningOptions(Body):
    """OpenRouter's; `exclude`, which hides the thinking, is refused."""

    enabled: bool | None = None
    exclude: Literal[False] | None = None
    effort: str | None = None  # `none` switches it off; without an effect otherwise
    max_tokens: Count | None = None  # without an effect
    summary: str | None = None  # without an effect


class ThinkingOptions(Body):
    """Anthropic's."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None  # without an effect


class UsageOptions(Body):
    """OpenRouter's."""

    include: bool = False


class Sampling(Ignored, Common):
    n: Samples | None = None
    best_of: Samples | None = Field(None, description="must equal n")
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = Field(None, description="is `max_tokens`")
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    repeat_penalty: Finite | None = Field(None, description="is `repetition_penalty`")
    logit_bias: Annotated[dict[str, Finite], BeforeValidator(few)] | None = Field(None, max_length=MAX_BIASES)
    bad_words: Annotated[list[str], FIRST] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FIRST] | None = None
    guided_grammar: str | None = Field(None, description="a grammar in Lark's form")
    enable_thinking: bool | None = Field(None, description="variable of the chat template")
    think: Annotated[bool, AS_SWITCH] | None = Field(
        None, description="is `enable_thinking`; a level is true"
    )
    thinking: bool | ThinkingOptions | None = Field(None, description="is `enable_thinking`")
    reasoning: ReasoningOptions | None = Field(None, description="`enabled` is `enable_thinking`")
    usage: UsageOptions | None = Field(None, description="`include` is `stream_options.include_usage`")
    add_special_tokens: bool | None = Field(
        None, description="whether the tokenizer adds its own to a prompt; not to a chat, by default"
    )
    truncate_prompt_tokens: None = Field(None, description="not supported: a prompt is never cut")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


ManyTokenIds = Annotated[list[TokenIds], FIRST, Field(min_length=1, max_length=MAX_PROMPTS)]


def needs_one(*names: str) -> ConfigDict:
    """The description of a body that needs one of these fields."""
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in names]})


class CompletionRequest(Sampling):
    model_config = needs_one("prompt", "prompt_token_ids")

    prompt: (
        str
        | Annotated[list[str], FIRST, Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | ManyTokenIds
        | None
    ) = None
    prompt_token_ids: TokenIds | ManyTokenIds | None = Field(None, description="in place of `prompt`")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), AS_WHOLE] | None = None
    suffix: str | None = Field(
        None, description="the text after the cursor, for models with fill-in-the-middle tokens"
    )


class FunctionCall(Extensible):
    name: str
    arguments: Arguments = "{}"


class MessageToolCall(Extensible):
    """One of a function. That of a custom tool is read as one of a function with the text as its `input`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def of_custom_tool(cls, value: Any) -> Any:
        custom = value.get("custom") if isinstance(value, dict) and value.get("type") == "custom" else None
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            return value
        function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
        others = {key: part for key, part in value.items() if key not in ("type", "custom")}
        return {**others, "function": function}


class Message(Extensible):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: str | None = None
    refusal: str | None = Field(None, description="the content where there is no other")
    prefix: bool | None = Field(None, exclude=True, description="the answer goes on from this last message")
    tool_calls: Annotated[list[MessageToolCall], FIRST] | None = None
    function_call: Legacy = None
    tool_call_id: str | None = None


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl = None


class OfFunction(Body):
    type: Literal["function"]


class Tool(OfFunction):
    function: Function
    cache_control: CacheControl = None


class HostedTool(Extensible):
    """A tool that a server would run, such as a web search. Tools of this kind are left out."""

    type: str


class NamedFunction(Body):
    name: str


class NamedTool(OfFunction):
    function: NamedFunction


class OverlappingForms(Discriminator):
    """Tells the classes of a union by a function. A body may have the form of several of them (a hosted tool
    may have any `type`), so the schema says `anyOf` where pydantic would write `oneOf`.
    """

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(core)
        described["anyOf"] = described.pop("oneOf")
        return described


def by_type(classes: dict[str, str]) -> OverlappingForms:
    """Distinguishes the classes of a union by `type`; every other type is a hosted tool."""

    def name(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return classes.get(kind, "HostedTool") if isinstance(kind, str) else "HostedTool"

    return OverlappingForms(name)


Hosted = Annotated[HostedTool, Tag("HostedTool")]
ChatTool = Annotated[Annotated[Tool, Tag("Tool")] | Hosted, by_type({"function": "Tool"})]
NamedOrHosted = Annotated[Annotated[NamedTool, Tag("NamedTool")] | Hosted, by_type({"function": "NamedTool"})]


class FewTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedOrHosted], FIRST] = Field(max_length=MAX_TOOLS)


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: FewTools


ChatToolChoice = Annotated[
    Annotated[NamedTool, Tag("NamedTool")] | Annotated[AllowedTools, Tag("AllowedTools")] | Hosted,
    by_type({"function": "NamedTool", "allowed_tools": "AllowedTools"}),
]


# of responses: `type` is the first field, so that of several faults the first is named


class FunctionTool(Function, OfFunction):
    # of a search for tools, and of programs that call them: all tools are offered at once
    defer_loading: bool | None = Field(None, exclude=True)
    allowed_callers: Any = Field(None, exclude=True)
    output_schema: Any = Field(None, exclude=True)


class CustomTool(Body):
    """A tool that takes a text, as a grammar describes it."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = Field(None, exclude=True)
    allowed_callers: Any = Field(None, exclude=True)


OwnTool = Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[CustomTool, Tag("CustomTool")]
OWN_TOOLS = {"function": "FunctionTool", "custom": "CustomTool"}
OwnOrHosted = Annotated[OwnTool | Hosted, by_type(OWN_TOOLS)]


class NamespaceTool(Body):
    """Tools of a client under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[OwnOrHosted], FIRST] = Field(max_length=MAX_TOOLS)


ResponseTool = Annotated[
    OwnTool | Annotated[NamespaceTool, Tag("NamespaceTool")] | Hosted,
    by_type({**OWN_TOOLS, "namespace": "NamespaceTool"}),
]


class NamedResponseTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


NamedInResponse = Annotated[
    Annotated[NamedResponseTool, Tag("NamedResponseTool")] | Hosted,
    by_type(dict.fromkeys(OWN_TOOLS, "NamedResponseTool")),
]


class AllowedResponseTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedInResponse], FIRST] = Field(max_length=MAX_TOOLS)


ResponseToolChoice = Annotated[
    Annotated[NamedResponseTool, Tag("NamedResponseTool")]
    | Annotated[AllowedResponseTools, Tag("AllowedResponseTools")]
    | Hosted,
    by_type({**dict.fromkeys(OWN_TOOLS, "NamedResponseTool"), "allowed_tools": "AllowedResponseTools"}),
]


class ChatRequest(Sampling):
    model_config = needs_one("messages", "prompt_token_ids")

    messages: Annotated[list[Message], FIRST] | None = Field(None, max_length=MAX_MESSAGES)
    prompt_token_ids: TokenIds | None = Field(None, description="in place of `messages`")
    max_tokens: Annotated[Count | None, AS_NO_LIMIT] = Field(None, description="-1 is none")
    add_generation_prompt: bool | None = Field(None, description="whether the template opens an answer")
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = Field(
        None, description="whether the answer goes on from the last message, or which field of it"
    )
    echo: Literal[False] | None = None
    documents: Annotated[list[dict[str, Any]], FIRST, Field(max_length=MAX_DOCUMENTS)] | None = Field(
        None, description="for templates that show documents to the model"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), AS_WHOLE] | None = None
    tools: Annotated[list[ChatTool], FIRST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Legacy = Field(None, description="not supported: use `tools`")
    function_call: Legacy = Field(None, description="not supported: use `tool_choice`")
    modalities: Annotated[list[Literal["text"]], FIRST] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the checkpoint's template"
    )


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = Field(None, description="this or `messages`")
    messages: Annotated[list[Message], FIRST] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST]
