"""Rejection leaves the target's distribution alone, whatever the drafter's q: enumerated through the shipped
verify.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import Draft, Verdict
from speculon.decoding import verify as verifying
from speculon.decoding.rounds import Drafted
from speculon.decoding.sampling import ScoredRow, exponential_race
from speculon.decoding.sequence import Sequence
from speculon.decoding.verify import COIN, RESIDUAL, flip, residual
from speculon.speculation.proposers.compose import fit
from tests.builders import make_sequence, span_of
from tests.stat.test_verify import CASES, EXACT, FILTERED, VISIBLE, judged_by_toy, written
from tests.stat.toy import Case, Distribution, V, distance, reference_probs, reference_texts

SAMPLED = {name: case for name, case in CASES.items() if not case.params.greedy}
OTHER_PROMPT = (3, 3, 1)  # what the drafter sees instead of the prompt: another model's q
CallCost = Callable[[Case, tuple[int, ...]], list[float]]


def drafter(case: Case, output: tuple[int, ...]) -> list[float]:
    """q: another distribution, through the same filters."""
    return reference_probs(replace(case, prompt=OTHER_PROMPT), output)


def certain(case: Case, output: tuple[int, ...]) -> list[float]:
    """q with all its weight on one token."""
    return [float(token == (len(output) + 1) % V) for token in range(V)]


def itself(case: Case, output: tuple[int, ...]) -> list[float]:
    return reference_probs(case, output)


def one_round(
    case: Case, output: tuple[int, ...], chain: tuple[int, ...], probs: Tensor
) -> list[tuple[float, Verdict]]:
    """Every outcome for one chain of drafts: one span for each number of coins that fall well, and each last
    token.
    """
    k = len(chain)
    outcomes = list(itertools.product(range(k + 1), range(V)))
    draft = Draft(chain, ("toy",) * k, probs)
    drafted = [Drafted(span_of(written(case, output, acceptance="rejection")), draft) for _ in outcomes]
    chances = torch.ones(len(outcomes), dtype=torch.float64)

    def coin(p: Tensor, q: Tensor, rows: list[ScoredRow]) -> Tensor:
        assert len(p) == len(q) == len(rows) == len(outcomes) * k and {row.stream for row in rows} <= {COIN}
        well = torch.minimum(torch.ones(()), p / q).double().view(-1, k)
        falls = torch.tensor([[i < accepted for i in range(k)] for accepted, _ in outcomes])
        for n, (accepted, _) in enumerate(outcomes):
            chances[n] *= well[n, :accepted].prod() * (1 - well[n, accepted] if accepted < k else 1)
        return falls.flatten()

    def draw(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
        for n, (accepted, token) in enumerate(outcomes):
            assert rows[n].stream == (RESIDUAL if accepted < k else 0)
            # no softmax here: what is not normalised must be seen
            chances[n] *= logits[n].double().exp()[token]
        return torch.tensor([token for _, token in outcomes])

    judged = judged_by_toy(drafted, draw, coin)
    return [(float(chance), one.verdict) for chance, one in zip(chances, judged, strict=True) if chance > 0]


def chains(
    case: Case, output: tuple[int, ...], k: int, proposal: CallCost
) -> list[tuple[float, tuple[int, ...], Tensor]]:
    """(probability, tokens, q [K, V]) of every chain that the drafter can draw."""
    found: list[tuple[float, tuple[int, ...], list[list[float]]]] = [(1.0, (), [])]
    for _ in range(k):
        grown = []
        for chance, chain, probs in found:
            q = proposal(case, (*output, *chain))
            grown += [(chance * q[token], (*chain, token), [*probs, q]) for token in range(V) if q[token] > 0]
        found = grown
    return [(chance, chain, torch.tensor(probs)) for chance, chain, probs in found]


def texts(
    case: Case, k: int, proposal: CallCost, output: tuple[int, ...] = (), reported: CallCost | None = None
) -> Distribution:
    """Every text that rounds of K drafts can write, with its probability; `reported` is the q that
    verify is given.
    """
    made: Distribution = {}
    room = (case.params.max_tokens or 0) - len(output)
    k_now = min(k, room - 1)
    if k_now < 1:
        return reference_texts(case, output)
    for q, chain, probs in chains(case, output, k_now, proposal):
        if reported is not None:
            probs = torch.tensor([reported(case, (*output, *chain[:i])) for i in range(k_now)])
        for chance, verdict in one_round(case, output, chain, probs):
            grown, finish = (*output, *verdict.tokens), verdict.finish and verdict.finish.reason
            follow = {(grown, finish): 1.0} if finish else texts(case, k, proposal, grown, reported)
            for text, part in follow.items():
                made[text] = made.get(text, 0.0) + q * chance * part
    return made


def error(case: Case, k: int, proposal: CallCost = drafter, reported: CallCost | None = None) -> float:
    return distance(texts(case, k, proposal, reported=reported), reference_texts(case))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_output_distribution_is_the_targets(name: str, k: int) -> None:
    assert error(SAMPLED[name], k) < EXACT


@pytest.mark.soak
def test_three_drafts() -> None:
    for name in ("plain", "filters"):
        longer = replace(SAMPLED[name], params=SAMPLED[name].params.model_copy(update={"max_tokens": 4}))
        assert error(longer, 3) < EXACT


@pytest.mark.parametrize("proposal", [certain, itself], ids=["q on one token", "q = p"])
def test_the_extremes_of_q(proposal: CallCost) -> None:
    for name in ("plain", "filters", "penalties", "min_tokens"):
        assert error(SAMPLED[name], 2, proposal) < EXACT


class Forbidding:
    """A grammar that forbids one token everywhere."""

    def __init__(self, token: int):
        self.token = token

    def allows(self, tokens: tuple[int, ...]) -> int:
        return (*tokens, self.token).index(self.token)


def under_a_grammar(fitted: Callable[[Draft, Sequence], Draft], k: int) -> float:
    """The error of one round whose drafter knows nothing of the grammar that forbids token 3."""
    case = Case(SamplingParams(temperature=1, max_tokens=k + 1, logit_bias={3: -100.0}))
    free = replace(case, params=case.params.model_copy(update={"logit_bias": {}}))
    seq = make_sequence([1], grammar=cast(Any, Forbidding(3)))
    made: Distribution = {}
    for q, chain, probs in chains(free, (), k, drafter):
        draft = fitted(Draft(chain, ("toy",) * k, probs), seq)
        outcomes = [(1.0, ())]
        if draft.tokens and draft.probs is not None:
            outcomes = [(p, v.tokens) for p, v in one_round(case, (), draft.tokens, draft.probs)]
        for chance, tokens in outcomes:
            for text, part in reference_texts(case, tokens).items():
                made[text] = made.get(text, 0.0) + q * chance * part
    return distance(made, reference_texts(case))


@pytest.mark.parametrize("k", [1, 2])
def test_a_draft_with_q_that_leaves_the_grammar_is_judged_whole(k: int) -> None:
    assert under_a_grammar(lambda draft, seq: fit(draft, k, seq), k) < EXACT

    def cut_by_token(draft: Draft, seq: Sequence) -> Draft:
        assert seq.grammar is not None
        return draft.truncated(seq.grammar.allows(draft.tokens))

    assert under_a_grammar(cut_by_token, k) > 1e-2


def chained(case: Case, output: tuple[int, ...]) -> list[float]:
    """q where drafts are chained: behind one that was drawn comes one that was looked up."""
    return (certain if len(output) % 2 else drafter)(case, output)


def test_a_draft_may_be_drawn_in_part_and_looked_up_in_part() -> None:
    for name in ("plain", "filters", "penalties", "min_tokens"):
        assert error(SAMPLED[name], 2, chained) < EXACT


def test_a_chained_draft_marks_its_tail_as_certain() -> None:
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    head, tail = Draft((3, 0), ("toy", "toy"), q, (0.4, 0.4)), Draft((2, 2, 1), ("looked up",) * 3)
    whole = head.chain(tail)
    assert whole.probs is not None and torch.equal(whole.probs[:2], q)
    assert torch.equal(whole.probs[2:], torch.eye(4)[[2, 2, 1]]) and whole.tokens == (3, 0, 2, 2, 1)
    assert whole.confidence == (0.4, 0.4, 0, 0, 0) and whole.unchained(("toy", "looked up")) == 2
    for k in range(1, 5):
        short = whole.truncated(k)
        assert short.probs is not None and len(short.probs) == len(short.sources) == k


def test_a_residual_of_nothing_is_the_target_itself() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.3, 0.2]])
    assert torch.equal(residual(p, q), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))


def test_spans_with_and_without_q_share_a_batch() -> None:
    """Each is judged by its own rule, and keeps its own tokens."""
    case = SAMPLED["plain"]
    q = torch.tensor([drafter(case, ()), drafter(case, (1,))])
    drafted = []
    for probs, rejects in ((q, True), (None, True), (q, False), (q[:1], True)):
        seq = written(case, (), acceptance="rejection" if rejects else "matching")
        k = 2 if probs is None else len(probs)
        drafted.append(Drafted(span_of(seq), Draft((1, 2)[:k], ("toy",) * k, probs)))

    def verdicts_on(some: list[Drafted]) -> list[Verdict]:
        judged = judged_by_toy(some, lambda logits, rows: logits.argmax(-1), lambda p, q, rows: p > 0)
        return [one.verdict for one in judged]

    verdicts = verdicts_on(drafted)
    assert verdicts == [verdict for one in drafted for verdict in verdicts_on([one])]
    assert verdicts[0].tokens[:2] == (1, 2) and verdicts[0].accepted == 2 and verdicts[3].accepted == 1


# the keyed coin

SEEDS = range(5_000)


@cache
def keyed(stream: int) -> list[ScoredRow]:
    return [ScoredRow(seq, cast(Any, None), stream=stream) for seq in sequences()]


@cache
def sequences() -> list[Sequence]:
    return [make_sequence([1], seed=seed) for seed in SEEDS]


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    yield
    keyed.cache_clear()
    sequences.cache_clear()


@pytest.mark.parametrize(("p", "q"), [(0.2, 0.8), (0.7, 0.9), (1e-3, 1.0), (0.5, 0.5), (0.9, 0.1)])
def test_the_coin_falls_with_the_ratio(p: float, q: float) -> None:
    n, chance = len(SEEDS), min(1.0, p / q)
    share = flip(torch.full((n,), p), torch.full((n,), q), keyed(COIN)).float().mean().item()
    assert abs(share - chance) <= 4 * (chance * (1 - chance) / n) ** 0.5


def test_the_coin_the_draft_and_the_residual_are_independent() -> None:
    """At one position, over seeds: the draw is independent of the coin and of the draw after it."""
    logits = torch.full((len(SEEDS), 2), 0.5).log()
    drawn = exponential_race(logits, keyed(0)).double()
    again = exponential_race(logits, keyed(RESIDUAL)).double()
    half = torch.full((len(SEEDS),), 0.5)
    fell = flip(half, torch.ones(len(SEEDS)), keyed(COIN)).double()
    for a, b in itertools.combinations((drawn, again, fell), 2):
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert abs(correlation) < 4 / len(SEEDS) ** 0.5


def test_a_coin_from_the_drafts_own_noise_is_seen() -> None:
    logits = torch.full((len(SEEDS), 2), 0.5).log()
    fell = flip(torch.full((len(SEEDS),), 0.5), torch.ones(len(SEEDS)), keyed(0)).double()
    correlation = torch.corrcoef(torch.stack([exponential_race(logits, keyed(0)).double(), fell]))[0, 1]
    assert abs(correlation) > 0.1


# planted errors


def test_a_looked_up_draft_that_reports_no_q_is_seen() -> None:
    def silent(case: Case, output: tuple[int, ...]) -> list[float]:
        return [1e-6] * V if len(output) % 2 else drafter(case, output)

    assert error(SAMPLED["plain"], 2, chained, silent) > VISIBLE


def test_a_residual_that_is_not_renormalised_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "residual", lambda p, q: (p - q).clamp(min=0))
    assert error(SAMPLED["plain"], 1) > VISIBLE


def test_drawing_again_from_p_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "residual", lambda p, q: p)
    assert error(SAMPLED["plain"], 1) > VISIBLE


def test_q_before_the_filters_is_seen() -> None:
    def unfiltered(case: Case, output: tuple[int, ...]) -> list[float]:
        return drafter(SAMPLED["plain"], output)

    assert error(FILTERED, 2, reported=unfiltered) > VISIBLE


def test_q_of_another_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(case: Case, output: tuple[int, ...]) -> list[float]:
        return drafter(case, (*output, 0))

    assert error(SAMPLED["plain"], 2, reported=shifted) > VISIBLE


def test_p_and_q_exchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = residual
    monkeypatch.setattr(verifying, "residual", lambda p, q: real(q, p))
    assert error(SAMPLED["plain"], 1) > VISIBLE
