"""From the target's logits to tokens: adjustments, filters and keyed noise, row by row.

One fixed order: the request's own logits processor, penalties, bias, bad words, min_tokens, grammar,
temperature, top-k, top-p, min-p. Ties go to the lowest id. A drawn token is argmax over the surviving tokens
of p / E, with exponential noise E that is a pure function of (seed, sample, output position, token id): the
Gumbel-max trick, argmax of log p + g, without its outer logarithm, since g = -log E (Gumbel 1954; Maddison et
al. 2014). So a text depends on the model, the prompt and the seed alone, whatever else runs beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.errors import LogitsProcessorError
from speculon.core.types import TokenLogprobs
from speculon.decoding.processor import call_processor
from speculon.decoding.sequence import Rules, Sequence
from speculon.decoding.text.bad_words import BadWords
from speculon.decoding.token_counts import Ints, TokenCounts

NEVER = float("-inf")
HEAD = 256  # guess: the survivors of the usual top-k and top-p lie within
# a temperature that rounds to 0 would make 0 / 0 of the best token
SMALLEST = torch.finfo(torch.float32).tiny
AHEAD = 16  # positions of a text whose noise is drawn in one call, which costs little more than one position
AHEAD_IN_ROUND = 4  # guess: the same for noise of one round only, since few drafts are longer
STOCK = 1 << 16  # most numbers drawn ahead; with a large vocabulary the numbers cost more than the call
SHORT = 1 << 13  # guess: numbers of a row that counts as short
MANY_ROWS = 64  # guess: beyond this many rows, their noise is drawn in one call and nothing ahead
COIN, RESIDUAL = 1, 2  # streams of a position's noise; stream 0 draws the tokens of the target and of drafts
STREAMS = 4  # number of streams of one round, if it has streams of its own
U32, U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One scored position: a sequence, and the drafted tokens before this row."""

    seq: Sequence
    rules: Rules
    prefix: tuple[int, ...] = ()
    stream: int = 0  # which of the position's independent noises
    forbidden: Tensor | None = None  # [V], what the grammar forbids

    @property
    def position(self) -> int:
        """Index of the output token that this row decides."""
        return self.seq.num_output + len(self.prefix)


Draw = Callable[[Tensor, list[ScoredRow]], Tensor]


def round_stream(seq: Sequence, stream: int = 0) -> int:
    """The stream that a round draws its drafts or coins from; under block verification no other round does.

    There, what is accepted depends on the noise of positions behind it, which a later round must not reuse.
    """
    own = seq.request.acceptance == "block"
    return stream + STREAMS * (1 + seq.num_output) if own else stream


def sample(logits: Tensor, rows: list[ScoredRow], draw: Draw | None = None) -> list[int]:
    """One token for each row of `logits` [R, V], which stay unchanged; tests replace the noise by `draw`."""
    return pick(weigh(logits, rows), rows, draw)


