"""Which drafts stand, and where the text ends.

Matching: every row is sampled from the target with its own keyed noise, and a draft stands while it equals that sample.
Each emitted token is therefore the target's own, whatever was drafted.
law: tests/stat/test_verify.py::test_output_distribution_is_the_targets
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from speculon.batch import Batch
from speculon.core import Finish, Sequence, Span, SpanKind, Verdict
from speculon.sampling import Draw, Row, sample, token_logprobs


def verify(batch: Batch, logits: Tensor, draw: Draw | None = None) -> list[Verdict]:
    """One verdict per span from the target's logits [R, V]; a prompt chunk yields none of its tokens yet."""
    sampled = [span for span in batch.spans if span.samples]
    rows: list[Row] = []
    wanted: list[int] = []
    for span in sampled:
        k = len(span.draft.tokens)
        wanted.extend(span.score[-(k + 1) :])
        rows.extend(Row(span.seq, span.seq.rules, span.draft.tokens[:i]) for i in range(k + 1))
    picked = logits if len(wanted) == len(logits) else logits[wanted]
    tokens = sample(picked, rows, draw) if rows else []

    verdicts, first = {}, 0
    for span in sampled:
        k = len(span.draft.tokens)
        verdicts[span.row] = match(span, tuple(tokens[first : first + k + 1]), picked[first : first + k + 1])
        first += k + 1
    return [with_prompt_logprobs(span, verdicts.get(span.row, Verdict(())), logits) for span in batch.spans]


def match(span: Span, target: tuple[int, ...], logits: Tensor) -> Verdict:
    """Keeps the drafts that equal the target's samples, then the correction or the bonus."""
    draft = span.draft.tokens
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    tokens = target[: accepted + 1]
    top = span.seq.params.logprobs
    logprobs = None if top is None else token_logprobs(logits[: accepted + 1], list(tokens), top)
    return Verdict(tokens, accepted, kind_of(accepted, len(draft)), logprobs)


def kind_of(accepted: int, k: int) -> SpanKind | None:
    if k == 0:
        return None
    return SpanKind.FULL if accepted == k else SpanKind.TAIL if accepted == k - 1 else SpanKind.EARLY


def with_prompt_logprobs(span: Span, verdict: Verdict, logits: Tensor) -> Verdict:
    """Adds the log-probabilities of the prompt tokens that follow this span's rows."""
    seq = span.seq
    if not span.scores_prompt:
        return verdict
    first = max(span.start, seq.prompt_scored)  # a prompt that is computed again is not reported again
    following = seq.tokens[first + 1 : min(span.start + span.length + 1, seq.prompt_len)]
    row = span.score.start + first - span.start
    rows = logits[row : row + len(following)]
    return replace(verdict, prompt_logprobs=token_logprobs(rows, following, seq.params.prompt_logprobs or 0))


@dataclass(frozen=True, slots=True)
class Ending:
    """When a sequence's text is over, besides max_tokens."""

    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    find_stop: Callable[[list[int], tuple[int, ...]], tuple[int, str] | None] | None = None


def cut(verdicts: list[Verdict], spans: list[Span]) -> list[Verdict]:
    """Ends each text at its first stop token, stop string or at max_tokens. Pure: nothing is kept or counted yet.

    A stop token is dropped; the token that completes a stop string is kept.
    """
    return [cut_one(verdict, span) if span.samples else verdict for verdict, span in zip(verdicts, spans, strict=True)]


def cut_one(verdict: Verdict, span: Span) -> Verdict:
    seq = span.seq
    end, finish = find_end(seq, verdict.tokens)
    if finish is None:
        return verdict
    kept = verdict.tokens[: end + 1]
    if isinstance(finish.matched, int) or seq.room == 0:
        kept = verdict.tokens[:end]
    kind = verdict.kind
    if kind is not None and end < len(span.draft.tokens):
        kind = SpanKind.STOP if end < verdict.accepted else SpanKind.EARLY_STOP
    logprobs = verdict.logprobs and verdict.logprobs[: len(kept)]
    return replace(verdict, tokens=kept, accepted=min(verdict.accepted, len(kept)), kind=kind, logprobs=logprobs, finish=finish)


def find_end(seq: Sequence, tokens: tuple[int, ...]) -> tuple[int, Finish | None]:
    """Index of the token that ends the text, and how; the earliest cause wins."""
    ending: Ending = seq.ending
    if seq.room == 0:
        return 0, Finish("length")
    stop_string = first_stop_string(seq, tokens)
    for i, token in enumerate(tokens):
        if token in ending.stop_ids and seq.num_output + i >= ending.min_tokens:
            return i, Finish("stop", token)
        if stop_string and stop_string[0] == i:
            return i, Finish("stop", stop_string[1])
        if i + 1 == seq.room:
            return i, Finish("length")
    return len(tokens), None


def first_stop_string(seq: Sequence, tokens: tuple[int, ...]) -> tuple[int, str] | None:
    """(index of the completing token, stop string), at or after min_tokens."""
    ending: Ending = seq.ending
    if ending.find_stop is None:
        return None
    skip = max(0, ending.min_tokens - 1 - seq.num_output)
    found = ending.find_stop([*seq.tokens[seq.prompt_len :], *tokens[:skip]], tokens[skip:])
    return found and (found[0] + skip, found[1])
