"""Block verification leaves the target's distribution alone, and accepts no fewer drafts than rejection.

Both are enumerated through the shipped verify.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from math import prod

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import Draft, Verdict
from speculon.decoding import verify as verifying
from speculon.decoding.rounds import Drafted
from speculon.decoding.sampling import COIN, RESIDUAL, ScoredRow, pick, round_stream
from speculon.decoding.sequence import Rules, Sequence
from speculon.decoding.verify import WITH_Q, Scored, joint_ratios, residual
from tests.builders import make_sequence, span_of
from tests.stat.test_rejection import SAMPLED, CallCost, certain, chained, chains, drafter, itself
from tests.stat.test_verify import EXACT, FILTERED, VISIBLE, judged_by_toy, written
from tests.stat.toy import Case, Distribution, V, distance, reference_texts


def one_round(
    case: Case, output: tuple[int, ...], chain: tuple[int, ...], probs: Tensor
) -> list[tuple[float, Verdict]]:
    """Every outcome for one chain of drafts: one span for each pattern of coins and each last token."""
    k = len(chain)
    outcomes = list(itertools.product(itertools.product((False, True), repeat=k), range(V)))
    draft = Draft(chain, ("toy",) * k, probs)
    drafted = [Drafted(span_of(written(case, output, acceptance="block")), draft) for _ in outcomes]
    chances = torch.ones(len(outcomes), dtype=torch.float64)

    def coin(p: Tensor, q: Tensor, rows: list[ScoredRow]) -> Tensor:
        assert {row.stream for row in rows} == {round_stream(rows[0].seq, COIN)} != {COIN}
        h = torch.minimum(torch.ones(()), p / q).double().view(-1, k)
        falls = torch.tensor([pattern for pattern, _ in outcomes])
        chances.mul_(torch.where(falls, h, 1 - h).prod(-1))
        return falls.flatten()

    def draw(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
        assert {row.stream for row in rows} == {RESIDUAL}
        for n, (_, token) in enumerate(outcomes):
            # no softmax here: what is not normalised must be seen
            chances[n] *= logits[n].double().exp()[token]
        return torch.tensor([token for _, token in outcomes])

    judged = judged_by_toy(drafted, draw, coin)
    return [(float(chance), one.verdict) for chance, one in zip(chances, judged, strict=True) if chance > 0]


def texts(
    case: Case, k: int, proposal: CallCost, output: tuple[int, ...] = (), reported: CallCost | None = None
) -> Distribution:
    """Every text that rounds of K drafts can write; `reported` is the q that verify is given."""
    made: Distribution = {}
    k_now = min(k, (case.params.max_tokens or 0) - len(output) - 1)
    if k_now < 1:
        return reference_texts(case, output)
    for q, chain, probs in chains(case, output, k_now, proposal):
        if reported is not None:
            probs = torch.tensor([reported(case, (*output, *chain[:i])) for i in range(k_now)])
        ends: Distribution = {}
        for chance, verdict in one_round(case, output, chain, probs):
            end = (*output, *verdict.tokens), verdict.finish and verdict.finish.reason
            ends[end] = ends.get(end, 0.0) + chance
        for (grown, finish), chance in ends.items():
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


@pytest.mark.parametrize("proposal", [certain, itself, chained], ids=["q on one token", "q = p", "chained"])
def test_the_extremes_of_q(proposal: CallCost) -> None:
    for name in ("plain", "filters", "penalties", "min_tokens"):
        assert error(SAMPLED[name], 2, proposal) < EXACT


def test_a_draft_may_end_by_what_was_drafted() -> None:
    """As under a least confidence: whether another draft follows depends on those before it."""
    case = SAMPLED["plain"]
    made: Distribution = {}
    for _, chain, probs in chains(case, (), 2, drafter):
        k = 1 if chain[0] % 2 else 2
        if k == 1 and chain[1]:
            continue  # one draft that ends there stands for all that would go on
        q = float(probs[range(k), chain[:k]].double().prod())
        for chance, verdict in one_round(case, (), chain[:k], probs[:k]):
            for text, part in reference_texts(case, verdict.tokens).items():
                made[text] = made.get(text, 0.0) + q * chance * part
    assert distance(made, reference_texts(case)) < EXACT


# random p and q, with zeros: one round alone, over given rows


class Tree:
    """p and q after every beginning of at most K tokens, over `vocab` tokens, some of them 0."""

    def __init__(self, seed: int, k: int, vocab: int = 3, zeros: float = 0.25) -> None:
        self.k, self.vocab, chance = k, vocab, random.Random(seed)
        starts = [s for n in range(k + 1) for s in itertools.product(range(vocab), repeat=n)]
        self.p = {start: self._row(chance, zeros) for start in starts}
        self.q = {start: self._row(chance, zeros) for start in starts}

    def _row(self, chance: random.Random, zeros: float) -> list[float]:
        row = [0.0 if chance.random() < zeros else chance.random() ** 3 for _ in range(self.vocab)]
        row[chance.randrange(self.vocab)] += 0.05
        return [x / sum(row) for x in row]

    def chains(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(probability, tokens) of each draft."""
        for chain in itertools.product(range(self.vocab), repeat=self.k):
            chance = 1.0
            for i, token in enumerate(chain):
                chance *= self.q[chain[:i]][token]
            if chance:
                yield chance, chain

    def target(self) -> dict[tuple[int, ...], float]:
        """The probability of each K + 1 tokens."""
        made = {(): 1.0}
        for _ in range(self.k + 1):
            made = {
                (*start, token): chance * p
                for start, chance in made.items()
                for token, p in enumerate(self.p[start])
            }
        return made


