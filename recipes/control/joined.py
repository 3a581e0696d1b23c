"""What joined drafts bring: a draft model's drafts gone on with by a look-up at their end, on real texts of the demo pair.

python -m recipes.control.joined                      # five workloads, at 1, 4 and 8 at once: two minutes
python -m recipes.control.joined --base-ms 3.7 --text-ms 0.3 --row-ms 0.15 --call-ms 0.8 --read-ms 0.015

Every position of every text gets the model's drafts, the look-up's, and what the look-up has behind each of the model's; then
policies play with them, under a clock that runs by formula. Rates are of three passes over all texts, after one to learn in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

from speculon import LLM
from speculon.bench.workloads import WORKLOADS, Size, build, side_by_side
from speculon.control.auto import Auto
from speculon.control.fixed import Fixed
from speculon.control.policy import Policy
from speculon.control.shadow import common
from speculon.control.simulate import FALLS, STANDS, Played, Text, play
from speculon.core import NO_DRAFT, Ask, Decision, Draft, Load, Reason, Sequence
from speculon.models.load import SHIPPED
from speculon.proposers.base import Extending
from speculon.proposers.compose import Proposers

MODEL, LOOKUP = "draft_model", "suffix"
MODEL_K, MOST = 10, 16
PASSES = 4
FIXED = ((LOOKUP, 8), (LOOKUP, 16), (MODEL, 2), (MODEL, 4), (MODEL, 6), (f"{LOOKUP} {MODEL}", 4), (f"{LOOKUP} {MODEL}", 8))


@dataclass
class Known:
    """One text, and what was drafted after each number of its tokens."""

    seq: Sequence
    drafts: dict[int, dict[str, Draft]] = field(default_factory=dict)
    behind: dict[int, list[Draft]] = field(default_factory=dict)  # the first j drafts of the model: the look-up's

    @property
    def tokens(self) -> list[int]:
        return self.seq.tokens[self.seq.prompt_len :]


class Watching(Fixed):
    """Asks for everything everywhere and has none of it verified."""

    def __init__(self, proposers: Proposers):
        self.known: dict[int, Known] = {}
        self._proposers = proposers

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        return [
            Decision.of(Ask(name, min(k, seq.room - 1)) for name, k in ((LOOKUP, MOST), (MODEL, MODEL_K)))
            if seq.room > 1
            else Decision(None, 0, Reason.MAX_TOKENS)
            for seq in seqs
        ]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        known = self.known.setdefault(seq.id, Known(seq))
        known.drafts.setdefault(seq.num_output, {})[method] = draft
        lookup = self._proposers.find(LOOKUP)
        if method == MODEL and isinstance(lookup, Extending):
            ends = range(len(draft.tokens) + 1)
            known.behind[seq.num_output] = [lookup.extend(seq, draft.tokens[:j], MOST) for j in ends]
        return NO_DRAFT


def record(workload: str, cases: int, max_tokens: int) -> list[Known]:
    speculation = {"draft": str(SHIPPED["demo-draft"]), "method": "auto"}
    llm = LLM("demo", speculation=speculation, max_num_seqs=4, prefix_cache=False, threads=1)
    watching = Watching(llm.engine.proposers)
    vars(llm.engine)["policy"] = watching
    for group in side_by_side(build(workload, llm.tokenizer, Size(cases, max_tokens, llm.engine.max_context, 4)), 4):
        llm.generate([c.prompt for c in group], [c.params for c in group], speculation=[{"pool": c.user} for c in group])
    return list(watching.known.values())


@dataclass
class Scene:
    """The known texts, so many at once, `PASSES` times."""

    texts: list[Known]
    at_once: int
    methods: tuple[str, ...]
    k: int
    joins: bool
    costs: argparse.Namespace
    noise: float = 0.04

    def crowds(self) -> Iterator[list[Text]]:
        waiting = [self._text(number) for number in range(len(self.texts) * PASSES)]
        running: list[Text] = []
        while True:
            running = [text for text in running if text.room > 0]
            while waiting and len(running) < self.at_once:
                running.append(waiting.pop(0))
            if not running:
                return
            yield running

    def _text(self, number: int) -> Text:
        known = self._of(number)
        prompt = [STANDS] * (known.seq.prompt_len + 1)
        return Text(number, self.methods, self.k, len(known.tokens) - 1, None, self.joins, known.seq.kind, tokens=prompt)

    def _of(self, number: int) -> Known:
        return self.texts[number % len(self.texts)]

    def step_ms(self, texts: int, drafts: int, /) -> float:
        return self.costs.base_ms + self.costs.text_ms * texts + self.costs.row_ms * drafts

    def proposal_ms(self, method: str, texts: int, k: int, unread: int = 0) -> float:
        if method == LOOKUP:
            return 0.03 * texts
        return self.costs.call_ms * k * (0.9 + 0.1 * texts) + self.costs.read_ms * unread

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        known, at = self._of(text.id), text.written + 1
        return judged(known.drafts.get(at, {}).get(method, NO_DRAFT).cut(k), known.tokens[at:])

    def join(self, number: int, text: Text, draft: Draft, k: int, random: Random) -> Draft:
        if draft.sources[0] != MODEL:
            return draft
        known, at, own = self._of(text.id), text.written + 1, len(draft.tokens)
        tail = judged(known.behind[at][own].cut(k), known.tokens[at + own :])
        return draft.join(tail if FALLS not in draft.tokens else fallen(tail))

    def chance(self, number: int, text: Text, draft: Draft, position: int) -> float:
        return float(draft.tokens[position])


def judged(draft: Draft, truth: list[int]) -> Draft:
    """With its fate in the place of its tokens."""
    stands = common(draft.tokens, truth)
    return Draft((STANDS,) * stands + (FALLS,) * (len(draft.tokens) - stands), draft.sources, None, draft.confidence)


def fallen(draft: Draft) -> Draft:
    return Draft((FALLS,) * len(draft.tokens), draft.sources, None, draft.confidence)


def rounds_of(texts: list[Known], costs: argparse.Namespace) -> list[dict[str, Any]]:
    """What one round brings where the look-up has nothing, or nothing that stands: tokens and ms beyond a plain one's."""
    found = []
    places = [(known, at) for known in texts for at in known.behind if len(known.tokens) - at > MOST]
    bare = [(known, at) for known, at in places if not judged_at(known, at, LOOKUP, 1)]
    price = costs.call_ms + costs.row_ms
    for k in (1, 2, 3, 4):
        alone = [judged_at(known, at, MODEL, k) for known, at in bare]
        whole = [(known, at) for (known, at), n in zip(bare, alone, strict=True) if n == k]
        tails = [common(known.behind[at][k].tokens, known.tokens[at + k :]) for known, at in whole]
        rows = sum(len(known.behind[at][k].tokens) for known, at in bare) / max(1, len(bare))
        # a short match that the model goes on with: where the match stands, its drafts are those of that place
        matched = [(known, at) for known, at in places if len(known.drafts[at].get(LOOKUP, NO_DRAFT).tokens) >= k]
        stood = [(known, at + k) for known, at in matched if judged_at(known, at, LOOKUP, k) == k and at + k in known.behind]
        more = sum(judged_at(known, at, MODEL, 1) for known, at in stood)
        found.append(
            {
                "k": k,
                "rounds": len(bare),
                "model": round(sum(alone) / max(1, len(bare)), 2),
                "whole": round(len(whole) / max(1, len(bare)), 2),
                "behind": round(sum(tails) / max(1, len(bare)), 2),
                "rows_behind": round(rows, 1),
                "model_per_ms": round(sum(alone) / max(1, len(bare)) / k / price, 2),
                "behind_per_ms": round(sum(tails) / max(1, len(bare)) / max(rows, 0.1) / costs.row_ms, 2),
                "model_behind_a_match_per_ms": round(more / max(1, len(matched)) / price, 2),
            }
        )
    return found


