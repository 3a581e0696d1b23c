"""Chained drafts: a lookup continues where another method's draft ends, and no token changes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.config import SamplingParams
from speculon.core.types import NO_LIMITS, Draft
from speculon.decoding.rounds import Drafted
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.speculation.proposers import registry
from speculon.speculation.proposers.suffix import Suffix
from tests.recording import read
from tests.tiny.account import check_account
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.requests import Texts, assert_same, plain, requests_of
from tests.tiny.scripted import Key, Result, drain, make_engine, run, script

LLAMA, HEAD, K = "llama", 2, 8
Runs = list[list[tuple[str, int]]]  # of each draft that was verified: source, tokens


class Brief:
    """Drafts the first known tokens of a sequence; a lookup that knows the others continues the draft."""

    def __init__(self, truth: Texts):
        self.known = script(truth)
        self.limits = self.known.limits
        self.admit, self.observe, self.release = self.known.admit, self.known.observe, self.known.release

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        drafts = self.known.propose(seqs, budgets)
        return [Draft(d.tokens[:HEAD], ("brief",) * len(d.tokens[:HEAD])) for d in drafts]


class Knowing:
    """A lookup that continues drafts: each token is right in three cases of four, or `says` gives it."""

    def __init__(self, truth: Texts, says: Any = None):
        self.truth, self.says = truth, says
        self.limits = NO_LIMITS
        self.chance = random.Random(1)

    def admit(self, seq: Sequence) -> None: ...

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        return [Draft()] * len(seqs)

    def observe(self, seqs: list[Sequence], verdicts: Any) -> None: ...

    def release(self, seq: Sequence) -> None: ...

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        if self.says:
            return self.says(seq, ahead, k)
        at = seq.num_output + len(ahead)
        tokens = [
            t ^ (self.chance.random() < 0.25) for t in self.truth[seq.request.id, seq.sample][at : at + k]
        ]
        return Draft(tuple(tokens), ("knowing",) * len(tokens))


def with_chain(truth: Texts, says: Any = None, **settings: Any) -> tuple[Engine, Runs]:
    """An engine whose method `auto` is `brief` and then `knowing`, and the drafts that it verifies."""
    brief, knowing = Brief(truth), Knowing(truth, says)
    registry.register("brief", lambda config, target: brief)
    registry.register("knowing", lambda config, target: knowing)
    engine = make_engine(tiny_target(LLAMA), **settings)
    engine.proposers.chain = lambda name: (
        ("brief", "knowing") if name == "auto" else () if name == "off" else (name,)
    )  # type: ignore[method-assign]
    return engine, watched(engine)


def watched(engine: Engine) -> Runs:
    runs: Runs = []
    judge = engine.forward_and_verify

    def counting(step: Any, drafted: list[Drafted], *args: Any) -> Any:
        runs.extend(
            [(s, len(list(g))) for s, g in groupby(one.draft.sources)] for one in drafted if one.draft.tokens
        )
        return judge(step, drafted, *args)

    engine.forward_and_verify = counting  # type: ignore[method-assign]
    return runs


def write(engine: Engine, mode: str, **options: Any) -> dict[Key, Result]:
    for request in requests_of(mode):
        speculation = {"method": "auto", "num_speculative_tokens": K, "chained_drafts": True, **options}
        engine.add_request(request.prompt, request.params, speculation, request.id)
    results = drain(engine)
    for result in results.values():
        check_account(result)
    engine.check_integrity()
    return results


@pytest.mark.parametrize("chained", [None, False])
def test_a_fixed_policy_chains_only_where_it_is_asked_to(chained: bool | None) -> None:
    engine, runs = with_chain(plain("greedy"))
    write(engine, "greedy", chained_drafts=chained)
    assert runs and all(len(sources) == 1 for sources in runs)


def test_the_setting_holds_for_requests_that_say_nothing() -> None:
    engine, runs = with_chain(plain("greedy"), speculation={"chained_drafts": True})
    write(engine, "greedy", chained_drafts=None)
    assert any(len(sources) == 2 for sources in runs)


def test_k_and_max_tokens_bound_both_together() -> None:
    engine, runs = with_chain(plain("greedy"))
    write(engine, "greedy", num_speculative_tokens=3)
    assert max(sum(n for _, n in sources) for sources in runs) == 3


def test_the_record_separates_proposed_from_chained_drafts(tmp_path: Path) -> None:
    engine, runs = with_chain(plain("greedy"), events=tmp_path / "e.jsonl")
    write(engine, "greedy")
    engine.close()
    recording = read(tmp_path / "e.jsonl")
    texts = [text for round_ in recording.rounds for text in round_.texts if text.drafts]
    assert [list(text.drafts) for text in texts] == runs and any(len(text.drafts) == 2 for text in texts)
    assert all(text.proposals[0].found == dict(text.drafts)["brief"] <= HEAD for text in texts)


# faults


def beyond(seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
    return Draft((10**6,), ("knowing",))


def raising(seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
    raise RuntimeError("planted")


def too_much(seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
    return Draft((1,) * 500, ("knowing",) * 500)


def drawn(seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
    return Draft((1,), ("knowing",), probs=torch.ones(1, 8))


@pytest.mark.parametrize(
    ("says", "failed"), [(beyond, True), (raising, True), (drawn, True), (too_much, False)]
)
def test_a_lookup_that_fails_behind_a_draft_costs_no_token(says: Any, failed: bool) -> None:
    engine, runs = with_chain(plain("greedy"), says)
    results = write(engine, "greedy")
    assert_same(requests_of("greedy"), results, plain("greedy"))
    assert all(("error" in r.stats.reasons) == failed for r in results.values())
    assert max(sum(n for _, n in sources) for sources in runs) == (HEAD if failed else K)


# the methods there are


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_model_s_drafts_keep_their_q_where_a_lookup_goes_on(acceptance: str) -> None:
    """Every draft needs a q; the law itself is in tests/stat/test_rejection.py and test_block.py."""
    noisy_draft(error_rate=0.0)
    engine = make_engine(
        tiny_target(LLAMA), speculation={**DRAFT, "chained_drafts": True, "draft_min_confidence": 0.2}
    )
    runs, seen = watched(engine), []
    judge = engine.forward_and_verify

    def looked(step: Any, drafted: list[Drafted], *args: Any) -> Any:
        seen.extend(one.draft for one in drafted if len({*one.draft.sources}) == 2)
        return judge(step, drafted, *args)

    engine.forward_and_verify = looked  # type: ignore[method-assign]
    for i in range(6):
        params = SamplingParams(temperature=0.3, max_tokens=60, ignore_eos=True, seed=i)
        speculation = {
            "method": "auto",
            "policy": "fixed",
            "acceptance": acceptance,
            "num_speculative_tokens": K,
        }
        engine.add_request([*range(20, 28)] * 4, params, speculation, f"r{i}")
    results = drain(engine)
    assert all(len(result.tokens) == 60 for result in results.values()) and runs
    assert any(draft.sources[0] == "draft_model" for draft in seen)
    for draft in (draft for draft in seen if draft.sources[0] == "draft_model"):
        assert draft.probs is not None and len(draft.probs) == len(draft.tokens)
        assert all(float(q.sum()) == pytest.approx(1, abs=1e-4) for q in draft.probs)


def test_an_index_is_not_spoilt_by_what_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup of a text whose drafts were chained in every round holds that text, and nothing besides."""
    noisy_draft()
    trails: list[tuple[list[int], list[int]]] = []
    release = Suffix.release

    def released(self: Suffix, seq: Any) -> None:
        if seq.id in self.trails:
            trails.append((list(self.trails[seq.id][0].tokens), list(seq.tokens)))
        release(self, seq)

    monkeypatch.setattr(Suffix, "release", released)
    requests = [
        replace(r, speculation={"method": "auto", "chained_drafts": True}) for r in requests_of("greedy")
    ]
    run(tiny_target(LLAMA), requests, speculation={**DRAFT, "draft_min_confidence": 0.05})
    assert len(trails) == len(requests) and all(held == text[: len(held)] for held, text in trails)
