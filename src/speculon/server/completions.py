"""`/v1/completions` and `/v1/chat/completions`: from body to `GenerationRequest`, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from speculon.errors import InvalidParameter
from speculon.server.capture_format import chat_prompt, completion_prompts
from speculon.server.infill import Infill
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest, common_fields, sampling_of, text_of
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, NamedTool, Tool
from speculon.server.tool_calls import (
    NamedCallParser,
    ReplyParser,
    RequiredCallsParser,
    TextParser,
    calls_schema,
    parser_for,
)

DEFAULT_TOKENS = 16  # max_tokens of a completion, as OpenAI
# for checkpoints whose template does not mention tools
TOOLS_PROMPT = (
    "You can call these functions. Answer with a JSON array of calls, each with its name and arguments:"
)


def read_completion(body: CompletionRequest, model: ServedModel) -> GenerationRequest:
    model.check_name(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParameter("best_of", body.best_of, "must equal n: all choices are returned")
    prompt_logprobs = body.logprobs if body.echo else None
    infill = Infill.of(model, body.suffix) if body.suffix else None
    if infill and body.echo:
        raise InvalidParameter("echo", True, "not together with suffix")
    prompts = read_prompts(body, model, infill)
    max_tokens = model.max_tokens(body.max_tokens, prompts, DEFAULT_TOKENS)
    params = sampling_of(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
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
        echo=bool(body.echo),
        captured_prompts=completion_prompts(body, prompts, model),
        **common_fields(body, model),
    )


def read_prompts(body: CompletionRequest, model: ServedModel, infill: Infill | None) -> list[list[int]]:
    """Token ids of a text, of several texts, of a list of ids or of several lists."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise InvalidParameter("prompt", body.prompt, "give this or prompt_token_ids, and not both")
    prompt: Any = body.prompt_token_ids if body.prompt is None else body.prompt
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if infill is None:
        return [model.encode(one) if isinstance(one, str) else one for one in many]
    before = [model.encode(one, add_special_tokens=False) if isinstance(one, str) else one for one in many]
    return [infill.prompt(ids) for ids in before]


def read_chat(body: ChatRequest, model: ServedModel) -> GenerationRequest:
    model.check_name(body.model)
    requested = max_tokens_of(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs", body.top_logprobs, "only with logprobs = true")
    parser, structured = read_tools(body, model)
    tools = tools_in_use(body)
    prompts = [conversation(body, tools, model)]
    params = sampling_of(
        body,
        max_tokens=model.max_tokens(requested, prompts),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=structured,
    )
    return GenerationRequest(
        chat=True,
        prompts=prompts,
        params=params,
        parser=parser,
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
    text = render(body.messages or [], tools, model, body.chat_template_kwargs, answer_follows=opens)
    return model.encode(text, add_special_tokens=False)


def max_tokens_of(body: ChatRequest) -> int | None:
    """The limit under either of its names, which must not differ."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidParameter("max_tokens", old, f"max_completion_tokens is {new}")
    return new if old is None else old


def tools_in_use(body: ChatRequest) -> list[Tool]:
    return [] if body.tool_choice == "none" else body.tools or []


def read_tools(
    body: ChatRequest, model: ServedModel
) -> tuple[Callable[[], ReplyParser], dict[str, Any] | None]:
    """How the reply is parsed, and the `structured` grammar that forces a tool call, if one is forced."""
    tools, choice = tools_in_use(body), body.tool_choice or "auto"
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidParameter("tool_choice", shown(choice), "needs tools")
        return TextParser, None
    form = body.response_format
    if form is not None and form.type != "text" and choice != "auto":
        raise InvalidParameter("response_format", form.type, "not together with a forced tool call")
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        function = next((function for function in functions if function["name"] == name), None)
        if function is None:
            raise InvalidParameter("tool_choice.function.name", name, "is not among the tools")
        schema = function.get("parameters") or {"type": "object"}
        return lambda: NamedCallParser(name), {"json_schema": schema}
    if choice == "required":
        schema = calls_schema(functions, parallel=body.parallel_tool_calls is not False)
        return RequiredCallsParser, {"json_schema": schema}
    parser = parser_for(model.tokenizer.chat_template)
    if parser is None:
        limit = "no known form of tool calls in this checkpoint's chat template; use required, none or a name"
        raise InvalidParameter("tool_choice", "auto", limit)
    return parser, None


def shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def render(
    messages: Seq[Message],
    tools: Seq[Tool],
    model: ServedModel,
    variables: dict[str, Any] | None = None,
    *,
    answer_follows: bool = True,
) -> str:
    """The conversation as the checkpoint's template writes it."""
    rendered = [template_message(message) for message in messages]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    if functions and "tools" not in model.tokenizer.chat_template:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in functions]
        prompt = {"role": "system", "content": "\n".join([TOOLS_PROMPT, *lines])}
        rendered, functions = [prompt, *rendered], []
    return model.tokenizer.render_chat(rendered, functions, variables, answer_follows=answer_follows)


def template_message(message: Message) -> dict[str, Any]:
    """One message as templates expect it: content as text, arguments of tool calls as objects."""
    fields = message.model_dump(exclude_none=True)
    fields["content"] = text_of(message.content)
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            pass  # the template gets the text as it is
    return fields
