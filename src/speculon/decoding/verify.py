"""Which drafts are accepted, and where a sequence ends.

Matching: every row is sampled from the target with its own keyed noise, and a draft is accepted while it
equals that sample. Each emitted token is therefore the target's own, whatever was drafted. Of a tree, the
path from the root is accepted along which each draft equals the sample after its parent.
Rejection, for drafts that carry q: d stands with probability min(1, p(d) / q(d)), else a token of the
residual max(0, p - q) takes its place (Leviathan et al. 2023; Chen et al. 2023). The distribution is the
target's; the text also depends on what was drafted.
Block, for the same drafts: they are judged together, and the longest accepted beginning is kept (Sun et al.
2024). The distribution is the target's too, and on average at least as many drafts are accepted.
law: tests/stat/test_verify.py::test_output_distribution_is_the_targets
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speculon.core.errors import InvalidParameter
from speculon.core.types import Draft, Finish, SpanOutcome, Verdict
from speculon.decoding.rounds import Drafted, Judged
from speculon.decoding.sampling import (
    COIN,
    RESIDUAL,
    SMALLEST,
    Draw,
    ScoredRow,
    best,
    pick,
    round_stream,
    sample,
    token_logprobs,
    toss,
    weigh,
)
from speculon.decoding.sequence import Ending, Sequence
from speculon.decoding.text.grammar import forbid

Coin = Callable[
    [Tensor, Tensor, list[ScoredRow]], Tensor
]  # p [N] and q [N] of drafted tokens -> which are accepted [N]
Accepted = list[tuple[tuple[int, ...], Seq[int]]]  # per span: its new tokens, and the accepted drafts
NO_TOKEN = Verdict(())


class Scored(NamedTuple):
    """A span with its draft, and its rows among the R that are scored."""

    drafted: Drafted
    rows: range

    @property
    def seq(self) -> Sequence:
        return self.drafted.seq

    @property
    def draft(self) -> Draft:
        return self.drafted.draft

    @property
    def judging(self) -> range:
        """The rows that decide a token: the row of the last token, then one row per draft."""
        return self.rows[-(len(self.draft.tokens) + 1) :]


def verify(
    drafted: list[Drafted],
    logits: Tensor,
    scored: Seq[range],
    draw: Draw | None = None,
    coin: Coin | None = None,
) -> list[Judged]:
    """The verdict on each span by the target's logits [R, V], of which `scored` are its rows, up to where its
    sequence ends. A prompt chunk yields no token yet.

    `draw` and `coin` replace the keyed noise in tests.
    """
    verdicts = verdicts_by_rows(drafted, logits, scored, draw, coin)
    return [
        Judged(one, truncate_at_end(one, verdict)) for one, verdict in zip(drafted, verdicts, strict=True)
    ]


def verdicts_by_rows(
    drafted: list[Drafted],
    logits: Tensor,
    scored: Seq[range],
    draw: Draw | None = None,
    coin: Coin | None = None,
) -> list[Verdict]:
    """The same, without the cut where a sequence ends."""
    spans = [Scored(*pair) for pair in zip(drafted, scored, strict=True)]
    spans.sort(key=lambda span: span.rows.start)  # a runtime may have its rows in another order
    by_rule: dict[str, list[Scored]] = {"matching": []}
    for span in spans:
        if span.drafted.span.samples:
            # errors of the logits processor on behalf of drafters, which may call it with other logits
            span.seq.faults = {}
            by_rule.setdefault(judged_by(span.drafted), []).append(span)
    verdicts: dict[Drafted, Verdict] = {}
    for rule, group in by_rule.items():
        with_q = WITH_Q.get(rule)
        found = with_q(group, logits, draw, coin) if with_q else match(group, logits, draw)
        for span, (tokens, accepted) in zip(group, found, strict=True):
            verdicts[span.drafted] = as_verdict(span, tokens, accepted, logits)
    if logits.shape[0] > sum(map(count, by_rule.values())):
        for span in spans:
            verdict = verdicts.get(span.drafted, NO_TOKEN)
            verdicts[span.drafted] = with_prompt_logprobs(span, verdict, logits)
    return [verdicts.get(one, NO_TOKEN) for one in drafted]


def judged_by(drafted: Drafted) -> str:
    """The rule for the drafts of a span: the request's rule if the drafts have q, otherwise matching."""
    return "matching" if drafted.draft.probs is None else drafted.seq.request.acceptance


def count(spans: list[Scored]) -> int:
    """The number of rows that decide a token: one per draft, and one more per span."""
    return sum([len(span.draft.tokens) for span in spans]) + len(spans)


