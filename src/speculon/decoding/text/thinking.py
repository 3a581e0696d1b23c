"""Thinking before an answer: whether a prompt leads to it, where the answer begins, how they are parted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from functools import partial
from itertools import groupby
from typing import Literal

from speculon.core.config import Thinking
from speculon.decoding.text.deltas import Delta, ReplyParser, partial_tag, reasoning_delta
from speculon.decoding.text.tokenizer import Tokenizer

THINKING_TAGS = (Thinking().start, Thinking().end)
TAIL = 16  # tokens of a prompt's end that may hold a tag


class AnswerStart:
    """Finds the first token of the answer in one sequence's output, token by token.

    It is the first token that is not blank, after the token that ends the thinking.
    """

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer):
        self._thinking, self._tokenizer = thinking, tokenizer
        self._longest = max(len(thinking.start), len(thinking.end))  # a token may be one character
        self._tail: tuple[int, ...] = ()
        self._read = 0
        self._part: Literal["start", "thinking", "gap", "answer"] = "thinking" if thinking.opened else "start"
        self.at: int | None = None if thinking.opened else 0  # None: no answer yet

    def push(self, token: int) -> int | None:
        """Where the answer has begun; None where the token is not of an answer."""
        if self._part != "answer":
            self._tail = (*self._tail, token)[-self._longest :]
            self._look(self._tokenizer.decode(self._tail, skip_special_tokens=False))
        self._read += 1
        return self.at

    def _look(self, text: str) -> None:
        """Goes on by the text of the last tokens."""
        match self._part:
            case "start":
                begun = text.lstrip()
                if begun.startswith(self._thinking.start):
                    self.at, self._tail, self._part = None, (), "thinking"
                elif not self._thinking.start.startswith(begun):
                    self._part = "answer"
            case "thinking" if self._thinking.end in text:
                self._tail, self._part = (), "gap"
            case "gap" if text.strip():
                self.at, self._part = self._read, "answer"

    def runs(self, output: Seq[int], num_committed: int) -> list[tuple[int, int, int]]:
        """(start of the answer, first position, end) of those output tokens after the committed ones that are
        of an answer. Of them nothing is kept.
        """
        for token in output[self._read : num_committed]:
            self.push(token)
        ahead = copy(self)
        begins = [ahead.push(token) for token in output[num_committed:]]
        runs = []
        for begin, run in groupby(range(len(begins)), key=begins.__getitem__):
            positions = [num_committed + i for i in run]
            if begin is not None:
                runs.append((begin, positions[0], positions[-1] + 1))
        return runs


def prompt_thinking(tokenizer: Tokenizer, prompt: Seq[int]) -> Thinking | None:
    """How the reply to a prompt may think; None where it does not.

    A template opens the thinking, leaves that to the model, or closes an empty one, where it is switched off.
    """
    tags = Thinking()
    known = any(tag in tokenizer.chat_template for tag in THINKING_TAGS)
    if not known and tokenizer.token_id(tags.end) is None:
        return None
    tail = [token for token in prompt[-TAIL:] if token < tokenizer.vocab_size]  # the engine refuses others
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
        self._state: Callable[[], list[Delta]] = self._begin

    @property
    def called(self) -> bool:
        return self._answer.called

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
            self._held, self._state = text.removeprefix(start), partial(self._skip_blanks, self._reason)
        else:
            self._state = self._pass_on
        return self._state()

    def _skip_blanks(self, following: Callable[[], list[Delta]]) -> list[Delta]:
        self._held = self._held.lstrip()
        if not self._held:
            return []
        self._state = following
        return following()

    def _reason(self) -> list[Delta]:
        text, ending, rest = self._held.partition(self._thinking.end)
        if ending:
            self._held, self._state = rest, partial(self._skip_blanks, self._pass_on)
            return reasoning_delta(text.rstrip()) + self._state()
        certain = text[: len(text) - partial_tag(text, self._thinking.end)].rstrip()
        self._held = text[len(certain) :]
        return reasoning_delta(certain)

    def _pass_on(self) -> list[Delta]:
        text, self._held = self._held, ""
        return self._answer.push(text)
