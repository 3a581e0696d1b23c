"""Tags that are special tokens: parsers see them, and the texts of an answer do not show them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from speculon.server.deltas import Delta
from speculon.text import Tokenizer


class ShownTags(Tokenizer):
    """A tokenizer whose texts have some of the special tokens where the others are left out."""

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int]):
        super().__init__(tokenizer.inner)
        self._left_out = frozenset(self.special_ids).difference(shown)

    def hidden(self, skip_special_tokens: bool) -> frozenset[int]:
        return self._left_out if skip_special_tokens else frozenset()

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._left_out]
        return super().decode(ids, skip_special_tokens=False)


def special_tags(tokenizer: Tokenizer, tags: Iterable[str]) -> dict[str, int]:
    """The ids of those tags that are special tokens, which texts leave out."""
    found = {tag: token for tag in tags if (token := tokenizer.token_id(tag)) is not None}
    special = set(tokenizer.special_ids) if found else ()
    return {tag: token for tag, token in found.items() if token in special}


def without_tags(deltas: list[Delta], tags: Seq[str]) -> list[Delta]:
    """The deltas without special tokens in their texts."""
    for delta in deltas:
        for key in delta.keys() & {"content", "reasoning_content"}:
            for tag in tags:
                delta[key] = delta[key].replace(tag, "")
    return [delta for delta in deltas if any(delta.values())]