def match(spans: list[Scored], logits: Tensor, draw: Draw | None = None) -> Accepted:
    """Keeps the drafts that equal the target's samples (`Draft.accepted`), then the correction or bonus."""
    if all(span.seq.request.rules.plain for span in spans):
        tokens = iter(best(scored_logits(spans, logits)).tolist() if spans else ())
    else:
        tokens = iter(sample(*scored_rows(spans, logits), draw))
    found: Accepted = []
    for span in spans:
        samples = tuple(islice(tokens, len(span.draft.tokens) + 1))
        accepted = span.draft.accepted(samples)
        found.append(((samples[0], *(samples[node + 1] for node in accepted)), accepted))
    return found


@dataclass(frozen=True, slots=True)
class WithQ:
    """Spans whose drafts carry q, with the rows that judge them: B spans, R rows, R - B drafts."""

    spans: list[Scored]
    rows: list[ScoredRow]
    p: Tensor  # [R, V]
    q: Tensor  # [R - B, V]
    first: list[int]  # row of each span's first draft, [B]
    judging: list[int]  # row of each draft, [R - B]
    chosen: tuple[Tensor, Tensor]  # p and q of the drafted tokens, each [R - B]

    @classmethod
    def of(cls, spans: list[Scored], logits: Tensor) -> WithQ:
        picked, rows = scored_rows(spans, logits)
        p = weigh(picked, rows).softmax(-1)
        q = torch.cat([span.draft.probs for span in spans if span.draft.probs is not None])
        lengths = [len(span.draft.tokens) for span in spans]
        first = [end - k - 1 for end, k in zip(accumulate(k + 1 for k in lengths), lengths, strict=True)]
        judging = [begin + i for begin, k in zip(first, lengths, strict=True) for i in range(k)]
        tokens = torch.tensor([token for span in spans for token in span.draft.tokens], device=p.device)
        chosen = p[judging].gather(-1, tokens[:, None])[:, 0], q.gather(-1, tokens[:, None])[:, 0]
        return cls(spans, rows, p, q, first, judging, chosen)

    @property
    def lengths(self) -> list[int]:
        """K of each span, [B]."""
        return [len(span.draft.tokens) for span in self.spans]

    def toss(self, p: Tensor, q: Tensor, coin: Coin | None) -> list[list[bool]]:
        """One keyed coin for each draft, with probability min(1, p / q); per span."""
        rows = [
            replace(row, stream=round_stream(row.seq, COIN))
            for row in map(self.rows.__getitem__, self.judging)
        ]
        passed = iter((coin or flip)(p, q, rows).tolist())
        return [list(islice(passed, k)) for k in self.lengths]

    def end(self, accepted: list[int], weights: Tensor, draw: Draw | None) -> Accepted:
        """The accepted drafts of each span, and one token drawn by its row of `weights` [B, V]."""
        last = [self.rows[begin + a] for begin, a in zip(self.first, accepted, strict=True)]
        ends = [
            replace(row, stream=RESIDUAL if len(row.prefix) < k or round_stream(row.seq) else 0)
            for row, k in zip(last, self.lengths, strict=True)
        ]
        drawn = pick(weights.log(), ends, draw)
        return [
            ((*span.draft.tokens[:a], token), range(a))
            for span, a, token in zip(self.spans, accepted, drawn, strict=True)
        ]


def rejection(
    spans: list[Scored], logits: Tensor, draw: Draw | None = None, coin: Coin | None = None
) -> Accepted:
    """Keeps a draft with probability min(1, p / q), then a token of the residual, or the bonus."""
    given = WithQ.of(spans, logits)
    accepted = [up_to_first_failure(passed) for passed in given.toss(*given.chosen, coin)]
    corrected = [n for n, k in enumerate(given.lengths) if accepted[n] < k]
    last = [begin + a for begin, a in zip(given.first, accepted, strict=True)]
    weights = given.p[last]  # [B, V]
    if corrected:
        # n bonus rows lie before it
        weights[corrected] = residual(weights[corrected], given.q[[last[n] - n for n in corrected]])
    return given.end(accepted, weights, draw)