PLAIN = SamplingParams()


def scored(drafted: list[Drafted]) -> list[Scored]:
    """Rows end to end."""
    ends = accumulate(len(one.draft.tokens) + 1 for one in drafted)
    return [
        Scored(one, range(end - len(one.draft.tokens) - 1, end))
        for one, end in zip(drafted, ends, strict=True)
    ]


def judged(tree: Tree, chain: tuple[int, ...], rule: str) -> list[tuple[float, tuple[int, ...], int]]:
    """(probability, tokens, accepted) of every outcome for one draft, by the shipped rule."""
    k, made = tree.k, []
    patterns = list(itertools.product((False, True), repeat=k))
    seq = make_sequence([1], params=PLAIN, rules=Rules.of(PLAIN, (), ()), acceptance=rule)
    draft = Draft(chain, ("toy",) * k, torch.tensor([tree.q[chain[:i]] for i in range(k)]))
    spans = scored([Drafted(span_of(seq), draft) for _ in patterns])
    chances, ends = torch.ones(len(patterns), dtype=torch.float64), []

    def coin(p: Tensor, q: Tensor, rows: list[ScoredRow]) -> Tensor:
        h = torch.minimum(torch.ones(()), p / q.clamp(min=1e-30)).double().view(-1, k)
        chances.mul_(torch.where(torch.tensor(patterns), h, 1 - h).prod(-1))
        return torch.tensor(patterns).flatten()

    def draw(logits: Tensor, rows: list[ScoredRow]) -> Tensor:
        ends.append(logits.double().exp())
        return torch.zeros(len(rows), dtype=torch.long)

    p = torch.tensor([tree.p[chain[:i]] for i in range(k + 1)])
    found = WITH_Q[rule](spans, p.log().repeat(len(patterns), 1), draw, coin)
    for n, (tokens, accepted) in enumerate(found):
        for token in range(tree.vocab):
            made.append((float(chances[n] * ends[0][n, token]), (*tokens[:-1], token), len(accepted)))
    return made


def joint_error(tree: Tree, rule: str = "block") -> float:
    """Total variation between what a round and the target after it write, and the target: K + 1 tokens."""
    made, target = dict.fromkeys(tree.target(), 0.0), tree.target()
    for q, chain in tree.chains():
        for chance, tokens, _ in judged(tree, chain, rule):
            for whole in target:
                if chance and whole[: len(tokens)] == tokens:
                    rest = 1.0
                    for i in range(len(tokens), tree.k + 1):
                        rest *= tree.p[whole[:i]][whole[i]]
                    made[whole] += q * chance * rest
    return sum(abs(made[whole] - target[whole]) for whole in target) / 2


