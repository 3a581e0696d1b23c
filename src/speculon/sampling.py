"""From the target's logits to tokens: adjustments, filters and keyed noise, row by row.

One fixed order: penalties, bias, bad words, min_tokens, temperature, top-k, top-p, min-p. Ties go to the lowest id.
A drawn token is argmax over the surviving tokens of p / E, with exponential noise E that is a pure function of
(seed, sample, output position, token id): the Gumbel-max trick, argmax of log p + g, without its outer logarithm, since
g = -log E (Gumbel 1954; Maddison et al. 2014). So a text depends on the model, the prompt and the seed alone, whatever
else runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculon.config import SamplingParams
from speculon.core import Sequence, TokenLogprobs

NEVER = float("-inf")
HEAD = 256  # guess: the survivors of the usual top-k and top-p lie within
U32, U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Rules:
    """`SamplingParams` resolved once per sequence against the vocabulary."""

    params: SamplingParams
    greedy: bool
    adjusts: bool  # whether any logit is changed before the temperature
    penalises: bool
    filters: bool
    bad_words: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]  # forbidden below min_tokens

    @classmethod
    def of(cls, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = (), stop_ids: tuple[int, ...] = ()) -> Rules:
        p = params
        penalises = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        adjusts = bool(penalises or p.logit_bias or bad_words or (p.min_tokens and stop_ids))
        filters = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        return cls(p, p.greedy, adjusts, penalises, filters, bad_words, stop_ids)


@dataclass(frozen=True, slots=True)
class Row:
    """One scored position: a sequence, and the drafted tokens that stand before this row."""

    seq: Sequence
    rules: Rules
    prefix: tuple[int, ...] = ()
    stream: int = 0  # which of the position's independent noises

    @property
    def position(self) -> int:
        """Index of the output token that this row decides."""
        return self.seq.num_output + len(self.prefix)


Draw = Callable[[Tensor, list[Row]], Tensor]


def sample(logits: Tensor, rows: list[Row], draw: Draw | None = None) -> list[int]:
    """One token for each row of `logits` [R, V], which are not modified. `draw` replaces the keyed noise in tests."""
    return pick(weigh(logits, rows), rows, draw)


def weigh(logits: Tensor, rows: list[Row]) -> Tensor:
    """What a row's token is chosen by, [R, V]: adjusted logits where greedy, else filtered log-weights, p up to a factor."""
    if any(row.rules.adjusts for row in rows):
        logits = adjust(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if len(drawn) == len(rows):
        return shape(logits, rows)
    if drawn:
        logits = logits.index_copy(0, torch.tensor(drawn, device=logits.device), shape(logits[drawn], [rows[i] for i in drawn]))
    return logits


def pick(weights: Tensor, rows: list[Row], draw: Draw | None = None) -> list[int]:
    """The best token of greedy rows, a drawn one of the others."""
    draw = draw or race
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if len(drawn) == len(rows):
        return draw(weights, rows).tolist()
    tokens = weights.argmax(-1)  # [R]
    if drawn:
        tokens[drawn] = draw(weights[drawn], [rows[i] for i in drawn])
    return tokens.tolist()


def adjust(logits: Tensor, rows: list[Row]) -> Tensor:
    """Penalties, bias, bad words and min_tokens on a copy of `logits` [R, V]; each row sees its drafted prefix."""
    logits = logits.clone()
    for x, row in zip(logits, rows, strict=True):  # x [V]
        if row.rules.penalises:
            penalise(x, row)
        if bias := row.rules.params.logit_bias:
            x[list(bias)] += torch.tensor(list(bias.values()), device=x.device)
        for word in row.rules.bad_words:
            forbid_completion(x, row, word)
        if row.position < row.rules.params.min_tokens:
            x[list(row.rules.stop_ids)] = NEVER
    return logits.clamp_(max=torch.finfo(logits.dtype).max)  # an overflow is the best token; inf - inf would be none


def penalise(x: Tensor, row: Row) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output. Changes `x` [V]."""
    seq, p = row.seq, row.rules.params
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted({*seq.tokens, *row.prefix}), device=x.device)
        x[seen] = torch.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    written = [*seq.tokens[seq.prompt_len :], *row.prefix]
    if written and (p.presence_penalty or p.frequency_penalty):
        counts = torch.tensor(written, device=x.device).bincount(minlength=len(x))  # [V]
        x -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts


def forbid_completion(x: Tensor, row: Row, word: tuple[int, ...]) -> None:
    """Removes the last token of `word` where the text before ends with the rest of it. Changes `x` [V]."""
    head = word[:-1]
    context = (*row.seq.tokens[-len(head) :], *row.prefix) if head else ()
    if not head or context[-len(head) :] == head:
        x[word[-1]] = NEVER


def shape(logits: Tensor, rows: list[Row]) -> Tensor:
    """Log-weights [N, V] of drawn rows after temperature, top-k, top-p and min-p; removed tokens are -inf."""
    smallest = torch.finfo(logits.dtype).tiny  # what rounds to 0 would make 0 / 0 of the best token
    temperature = torch.tensor([[max(row.rules.params.temperature, smallest)] for row in rows], device=logits.device)
    # Relative to the best token first: a tiny temperature would overflow the quotient.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    filtered = [i for i, row in enumerate(rows) if row.rules.filters]
    if filtered:
        logits[filtered] = keep_likely(logits[filtered], [rows[i].rules.params for i in filtered])
    return logits


def keep_likely(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """top-k, then top-p over what is left, then min-p, on logits [N, V].

    Rows whose survivors all lie among the `HEAD` likeliest tokens are not sorted any further.
    """
    kept, settled = keep_among(logits, params, HEAD)
    open_rows = (~settled).nonzero().flatten().tolist()
    if open_rows:
        kept[open_rows], _ = keep_among(logits[open_rows], [params[i] for i in open_rows], logits.shape[-1])
    return kept


def keep_among(logits: Tensor, params: list[SamplingParams], head: int) -> tuple[Tensor, Tensor]:
    """Filtered logits [N, V] as seen from the `head` likeliest tokens, and for which rows [N] that was enough."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]  # [N, 1]

    vocab = logits.shape[-1]
    head = min(head, vocab)
    ids = logits.topk(head).indices.sort(-1).values  # [N, head]
    ordered, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)  # ties stay in the order of ids
    ids = ids.gather(-1, order)
    top_k = column([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params])
    keep = torch.arange(head, device=logits.device) < top_k
    total = torch.where(top_k < vocab, ordered.masked_fill(~keep, NEVER).logsumexp(-1, True), logits.logsumexp(-1, True))
    probs = (ordered - total).exp()
    # Without top-p no limit: the rounded sum reaches 1 before the rare tokens.
    keep &= probs.cumsum(-1) - probs < column([p.top_p if p.top_p < 1 else 2.0 for p in params])
    keep &= probs >= column([p.min_p for p in params]) * probs[:, :1]
    keep[:, 0] = True
    # A survivor as likely as the last of the head may have equals beyond it.
    beyond = (keep & (ordered == ordered[:, -1:])).any(-1, keepdim=True) | ((head < top_k) & (top_k < vocab))  # [N, 1]
    kept = torch.full_like(logits, NEVER).scatter(-1, ids, ordered.masked_fill(~keep, NEVER))
    return kept, ~beyond[:, 0] | (head == vocab)


