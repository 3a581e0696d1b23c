"""`/v1/completions` and `/v1/chat/completions`: from body to `GenerationRequest`, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from speculon.core.config import Structured
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.deltas import ReplyParser, TextParser
from speculon.decoding.text.tags import special_tags
from speculon.decoding.text.thinking import THINKING_TAGS, ThinkingParser, prompt_thinking
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
from speculon.server.capture_format import chat_prompt, completion_prompts
from speculon.server.constraints import Form, form_of
from speculon.server.infill import Infill
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest, common_fields, sampling_of, text_of, under_either
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, NamedTool, Sampling, Tool

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
    infill = Infill.of(model, body.suffix) if body.suffix else None
    if infill and body.echo:
        raise InvalidParameter("echo", True, "not together with suffix")
    sent = prompts_of(body)
    prompts = read_prompts(sent, model, infill, special=body.add_special_tokens is not False)
    max_tokens = model.max_tokens(max_tokens_of(body), prompts, DEFAULT_TOKENS, body.min_tokens)
    form = form_of(body)
    params = sampling_of(
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
        echo=tuple(prompt_text(one, model) for one in sent) if body.echo else (),
        captured_prompts=completion_prompts(body, prompts, model),
        **common_fields(body, model),
    )


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """A text, several texts, a list of ids or several lists, as a list of prompts."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise InvalidParameter("prompt", body.prompt, "give this or prompt_token_ids, and not both")
    prompt: Any = body.prompt_token_ids if body.prompt is None else body.prompt
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def read_prompts(
    sent: list[str | list[int]], model: ServedModel, infill: Infill | None, special: bool
) -> list[list[int]]:
    """Their token ids; `special`: with the tokens that the tokenizer adds, which infilling has none of."""
    add = special and infill is None
    ids = [model.encode(one, add_special_tokens=add) if isinstance(one, str) else one for one in sent]
    return ids if infill is None else [infill.prompt(one) for one in ids]


def prompt_text(sent: str | list[int], model: ServedModel) -> str:
    """A prompt as it was sent; of token ids, without the special tokens that surround every text."""
    if isinstance(sent, str):
        return sent
    known = range(model.tokenizer.vocab_size)  # the engine refuses others
    ids = [token for token in sent if token in known]
    return sure_text(model.tokenizer, (), model.tokenizer.as_sent(ids), skip=False)