def block(
    spans: list[Scored], logits: Tensor, draw: Draw | None = None, coin: Coin | None = None
) -> Accepted:
    """Block verification: judges all drafts of a span together (Sun et al. 2024, algorithm 2).

    With w_0 = 1, w_i = min(1, w_{i-1} p(d_i) / q(d_i)), and r_i the sum of max(0, w_i p - q) over the row
    after d_i, the beginning d_1..d_i is accepted with probability h_i = r_i / (r_i + 1 - w_i), by a coin of
    its own. The longest accepted one is kept, then a token of max(0, w_i p - q). After the last draft q is 0:
    there h_K = w_K, and the token is the bonus. P(at least i accepted | d_1..d_i) = w_i, for any K.
    """
    given = WithQ.of(spans, logits)
    w = joint_ratios(*given.chosen, given.lengths)  # [R]
    # in place: these are the largest tensors of a step
    weighted = given.p.mul_(w[:, None])  # [R, V]
    q = torch.zeros_like(given.p)
    q[given.judging] = given.q
    h = beginning_chances(weighted, q, w)[[row + 1 for row in given.judging]]  # [R - B]
    accepted = [up_to_last_success(passed) for passed in given.toss(h, torch.ones_like(h), coin)]
    last = [begin + a for begin, a in zip(given.first, accepted, strict=True)]
    return given.end(accepted, residual(weighted[last], q[last]), draw)


def joint_ratios(p: Tensor, q: Tensor, lengths: list[int]) -> Tensor:
    """w of each span's rows [R] (see `block`) from p and q of its drafted tokens [R - B]."""
    # a token that was drawn has q > 0, but the noise may find one whose q was rounded to 0
    split = torch.split(p / q.clamp(min=SMALLEST), lengths)
    ratios = pad_sequence(list(split), batch_first=True)  # [B, K]
    w = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        w.append((w[-1] * ratio).clamp(max=1))
    return torch.cat([row[: k + 1] for row, k in zip(torch.stack(w, 1), lengths, strict=True)])


def beginning_chances(weighted: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """h = r / (r + 1 - w) of each row [R] from w p [R, V], q [R, V] and w [R]; 1 where w = 1 and p = q."""
    r = (weighted - q).clamp_(min=0).sum(-1)
    total = r + (1 - w)
    return torch.where(total > 0, r / total, 1.0)


def up_to_first_failure(passed: list[bool]) -> int:
    return next((i for i, accepted in enumerate(passed) if not accepted), len(passed))


def up_to_last_success(passed: list[bool]) -> int:
    return next((i for i in range(len(passed), 0, -1) if passed[i - 1]), 0)


def flip(p: Tensor, q: Tensor, rows: list[ScoredRow]) -> Tensor:
    """u q <= p with keyed u: true with probability min(1, p / q)."""
    return toss(rows, p.device) * q <= p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) renormalised, [N, V]; p itself where rounding leaves nothing."""
    rest = (p - q).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


# rules for drafts that carry q
WITH_Q: dict[str, Callable[[list[Scored], Tensor, Draw | None, Coin | None], Accepted]] = {
    "rejection": rejection,
    "block": block,
}


def scored_rows(spans: list[Scored], logits: Tensor) -> tuple[Tensor, list[ScoredRow]]:
    """The scored rows of [last token, d_1..d_K] of each span, end to end: their logits and their prefixes."""
    rows = [
        ScoredRow(span.seq, span.seq.request.rules, prefix)
        for span in spans
        for prefix in span.draft.prefixes
    ]
    bound = [(s.seq.grammar, s.draft.tokens) for s in spans if s.seq.grammar is not None]
    if bound:
        bans = iter(forbid(bound, logits.device))  # [V] for each of their rows
        rows = [row if row.seq.grammar is None else replace(row, forbidden=next(bans)) for row in rows]
    return scored_logits(spans, logits), rows


def scored_logits(spans: list[Scored], logits: Tensor) -> Tensor:
    if count(spans) == logits.shape[0]:
        return logits
    return logits[[row for span in spans for row in span.judging]]


def as_verdict(span: Scored, tokens: tuple[int, ...], accepted: Seq[int], logits: Tensor) -> Verdict:
    """Makes the verdict on a span, with the raw log-probabilities if the request has them."""
    draft, top = span.draft, span.seq.request.params.logprobs
    logprobs = None
    if top is not None:
        first = span.judging.start
        rows = [first, *(first + 1 + node for node in accepted)]
        logprobs = token_logprobs(logits[rows], list(tokens), top)
    path = None if draft.parents is None else tuple(accepted)
    return Verdict(tokens, len(accepted), draft.outcome(len(accepted)), logprobs, path=path)


def with_prompt_logprobs(scored: Scored, verdict: Verdict, logits: Tensor) -> Verdict:
    """Adds the log-probabilities of the prompt tokens that follow this span's rows."""
    span, seq = scored.drafted.span, scored.seq
    if not span.scores_prompt:
        return verdict
    first = max(span.start, seq.prompt_scored)  # a prompt that is computed again is not reported again
    following = seq.tokens[first + 1 : min(span.end + 1, seq.request.prompt_len)]
    row = scored.rows.start + first - span.start
    rows = logits[row : row + len(following)]
    logprobs = token_logprobs(rows, following, seq.request.params.prompt_logprobs or 0)
    return replace(verdict, prompt_logprobs=logprobs)


