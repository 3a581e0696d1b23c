"""`/v1/completions` and `/v1/chat/completions`: from body to `GenerationRequest`, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

from speculon.core.config import Structured
from speculon.core.errors import InvalidParameter
from speculon.core.images import ImageInput
from speculon.core.media.parts import read_messages
from speculon.decoding.text.conversations import CONTINUE, Beginning, Named, arguments_of, beginning_of
from speculon.decoding.text.deltas import (
    THINKING_TAGS,
    ContinuedParser,
    ReplyParser,
    TextParser,
    ThinkingParser,
    thinking_of,
)
from speculon.decoding.text.tokenizer import sure_text
from speculon.decoding.text.tool_calls import (
    CLOSE,
    OPEN,
    ForcedCallsParser,
    NamedCallParser,
    TaggedCallsParser,
    as_json,
    parser_for,
    tagged_call,
)
from speculon.decoding.text.tool_schemas import TOOLS, calls_grammar, calls_schema, check_size, fitted
from speculon.server.capture import chat_prompt, completion_prompts
from speculon.server.choice import special_tags
from speculon.server.infill import Infill
from speculon.server.model import ServedModel
from speculon.server.request import (
    GenerationRequest,
    TextForm,
    common_fields,
    form_of,
    read_sampling,
    template_message,
    thinks,
    under_either,
)
from speculon.server.schemas import (
    AllowedTools,
    ChatRequest,
    CompletionRequest,
    HostedTool,
    Message,
    NamedTool,
    Tool,
)
from speculon.server.tools import log_left_out

DEFAULT_TOKENS = 16  # max_tokens of a completion, as OpenAI
# For checkpoints whose template has no known form of tool calls: for a reply that may call, and one that
# must.
TOOLS_PROMPT = (
    "You can call these functions. Write each call as\n"
    f'{OPEN}{{"name":"...","arguments":{{...}}}}{CLOSE}\n'
    "and nothing else between the tags. Where no call is needed, answer with text."
)
CALLS_PROMPT = (
    "You can call these functions. Answer with a JSON array of calls, each with its name and arguments:"
)


def read_completion(body: CompletionRequest, model: ServedModel) -> GenerationRequest:
    prompt_logprobs = body.logprobs if body.echo else None
    infill = Infill(model, body.suffix) if body.suffix else None
    if infill and body.echo:
        raise InvalidParameter("echo", True, "cannot be used together with suffix")
    sent = sent_prompts(body)
    prompts = read_prompts(sent, model, infill, special=body.add_special_tokens is not False)
    requested = under_either(body, "max_tokens", "max_completion_tokens")
    max_tokens = model.max_tokens(requested, prompts, DEFAULT_TOKENS, body.min_tokens)
    form = form_of(body)
    params = read_sampling(
        body, model, form, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )
    if prompt_logprobs is not None and max_tokens == 1:
        # Evaluation harnesses read a prompt's log-probabilities so, and drop the last entry unseen: it must
        # be there, also where it is the end of the text.
        params = params.model_copy(update={"ignore_eos": True})
    if infill:
        params = params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, *infill.stops)})
    return GenerationRequest(
        chat=False,
        prompts=prompts,
        params=params,
        form=form,
        prompt_name="prompt_token_ids" if body.prompt is None else "prompt",
        echo=tuple(prompt_text(text, model) for text in sent) if body.echo else (),
        captured_prompts=completion_prompts(body, prompts, model),
        **common_fields(body, model),
    )


def sent_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """A text, several texts, a list of ids or several lists, as a list of prompts."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise InvalidParameter("prompt", body.prompt, "give either prompt or prompt_token_ids")
    prompt: Any = body.prompt_token_ids if body.prompt is None else body.prompt
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def read_prompts(
    sent: list[str | list[int]], model: ServedModel, infill: Infill | None, special: bool
) -> list[list[int]]:
    """The token ids of the prompts. With `special` the tokenizer adds its special tokens, except when
    infilling.
    """
    add = special and infill is None
    prompts = [model.encode(text, add_special_tokens=add) if isinstance(text, str) else text for text in sent]
    return prompts if infill is None else [infill.prompt(before) for before in prompts]


def prompt_text(sent: str | list[int], model: ServedModel) -> str:
    """A prompt as it was sent; of token ids, without the special tokens that surround every text."""
    if isinstance(sent, str):
        return sent
    known = range(model.tokenizer.vocab_size)  # the engine refuses all other ids
    ids = [token for token in sent if token in known]
    return sure_text(model.tokenizer, (), model.tokenizer.as_sent(ids), skip=False)