def accepted(tree: Tree, rule: str) -> float:
    """The expected number of accepted drafts."""
    return sum(q * chance * n for q, chain in tree.chains() for chance, _, n in judged(tree, chain, rule))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_random_p_and_q(k: int) -> None:
    for seed in range(12):
        assert joint_error(Tree(seed, k)) < EXACT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_at_least_as_many_drafts_are_accepted_as_by_rejection(k: int) -> None:
    gains = [
        accepted(tree, "block") - accepted(tree, "rejection") for tree in (Tree(s, k) for s in range(12))
    ]
    assert min(gains) > -EXACT
    assert (max(gains) > 0.01) == (k > 1), "of a single draft both accept the same share"


def test_the_example_of_the_paper() -> None:
    """Sun et al. 2024, section 2: rejection accepts 10/9 of two drafts, block verification 11/9."""
    tree = Tree(0, 2, vocab=2)
    tree.p, tree.q = dict.fromkeys(tree.p, [1 / 3, 2 / 3]), dict.fromkeys(tree.q, [2 / 3, 1 / 3])
    assert accepted(tree, "rejection") == pytest.approx(10 / 9, abs=EXACT)
    assert accepted(tree, "block") == pytest.approx(11 / 9, abs=EXACT)


def test_the_chance_of_a_beginning_does_not_depend_on_k() -> None:
    """P(at least i accepted) is the mean of w_i, so what is learned at one K holds at another."""
    long = Tree(5, 3)
    for k in (1, 2):
        short = Tree(5, 3)
        short.k = k
        for i in range(1, k + 1):
            shares = [
                sum(q * c for q, chain in t.chains() for c, _, n in judged(t, chain, "block") if n >= i)
                for t in (long, short)
            ]
            assert shares[0] == pytest.approx(shares[1], abs=EXACT)


# numbers


def test_ratios_of_tiny_numbers_stay_finite() -> None:
    p = torch.tensor([1.0, 1e-38, 0.0, 1e-30, 1e-30, 0.5, 0.5])
    q = torch.tensor([1e-45, 1.0, 0.0, 1e-38, 1.0, 1.0, 1e-20])
    w = joint_ratios(p, q, [3, 4])
    assert w.tolist()[:4] == [1, 1, pytest.approx(1e-38, rel=1e-4, abs=0), 0]
    assert w.tolist()[4:] == [1, 1, *(pytest.approx(x, rel=1e-4, abs=0) for x in (1e-30, 5e-31, 2.5e-11))]