def verify_given(drafted: Drafted, logits: Tensor) -> Judged:
    """The verdict on one span by given logits [K + 1, V], as `read_logits` returns them, up to its end; no
    call is made.

    With [K, V] there is no bonus token: one is sampled from a row of zeros, and dropped.
    """
    k = len(drafted.draft.tokens)
    has_bonus = len(logits) > k
    rows = logits if has_bonus else torch.cat([logits, logits.new_zeros(1, logits.shape[1])])
    (verdict,) = verdicts_by_rows([drafted], rows, [range(k + 1)])
    if not has_bonus:
        logprobs = verdict.logprobs and verdict.logprobs[:k]
        verdict = replace(verdict, tokens=verdict.tokens[:k], logprobs=logprobs)
    return Judged(drafted, truncate_at_end(drafted, verdict))


def read_logits(logits: Any, k: int, vocab_size: int) -> Tensor:  # [K + 1, V] or [K, V]
    """The caller's logits as float32. Raises `InvalidParameter` for logits that cannot judge `k` drafts."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        shown = logits.dtype if isinstance(logits, Tensor) else logits
        raise InvalidParameter("target_logits", shown, "must be a float tensor")
    if logits.shape not in ((k + 1, vocab_size), (k, vocab_size)):
        limit = f"must have shape ({k + 1}, {vocab_size}), or ({k}, {vocab_size}) without a bonus token"
        raise InvalidParameter("target_logits", tuple(logits.shape), limit)
    rows = logits.detach().float()
    for row, largest in enumerate(rows.amax(-1).tolist()):  # NaN where the row has one
        if not isfinite(largest):
            limit = f"row {row} must have a finite number, and otherwise only finite numbers or -inf"
            raise InvalidParameter("target_logits", largest, limit)
    return rows


def truncate_at_end(drafted: Drafted, verdict: Verdict) -> Verdict:
    """Ends a verdict at its sequence's first stop token, stop string or at max_tokens. Nothing is committed
    or counted yet.

    A stop token is dropped; the token that completes a stop string or a grammar stays.
    """
    if not drafted.span.samples:
        return verdict
    seq = drafted.seq
    end, finish = find_end(seq, verdict.tokens)
    if finish is None:
        return verdict
    dropped = isinstance(finish.matched, int) or finish.reason == "error" or seq.tokens_left == 0
    tokens = verdict.tokens[:end] if dropped else verdict.tokens[: end + 1]
    outcome = verdict.outcome
    if outcome is not None and end < drafted.draft.depth:
        outcome = SpanOutcome.STOP if end < verdict.accepted else SpanOutcome.EARLY_STOP
    return replace(
        verdict,
        tokens=tokens,
        accepted=min(verdict.accepted, len(tokens)),
        outcome=outcome,
        logprobs=verdict.logprobs and verdict.logprobs[: len(tokens)],
        finish=finish,
    )


def find_end(seq: Sequence, tokens: tuple[int, ...]) -> tuple[int, Finish | None]:
    """The index of the token that ends the text, and the cause; the earliest cause counts."""
    ending: Ending = seq.request.ending
    room = seq.tokens_left
    if room == 0:
        return 0, Finish("length")
    stop_string = first_stop_string(seq, tokens)
    complete = seq.grammar.find_end(tokens) if seq.grammar else None
    for i, token in enumerate(tokens):
        if tokens[:i] in seq.faults:
            return i, Finish("error", error=seq.faults[tokens[:i]])
        if token in ending.stop_ids and seq.num_output + i >= ending.min_tokens:
            return i, Finish("stop", token)
        if stop_string and stop_string[0] == i:
            return i, Finish("stop", stop_string[1])
        if complete and complete[0] == i:
            return complete
        if i + 1 == room:
            return i, Finish("length")
    return len(tokens), None


def first_stop_string(seq: Sequence, tokens: tuple[int, ...]) -> tuple[int, str] | None:
    """(index of the completing token, stop string), at or after min_tokens, in the answer alone."""
    ending: Ending = seq.request.ending
    if ending.find_stop is None:
        return None
    num_output, output = seq.num_output, [*seq.tokens[seq.request.prompt_len :], *tokens]
    runs = [(0, num_output, len(output))]
    if ending.answer_start is not None:
        seq.answer = seq.answer or ending.answer_start()
        runs = seq.answer.runs(output, num_output)
    for begin, first, end in runs:
        first = min(max(first, ending.min_tokens - 1), end)
        if stop := ending.find_stop(output[begin:first], tuple(output[first:end])):
            return first + stop[0] - num_output, stop[1]
    return None