def read_chat(body: ChatRequest, model: ServedModel) -> GenerationRequest:
    body, requested = with_thinking(body), max_tokens_of(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs", body.top_logprobs, "only with logprobs = true")
    parser, form = read_tools(body, model)
    tools = tools_in_use(body)
    prompts = [conversation(body, tools, model)]
    thinking = prompt_thinking(model.tokenizer, prompts[0])
    params = sampling_of(
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
        parser=partial(ThinkingParser, thinking, parser) if thinking else parser,
        captured_prompts=chat_prompt(body, tools, model),
        **common_fields(body, model),
    )


def conversation(body: ChatRequest, tools: list[Tool], model: ServedModel) -> list[int]:
    """Token ids of the messages as the template writes them, or those that the client sent instead."""
    if bool(body.messages) == (body.prompt_token_ids is not None):
        raise InvalidParameter("messages", body.messages, "give some, or prompt_token_ids instead")
    if body.prompt_token_ids is not None:
        return body.prompt_token_ids
    opens = body.add_generation_prompt is not False
    prompt = TOOLS_PROMPT if body.tool_choice in (None, "auto") else CALLS_PROMPT
    text = render(body.messages or [], tools, model, body.chat_template_kwargs, prompt, answer_follows=opens)
    return model.encode(text, add_special_tokens=body.add_special_tokens is True)


def with_thinking(body: ChatRequest) -> ChatRequest:
    """`enable_thinking` or `think` as the template's variable, unless that is given, too."""
    thinks = under_either(body, "enable_thinking", "think")
    if thinks is None:
        return body
    variables = {"enable_thinking": thinks, **(body.chat_template_kwargs or {})}
    return body.model_copy(update={"chat_template_kwargs": variables})


def max_tokens_of(body: Sampling) -> int | None:
    limit: int | None = under_either(body, "max_tokens", "max_completion_tokens")
    return limit


def tools_in_use(body: ChatRequest) -> list[Tool]:
    return [] if body.tool_choice == "none" else body.tools or []


Reading = tuple[Callable[[], ReplyParser], Form | None]


def read_tools(body: ChatRequest, model: ServedModel) -> Reading:
    """How the reply is parsed, and its form: that of a forced call, or the client's."""
    tools, choice, form = tools_in_use(body), body.tool_choice or "auto", form_of(body)
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidParameter("tool_choice", shown(choice), "needs tools")
        return TextParser, form
    if form is not None and choice != "auto":
        raise InvalidParameter(form.name, form.value, "not together with a forced tool call")
    parallel = body.parallel_tool_calls is not False
    written = parser_for(model.tokenizer.chat_template)
    if choice == "auto" and written is not None:  # in the model's own form
        return partial(written, None if parallel else 1), form
    named = choice.function.name if isinstance(choice, NamedTool) else None
    functions = functions_of(tools, named)
    if named is not None:
        (function,) = functions
        return partial(NamedCallParser, named), form_of_calls(functions, json_schema=function["parameters"])
    if choice == "required":
        return ForcedCallsParser, form_of_calls(functions, json_schema=calls_schema(functions, parallel))
    tags = special_tags(model.tokenizer, (OPEN, CLOSE, *THINKING_TAGS))
    free = sorted(model.tokenizer.special_ids.difference(tags.values()))
    grammar = calls_grammar(functions, parallel, free, schema_of(form), tags)
    return partial(TaggedCallsParser, None if parallel else 1), form_of_calls(functions, grammar=grammar)


def functions_of(tools: Seq[Tool], named: str | None) -> list[dict[str, Any]]:
    """The functions that may be called, with parameters that a grammar can say.

    Raises `InvalidParameter` where these are not the client's, though it relies on them.
    """
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if named is not None:
        functions = [function for function in functions if function["name"] == named][:1]
    if not functions:
        raise InvalidParameter("tool_choice.function.name", named, "is not among the tools")
    check_size(functions)
    return [fitted(one, exact=named is not None or one.get("strict") is True) for one in functions]


def form_of_calls(functions: list[dict[str, Any]], **fields: Any) -> Form:
    return Form(TOOLS, [function["name"] for function in functions], Structured(**fields))


def schema_of(form: Form | None) -> dict[str, Any] | None:
    """The form of the text as a JSON schema; None for free text."""
    if form is None:
        return None
    kind, value = form.structured.constraint
    if kind not in ("json_schema", "json_object"):
        raise InvalidParameter(form.name, form.value, "not together with tools: it is no JSON")
    return {"type": "object"} if kind == "json_object" else {} if value is True else value


def shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def render(
    messages: Seq[Message],
    tools: Seq[Tool],
    model: ServedModel,
    variables: dict[str, Any] | None = None,
    tools_prompt: str = TOOLS_PROMPT,
    *,
    answer_follows: bool = True,
) -> str:
    """The conversation as the checkpoint's template writes it; tools and their calls as plain text where the
    template has no known form of them.
    """
    rendered = [template_message(message) for message in messages]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    if parser_for(model.tokenizer.chat_template) is None:
        rendered, functions = generic_messages(rendered, functions, tools_prompt), []
    return model.tokenizer.render_chat(rendered, functions, variables, answer_follows=answer_follows)


def template_message(message: Message) -> dict[str, Any]:
    """One message as templates expect it: content as text, arguments of tool calls as objects."""
    fields = message.model_dump(exclude_none=True)
    fields["content"] = text_of(message.content)
    if not message.tool_calls:
        fields.pop("tool_calls", None)  # to templates a list is a list of calls
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            pass  # the template gets the text as it is
    return fields


def generic_messages(
    messages: list[dict[str, Any]], functions: list[dict[str, Any]], tools_prompt: str
) -> list[dict[str, Any]]:
    """A conversation without fields for tools: one system message, calls in tags, results from the user."""
    found: list[dict[str, Any]] = []
    if functions:
        lines = [as_json(tool["function"]) for tool in functions]
        found.append({"role": "system", "content": "\n".join([tools_prompt, *lines])})
    last = ""
    for message in map(generic_message, messages):
        # templates may allow one system message, and no two messages of the user in a row
        if found and (last, message["role"]) in (("", "system"), ("tool", "tool")):
            found[-1]["content"] += "\n" + message["content"]
        else:
            found.append({**message, "role": "user"} if message["role"] == "tool" else message)
        last = message["role"]
    return found


def generic_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = [call["function"] for call in message.pop("tool_calls", ())]
    lines = [tagged_call(call["name"], call["arguments"]) for call in calls]
    return {**message, "content": "\n".join([message["content"], *lines]).lstrip("\n")} if lines else message
