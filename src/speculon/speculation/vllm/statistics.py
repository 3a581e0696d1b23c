"""What the plug-in counts, for Prometheus and for a line of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import Counter

from speculon.core.telemetry import RequestStats
from speculon.decoding.rounds import Judged

log = logging.getLogger("vllm.speculon")  # below vLLM's own, which has the handler and the level

# by the field of `RequestStats` that they count
# in the default registry; with PROMETHEUS_MULTIPROC_DIR in the folder that it names
COUNTERS: dict[str, Counter] = {
    "drafted_from": Counter("speculon_vllm_draft_tokens", "draft tokens given to vLLM", ["method"]),
    "accepted_from": Counter("speculon_vllm_accepted_tokens", "draft tokens that were accepted", ["method"]),
    "reasons": Counter(
        "speculon_vllm_plain_rounds", "rounds of requests without a draft, by reason", ["reason"]
    ),
    "target_calls": Counter("speculon_vllm_target_calls", "rounds of requests: each is a row of a step"),
    "emitted": Counter("speculon_vllm_output_tokens", "tokens of these rounds"),
}


class VllmStatistics:
    """Counts rounds, of which each has one or more new tokens, and writes a line every so many seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._due = clock() + seconds
        self._since = RequestStats()  # the latest line

    def count(self, judged: list[Judged]) -> None:
        """The rounds of one step."""
        now = RequestStats()
        for one in judged:
            # the last token is the target's own, also where the draft had it and vLLM did not verify it
            accepted = min(one.verdict.accepted, len(one.verdict.tokens) - 1)
            verdict = replace(one.verdict, accepted=accepted)
            now.record(one.draft, verdict, one.drafted.asked, one.drafted.reason)
        for name, counter in COUNTERS.items():
            counted = getattr(now, name)
            if isinstance(counted, int):
                counter.inc(counted)
                continue
            for label, n in counted.items():
                counter.labels(label).inc(n)
        self._since.add(now)
        if self._clock() >= self._due:
            log.info("%s", line(self._since))
            self._since = RequestStats()
            self._due = self._clock() + self._seconds


def line(stats: RequestStats) -> str:
    """`512 tokens, 2.31 per target call | suffix 71 % of 412 drafts | plain 103: no_match 80 cost 23`"""
    parts = [f"{stats.emitted} tokens, {stats.tokens_per_target_call:.2f} per target call"]
    for method, n in stats.drafted_from.most_common():
        parts.append(f"{method} {stats.accepted_from[method] / n:.0%} of {n} drafts")
    if stats.reasons:
        reasons = " ".join(f"{reason} {n}" for reason, n in stats.reasons.most_common())
        parts.append(f"plain {stats.reasons.total()}: {reasons}")
    return " | ".join(parts)
