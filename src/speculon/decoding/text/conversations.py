"""Conversations in the forms that chat templates take: their messages, which template is meant, and which
message a template refuses. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any, NamedTuple

from speculon.core.errors import InvalidParameter, InvalidRequest

BLANK_LINE = "\n\n"  # between messages that become one, as Mistral's own tokenizer and LiteLLM join them
SYSTEM = ("system", "developer")
TURNS = ("user", "assistant")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's thinking
REFUSED = "the chat template refuses these messages"
CONTINUE, OPEN = "continue_final_message", "add_generation_prompt"
# for a message that a template refuses, by whether it is a system message further on, or the first
FURTHER_ON = "put it at the beginning, or send its text as the user's"
OPENING = "put its text into the first message of the user"
OTHERWISE = "send it in another role, or leave it out"

ChatMessage = dict[str, Any]
Named = tuple[str, ChatMessage]  # a message, and the field of the client that it comes from
Write = Callable[[list[ChatMessage]], str]


# which template


def template_for(templates: Any, *, tools: bool = False, documents: bool = False) -> Any:
    """The source of the template that a conversation is written by; empty where there is none.

    `templates` are those of a checkpoint: a source, or sources by name. Of named ones `tool_use` is for
    conversations with tools and `rag` for those with documents, as transformers and Cohere name them.
    """
    if not isinstance(templates, Mapping):
        return templates or ""
    names = ["tool_use"] * tools + ["rag"] * documents + ["default"]
    return next((str(templates[name]) for name in names if templates.get(name)), "")


# how an answer begins


class Beginning(NamedTuple):
    """What an answer goes on from."""

    field: str  # of the last message: content, or its thinking
    text: str


def beginning_of(
    messages: Seq[Mapping[str, Any]], continues: bool | str | None, opens: bool | None
) -> Beginning | None:
    """What the answer goes on from; None where it begins, as it does after an empty last message.

    `continues` may name the field: otherwise it is the content, or a thinking without content.
    Raises `InvalidParameter` where the last message cannot be continued, or the template is to open an answer
    as well.
    """
    if not continues:
        return None
    field = continues if isinstance(continues, str) else ""
    if field not in ("", "content", "reasoning_content"):
        raise InvalidParameter(CONTINUE, continues, "must be True, False, 'content' or 'reasoning_content'")
    if opens:
        limit = (
            f"cannot be used together with {OPEN} = True: an answer either continues the last message or "
            "begins anew"
        )
        raise InvalidParameter(CONTINUE, continues, limit)
    last = messages[-1] if messages else {}
    if (role := last.get("role")) != "assistant":
        limit = f"the last message must be the assistant's, and its role is {role!r}"
        raise InvalidParameter(CONTINUE, continues, limit)
    if last.get("tool_calls"):
        limit = "the last message ends with tool calls: send their results instead"
        raise InvalidParameter(CONTINUE, continues, limit)
    content = last.get("content") or ""
    if not isinstance(content, str):
        raise InvalidParameter(f"messages.{len(messages) - 1}.content", content, "must be a string")
    thinking = next((text for name in REASONING if isinstance(text := last.get(name), str) and text), "")
    if field == "reasoning_content" or (not field and thinking and not content):
        return Beginning("reasoning_content", thinking) if thinking.strip() else None
    return Beginning("content", content) if content.strip() or thinking else None


# how a conversation is written


def written(
    messages: Seq[Mapping[str, Any]], names: Seq[str] | None, write: Callable[..., str], continued: str = ""
) -> str:
    """A conversation as a template writes it, open at the end of the field `continued` of its last message.

    `write` is the template, called with messages and that field. Raises `InvalidParameter` by the `names` of
    messages, or `InvalidRequest`, where the template refuses it in all of its forms.
    """
    names = names or [f"messages.{i}" for i in range(len(messages))]
    named = one_opening(list(zip(names, map(plain_form, messages), strict=True)))
    if not continued:
        return first_written(named, write)
    try:
        return first_written(named, lambda form: write(form, continued))
    except InvalidRequest as error:
        first_written(named, write)  # raises where the messages themselves are the reason
        limit = "the model's chat template cannot leave the last message open, so it cannot be continued"
        raise InvalidParameter(CONTINUE, continued, limit) from error


def plain_form(message: Mapping[str, Any]) -> ChatMessage:
    """A message with a text as its content, without empty lists, with objects as the arguments of calls."""
    form = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    form["content"] = message.get("content") or ""
    if message.get("tool_calls"):
        form["tool_calls"] = [with_arguments(call, arguments_of) for call in message["tool_calls"]]
    return form


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """A tool call whose arguments were changed; anything else as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def arguments_of(arguments: Any) -> dict[str, Any]:
    """The arguments of a tool call as an object, which templates iterate.

    Clients send JSON or the object, and some encode it twice. Whatever else stands there is no argument.
    """
    for _ in range(2):
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def one_opening(messages: list[Named]) -> list[Named]:
    """The system messages at the beginning as one: templates may allow no other."""
    others = (i for i, (_, message) in enumerate(messages) if message["role"] not in SYSTEM)
    size = next(others, len(messages))
    if size < 2:
        return messages
    (name, first), *_ = messages
    texts = [message["content"] for _, message in messages[:size]]
    return [(name, {**first, "content": BLANK_LINE.join(filter(None, texts))}), *messages[size:]]


