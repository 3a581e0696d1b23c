"""The output of verify has the target's distribution whatever the drafts: enumerated, not sampled."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import Draft, Verdict
from speculon.decoding import sampling
from speculon.decoding import verify as verifying
from speculon.decoding.rounds import Drafted, Judged
from speculon.decoding.sampling import Draw, ScoredRow
from speculon.decoding.sequence import Ending, Rules, Sequence
from speculon.decoding.text.bad_words import BadWords, Spellings
from speculon.decoding.verify import Coin, Scored, verify
from speculon.runtimes.torch.batch import Batch
from tests.builders import make_sequence, span_of
from tests.stat.toy import Case, Distribution, V, distance, reference_probs, reference_texts, toy_logits

EXACT, VISIBLE = 1e-6, 1e-3
# p [K + 1, V] -> the joint probability [V^(K + 1)] of what the rows draw
Coupling = Callable[[Tensor], Tensor]


def independent(p: Tensor) -> Tensor:
    """Every row has a draw of its own."""
    joint = torch.ones(1, dtype=torch.float64)
    for row in p:
        joint = (joint[:, None] * row[None]).flatten()
    return joint


def reused(p: Tensor) -> Tensor:
    """One uniform number serves all rows, each inverting its own distribution with it."""
    edges = torch.cat([torch.zeros(len(p), 1), p.cumsum(-1)], -1)
    joint = []
    for outcome in itertools.product(range(V), repeat=len(p)):
        low = max(float(edges[i, token]) for i, token in enumerate(outcome))
        high = min(float(edges[i, token + 1]) for i, token in enumerate(outcome))
        joint.append(max(0.0, high - low))
    return torch.tensor(joint, dtype=torch.float64)


def drafts_after(case: Case, output: tuple[int, ...], k: int) -> list[tuple[float, tuple[int, ...]]]:
    """q: three weighted chains.

    The likeliest one (so that drafts are accepted), one that repeats a token, a random one.
    """
    chance = random.Random(repr((output, k)))
    likely: list[int] = []
    for _ in range(k):
        p = reference_probs(case, (*output, *likely))
        likely.append(p.index(max(p)))
    chains = [tuple(likely), (chance.randrange(V),) * k, tuple(chance.randrange(V) for _ in range(k))]
    q = [chance.random() + 0.1 for _ in chains]
    return [(weight / sum(q), chain) for weight, chain in zip(q, chains, strict=True)] if k else [(1.0, ())]


def written(case: Case, output: tuple[int, ...], **fields: Any) -> Sequence:
    return make_sequence(
        list(case.prompt),
        output=list(output),
        params=case.params,
        max_tokens=case.params.max_tokens or 0,
        rules=Rules.of(case.params, bad_words_of(case), tuple(case.stop_ids)),
        ending=Ending(case.stop_ids, case.params.min_tokens),
        **fields,
    )


def bad_words_of(case: Case) -> BadWords | None:
    """Of letters: each token is one."""
    letters = "abcdefgh"[:V]
    words = ["".join(letters[token] for token in word) for word in case.bad_words]
    return BadWords(words, Spellings([letter.encode() for letter in letters])) if words else None


def forward(batch: Batch) -> Tensor:
    """The toy target's logits [R, V], read off the flat row."""
    ids, rows = batch.input_ids[0].tolist(), []
    for one, row in batch.placed:
        before = one.seq.tokens[: one.span.start]
        rows += [toy_logits((*before, *ids[row : row + i + 1])) for i in range(one.rows)]
    return torch.tensor(rows)[batch.score_rows]


def judged_by_toy(drafted: list[Drafted], draw: Draw | None = None, coin: Coin | None = None) -> list[Judged]:
    """One round through the shipped packing and verify."""
    batch = Batch.pack(drafted, torch.device("cpu"))
    return verify(drafted, forward(batch), batch.scored, draw, coin)


def one_round(
    case: Case, output: tuple[int, ...], chain: tuple[int, ...], coupling: Coupling
) -> list[tuple[float, Verdict]]:
    """Every outcome of one round: one span for each way its rows can be drawn."""
    rows = len(chain) + 1
    outcomes = list(itertools.product(range(V), repeat=rows)) if not case.params.greedy else [()]
    draft = Draft(chain, ("toy",) * len(chain))
    drafted = [Drafted(span_of(written(case, output)), draft) for _ in outcomes]
    joint = torch.ones(len(outcomes), dtype=torch.float64)

    def oracle(logits: Tensor, chosen: list[ScoredRow]) -> Tensor:
        assert logits.shape == (len(outcomes) * rows, V) and len(chosen) == len(logits)
        joint.copy_(coupling(logits[:rows].double().softmax(-1)))
        return torch.tensor(outcomes).flatten()

    judged = judged_by_toy(drafted, oracle)
    return [(float(chance), one.verdict) for chance, one in zip(joint, judged, strict=True) if chance > 0]


def speculative_texts(
    case: Case, k: int, output: tuple[int, ...] = (), coupling: Coupling = independent, rounds: int = 99
) -> Distribution:
    """Every text that `rounds` of at most K drafts can write, with its probability; the target alone finishes
    it.
    """
    texts: Distribution = {}
    room = (case.params.max_tokens or 0) - len(output)
    for q, chain in drafts_after(case, output, min(k, room - 1)):
        ends: dict[tuple[tuple[int, ...], str | None], float] = {}
        for chance, verdict in one_round(case, output, chain, coupling):
            end = (*output, *verdict.tokens), verdict.finish and verdict.finish.reason
            ends[end] = ends.get(end, 0.0) + chance
        for (grown, finish), chance in ends.items():
            if finish:
                follow: Distribution = {(grown, finish): 1.0}
            elif rounds > 1:
                follow = speculative_texts(case, k, grown, coupling, rounds - 1)
            else:
                follow = reference_texts(case, grown)
            for text, part in follow.items():
                texts[text] = texts.get(text, 0.0) + q * chance * part
    return texts


