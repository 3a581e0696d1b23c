"""Where a text ends at a stop string. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from speculon.decoding.text.tokenizer import MAX_UNSURE, UNSURE, Tokenizer, check_text, sure_text


class StopStrings:
    """Finds where a text ends at a stop string, token by token, from a bounded tail of the text.

    The name of a special token ends it at this token, also where these are not shown.
    """

    def __init__(self, stops: Seq[str], tokenizer: Tokenizer, context: Seq[int] = ()):
        for stop in stops:
            check_text("stop", stop)
        self._stops, self._tokenizer, self._context = tuple(stops), tokenizer, context
        self._longest = max(map(len, self._stops), default=0)
        special = tokenizer.hidden(True)
        named = ((tokenizer.token_id(stop), stop) for stop in stops if special)
        self._special = {token: stop for token, stop in named if token in special}

    def find(
        self, before: list[int], new: tuple[int, ...], skip_special_tokens: bool = True
    ) -> tuple[int, str] | None:
        """(index of the first of the `new` tokens that completes a stop string, the one that ends first).

        `before` are the output's earlier tokens, without the prompt: a stop string may begin in them, not
        before.
        """
        special = self._special if skip_special_tokens else {}  # else they are found as text
        named = next((i for i, token in enumerate(new) if token in special), len(new))
        tail, context, settled = self._tail(before, skip_special_tokens)
        whole = self._tokenizer.continuation(context, [*tail, *new[:named]], skip_special_tokens)
        if UNSURE in whole or self._complete(whole, settled):
            for i in range(named):
                # an unfinished character must not match: alone or among drafts, the same token ends the text
                text = sure_text(self._tokenizer, context, [*tail, *new[: i + 1]], skip_special_tokens)
                if ends := self._complete(text, settled):
                    return i, min(ends)[2]
        return (named, special[new[named]]) if named < len(new) else None

    def _complete(self, text: str, settled: int) -> list[tuple[int, int, str]]:
        """(end, rank, stop string) of each stop string in `text` that ends after its first `settled`
        characters.
        """
        matches = []
        for rank, stop in enumerate(self._stops):
            at = text.find(stop, max(0, settled - len(stop) + 1))
            if at >= 0:
                matches.append((at + len(stop), rank, stop))
        return matches

    def _tail(self, before: list[int], skip: bool) -> tuple[list[int], Seq[int], int]:
        """Last tokens that hold every character a stop string could begin with, what they are decoded after,
        and how many characters they are.
        """
        # tokens can be single bytes of characters that have four, so only their text says whether they are
        # enough
        enough, n = self._longest + 4, 4 + self._longest // 2
        longest = 4 * enough + MAX_UNSURE
        while True:
            n = min(n, len(before), longest)
            tail = before[len(before) - n :]
            context = self._context if n == len(before) else self._tokenizer.anchor
            text = sure_text(self._tokenizer, context, tail, skip)
            if len(text) >= enough or n == len(before) or n == longest:
                return tail, context, len(text)
            n *= 2
