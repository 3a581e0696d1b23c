"""Text to token ids and back: prompts, chat templates, streams, stop strings. No torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from speculon.errors import InvalidParameter, InvalidRequest

if TYPE_CHECKING:
    from speculon.config import SamplingParams

NO_TOKENIZER = "texts need a tokenizer, and none was given"
UNSURE = "\ufffd"  # how decoders write bytes that are no character, or not yet one
# tokens without a whole character after which they are taken for garbage, not for a character's beginning
MAX_UNSURE = 32
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
OWN_VARIABLES = {"tokenize", "add_generation_prompt"}
CONTEXT = 8  # tokens kept in front of garbage; an unfinished character spans at most 3


class Tokenizer:
    """What speculon needs of a transformers tokenizer; `inner` is the tokenizer itself."""

    def __init__(self, inner: Any):
        self.inner = inner
        self._encoding = Lock()  # a fast tokenizer fails when two threads set its truncation at once

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Token ids, with the special tokens that the checkpoint puts around a plain prompt unless told
        otherwise.

        Errors are about the parameter `name`.
        """
        check_text(name, text)
        try:
            with self._encoding:
                ids = self.inner(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
            return list(ids)
        except Exception as error:
            raise InvalidParameter(
                name, text, f"the tokenizer cannot encode it: {first_line(error)}"
            ) from error

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        # without the clean-up of spaces: it would change text that has been streamed already
        return self.inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        answer_follows: bool = True,
    ) -> str:
        """The conversation as the checkpoint's template writes it, up to where the answer begins, if one
        follows.
        """
        check_messages(messages)
        if not self.has_chat_template:
            raise InvalidRequest("this checkpoint has no chat template: give a plain prompt")
        known = {**(variables or {}), "tokenize": False, "add_generation_prompt": answer_follows}
        if (
            taken := known.keys()
            & inspect.signature(self.inner.apply_chat_template).parameters.keys() - OWN_VARIABLES
        ):
            raise InvalidParameter("chat_template_kwargs", min(taken), "is no variable of a template")
        try:
            text: str = self.inner.apply_chat_template(
                [dict(m) for m in messages], tools=list(tools) or None, **known
            )
        except Exception as error:  # templates raise errors of their own choice
            refusal = "the chat template refuses these messages"
            refused = InvalidRequest(f"{refusal}: {first_line(error)}")
            refused.logged = refusal
            raise refused from error
        return text

    def apply_chat(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The source of the template in use; empty where there is none."""
        template = self.inner.chat_template
        return str(template.get("default", "") if isinstance(template, dict) else template or "")

    @property
    def special_ids(self) -> list[int]:
        """The added tokens that are marked as special."""
        added = getattr(self.inner, "added_tokens_decoder", {})
        return sorted(token for token, known in added.items() if known.special)

    def token_text(self, token: int) -> str:
        """One token alone; bytes that are no whole character show as U+FFFD."""
        return self.decode([token], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of one token of the vocabulary, by its name; None where there is none."""
        found = self.inner.convert_tokens_to_ids(token)
        # an unknown name has the id of the unknown token
        return found if found is not None and self.inner.convert_ids_to_tokens(found) == token else None

    def token_bytes(self, token: int) -> list[int] | None:
        """The bytes of one token; None where the vocabulary does not tell them."""
        text = self.token_text(token)
        if UNSURE not in text:
            return list(text.encode())
        piece = str(self.inner.convert_ids_to_tokens(token))
        if BYTE_PIECE.fullmatch(piece):  # SentencePiece's way of writing a byte
            return [int(piece[3:5], 16)]
        alphabet = byte_alphabet()
        return [alphabet[char] for char in piece] if all(char in alphabet for char in piece) else None

    def bad_word_ids(self, words: Iterable[str]) -> list[tuple[int, ...]]:
        """Each word as it would be written at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            check_text("bad_words", word)
            for form in (word, word if word.startswith(" ") else " " + word):
                ids = tuple(self.encode(form, add_special_tokens=False))
                if not ids:
                    raise InvalidParameter("bad_words", word, "it has no tokens")
                found[ids] = None
        return list(found)


class Stream:
    """Turns the tokens of one text into text as they come; what is returned is never taken back.

    Held back are an unfinished character and, with `stops`, whatever may turn out to be a stop string.
    Pushes and `flush` together are the decoded whole, up to the stop string that ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Seq[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ):
        self._tokenizer, self._stops, self._skip = tokenizer, tuple(stops), skip_special_tokens
        self._include_stop = include_stop
        self._window: list[int] = []  # the latest tokens, from a character's beginning on
        self._text = ""  # what they decode to
        self._sure = 0  # characters of it that went on to `_held`
        self._held = ""  # whole characters not returned yet
        self._settled = 0  # characters of it from before the last token: no text ended there
        self.length = 0  # whole characters so far, returned or held back: where the next token begins

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> Stream:
        """A stream of a text that is sampled with these parameters."""
        return cls(tokenizer, params.stop, params.skip_special_tokens, params.include_stop_str_in_output)

    def push(self, ids: Seq[int]) -> str:
        """The text that is now certain."""
        return "".join(self._push(token) for token in ids)

    def flush(self, stop: str | int | None = None) -> str:
        """The rest, once the text has ended; `stop` is what ended it (`Finish.matched`): a stop string, or
        what follows it, is cut off.
        """
        text = self._held + self._text[self._sure :]
        after, self._held, self._window, self._text, self._sure = self._settled, "", [], "", 0
        return truncate(text, stop, after, self._include_stop) if isinstance(stop, str) else text

    def _push(self, token: int) -> str:
        self._settled, new = len(self._held), self._decode(token)
        self._held += new
        self.length += len(new)
        certain = len(self._held) - self._may_be_stop()
        ready, self._held = self._held[:certain], self._held[certain:]
        self._settled = max(0, self._settled - certain)
        return ready

    def _decode(self, token: int) -> str:
        self._window.append(token)
        self._text = self._tokenizer.decode(self._window, self._skip)
        long, unsure = len(self._window) > MAX_UNSURE, self._text.endswith(UNSURE)
        end = max(self._sure, len(self._text) - unsure if long else len(self._text.rstrip(UNSURE)))
        new, self._sure = self._text[self._sure : end], end
        if long:
            self._restart(self._window[-CONTEXT:], unsure)
        elif end == len(self._text) > 0:
            # the last visible token stays: some tokenizers write a word's space only after another word
            for n in range(1, len(self._window)):
                if self._tokenizer.decode(self._window[-n:], self._skip):
                    self._restart(self._window[-n:], False)
                    break
        return new

    def _restart(self, window: list[int], unsure: bool) -> None:
        self._window = window
        self._text = self._tokenizer.decode(window, self._skip)
        self._sure = max(0, len(self._text) - unsure)

    def _may_be_stop(self) -> int:
        """Length of the held text's tail from where a stop string ended in the last token, or may be
        beginning.
        """
        text, longest = self._held, 0
        for stop in self._stops:
            at = text.find(stop, max(0, self._settled - len(stop) + 1))
            if at < 0:
                at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
                while at >= 0 and not stop.startswith(text[at:]):
                    at = text.find(stop[0], at + 1)
            longest = max(longest, len(text) - at if at >= 0 else 0)
        return longest


class StopStrings:
    """Finds where a text ends at a stop string, token by token, from a bounded tail of the text."""

    def __init__(self, stops: Seq[str], tokenizer: Tokenizer):
        for stop in stops:
            check_text("stop", stop)
        self._stops, self._tokenizer = tuple(stops), tokenizer
        self._longest = max(map(len, self._stops), default=0)

    def find(
        self, before: list[int], new: tuple[int, ...], skip_special_tokens: bool = True
    ) -> tuple[int, str] | None:
        """(index of the first of the `new` tokens that completes a stop string, the one that ends first).

        `before` are the output's earlier tokens, without the prompt: a stop string may begin in them, not
        before.
        """
        tail, settled = self._tail(before, skip_special_tokens)
        if not self._complete(self._sure_text([*tail, *new], skip_special_tokens), settled):
            return None
        for i in range(len(new)):
            text = self._sure_text([*tail, *new[: i + 1]], skip_special_tokens)
            if ends := self._complete(text, settled):
                return i, min(ends)[2]
        return None

    def _complete(self, text: str, settled: int) -> list[tuple[int, int, str]]:
        """(end, rank, stop string) of those in `text` that end after its first `settled` characters."""
        found = []
        for rank, stop in enumerate(self._stops):
            at = text.find(stop, max(0, settled - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), rank, stop))
        return found

    def _tail(self, before: list[int], skip: bool) -> tuple[list[int], int]:
        """Last tokens that hold every character a stop string could begin with, and how many characters they
        are.
        """
        # tokens can be single bytes of characters that have four, so only their text says whether they are
        # enough
        enough, n = self._longest + 4, 4 + self._longest // 2
        most = 4 * enough + MAX_UNSURE
        while True:
            n = min(n, len(before), most)
            tail = before[len(before) - n :]
            chars = len(self._sure_text(tail, skip))
            if chars >= enough or n == len(before) or n == most:
                return tail, chars
            n *= 2

    def _sure_text(self, ids: list[int], skip: bool) -> str:
        # an unfinished character must not match: alone or among drafts, the same token ends the text
        return self._tokenizer.decode(ids, skip).rstrip(UNSURE)