def judged_at(known: Known, at: int, method: str, k: int) -> int:
    """How many of the first `k` drafts stand."""
    return common(known.drafts.get(at, {}).get(method, NO_DRAFT).cut(k).tokens, known.tokens[at:])


def rates(texts: list[Known], at_once: int, costs: argparse.Namespace) -> dict[str, float]:
    """Tokens per ms by policy."""

    def rate(policy: type[Policy], methods: tuple[str, ...], k: int, joins: bool = False, seeds: int = 1) -> float:
        scenes = [Scene(texts, at_once, methods, k, joins, costs) for _ in range(seeds)]
        return round(sum(known_rate(play(policy(), scene, seed=seed), texts) for seed, scene in enumerate(scenes)) / seeds, 4)

    found = {f"{name}:{k}": rate(Fixed, (*name.split(),), k) for name, k in FIXED}
    for name, joins in (("auto", False), ("auto, joined", True)):
        found[name] = rate(Auto, (LOOKUP, MODEL), MOST, joins, costs.seeds)
    return found


def known_rate(played: Played, texts: list[Known]) -> float:
    """Of the passes after the first."""
    first = sum(len(known.tokens) - 1 for known in texts)
    written = accumulate(tokens for _, tokens, _ in played.rates)
    return played.rate(next(i for i, tokens in enumerate(written, 1) if tokens >= first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    for name, ms in {"base": 5.85, "text": 0.55, "row": 0.35, "call": 1.2, "read": 0.022}.items():
        parser.add_argument(f"--{name}-ms", type=float, default=ms)
    asked = parser.parse_args()
    for workload in asked.workloads:
        texts = record(workload, asked.cases, asked.max_tokens)
        for one in rounds_of(texts, asked):
            print(json.dumps({"workload": workload, **one}), flush=True)
        for at_once in asked.at_once:
            found = rates(texts, at_once, asked)
            best = max(value for name, value in found.items() if not name.startswith("auto"))
            gains = {
                "auto_over_fixed": round(found["auto"] / best, 3),
                "joined_over_fixed": round(found["auto, joined"] / best, 3),
                "joined_over_auto": round(found["auto, joined"] / found["auto"], 3),
            }
            print(json.dumps({"workload": workload, "at_once": at_once, "tokens_per_ms": found, **gains}), flush=True)


if __name__ == "__main__":
    main()
