"""How well drafts are foretold: by what all texts have shown alone, with what each has shown of itself, and with as much of that
as `auto` trusts. Real texts and real drafts; the higher, the better, in nats for each draft.

python -m recipes.control.luck    # minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain, zip_longest
from math import log
from typing import Any

from speculon import LLM
from speculon.bench.workloads import WORKLOADS, Size, build
from speculon.control.estimate import SURE, Acceptance, Own
from speculon.core import SpanKind

METHODS = {"eagle3": 3, "draft_model": 3, "suffix": 8}
TOGETHER = 8

Rounds = list[list[tuple[int, int]]]  # of each text: drafts that were judged, and how many of them stood


class Nobody(Acceptance):
    """Texts are taken for alike."""

    trust = 0.0  # type: ignore[assignment]


class Everybody(Acceptance):
    """What a text shows of itself is never taken for luck."""

    trust = 1.0  # type: ignore[assignment]


def recorded(llm: LLM, workload: str, method: str, prompts: int) -> Rounds:
    found: dict[int, list[tuple[int, int]]] = {}
    proposers = llm.engine.proposers
    observe = proposers.observe

    def noting(spans: Any, decisions: Any, verdict_of: Any, taps: Any) -> None:
        for span in spans:
            verdict = verdict_of[span.seq.id]
            ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
            judged = min(verdict.accepted + (not ended), len(span.draft.tokens))
            if judged:
                found.setdefault(span.seq.id, []).append((judged, min(verdict.accepted, judged)))
        observe(spans, decisions, verdict_of, taps)

    proposers.observe = noting  # type: ignore[method-assign]
    cases = build(workload, llm.tokenizer, Size(prompts, 96, llm.engine.max_context))
    for i in range(0, len(cases), TOGETHER):
        group = cases[i : i + TOGETHER]
        asked = {"method": method, "num_speculative_tokens": METHODS[method], "policy": "fixed"}
        each = [{**asked, "pool": case.user and f"{case.user}, {method}"} for case in group]
        llm.generate([case.prompt for case in group], [case.params for case in group], speculation=each)
    proposers.observe = observe  # type: ignore[method-assign]
    return list(found.values())


def in_turn(rounds: Rounds) -> Iterator[tuple[int, tuple[int, int]]]:
    """(text, what became of its draft), in the order in which they were written."""
    for i in range(0, len(rounds), TOGETHER):
        each = [[(i + j, one) for one in text] for j, text in enumerate(rounds[i : i + TOGETHER])]
        yield from (one for one in chain(*zip_longest(*each)) if one is not None)


def foretold(rounds: Rounds, acceptance: Acceptance) -> float:
    """Mean log-likelihood of a draft's fate."""
    texts, nats, drafts = [Own() for _ in rounds], 0.0, 0
    for text, (judged, accepted) in in_turn(rounds):
        grades = [0] * judged
        chances = [min(SURE, chance) for chance in texts[text].chances(acceptance, grades)]
        nats += sum(log(chance if i < accepted else 1 - chance) for i, chance in enumerate(chances))
        drafts += judged
        texts[text].observe(acceptance, grades, accepted)
        acceptance.observe(grades, accepted)
    return nats / max(1, drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    asked = parser.parse_args()
    drafts = {"draft_model": "demo-draft", "eagle3": "demo-eagle3"}
    llm = LLM("demo", prefix_cache=False, speculation={"draft": drafts, "suffix_pools": 512})
    print("| workload | method | drafts | texts are alike | they differ | as far as trusted |\n|---|---|---|---|---|---|")
    for workload in WORKLOADS:
        for method in METHODS:
            rounds = recorded(llm, workload, method, asked.prompts)
            drafts_judged = sum(judged for text in rounds for judged, _ in text)
            cells = [f"{foretold(rounds, kind()):.3f}" for kind in (Nobody, Everybody, Acceptance)]
            print("|", " | ".join([workload, method, str(drafts_judged), *cells]), "|", flush=True)
    llm.close()


if __name__ == "__main__":
    main()
