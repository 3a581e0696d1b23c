"""Rules of acceptance in the engine: who is judged by which, and what they draw their noise from.

That the distribution is the target's is tested in tests/stat.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.decoding import sampling
from speculon.decoding import verify as verifying
from speculon.decoding.sampling import ScoredRow
from speculon.speculation.proposers import chain
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft, use_draft
from tests.tiny.requests import OFF
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, texts_of


def engine() -> Any:
    return make_engine(tiny_target("llama"), speculation=DRAFT)


def write(requests: list[Request]) -> dict[Key, Result]:
    made = engine()
    for request in requests:
        made.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(made)


def sampled(acceptance: str, **params: Any) -> list[Request]:
    speculation = {"method": "draft_model", "acceptance": acceptance, "num_speculative_tokens": 6}
    return [
        Request(
            list(range(3, 20 + i)),
            SamplingParams(max_tokens=30, ignore_eos=True, **params),
            speculation,
            f"q{i}",
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_with_q_accept_everything_where_q_is_p(acceptance: str) -> None:
    """By rejection the drafts, drawn with the target's own noise, are the plain text; by block verification
    each round has noise of its own.
    """
    use_draft(tiny_target("llama"))
    requests = sampled(acceptance, temperature=0.9, top_p=0.9, seed=4)
    results = write(requests)
    for result in results.values():
        done = result.stats.speculation()
        assert done.rejected == 0 and done.drafted > 20
    plain = run(tiny_target("llama"), [Request(r.prompt, r.params, OFF, r.id) for r in requests])
    assert (texts_of(results) == texts_of(plain)) == (acceptance == "rejection")


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_with_q_sample_another_output_but_the_same_one_each_time(acceptance: str) -> None:
    use_draft(tiny_target("llama", 1))
    params: dict[str, Any] = {"temperature": 0.9, "seed": 4, "logprobs": 2, "min_tokens": 9}
    requests = sampled(acceptance, repetition_penalty=1.3, **params)
    results, again = write(requests), write(requests[::-1])
    matched = write(sampled("matching", repetition_penalty=1.3, **params))
    assert texts_of(results) == texts_of(again) != texts_of(matched)
    for result in results.values():
        assert [lp.token for lp in result.logprobs] == result.tokens
        done = result.stats.speculation()
        assert 0 < done.accepted < done.drafted


@pytest.mark.parametrize(
    ("acceptance", "seed", "rule"),
    [
        (None, None, "block"),
        ("auto", None, "block"),
        (None, 7, "matching"),
        ("matching", None, "matching"),
        ("rejection", None, "rejection"),
        ("rejection", 7, "rejection"),
        ("block", 7, "block"),
    ],
)
def test_who_is_judged_by_which_rule(acceptance: str | None, seed: int | None, rule: str) -> None:
    """By default those without a seed: with one, the text must not depend on the drafts."""
    use_draft(tiny_target("llama"))
    made = engine()
    asked_for = {"acceptance": acceptance} if acceptance else None
    made.add_request(
        [5, 6, 7], SamplingParams(temperature=1.0, seed=seed, max_tokens=4), asked_for, "sampled"
    )
    made.add_request([5, 6, 7], SamplingParams(temperature=0.0, seed=seed, max_tokens=4), asked_for, "greedy")
    assert {seq.request.id: seq.request.acceptance for seq in made.scheduler.waiting} == {
        "sampled": rule,
        "greedy": "matching",
    }
    assert all(
        seq.request.needs_q == (seq.request.acceptance != "matching") for seq in made.scheduler.waiting
    )


# noise


def noise_drawn_twice(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Places of noise that were read more than once while drafted texts were written."""
    seen: list[tuple[int, int, int]] = []
    draw, toss = sampling.exponential_race, verifying.toss

    def note(rows: list[ScoredRow]) -> None:
        seen.extend((row.seq.id, row.position, row.stream) for row in rows)

    def noted_draw(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
        note(rows)
        return draw(logits, rows)

    def noted_toss(rows: list[ScoredRow], device: torch.device) -> Tensor:
        note(rows)
        return toss(rows, device)

    monkeypatch.setattr(sampling, "exponential_race", noted_draw)
    monkeypatch.setattr(verifying, "toss", noted_toss)
    noisy_draft(error_rate=0.1)
    results = write(sampled(acceptance, temperature=1.0))
    assert 0 < sum(result.stats.accepted for result in results.values()) and len(seen) > 300
    return len(seen) - len({*seen})


def test_block_verification_never_reads_noise_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noise_drawn_twice("block", monkeypatch) == 0


@pytest.mark.parametrize("place", [chain, verifying], ids=["drafts", "coins"])
def test_noise_that_is_read_twice_is_seen(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: drafts or coins from streams that all rounds share."""
    monkeypatch.setattr(place, "round_stream", lambda seq, stream=0: stream)
    assert noise_drawn_twice("block", monkeypatch) > 0