def forms_of(messages: list[Named]) -> Iterator[list[Named]]:
    """A conversation as it is, and in the forms that some templates demand: neighbours of one role as one
    message, arguments of calls as text.
    """
    yield messages
    seen, joined = [messages], neighbours_joined(messages)
    for form in (joined, with_text(messages), with_text(joined)):
        if form not in seen:
            seen.append(form)
            yield form


def neighbours_joined(messages: list[Named]) -> list[Named]:
    joined: list[Named] = []
    for role, neighbours in groupby(messages, key=lambda named: named[1]["role"]):
        run = list(neighbours)
        joined += [(run[0][0], join(plain(run)))] if role in TURNS and len(run) > 1 else run
    return joined


def join(messages: list[ChatMessage]) -> ChatMessage:
    """Messages of one role as one: texts with blank lines between them, and the calls of all."""
    both = dict(messages[0])
    for key in ("content", *REASONING):
        texts = [text for message in messages if isinstance(text := message.get(key), str) and text]
        if texts:
            both[key] = BLANK_LINE.join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        both["tool_calls"] = calls
    return both


def with_text(messages: list[Named]) -> list[Named]:
    """With JSON as the arguments of tool calls, for templates that put them into a text."""
    return [
        (name, {**message, "tool_calls": [with_arguments(call, as_text) for call in message["tool_calls"]]})
        if "tool_calls" in message
        else (name, message)
        for name, message in messages
    ]


def as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# what a template refuses


def first_written(messages: list[Named], write: Write) -> str:
    """The text of the first form that the template takes. Raises what is wrong with the joined form."""
    faults: list[tuple[list[Named], Exception]] = []
    for form in forms_of(messages):
        try:
            return write(plain(form))
        except Exception as error:  # templates raise errors of their own choice
            faults.append((form, error))
    joined = neighbours_joined(messages)
    fault = next(fault for form, fault in faults if form == joined)
    raise refusal(joined, write, first_line(fault)) from fault


def refusal(messages: list[Named], write: Write, reason: str) -> InvalidRequest:
    """The template's refusal, by the message that it is about where that can be told."""
    at = refused_at(plain(messages), write, reason)
    refused = InvalidRequest(f"{REFUSED}: {reason}")
    if at is not None:
        name, message = messages[at]
        advice = OTHERWISE if message["role"] not in SYSTEM else FURTHER_ON if at else OPENING
        limit = f"the chat template refuses it here ({reason}): {advice}"
        refused = InvalidParameter(name, {"role": message["role"]}, limit)
    refused.logged = REFUSED  # a template may quote the request
    return refused


def refused_at(messages: list[ChatMessage], write: Write, reason: str) -> int | None:
    """The first message that a template refuses for a reason; None where it refuses them all together."""

    def refuses(some: list[ChatMessage]) -> bool:
        try:
            write(some)
        except Exception as error:
            return first_line(error) == reason
        return False

    taken, refused = 0, len(messages)  # numbers of messages from the beginning
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if refuses(messages[:middle]):
            refused = middle
        else:
            taken = middle
    alone = refused == 1 and len(messages) > 1 and refuses(messages[1:])
    return None if alone else refused - 1


def plain(messages: list[Named]) -> list[ChatMessage]:
    """As templates take them, which know no developer."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for _, message in messages
    ]


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