def test_equal_p_and_q_accept_everything() -> None:
    """Also where rounding leaves r = 0 and w = 1, or a little less."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(4, 1000, generator=chance)
        q = logits.softmax(-1)[:3]
        seq = make_sequence([1], params=PLAIN, rules=Rules.of(PLAIN, (), ()), acceptance="block")
        chain = tuple(q.argmax(-1).tolist())
        spans = scored([Drafted(span_of(seq), Draft(chain, ("toy",) * 3, q))])
        assert len(verifying.block(spans, logits)[0][1]) == 3


# noise: a later round must not draw what an earlier one was judged by

RUNS, LENGTH = 5000, 4
P, Q = [0.4, 0.6], [0.8, 0.2]  # whatever stands before


def drawn_by_noise() -> list[tuple[int, ...]]:
    """The first tokens of texts of as many seeds, in rounds of at most three drafts, by keyed noise alone."""
    rules, prompt = Rules.of(PLAIN, (), ()), [1]
    seqs = [make_sequence(prompt, params=PLAIN, rules=rules, acceptance="block", seed=i) for i in range(RUNS)]
    while going := [seq for seq in seqs if seq.num_output < LENGTH]:
        drafts = [
            Draft(chain, ("toy",) * len(chain), torch.tensor([Q] * len(chain)))
            for chain in drafted_by_noise(going)
        ]
        spans = scored([Drafted(span_of(seq), draft) for seq, draft in zip(going, drafts, strict=True)])
        found = verifying.block(spans, torch.tensor([P] * spans[-1].rows.stop).log())
        for span, (tokens, _) in zip(spans, found, strict=True):
            span.seq.tokens += tokens
    return [tuple(seq.tokens[1 : LENGTH + 1]) for seq in seqs]


def drafted_by_noise(seqs: list[Sequence]) -> list[tuple[int, ...]]:
    """Drafts as `proposers.chain` draws them: three, or up to the end of the text, and at least one."""
    chains: list[tuple[int, ...]] = [() for _ in seqs]
    for k in range(3):
        active = [i for i, seq in enumerate(seqs) if not k or seq.num_output + k < LENGTH]
        rows = [
            ScoredRow(seqs[i], seqs[i].request.rules, chains[i], verifying.round_stream(seqs[i]))
            for i in active
        ]
        for i, token in zip(
            active, pick(torch.tensor([Q] * len(rows)).log(), rows) if rows else (), strict=True
        ):
            chains[i] += (token,)
    return chains


def chi_square() -> float:
    """Over all texts, of 15 degrees of freedom."""
    counts, found = Counter(drawn_by_noise()), 0.0
    for text in itertools.product(range(2), repeat=LENGTH):
        expected = RUNS * prod(P[token] for token in text)
        found += (counts[text] - expected) ** 2 / expected
    return found


UNLIKELY = 15 + 4 * (2 * 15) ** 0.5


def test_rounds_draw_from_noise_of_their_own() -> None:
    assert chi_square() < UNLIKELY


@pytest.mark.parametrize("reused", [0, COIN], ids=["drafts", "coins"])
def test_noise_that_a_later_round_draws_again_is_seen(reused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rejection may draw it: there nothing depends on the noise behind the first rejected draft."""

    def shared(seq: Sequence, stream: int = 0) -> int:
        return stream if stream == reused else round_stream(seq, stream)

    monkeypatch.setattr(verifying, "round_stream", shared)
    assert chi_square() > 2 * UNLIKELY


# planted errors


def test_a_residual_of_the_unweighted_p_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(weighted: Tensor, q: Tensor) -> Tensor:
        return residual(weighted / weighted.sum(-1, keepdim=True).clamp(min=1e-9), q)

    monkeypatch.setattr(verifying, "residual", unweighted)
    assert joint_error(Tree(0, 2)) > VISIBLE


def test_ratios_of_single_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(1, p / q) of each draft, and not of all up to it."""

    def single(p: Tensor, q: Tensor, lengths: list[int]) -> Tensor:
        split = zip(p.split(lengths), q.split(lengths), strict=True)
        return torch.cat([part for a, b in split for part in (torch.ones(1), (a / b).clamp(max=1))])

    monkeypatch.setattr(verifying, "joint_ratios", single)
    assert error(SAMPLED["plain"], 2) > VISIBLE and joint_error(Tree(0, 3)) > VISIBLE


def test_a_product_that_is_not_limited_to_1_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlimited(p: Tensor, q: Tensor, lengths: list[int]) -> Tensor:
        split = (p / q).split(lengths)
        return torch.cat([part for ratio in split for part in (torch.ones(1), ratio.cumprod(0).clamp(max=1))])

    monkeypatch.setattr(verifying, "joint_ratios", unlimited)
    assert error(SAMPLED["plain"], 2) > VISIBLE and joint_error(Tree(0, 3)) > VISIBLE


def test_ending_at_the_first_failure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning may be accepted though a shorter one was not."""
    monkeypatch.setattr(verifying, "up_to_last_success", verifying.up_to_first_failure)
    assert error(SAMPLED["plain"], 2) > VISIBLE and joint_error(Tree(0, 2)) > VISIBLE


def test_the_chance_of_the_last_draft_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """h_i = w_i holds for i = K alone."""
    monkeypatch.setattr(verifying, "beginning_chances", lambda weighted, q, w: w)
    assert error(SAMPLED["plain"], 2) > VISIBLE and joint_error(Tree(0, 2)) > VISIBLE


def test_q_before_the_filters_is_seen() -> None:
    assert error(FILTERED, 2, reported=lambda case, output: drafter(SAMPLED["plain"], output)) > VISIBLE