def read_chat(body: ChatRequest, model: ServedModel) -> GenerationRequest:
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs", body.top_logprobs, "needs logprobs = true")
    if (switched := thinks(body)) is not None:  # the template's variable, unless the body sets that itself
        variables = {"enable_thinking": switched, **(body.chat_template_kwargs or {})}
        body = body.model_copy(update={"chat_template_kwargs": variables})
    requested = under_either(body, "max_tokens", "max_completion_tokens")
    tools, choice = allowed_tools(body)
    body = body.model_copy(update={"tool_choice": choice})
    parser, form = read_tools(body, tools, model)
    prompt, images, begun = conversation(body, tools, model)
    if begun and body.tool_choice not in (None, "none", "auto"):
        raise InvalidParameter(
            CONTINUE, True, "cannot be used together with a forced tool call, which begins a new answer"
        )
    prompts, thinking = [prompt], thinking_of(model.tokenizer, prompt, begun)
    if thinking:
        parser = partial(ThinkingParser, thinking, parser)
    params = read_sampling(
        body,
        model,
        form,
        max_tokens=model.max_tokens(requested, prompts, min_tokens=body.min_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking=thinking,
    )
    return GenerationRequest(
        chat=True,
        prompts=prompts,
        params=params,
        form=form,
        prompt_name="messages" if body.prompt_token_ids is None else "prompt_token_ids",
        parser=partial(ContinuedParser, begun.text, parser) if begun else parser,
        captured_prompts=() if begun else chat_prompt(body, tools, model),
        images=images,
        **common_fields(body, model),
    )


def allowed_tools(body: ChatRequest) -> tuple[list[Tool], Any]:
    """The tools that the model may call, and the choice among them.

    Raises `InvalidParameter` where the choice is a tool that this server would have to run.
    """
    hosted = [tool.type for tool in body.tools or () if isinstance(tool, HostedTool)]
    log_left_out("tools", hosted)
    tools = [tool for tool in body.tools or () if isinstance(tool, Tool)]
    choice = body.tool_choice or "auto"
    if isinstance(choice, HostedTool):
        raise InvalidParameter("tool_choice", choice.model_dump(), "this server runs no tools of its own")
    if isinstance(choice, AllowedTools):
        few = choice.allowed_tools
        names = {named.function.name for named in few.tools if isinstance(named, NamedTool)}
        tools, choice = [tool for tool in tools if tool.function.name in names], few.mode
    return ([] if choice == "none" else tools), choice


class ChatPrompt(NamedTuple):
    ids: list[int]
    images: tuple[ImageInput, ...] = ()
    begun: Beginning | None = None  # the beginning that the answer continues


def conversation(body: ChatRequest, tools: list[Tool], model: ServedModel) -> ChatPrompt:
    """The token ids of the messages, through the chat template; or the ids that the client sent instead."""
    if bool(body.messages) == (body.prompt_token_ids is not None):
        raise InvalidParameter("messages", body.messages, "give either messages or prompt_token_ids")
    if body.prompt_token_ids is not None:
        if body.continue_final_message:
            raise InvalidParameter(CONTINUE, body.continue_final_message, "needs messages")
        return ChatPrompt(body.prompt_token_ids)
    messages = body.messages or []
    return render(
        messages,
        tools,
        model,
        body.chat_template_kwargs,
        TOOLS_PROMPT if body.tool_choice in (None, "auto") else CALLS_PROMPT,
        encode=partial(model.encode, add_special_tokens=body.add_special_tokens is True),
        opens=body.add_generation_prompt,
        continues=continuation_in(messages, body.continue_final_message),
        documents=body.documents or (),
    )


def continuation_in(messages: Seq[Message], field: bool | str | None) -> bool | str | None:
    """Whether the answer continues the last message: the field says so, or the message has `prefix`, the name
    that Mistral and DeepSeek use.
    """
    if not messages[-1].prefix:
        return field
    if field is False:
        raise InvalidParameter(
            CONTINUE, field, f"must not be false, because messages.{len(messages) - 1}.prefix is true"
        )
    return field or True


def read_tools(
    body: ChatRequest, tools: list[Tool], model: ServedModel
) -> tuple[Callable[[], ReplyParser], TextForm | None]:
    """How the reply is parsed, and its form: that of a forced call, or the client's."""
    choice, form = body.tool_choice or "auto", form_of(body)
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools:
        if choice not in ("none", "auto"):
            sent = choice.model_dump() if isinstance(choice, NamedTool) else choice
            raise InvalidParameter(
                "tool_choice", sent, "needs tools of type function, the only ones that this server supports"
            )
        return TextParser, form
    if form is not None and choice != "auto":
        raise InvalidParameter(form.name, form.value, "cannot be used together with a forced tool call")
    parallel = body.parallel_tool_calls is not False
    written = parser_for(model.tokenizer.template_for(tools=True, documents=bool(body.documents)))
    if choice == "auto" and written is not None:  # the model writes calls in its own form
        return partial(written, None if parallel else 1), form
    functions = callable_functions(tools, named)
    if named is not None:
        (function,) = functions
        return partial(NamedCallParser, named), form_of_calls(functions, json_schema=function["parameters"])
    if choice == "required":
        return ForcedCallsParser, form_of_calls(functions, json_schema=calls_schema(functions, parallel))
    tags = special_tags(model.tokenizer, (OPEN, CLOSE, *THINKING_TAGS))
    free = sorted(model.tokenizer.special_ids.difference(tags.values()))
    grammar = calls_grammar(functions, parallel, free, json_schema_in(form), tags)
    return partial(TaggedCallsParser, None if parallel else 1), form_of_calls(functions, grammar=grammar)


def callable_functions(tools: Seq[Tool], named: str | None) -> list[dict[str, Any]]:
    """The functions that may be called, with parameters that a grammar can say.

    Raises `InvalidParameter` where these are not the client's, though it relies on them.
    """
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if named is not None:
        functions = [function for function in functions if function["name"] == named][:1]
    if not functions:
        raise InvalidParameter("tool_choice.function.name", named, "must be the name of one of the tools")
    check_size(functions)
    return [
        fitted(function, exact=named is not None or function.get("strict") is True) for function in functions
    ]


def form_of_calls(functions: list[dict[str, Any]], **fields: Any) -> TextForm:
    return TextForm(TOOLS, [function["name"] for function in functions], Structured(**fields))


def json_schema_in(form: TextForm | None) -> dict[str, Any] | None:
    """The form of the text as a JSON schema; None for free text."""
    if form is None:
        return None
    kind, value = form.structured.constraint
    if kind not in ("json_schema", "json_object"):
        raise InvalidParameter(
            form.name, form.value, "cannot be used together with tools, because it is not JSON"
        )
    return {"type": "object"} if kind == "json_object" else {} if value is True else value


def render(
    messages: Seq[Message],
    tools: Seq[Tool],
    model: ServedModel,
    variables: dict[str, Any] | None = None,
    tools_prompt: str = TOOLS_PROMPT,
    *,
    encode: Callable[[str], list[int]],
    opens: bool | None = None,
    continues: bool | str | None = None,
    documents: Seq[dict[str, Any]] = (),
) -> ChatPrompt:
    """The conversation as the checkpoint's template writes it, as token ids, and its images; tools and their
    calls as plain text where the template has no known form of them.
    """
    read, sources = read_messages([template_message(message) for message in messages])
    begun = beginning_of(read, continues, opens)
    named = [(f"messages.{i}", message) for i, message in enumerate(read)]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    if parser_for(model.tokenizer.template_for(tools=bool(tools), documents=bool(documents))) is None:
        named, functions = generic_messages(named, functions, tools_prompt), []
    text = model.tokenizer.render_chat(
        [message for _, message in named],
        functions,
        variables,
        answer_follows=opens,
        continues=continues,
        documents=documents,
        with_images=model.images.template(sources),
        names=[name for name, _ in named],
    )
    return ChatPrompt(*model.images.prompt(text, sources, encode, "messages", model.max_context), begun)


def generic_messages(
    messages: list[Named], functions: list[dict[str, Any]], tools_prompt: str
) -> list[Named]:
    """A conversation without fields for tools: they are a system message, calls in tags, and results the
    user's, those of one turn in one message.
    """
    written: list[Named] = []
    if functions:
        lines = [as_json(tool["function"]) for tool in functions]
        written.append(("tools", {"role": "system", "content": "\n".join([tools_prompt, *lines])}))
    last = ""
    for name, message in messages:
        generic = generic_message(message)
        if last == message["role"] == "tool":
            written[-1][1]["content"] += "\n" + generic["content"]
        else:
            written.append((name, generic))
        last = message["role"]
    return written


def generic_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    lines = [tagged_call(call["name"], arguments_of(call["arguments"])) for call in calls]
    text = "\n".join([message["content"], *lines]).lstrip("\n")
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