def truncate(text: str, stop: str, after: int = 0, include: bool = False) -> str:
    """`text` up to the first `stop` that ends beyond its first `after` characters, or up to its end with
    `include`; all of it when there is none.
    """
    at = text.find(stop, max(0, after - len(stop) + 1))
    return text if at < 0 else text[: at + include * len(stop)]


def final_text(tokenizer: Tokenizer, ids: Seq[int], stop: str | int | None, params: SamplingParams) -> str:
    """The whole text of an ended output; `stop` is what ended it (`Finish.matched`)."""
    skip = params.skip_special_tokens
    text = tokenizer.decode(ids, skip)
    if not isinstance(stop, str):
        return text
    # only in the last token can it have ended the text: an earlier one was passed over for min_tokens
    after = len(tokenizer.decode(ids[:-1], skip).rstrip(UNSURE))
    return truncate(text, stop, after, params.include_stop_str_in_output)


def check_text(name: str, text: str) -> None:
    """Raises `InvalidParameter` for what is no text: other types, and halves of surrogate pairs."""
    if not isinstance(text, str):
        raise InvalidParameter(name, text, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        limit = f"a lone surrogate U+{ord(text[error.start]):04X} at character {error.start} is no text"
        raise InvalidParameter(name, text[error.start : error.start + 8], limit) from None


def check_messages(messages: Seq[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidParameter("messages", messages, "a list of {'role': ..., 'content': ...}, not empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages.{i}", message, "needs a role, a string")
        if message.get("content") is not None or not message.get("tool_calls"):
            check_text(f"messages.{i}.content", message.get("content"))  # type: ignore[arg-type]


@cache
def byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write each byte (GPT-2): printable as it is, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