def error(case: Case, k: int, coupling: Coupling = independent, rounds: int = 99) -> float:
    return distance(speculative_texts(case, k, coupling=coupling, rounds=rounds), reference_texts(case))


def case(
    bad_words: tuple[tuple[int, ...], ...] = (),
    stop_ids: tuple[int, ...] = (),
    max_tokens: int = 3,
    **params: Any,
) -> Case:
    return Case(SamplingParams(max_tokens=max_tokens, **params), bad_words, frozenset(stop_ids))


FILTERED = case(top_k=3, top_p=0.8, temperature=0.9)
PENALISED = case(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=1.1)
CASES = {
    "plain": case(),
    "greedy": case(temperature=0.0),
    "cold": case(temperature=0.25),
    "hot": case(temperature=3.0),
    "top-k": case(top_k=2),
    "top-k 1": case(top_k=1),
    "top-k with ties": Case(SamplingParams(max_tokens=3, top_k=2, logit_bias={0: 60.0, 1: 60.0, 3: 60.0})),
    "top-p": case(top_p=0.7),
    "min-p": case(min_p=0.3),
    "repetition": case(repetition_penalty=2.5),
    "rewarded repetition": case(repetition_penalty=0.4),
    "presence": case(presence_penalty=1.5),
    "frequency": case(frequency_penalty=1.25),
    "rewarded frequency": case(frequency_penalty=-0.75),
    "bias": case(logit_bias={0: 1.5, 3: -2.0}),
    "bad word": case(bad_words=((1,),)),
    "bad words of several tokens": case(bad_words=((0, 1), (2, 2), (1, 3, 0))),
    "stop ids": case(stop_ids=(3,)),
    "min_tokens": case(min_tokens=2, stop_ids=(0, 3)),
    "filters": FILTERED,
    "penalties": PENALISED,
    "greedy with all of it": case(
        ((0, 1),), (3,), temperature=0.0, repetition_penalty=1.7, logit_bias={1: 1.0}
    ),
    "everything": case(
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={2: 0.75},
        bad_words=((0, 1), (3, 3)),
        stop_ids=(1,),
        min_tokens=2,
    ),
}


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_output_distribution_is_the_targets(name: str, k: int) -> None:
    """Several rounds, until the text has ended."""
    assert error(CASES[name], k) < EXACT


@pytest.mark.parametrize("name", CASES)
def test_one_round_of_three_drafts_leaves_the_distribution_alone(name: str) -> None:
    longer = replace(CASES[name], params=CASES[name].params.model_copy(update={"max_tokens": 4}))
    assert error(longer, 3, rounds=1) < EXACT


def test_every_single_chain_leaves_the_distribution_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for chain in itertools.product(range(V), repeat=2):
        monkeypatch.setitem(globals(), "drafts_after", lambda case, output, k, chain=chain: [(1.0, chain)])
        assert error(FILTERED, 2) < EXACT


def test_every_accepted_length_occurs() -> None:
    for k, chain in enumerate([(), (1,), (1, 0), (1, 0, 3)]):
        outcomes = one_round(CASES["plain"], (), chain, independent)
        assert {verdict.accepted for _, verdict in outcomes} == set(range(k + 1))


def test_the_reference_is_a_distribution() -> None:
    for name in CASES:
        assert sum(reference_texts(CASES[name]).values()) == pytest.approx(1, abs=1e-12)


# planted errors


def test_filters_shifted_by_one_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(logits: Tensor, params: list[SamplingParams]) -> Tensor:
        removed = keep_likely(logits, params).isneginf().roll(1, 0)
        return logits.masked_fill(removed, -torch.inf)

    keep_likely = sampling.keep_likely
    monkeypatch.setattr(sampling, "keep_likely", shifted)
    assert error(FILTERED, 2) > VISIBLE


def test_noise_reused_between_rows_is_seen() -> None:
    assert error(CASES["plain"], 2, reused) > VISIBLE


def test_rows_that_ignore_the_drafted_prefix_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "ScoredRow", lambda seq, rules, prefix: ScoredRow(seq, rules, ()))
    for name in ("penalties", "bad words of several tokens", "min_tokens"):
        assert error(CASES[name], 2) > VISIBLE


def test_drawing_from_the_unfiltered_distribution_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "keep_likely", lambda logits, params: logits)
    assert error(FILTERED, 1) > VISIBLE


def test_accepting_drafts_without_comparing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(spans: list[Scored], logits: Tensor, draw: sampling.Draw | None) -> verifying.Accepted:
        picked, rows = verifying.scored_rows(spans, logits)
        tokens, outcomes = iter(sampling.sample(picked, rows, draw)), []
        for span in spans:
            *_, bonus = itertools.islice(tokens, len(span.draft.tokens) + 1)
            outcomes.append(((*span.draft.tokens, bonus), range(len(span.draft.tokens))))
        return outcomes

    monkeypatch.setattr(verifying, "match", credulous)
    assert error(CASES["plain"], 1) > VISIBLE


def test_a_correction_from_the_row_after_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(logits: Tensor, rows: list[ScoredRow], draw: sampling.Draw | None) -> list[int]:
        """Each span's tokens turned by one."""
        tokens = sampling.sample(logits, rows, draw)
        length = 1 + max(len(row.prefix) for row in rows)
        return [tokens[i - i % length + (i + 1) % length] for i in range(len(tokens))]

    monkeypatch.setattr(verifying, "sample", shifted)
    assert error(CASES["plain"], 2, rounds=1) > VISIBLE