def weigh(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """What tokens are chosen by, [R, V]: adjusted logits where greedy, else filtered log p plus a number."""
    if any(row.rules.adjusts for row in rows):
        logits = adjust(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if len(drawn) == len(rows):
        return shape(logits, rows)
    if drawn:
        shaped = shape(logits[drawn], [rows[i] for i in drawn])
        logits = logits.index_copy(0, torch.tensor(drawn, device=logits.device), shaped)
    return logits


def pick(weights: Tensor, rows: list[ScoredRow], draw: Draw | None = None) -> list[int]:
    """The best token of each greedy row, and a sampled token of each other row."""
    draw = draw or exponential_race
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if len(drawn) == len(rows):
        return draw(weights, rows).tolist()
    tokens = best(weights)  # [R]
    if drawn:
        tokens[drawn] = draw(weights[drawn], [rows[i] for i in drawn])
    return tokens.tolist()


def perturbed(weights: Tensor, rows: list[ScoredRow]) -> Tensor:  # [R, V]
    """What `pick` takes the largest of: the weights of greedy rows; log (p / E) of the others, plus a number.

    The noise E of a row is the one with which the target's sample is drawn there (Gumbel-max).
    """
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if not drawn:
        return weights
    noise = row_noise([rows[i] for i in drawn], weights.shape[-1], weights.device)
    return weights.index_put((torch.tensor(drawn, device=weights.device),), weights[drawn] - noise.log())


def best(weights: Tensor) -> Tensor:
    """The index of the largest value of each row [R]; of equal values the first."""
    # numpy's argmax is vectorised, which pays beyond a short row
    if weights.device.type == "cpu" and weights.numel() > SHORT:
        return torch.from_numpy(weights.numpy().argmax(-1))
    return weights.argmax(-1)


def adjust(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """Processors, penalties, bias, bad words, min_tokens and grammar on a copy of `logits` [R, V], after each
    prefix.
    """
    raw = process(logits.contiguous(), rows)
    logits = raw.clone(memory_format=torch.contiguous_format)
    if any(row.rules.penalises for row in rows):
        penalise(logits, raw, rows)
    add_biases(logits, rows)
    for i, row in enumerate(rows):
        if row.rules.bad_words is not None:
            forbid_completions(logits[i], row, row.rules.bad_words)
        if row.position < row.rules.params.min_tokens:
            logits[i, list(row.rules.stop_ids)] = NEVER
        if row.forbidden is not None:
            constrain(logits[i], raw[i], row.forbidden)
    # an overflow is the best token; inf - inf would be none
    return logits.clamp_(max=torch.finfo(logits.dtype).max)


def process(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """`logits` [R, V] after the processors of the requests that have one; the same tensor where none has.

    A row whose processor fails stays as it is, and its sequence notes the fault: it ends there, if that is
    where its text goes.
    """
    own = [i for i, row in enumerate(rows) if row.rules.params.logits_processor is not None]
    logits = logits.clone() if own else logits
    for i in own:
        row = rows[i]
        try:
            tokens = [*row.seq.tokens, *row.prefix]
            logits[i] = call_processor(row.rules.params.logits_processor, tokens, logits[i])
        except LogitsProcessorError as fault:
            row.seq.faults[row.prefix] = fault
    return logits


def add_biases(logits: Tensor, rows: list[ScoredRow]) -> None:
    """Adds the biases of each row's request to `logits` [R, V]."""
    for rules, (first, last) in equal_runs([row.rules for row in rows]):
        if rules.params.logit_bias:
            ids, values = bias_tensors(rules, logits.device)
            logits[first:last].index_add_(1, ids, values.expand(last - first, -1))


def bias_tensors(rules: Rules, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token ids and the values of the biases, made once per request and device."""
    if device not in rules.bias:
        biases = rules.params.logit_bias
        ids, values = torch.tensor([*biases]), torch.tensor([*biases.values()])
        rules.bias[device] = ids.to(device), values.to(device)
    return rules.bias[device]


def penalise(logits: Tensor, raw: Tensor, rows: list[ScoredRow]) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output. Changes `logits`, which
    are `raw` [R, V] so far.
    """
    for seq, (first, last) in equal_runs([row.seq if row.rules.penalises else None for row in rows]):
        if seq is None:
            continue
        counts = seq.counts = seq.counts or TokenCounts()
        counts.read(seq.tokens, seq.request.prompt_len)
        ids, written = as_tensor(counts.ids, raw), as_tensor(counts.written, raw)
        penalised = penalised_by(seq.request.params, raw[first:last].index_select(1, ids), written)
        logits[first:last].index_copy_(1, ids, penalised)
        count_drafts(logits, raw, rows[first:last], first, counts)


def count_drafts(logits: Tensor, raw: Tensor, rows: list[ScoredRow], first: int, counts: TokenCounts) -> None:
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


def equal_runs(values: list[Any]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each value with the (first, last) of its run of neighbours, the very same object."""
    for _, run in groupby(range(len(values)), lambda i: id(values[i])):
        first, *others = run
        yield values[first], (first, first + len(others) + 1)


def forbid_completions(x: Tensor, row: ScoredRow, bad_words: BadWords) -> None:
    """Removes the tokens that complete a bad word after the text before. Changes `x` [V]."""
    for token_set in bad_words.completing(row.seq.tokens, row.prefix):
        if token_set.index is None or token_set.index.device != x.device:
            ids = [token for token in token_set.ids if token < len(x)]
            token_set.index = torch.tensor(ids, dtype=torch.long, device=x.device)
        x.index_fill_(0, token_set.index, NEVER)


def constrain(x: Tensor, raw: Tensor, forbidden: Tensor) -> None:
    """Removes what the grammar forbids from `x` [V]; it alone decides, over `raw`, where nothing is left."""
    x[forbidden] = NEVER
    if x.amax() == NEVER:
        x.copy_(raw).masked_fill_(forbidden, NEVER)


def shape(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """Log-weights [N, V] of drawn rows after temperature, top-k, top-p and min-p; removed tokens are -inf."""
    # Relative to the best token first: a tiny temperature would overflow the quotient.
    logits = logits - logits.amax(-1, keepdim=True)
    temperatures = tuple([max(row.rules.params.temperature, SMALLEST) for row in rows])
    if any(t != 1 for t in temperatures):
        logits /= column(temperatures, logits.device)
    filtered = [i for i, row in enumerate(rows) if row.rules.filters]
    if filtered:
        logits[filtered] = keep_likely(logits[filtered], [rows[i].rules.params for i in filtered])
    return logits


def keep_likely(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """top-k, then top-p over what is left, then min-p, on logits [N, V].

    Rows whose survivors all lie among the `HEAD` likeliest tokens are not sorted any further.
    """
    filtered, complete = keep_among(logits, params, HEAD)
    open_rows = (~complete).nonzero().flatten().tolist()
    if open_rows:
        params = [params[i] for i in open_rows]
        filtered[open_rows], _ = keep_among(logits[open_rows], params, logits.shape[-1])
    return filtered


@lru_cache(maxsize=64)
def column(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number for each row, [N, 1]; the same rows come step after step."""
    return torch.tensor(values, device=device)[:, None]


def keep_among(logits: Tensor, params: list[SamplingParams], head: int) -> tuple[Tensor, Tensor]:
    """Filtered logits [N, V] by the `head` likeliest tokens, and for which rows [N] these were enough."""
    vocab, device = logits.shape[-1], logits.device
    head = min(head, vocab)
    ids = logits.topk(head).indices.sort(-1).values  # [N, head]
    # ties stay in the order of ids
    ordered, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    top_k = column(tuple(min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params), device)
    keep = torch.arange(head, device=logits.device) < top_k
    total_k = ordered.masked_fill(~keep, NEVER).logsumexp(-1, True)
    total = torch.where(top_k < vocab, total_k, logits.logsumexp(-1, True))
    probs = (ordered - total).exp()
    # Without top-p no limit: the rounded sum reaches 1 before the rare tokens.
    keep &= probs.cumsum(-1) - probs < column(tuple(p.top_p if p.top_p < 1 else 2.0 for p in params), device)
    keep &= ordered > NEVER  # what is removed already is no reason to look further
    keep &= probs >= column(tuple(p.min_p for p in params), device) * probs[:, :1]
    keep[:, 0] = True
    # A survivor as likely as the last of the head may have equals beyond it.
    # [N, 1]
    beyond = (keep & (ordered == ordered[:, -1:])).any(-1, keepdim=True) | ((head < top_k) & (top_k < vocab))
    filtered = torch.full_like(logits, NEVER).scatter(-1, ids, ordered.masked_fill(~keep, NEVER))
    return filtered, ~beyond[:, 0] | (head == vocab)


def exponential_race(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
    """Draws one token per row [N] from softmax(logits), logits at most 0: argmax p / E with keyed noise."""
    return best(logits.exp().div_(row_noise(rows, logits.shape[-1], logits.device)))


def row_noise(rows: list[ScoredRow], vocab: int, device: torch.device) -> Tensor:
    """Exponential noise of each row, [N, V], or [V] of one row; few, short rows take it from their stock."""
    ahead = min(AHEAD, STOCK // vocab)
    own = any(row.stream for row in rows)  # streams of a round, of which little is drawn ahead
    enough = AHEAD_IN_ROUND if own else MANY_ROWS
    if ahead < 2 or len(rows) > enough or any(row.stream % STREAMS for row in rows):
        return draw_noise([(row.seq, row.position, row.stream) for row in rows], vocab, device)
    noises: list[Tensor] = []
    for row in rows:
        seq, at, stream = row.seq, row.position, row.stream
        if (stream, at) not in seq.noise:
            positions = range(at, at + (min(ahead, AHEAD_IN_ROUND) if stream else ahead))
            drawn = draw_noise([(seq, position, stream) for position in positions], vocab, device)
            # that of an earlier round is of no use any more
            reusable = {place: noise for place, noise in seq.noise.items() if stream and not place[0]}
            seq.noise = reusable | {(stream, position): noise for position, noise in enumerate(drawn, at)}
        noises.append(seq.noise[stream, at])
    return torch.stack(noises) if len(noises) > 1 else noises[0]


def draw_noise(places: list[tuple[Sequence, int, int]], vocab: int, device: torch.device) -> Tensor:
    """Exponential noise [N, V] at (text, position, stream): a function of these and the token id alone."""
    return exponential(uniform(*noise_keys(places, device), token_ids(vocab, device)))


@lru_cache(maxsize=8)
def token_ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device)


def toss(rows: list[ScoredRow], device: torch.device) -> Tensor:
    """One keyed uniform number per row [N]."""
    places = [(row.seq, row.position, row.stream) for row in rows]
    return uniform(*noise_keys(places, device), token_ids(1, device))[:, 0]


def noise_keys(places: list[tuple[Sequence, int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The two key halves of each place's noise, int32 [N, 1]."""
    keys = [row_key(seq.request.seed, seq.sample, position, stream) for seq, position, stream in places]
    low, high = torch.tensor(keys, dtype=torch.int32, device=device).chunk(2, 1)
    return low, high


def row_key(seed: int, sample: int, position: int, stream: int = 0) -> tuple[int, int]:
    """64 key bits of one output position as two signed 32-bit integers (splitmix64, Steele et al. 2014)."""
    x = mix64(stream_key(seed, sample | stream << 32), position)
    return signed32(x), signed32(x >> 32)


@lru_cache(maxsize=4096)
def stream_key(seed: int, stream: int) -> int:
    """The part of the noise key that all positions of a text share."""
    return mix64(mix64(0, seed), stream)


def mix64(x: int, part: int) -> int:
    x = (x + (part & U64) + 0x9E3779B97F4A7C15) & U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


def uniform(low: Tensor, high: Tensor, ids: Tensor) -> Tensor:
    """Floats in [2^-32, 1 - 2^-24] from key halves and token ids, all int32: the same on every device."""
    bits = mix32((ids * signed32(0x9E3779B1) + low).bitwise_xor_(high)).bitwise_and_(0x7FFFFFFF)
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def exponential(v: Tensor) -> Tensor:
    """Standard exponential noise -log(1 - v): fine near v = 0, where the rare tokens win. Changes `v`."""
    return v.neg_().log1p_().neg_()


def mix32(x: Tensor) -> Tensor:
    """Bijective avalanche of int32 with wrap-around (Wellons' lowbias32, hash-prospector). Changes `x`."""
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
