"""Text to token ids and back: prompts, chat templates, streams. No torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import cache, cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from speculon.core.errors import InvalidParameter, InvalidRequest
from speculon.core.media.parts import with_parts
from speculon.core.types import shared_length
from speculon.decoding.text.bad_words import BadWords, Spellings
from speculon.decoding.text.conversations import beginning_of, first_line, template_for, written

if TYPE_CHECKING:
    from speculon.core.config import SamplingParams

NO_TOKENIZER = "a text needs a tokenizer, and the model was loaded without one: give token ids"
UNSURE = "\ufffd"  # how decoders write bytes that are not, or not yet, a whole character
# after this many tokens without a whole character, their bytes are taken for garbage
MAX_UNSURE = 32
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
OWN_VARIABLES = {"tokenize", "add_generation_prompt"}
# names; not <|end|>, after which some models write another message
ENDS_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>", "[|endofturn|]",
)  # fmt: skip
UNFINISHED = 3  # most bytes of an incomplete character
CONTEXT = 8  # tokens kept before garbage; an incomplete character spans at most 3


class Tokenizer:
    """What speculon needs of a transformers tokenizer; `inner` is the tokenizer itself."""

    def __init__(self, inner: Any):
        self.inner = inner
        self._texts: dict[tuple[int, bool], str] = {}  # of single tokens
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
            limit = f"the tokenizer cannot encode it: {first_line(error)}"
            raise InvalidParameter(name, text, limit) from error

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
        answer_follows: bool | None = None,
        continues: bool | str | None = None,
        documents: Seq[Mapping[str, Any]] = (),
        with_images: Any = None,
        names: Seq[str] | None = None,
    ) -> str:
        """The conversation as the template writes it, up to where the answer begins, if one follows (as it
        does by default), or goes on.

        With `continues` the answer goes on from the last message, at the end of its text or of the field
        that is named. `with_images` is the template of a processor, which writes a placeholder for each
        `IMAGE`; an empty one is the tokenizer's. Errors are about the `names` of messages.
        """
        beginning = beginning_of(messages, continues, answer_follows)
        if continues and not beginning:
            messages, names, answer_follows = messages[:-1], names and names[:-1], True
        check_messages(messages)
        templates = with_images or self.inner.chat_template
        if not templates:
            raise InvalidRequest("this checkpoint has no chat template: give a plain prompt")
        template = template_for(templates, tools=bool(tools), documents=bool(documents))
        if documents and "documents" not in template:
            raise InvalidParameter(
                "documents", documents, "the model's chat template has no place for documents"
            )
        if not template:
            named = ", ".join(sorted(templates))
            raise InvalidRequest(f"this checkpoint has chat templates only for {named}: give a plain prompt")
        parameters = inspect.signature(self.inner.apply_chat_template).parameters
        if taken := (variables or {}).keys() & parameters.keys() - OWN_VARIABLES:
            raise InvalidParameter(
                "chat_template_kwargs",
                min(taken),
                "is an argument of the tokenizer and not a variable of the chat template",
            )
        known: dict[str, Any] = {**(variables or {}), "tokenize": False}
        known["add_generation_prompt"] = not beginning and answer_follows is not False
        if template is not self.inner.chat_template:
            known["chat_template"] = template
        if documents:
            known["documents"] = list(documents)

        def write(form: Seq[dict[str, Any]], continued: str = "") -> str:
            plain = list(form) if with_images is None else with_parts(form)
            goes_on = {"continue_final_message": continued} if continued else {}
            return str(self.inner.apply_chat_template(plain, tools=list(tools) or None, **known, **goes_on))

        return written(messages, names, write, beginning.field if beginning else "")

    def apply_chat(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The source of its chat template, or of all its templates by name; empty without one."""
        templates = self.inner.chat_template
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates or "")

    def template_for(self, *, tools: bool = False, documents: bool = False) -> str:
        """The source of the template that writes such a conversation; empty if there is none."""
        template: str = template_for(self.inner.chat_template, tools=tools, documents=documents)
        return template

    def hidden(self, skip_special_tokens: bool) -> frozenset[int]:
        """The tokens that are left out of a text."""
        return self.special_ids if skip_special_tokens else frozenset()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The added tokens that are marked as special."""
        added = getattr(self.inner, "added_tokens_decoder", {})
        return frozenset(token for token, known in added.items() if known.special)

    @cached_property
    def anchor(self) -> list[int]:
        """A token of plain text. A token decoded after it is written as in the middle of a text."""
        try:
            usual = self.encode("a", add_special_tokens=False)[-1:]
        except InvalidParameter:
            usual = []
        for token in (*usual, *range(self.vocab_size)):
            text = self.decode([token])
            if text.strip() and UNSURE not in text and not BYTE_PIECE.fullmatch(self._piece(token)):
                return [token]
        return []

    def context(self, prompt: Seq[int], skip_special_tokens: bool = True) -> list[int]:
        """The end of a prompt, after which an output is decoded: many tokenizers leave out the space of a
        text's first word. Empty where no token of the prompt is shown.
        """
        n, known = 1, range(self.vocab_size)  # the engine refuses all other ids
        while True:
            tail = [token for token in prompt[-n:] if token in known]
            text = self.decode(tail, skip_special_tokens)
            if n >= len(prompt) or (text.rstrip(UNSURE) and not text.startswith(UNSURE)):
                return tail if text or not self.hidden(skip_special_tokens).issuperset(tail) else []
            n *= 2

    def continuation(self, context: Seq[int], ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """The text that `ids` add to that of `context`; a character that was not whole belongs to it."""
        if context is self.anchor:
            begun = self._anchor_length
        else:
            begun = len(sure_text(self, (), context, skip_special_tokens)) if context else 0
        return self.decode([*context, *ids], skip_special_tokens)[begun:]

    @cached_property
    def _anchor_length(self) -> int:
        return len(self.decode(self.anchor))

    def as_sent(self, prompt: Seq[int]) -> Seq[int]:
        """A prompt without the special tokens that the tokenizer has put around it."""
        front = shared_length(self._around, prompt)
        back = shared_length(self._around[front:][::-1], prompt[front:][::-1])
        return prompt[front : len(prompt) - back]

    @cached_property
    def _around(self) -> list[int]:
        """The special tokens that are put around a plain prompt."""
        return [token for token in self.encode("") if token in self.special_ids]

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's end-of-text token, and the tokens that end a turn in
        its chat template.
        """
        own = getattr(self.inner, "eos_token", None)
        end = None if own is None else self.token_id(str(own))
        turns = ends_of_turn(self.token_id, self.chat_template) if self.chat_template else set()
        return frozenset(turns if end is None else {end, *turns})

    def token_text(self, token: int, first: bool = False) -> str:
        """The text of one token inside a text, or as its `first`. Incomplete characters are U+FFFD."""
        if (token, first) not in self._texts:
            context = [] if first else self.anchor
            self._texts[token, first] = self.continuation(context, [token], skip_special_tokens=False)
        return self._texts[token, first]

    def token_name(self, token: int, first: bool = False) -> str:
        """The text of one token; its bytes, as `bytes:\\xa9`, where they are no text, or a character that
        has a token of its own.
        """
        data = self.token_bytes(token, first)
        if data is None:
            return self.token_text(token, first)
        try:
            text = bytes(data).decode()
        except UnicodeDecodeError:
            text = None
        piece = self._piece(token)
        as_byte = text is not None and text != piece and BYTE_PIECE.fullmatch(piece)
        if text is not None and not (as_byte and self.token_id(text) is not None):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, token: str) -> int | None:
        """The id of the token with this name; None if the vocabulary has none."""
        index = self.inner.convert_tokens_to_ids(token)
        # an unknown name has the id of the unknown token
        return index if index is not None and self.inner.convert_ids_to_tokens(index) == token else None

    def token_bytes(self, token: int, first: bool = False) -> list[int] | None:
        """The bytes of one token as `token_text` has them; None where the vocabulary does not tell them."""
        text = self.token_text(token, first)
        return list(text.encode()) if UNSURE not in text else self._bytes_of_piece(token)

    def _bytes_of_piece(self, token: int) -> list[int] | None:
        piece = self._piece(token)
        if BYTE_PIECE.fullmatch(piece):  # SentencePiece's way of writing a byte
            return [int(piece[3:5], 16)]
        alphabet = byte_alphabet()
        return [alphabet[char] for char in piece] if all(char in alphabet for char in piece) else None

    def _piece(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        return str(self.inner.convert_ids_to_tokens(token))

    @cached_property
    def spellings(self) -> Spellings:
        """The bytes of each token in the middle of a text. Takes half a second for a large vocabulary."""
        anchor, ids = self.anchor, range(self.vocab_size)
        backend: Any = getattr(self.inner, "backend_tokenizer", None)
        if hasattr(backend, "decode_batch"):
            begun = self._anchor_length
            texts = backend.decode_batch([[*anchor, token] for token in ids], skip_special_tokens=False)
            texts = [text[begun:] for text in texts]
        else:
            texts = [self.token_text(token) for token in ids]
        written = [text.encode() for text in texts]
        for token, text in enumerate(texts):
            if UNSURE in text:
                written[token] = bytes(self._bytes_of_piece(token) or written[token])
        return Spellings(written)

    def bad_words(self, words: Seq[str], skip_special_tokens: bool = True) -> BadWords:
        for word in words:
            check_text("bad_words", word)
        return BadWords(words, self.spellings, self.hidden(skip_special_tokens))


def ends_of_turn(token_id: Callable[[str], int | None], template: str) -> set[int]:
    """Ids of tokens that end a turn, by name; where no template writes it, such a token has no meaning."""
    ids = (token_id(name) for name in ENDS_OF_TURN if name in template)
    return {token for token in ids if token is not None}


class Stream:
    """Turns the tokens of one text into text as they come; what is returned is never taken back.

    Held back are an unfinished character and, with `stops`, whatever may turn out to be a stop string.
    Pushes and `flush` together are what the tokens add to the `context`, up to the stop string that ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Seq[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        context: Seq[int] = (),
    ):
        self._tokenizer, self._stops, self._skip = tokenizer, tuple(stops), skip_special_tokens
        self._include_stop = include_stop
        self._window = list(context)  # the latest tokens, from a character's beginning on
        self._text = tokenizer.decode(context, self._skip) if context else ""  # what they decode to
        # characters of it that went on to `_held`
        self._sure = len(sure_text(tokenizer, (), context, self._skip)) if context else 0
        self._hidden = tokenizer.hidden(skip_special_tokens)
        self.first = not context  # whether the next token begins the text: none shown stands before it
        self._held = ""  # whole characters not returned yet
        self._settled = 0  # characters of it from before the last token: no text ended there
        self.length = 0  # whole characters so far, returned or held back: where the next token begins

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams, prompt: Seq[int] = ()) -> Stream:
        """The stream for a text that continues a prompt with these parameters."""
        context = output_context(tokenizer, params, prompt)
        include = params.include_stop_str_in_output
        return cls(tokenizer, params.stop, params.skip_special_tokens, include, context)

    @property
    def unfinished(self) -> int:
        """Characters as which an unfinished one is decoded so far."""
        return len(self._text) - self._sure

    def push(self, ids: Seq[int]) -> str:
        """Adds tokens, and returns the text that cannot change any more."""
        return "".join(self._push(token) for token in ids)

    def release(self) -> str:
        """Returns the text that was held back; the caller knows that no stop string begins in it."""
        text, self._held, self._settled = self._held, "", 0
        return text

    def flush(self, stop: str | int | None = None) -> str:
        """The rest, once the text has ended; `stop` is what ended it (`Finish.matched`): a stop string, or
        what follows it, is cut off.
        """
        text = self._held + self._text[self._sure :]
        after, self._held, self._window, self._text, self._sure = self._settled, "", [], "", 0
        return truncate(text, stop, after, self._include_stop) if isinstance(stop, str) else text

    def _push(self, token: int) -> str:
        self._settled, new = len(self._held), self._decode(token)
        self.first = self.first and token in self._hidden
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
            # the last character's tokens stay: some tokenizers write a word's space only after another word
            for n in range(1, len(self._window)):
                text = self._tokenizer.decode(self._window[-n:], self._skip)
                if text and UNSURE not in text:
                    self._restart(self._window[-n:], False)
                    break
        return new

    def _restart(self, window: list[int], unsure: bool) -> None:
        self._window = window
        self._text = self._tokenizer.decode(window, self._skip)
        self._sure = max(0, len(self._text) - unsure)

    def _may_be_stop(self) -> int:
        """Length of the held text's tail from where a stop string ended in the last token, or may begin."""
        text, longest = self._held, 0
        for stop in self._stops:
            at = text.find(stop, max(0, self._settled - len(stop) + 1))
            if at < 0:
                at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
                while at >= 0 and not stop.startswith(text[at:]):
                    at = text.find(stop[0], at + 1)
            longest = max(longest, len(text) - at if at >= 0 else 0)
        return longest


def sure_text(tokenizer: Tokenizer, context: Seq[int], ids: Seq[int], skip: bool = True) -> str:
    """What `ids` add to the text of `context`, without an unfinished character at its end."""
    text = tokenizer.continuation(context, ids, skip)
    if not text.endswith(UNSURE):
        return text
    # some decoders show a whole run of bytes as garbage for an unfinished character at its end
    cuts = range(max(0, len(ids) - UNFINISHED), len(ids))
    shorter = (tokenizer.continuation(context, ids[:n], skip) for n in cuts)
    whole = [text for text in shorter if not text.endswith(UNSURE)]
    return max(text.rstrip(UNSURE), *whole, "", key=len)


def truncate(text: str, stop: str, after: int = 0, include: bool = False) -> str:
    """`text` up to the first `stop` that ends beyond its first `after` characters, or up to its end with
    `include`; where it is not shown, all of `text`.
    """
    at = text.find(stop, max(0, after - len(stop) + 1))
    return text[:at] + stop * include if at >= 0 else text + stop * include


def output_context(tokenizer: Tokenizer, params: SamplingParams, prompt: Seq[int]) -> list[int]:
    """The tokens after which an output is decoded; a text of a given form is never at its beginning, where a
    space would be left out.
    """
    context = tokenizer.context(prompt, params.skip_special_tokens)
    return context or (tokenizer.anchor if params.structured else [])


def final_text(
    tokenizer: Tokenizer,
    ids: Seq[int],
    stop: str | int | None,
    params: SamplingParams,
    prompt: Seq[int] = (),
) -> str:
    """The whole text of an ended output; `stop` is what ended it (`Finish.matched`)."""
    context, skip = output_context(tokenizer, params, prompt), params.skip_special_tokens
    text = tokenizer.continuation(context, ids, skip)
    # only in the last token can a stop string have ended it: an earlier one was passed over for min_tokens
    if UNSURE in text:  # a decoder may show incomplete characters differently once more bytes follow
        stream = Stream(tokenizer, skip_special_tokens=skip, context=context)
        text, after = stream.push(ids[:-1]), stream.length
        text += stream.push(ids[-1:]) + stream.flush()
    else:
        after = len(sure_text(tokenizer, context, ids[:-1], skip)) if isinstance(stop, str) else 0
    include = params.include_stop_str_in_output
    return truncate(text, stop, after, include) if isinstance(stop, str) else text


def check_text(name: str, text: str) -> None:
    """Raises `InvalidParameter` unless this is a string without lone surrogates."""
    if not isinstance(text, str):
        raise InvalidParameter(name, text, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        limit = (
            f"must be valid Unicode: character {error.start} is a lone surrogate, "
            f"U+{ord(text[error.start]):04X}"
        )
        raise InvalidParameter(name, text[error.start : error.start + 8], limit) from None


def check_messages(messages: Seq[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidParameter(
            "messages", messages, "must be a list of {'role': ..., 'content': ...}, not empty"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(
                f"messages.{i}", message, "must be an object with a role, which is a string"
            )
        if message.get("content") is not None or not message.get("tool_calls"):
            check_text(f"messages.{i}.content", message.get("content"))  # type: ignore[arg-type]


@cache
def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies (GPT-2) write each byte: printable bytes as themselves,
    all others as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
