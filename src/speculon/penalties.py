"""Logit biases and penalties for all rows of a step at once.

What depends on the request or the sequence is kept there: the tensors of a bias, and how often each token was
written. So a row costs as much as its sequence has different tokens, whatever the length of its context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculon.config import SamplingParams
from speculon.sequence import Rules, Sequence

if TYPE_CHECKING:
    from speculon.sampling import Row

Ints = NDArray[np.int64]


class Counts:
    """Which tokens a sequence has, and how often it has written each, as it grows."""

    def __init__(self) -> None:
        self._read = 0  # tokens that are counted
        self._at: dict[int, int] = {}  # token -> its place in the arrays
        self._ids, self._written = np.zeros((2, 64), np.int64)

    @classmethod
    def of(cls, seq: Sequence) -> Counts:
        counts = seq.counts = seq.counts or cls()
        counts._read_to_end(seq)
        return counts

    @property
    def ids(self) -> Ints:
        return self._ids[: len(self._at)]

    @property
    def written(self) -> Ints:
        """Of each of `ids`; 0 for those of the prompt alone."""
        return self._written[: len(self._at)]

    def of_token(self, token: int) -> int:
        place = self._at.get(token)
        return 0 if place is None else int(self._written[place])

    def _read_to_end(self, seq: Sequence) -> None:
        for position, token in enumerate(seq.tokens[self._read :], self._read):
            place = self._at.setdefault(token, len(self._at))
            if place == len(self._ids):
                self._ids, self._written = np.pad([self._ids, self._written], ((0, 0), (0, place)))
            self._ids[place] = token
            self._written[place] += position >= seq.request.prompt_len
        self._read = len(seq.tokens)


def add_biases(logits: Tensor, rows: list[Row]) -> None:
    """Adds the biases of each row's request to `logits` [R, V]."""
    for rules, (first, last) in runs_of([row.rules for row in rows]):
        if rules.params.logit_bias:
            ids, values = bias_of(rules, logits.device)
            logits[first:last].index_add_(1, ids, values.expand(last - first, -1))


def bias_of(rules: Rules, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and values, made once for each request."""
    if device not in rules.bias:
        biases = rules.params.logit_bias
        ids, values = torch.tensor([*biases]), torch.tensor([*biases.values()])
        rules.bias[device] = ids.to(device), values.to(device)
    return rules.bias[device]


def penalise(logits: Tensor, raw: Tensor, rows: list[Row]) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output. Changes `logits`, which
    are `raw` [R, V] so far.
    """
    for seq, (first, last) in runs_of([row.seq if row.rules.penalises else None for row in rows]):
        if seq is None:
            continue
        counts = Counts.of(seq)
        ids, written = as_tensor(counts.ids, raw), as_tensor(counts.written, raw)
        penalised = penalised_by(seq.request.params, raw[first:last].index_select(1, ids), written)
        logits[first:last].index_copy_(1, ids, penalised)
        count_drafts(logits, raw, rows[first:last], first, counts)


def count_drafts(logits: Tensor, raw: Tensor, rows: list[Row], first: int, counts: Counts) -> None:
    """The same for the drafts before each of these rows of one sequence, which begin at row `first`."""
    places: list[tuple[int, int]] = []  # row, token
    written: list[int] = []
    for at, row in enumerate(rows, first):
        for token, times in Counter(row.prefix).items():
            places.append((at, token))
            written.append(counts.of_token(token) + times)
    if places:
        at, token = as_tensor(np.array(places).T, raw)
        x = penalised_by(rows[0].rules.params, raw[at, token], as_tensor(np.array(written), raw))
        logits[at, token] = x


def penalised_by(p: SamplingParams, x: Tensor, written: Tensor) -> Tensor:
    """Logits [.., N] of tokens that were seen, by how often each was written [N]."""
    if p.repetition_penalty != 1:
        x = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        x = x - (p.presence_penalty * (written > 0) + p.frequency_penalty * written)
    return x


def as_tensor(numbers: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)


def runs_of(values: list[Any]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each value with the (first, last) of its run of neighbours, the very same object."""
    for _, run in groupby(range(len(values)), lambda i: id(values[i])):
        first, *others = run
        yield values[first], (first, first + len(others) + 1)
