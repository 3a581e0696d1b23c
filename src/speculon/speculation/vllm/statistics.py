"""What the plug-in counts, for Prometheus and for a line of the log."""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter

from speculon.core.types import Reason
from speculon.decoding.sequence import Span

log = logging.getLogger("vllm.speculon")  # below vLLM's own, which has the handler and the level

DRAFTED, ACCEPTED, PLAIN, CALLS, TOKENS = "drafted", "accepted", "plain", "calls", "tokens"
# in the default registry; with PROMETHEUS_MULTIPROC_DIR in the folder that it names
COUNTERS: dict[str, Counter] = {
    DRAFTED: Counter("speculon_vllm_draft_tokens", "draft tokens given to vLLM", ["method"]),
    ACCEPTED: Counter("speculon_vllm_accepted_tokens", "draft tokens that were accepted", ["method"]),
    PLAIN: Counter("speculon_vllm_plain_rounds", "rounds of requests without a draft, by reason", ["reason"]),
    CALLS: Counter("speculon_vllm_target_calls", "rounds of requests: each is a row of a step"),
    TOKENS: Counter("speculon_vllm_output_tokens", "tokens of these rounds"),
}


class Statistics:
    """Counts rounds, of which each has one or more new tokens, and writes a line every so many seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._due = clock() + seconds
        self._since = Counts[tuple[str, str]]()  # the latest line, by counter and label

    def count(self, spans: list[Span]) -> None:
        """The rounds of one step. All new tokens of a round but its last are accepted drafts."""
        now = Counts[tuple[str, str]]()
        for span in spans:
            sources, new = span.draft.sources, span.verdict.tokens
            for method, n in Counts(sources).items():
                now[DRAFTED, method] += n
                now[ACCEPTED, method] += sources[: len(new) - 1].count(method)
            if not sources:
                now[PLAIN, span.reason or Reason.NO_MATCH] += 1
            now[CALLS, ""] += 1
            now[TOKENS, ""] += len(new)
        for (name, label), n in now.items():
            child: Any = COUNTERS[name].labels(label) if label else COUNTERS[name]
            child.inc(n)
        self._since.update(now)
        if self._clock() >= self._due:
            log.info("%s", line(self._since))
            self._since.clear()
            self._due = self._clock() + self._seconds


def line(counts: Counts[tuple[str, str]]) -> str:
    """`512 tokens, 2.31 per target call | suffix 71 % of 412 drafts | plain 103: no_match 80 cost 23`"""
    calls, tokens = counts[CALLS, ""], counts[TOKENS, ""]
    parts = [f"{tokens} tokens, {tokens / max(1, calls):.2f} per target call"]
    for method, n in labelled(counts, DRAFTED):
        parts.append(f"{method} {counts[ACCEPTED, method] / n:.0%} of {n} drafts")
    if plain := labelled(counts, PLAIN):
        reasons = " ".join(f"{reason} {n}" for reason, n in plain)
        parts.append(f"plain {sum(n for _, n in plain)}: {reasons}")
    return " | ".join(parts)


def labelled(counts: Counts[tuple[str, str]], name: str) -> list[tuple[str, int]]:
    """Labels of one counter, the most frequent first."""
    return [(label, n) for (key, label), n in counts.most_common() if key == name]