def race(logits: Tensor, rows: list[Row]) -> Tensor:
    """Draws one token per row [N] from softmax(logits), logits at most 0: argmax p / E with keyed noise."""
    low, high = keys_of(rows, logits.device)
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    noise = exponential(uniform(low, high, ids))  # [N, V]
    return logits.exp().div_(noise).argmax(-1)


def toss(rows: list[Row], device: torch.device) -> Tensor:
    """One keyed uniform number per row [N]."""
    low, high = keys_of(rows, device)
    return uniform(low, high, torch.zeros(1, dtype=torch.int32, device=device))[:, 0]


def keys_of(rows: list[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """The two key halves of each row's noise, int32 [N, 1]."""
    keys = [row_key(row.seq.seed, row.seq.sample, row.position, row.stream) for row in rows]
    low, high = torch.tensor(keys, dtype=torch.int32, device=device)[..., None].unbind(1)
    return low, high


def row_key(seed: int, sample: int, position: int, stream: int = 0) -> tuple[int, int]:
    """64 key bits of one output position as two signed 32-bit integers (splitmix64, Steele et al. 2014)."""
    x = 0
    for part in (seed, sample | stream << 32, position):
        x = (x + (part & U64) + 0x9E3779B97F4A7C15) & U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
        x ^= x >> 31
    return signed32(x), signed32(x >> 32)


def uniform(low: Tensor, high: Tensor, ids: Tensor) -> Tensor:
    """Floats in [2^-32, 1 - 2^-24] from key halves and token ids, all int32: the same on every device."""
    bits = mix32((ids * signed32(0x9E3779B1) + low).bitwise_xor_(high)).bitwise_and_(0x7FFFFFFF)
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def exponential(v: Tensor) -> Tensor:
    """Standard exponential noise -log(1 - v): fine near v = 0, where the rare tokens win. Changes `v`."""
    return v.neg_().log1p_().neg_()


def mix32(x: Tensor) -> Tensor:
    """Bijective avalanche of int32 with wrap-around (the lowbias32 constants of C. Wellons' hash-prospector). Changes `x`."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(signed32(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(signed32(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def signed32(x: int) -> int:
    x &= U32
    return x - (1 << 32) if x >> 31 else x


def token_logprobs(logits: Tensor, tokens: list[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-softmax of the raw logits [N, V] at `tokens`, with their rank and the `top` likeliest tokens."""
    logp = logits.float().log_softmax(-1)
    chosen = logp.gather(-1, torch.tensor(tokens, device=logp.device)[:, None])  # [N, 1]
    ranks = ((logp > chosen).sum(-1) + 1).tolist()
    values, ids = logp.topk(top, -1)  # [N, top]
    best = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(
        TokenLogprobs(token, lp, rank, pairs)
        for token, (lp,), rank, pairs in zip(tokens, chosen.tolist(), ranks, best, strict=True)
    )
