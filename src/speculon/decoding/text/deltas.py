"""What a reply adds to an assistant's message, as the API streams it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from typing import Any, Protocol

Delta = dict[str, Any]  # of an assistant's message: content, reasoning_content, tool_calls


class ReplyParser(Protocol):
    """Turns the text of one reply into deltas as it comes."""

    tags: tuple[str, ...]  # that it looks for; they may be special tokens

    def push(self, text: str) -> list[Delta]: ...

    def end(self, cut: bool) -> list[Delta]:
        """The rest, once the text has ended; `cut` where it did not end by itself."""
        ...

    @property
    def called(self) -> bool:
        """Whether the reply has tool calls."""
        ...


class TextParser:
    """Text without tool calls."""

    tags: tuple[str, ...] = ()
    called = False

    def push(self, text: str) -> list[Delta]:
        return text_delta(text)

    def end(self, cut: bool) -> list[Delta]:
        return []


def text_delta(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


def reasoning_delta(text: str) -> list[Delta]:
    return [{"reasoning_content": text}] if text else []


def new_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def more_arguments(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": text}}


def partial_tag(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def merge_deltas(deltas: Seq[Delta]) -> Delta:
    """The message that a stream of deltas adds up to."""
    text = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: Delta = {"role": "assistant", "content": text if text or not (calls or reasoning) else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message
