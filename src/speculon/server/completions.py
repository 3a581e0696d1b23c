"""`/v1/completions` and `/v1/chat/completions`: what a body asks for, as a `Job`.

Everything is judged here, by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from speculon.errors import InvalidParameter
from speculon.server.tool_calls import Named, Required, Spoken, calls_schema, recognise
from speculon.server.request import DEFAULT_TOKENS, House, Job, sampling_of, shared, text_of
from speculon.server.capture_format import ask_chat, ask_completion
from speculon.server.schemas import ChatRequest, CompletionRequest, Message, NamedTool, Tool

# where a
TOOLS_TOLD = (
    "You can call these functions. Answer with a JSON array of calls, each with its name and arguments:"
)
# checkpoint's template has no words of its own for tools


def read_completion(body: CompletionRequest, house: House) -> Job:
    house.check_model(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidParameter("best_of", body.best_of, "must equal n: all texts are returned")
    echoed = body.logprobs if body.echo else None
    prompts = read_prompts(body.prompt, house)
    max_tokens = house.length_of(body.max_tokens, prompts, DEFAULT_TOKENS)
    params = sampling_of(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=echoed)
    if echoed is not None and max_tokens == 1:
        # So harnesses ask about a prompt alone: they cut the last entry off unseen, so it must be there, an
        # end of text, too.
        params = params.model_copy(update={"ignore_eos": True})
    asked = ask_completion(body, prompts, house)
    return Job("text_completion", prompts, params, echo=bool(body.echo), asked=asked, **shared(body, house))


def read_prompts(prompt: Any, house: House) -> list[list[int]]:
    """Token ids of a text, of some texts, of a list of ids or of several."""
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [house.encode(one) if isinstance(one, str) else one for one in many]


def read_chat(body: ChatRequest, house: House) -> Job:
    house.check_model(body.model)
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidParameter(
            "max_tokens", body.max_tokens, f"max_completion_tokens says {body.max_completion_tokens}"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs", body.top_logprobs, "only with logprobs = true")
    reply, forced = read_tools(body, house)
    text = render(body.messages, tools_in_use(body), house, body.chat_template_kwargs)
    prompt = house.encode(text, add_special_tokens=False)
    params = sampling_of(
        body,
        max_tokens=house.length_of(
            body.max_completion_tokens if body.max_tokens is None else body.max_tokens, [prompt]
        ),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=forced,
    )
    asked = ask_chat(body, tools_in_use(body), house)
    return Job("chat.completion", [prompt], params, reply=reply, asked=asked, **shared(body, house))


def tools_in_use(body: ChatRequest) -> list[Tool]:
    return [] if body.tool_choice == "none" else body.tools or []


def read_tools(body: ChatRequest, house: House) -> tuple[Any, dict[str, Any] | None]:
    """How the answer is to be read, and the `structured` form that it is forced into."""
    tools, choice = tools_in_use(body), body.tool_choice or "auto"
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidParameter("tool_choice", shown(choice), "needs tools")
        return Spoken, None
    if body.response_format is not None and body.response_format.type != "text" and choice != "auto":
        raise InvalidParameter(
            "response_format", body.response_format.type, "cannot be joined with a forced tool call"
        )
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, NamedTool):
        wanted = next((function for function in functions if function["name"] == choice.function.name), None)
        if wanted is None:
            raise InvalidParameter(
                "tool_choice.function.name", choice.function.name, "is not among the tools"
            )
        return lambda: Named(wanted["name"]), {"json_schema": wanted.get("parameters") or {"type": "object"}}
    if choice == "required":
        return Required, {
            "json_schema": calls_schema(functions, parallel=body.parallel_tool_calls is not False)
        }
    reply = recognise(house.tokenizer.chat_template)
    if reply is None:
        limit = "this checkpoint's chat template has no form of tool calls that is known here; use required, none or a name"
        raise InvalidParameter("tool_choice", "auto", limit)
    return reply, None


def shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def render(
    messages: Seq[Message], tools: Seq[Tool], house: House, variables: dict[str, Any] | None = None
) -> str:
    """The conversation as the checkpoint's template writes it."""
    told = [as_template(message) for message in messages]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    if functions and "tools" not in house.tokenizer.chat_template:
        text = "\n".join(
            [TOOLS_TOLD, *(json.dumps(tool["function"], ensure_ascii=False) for tool in functions)]
        )
        told, functions = [{"role": "system", "content": text}, *told], []
    return house.tokenizer.render_chat(told, functions, variables)


def as_template(message: Message) -> dict[str, Any]:
    """One message as templates expect it: text, and arguments of calls as objects."""
    told = message.model_dump(exclude_none=True)
    told["content"] = text_of(message.content)
    if message.role == "developer":
        told["role"] = "system"
    for call in told.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            pass  # the template gets the text as it is
    return told
