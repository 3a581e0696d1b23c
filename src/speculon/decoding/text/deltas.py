"""Turns the text of a reply into the deltas that the API streams: the thinking, and then the answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from os.path import commonprefix
from typing import Any, Protocol

from speculon.core.config import Thinking
from speculon.decoding.text.conversations import Beginning
from speculon.decoding.text.tokenizer import Tokenizer

THINKING_TAGS = (Thinking().start, Thinking().end)
TAIL = 16  # tokens of a prompt's end that may hold a tag

Delta = dict[str, Any]  # of an assistant's message: content, reasoning_content, tool_calls


class ReplyParser(Protocol):
    """Turns the text of one reply into deltas as it comes."""

    tags: tuple[str, ...]  # that it looks for; they may be special tokens

    def push(self, text: str) -> list[Delta]: ...

    def end(self, cut: bool) -> list[Delta]:
        """The last deltas, after the text has ended. `cut` says that it did not end by itself."""
        ...

    @property
    def called(self) -> bool:
        """Whether the reply has tool calls."""
        ...

    @property
    def held(self) -> str:
        """The end of the text that is not shown yet, because a tag may begin in it."""
        ...


class TextParser:
    """Text without tool calls."""

    tags: tuple[str, ...] = ()
    called = False
    held = ""

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


def thinking_of(tokenizer: Tokenizer, prompt: Seq[int], begun: Beginning | None = None) -> Thinking | None:
    """How the reply to a prompt may think; None where it does not.

    A template opens the thinking, leaves that to the model, or closes an empty one, where it is switched off.
    An answer that goes on thinks where it has begun with that and not ended it.
    """
    tags = Thinking()
    known = any(tag in tokenizer.chat_template for tag in THINKING_TAGS)
    if not known and tokenizer.token_id(tags.end) is None:
        return None
    if begun is not None:
        open_tag = begun.text.lstrip().startswith(tags.start) and tags.end not in begun.text
        return Thinking(opened=True) if open_tag or begun.field != "content" else None
    # the engine refuses all other ids
    tail = [token for token in prompt[-TAIL:] if token < tokenizer.vocab_size]
    end = tokenizer.decode(tail, skip_special_tokens=False).rstrip()
    return None if end.endswith(tags.end) else Thinking(opened=end.endswith(tags.start))


class ThinkingParser:
    """The thinking as `reasoning_content`, and the answer after it as another parser reads it.

    Blanks around the tags are neither.
    """

    def __init__(self, thinking: Thinking, answer: Callable[[], ReplyParser]):
        self._thinking, self._answer = thinking, answer()
        self.tags = (*self._answer.tags, thinking.start, thinking.end)
        self._held = ""
        self._state = self._after_blanks = self._begin

    @property
    def called(self) -> bool:
        return self._answer.called

    @property
    def held(self) -> str:
        return self._answer.held + self._held

    def push(self, text: str) -> list[Delta]:
        self._held += text
        return self._state()

    def end(self, cut: bool) -> list[Delta]:
        rest = self._held.rstrip() if self._state == self._reason else self._held
        deltas = reasoning_delta(rest) if self._state == self._reason else self._answer.push(rest)
        return deltas + self._answer.end(cut)

    # Each state takes what it can of `_held`.

    def _begin(self) -> list[Delta]:
        """An opened thinking may be opened once more by the model."""
        text, start = self._held.lstrip(), self._thinking.start
        if start.startswith(text) and text != start:
            return []
        begun = text.startswith(start)
        if begun or self._thinking.opened:
            self._held = text.removeprefix(start)
            self._state, self._after_blanks = self._skip_blanks, self._reason
        else:
            self._state = self._pass_on
        return self._state()

    def _skip_blanks(self) -> list[Delta]:
        self._held = self._held.lstrip()
        if not self._held:
            return []
        self._state = self._after_blanks
        return self._state()

    def _reason(self) -> list[Delta]:
        text, ending, rest = self._held.partition(self._thinking.end)
        if ending:
            self._held = rest
            self._state, self._after_blanks = self._skip_blanks, self._pass_on
            return reasoning_delta(text.rstrip()) + self._state()
        certain = text[: len(text) - partial_tag(text, self._thinking.end)].rstrip()
        self._held = text[len(certain) :]
        return reasoning_delta(certain)

    def _pass_on(self) -> list[Delta]:
        text, self._held = self._held, ""
        return self._answer.push(text)


class ContinuedParser:
    """A reply that goes on from a text which the client has: another parser reads both, and what is new is
    shown.
    """

    def __init__(self, begun: str, make: Callable[[], ReplyParser]):
        self._parser = make()
        self._parser.push(begun)
        if (
            self._parser.called
        ):  # complete calls in the first text are the client's, and are not counted again
            self._parser = make()
        self.tags, self.held = self._parser.tags, self._parser.held

    @property
    def called(self) -> bool:
        return self._parser.called

    def push(self, text: str) -> list[Delta]:
        return self._new(self._parser.push(text))

    def end(self, cut: bool) -> list[Delta]:
        return self._new(self._parser.end(cut))

    def _new(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas without the end of the first text, which the parser shows once it cannot be a tag."""
        for delta in deltas:
            for key, value in delta.items():
                if not isinstance(value, str):
                    self.held = ""  # the held text was a tag
                    continue
                known = len(commonprefix([self.held, value]))
                delta[key], self.held = value[known:], self.held[known:] if known == len(value) else ""
        return [delta for delta in deltas if any(delta.values())]
