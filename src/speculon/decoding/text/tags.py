"""Tags that are special tokens: parsers see them, and the texts of an answer do not show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from speculon.decoding.text.deltas import Delta
from speculon.decoding.text.tokenizer import Stream, Tokenizer


class TaggedStream:
    """A stream of a text without special tokens, in which the tags among them are written.

    Stop strings are found in the text without tags, as the engine finds them and clients see it.
    """

    def __init__(self, stream: Stream, tags: Mapping[str, int]):
        self._stream = stream
        self._tags = {token: tag for tag, token in tags.items()}
        self._held: list[tuple[int, str]] = []  # tags not returned yet, and the characters before each
        self._returned = 0  # characters, without tags

    @property
    def length(self) -> int:
        return self._stream.length

    @property
    def first(self) -> bool:
        return self._stream.first

    def push(self, ids: Seq[int]) -> str:
        return "".join(self._push(token) for token in ids)

    def release(self) -> str:
        return self._tagged(self._stream.release())

    def flush(self, stop: str | int | None = None) -> str:
        return self._tagged(self._stream.flush(stop))

    def _push(self, token: int) -> str:
        if token in self._tags:
            self._held.append((self.length + self._stream.unfinished, self._tags[token]))
        return self._tagged(self._stream.push([token]))

    def _tagged(self, text: str) -> str:
        """`text`, which goes on from what was returned, with the tags that stand in it or at its ends."""
        begun, tagged = self._returned, ""
        self._returned += len(text)
        while self._held and self._held[0][0] <= self._returned:
            at, tag = self._held.pop(0)
            tagged, text, begun = tagged + text[: at - begun] + tag, text[at - begun :], at
        return tagged + text


def special_tags(tokenizer: Tokenizer, tags: Iterable[str]) -> dict[str, int]:
    """The ids of those tags that are special tokens, which texts leave out."""
    ids = {tag: tokenizer.token_id(tag) for tag in tags}
    return {tag: token for tag, token in ids.items() if token in tokenizer.special_ids}


def without_tags(deltas: list[Delta], tags: Seq[str]) -> list[Delta]:
    """The deltas without special tokens in their texts."""
    for delta in deltas:
        for key in delta.keys() & {"content", "reasoning_content"}:
            for tag in tags:
                delta[key] = delta[key].replace(tag, "")
    return [delta for delta in deltas if any(delta.values())]
