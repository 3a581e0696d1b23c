"""What the policy believes, and what it makes of it, in a world without a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random
from statistics import mean, median
from typing import Any, cast

import pytest

from speculon.control import estimate
from speculon.control.auto import Auto
from speculon.control.estimate import BAD_LUCK, HOPE, Acceptance, Own, ProposalCost, StepCost, grades_of
from speculon.control.known import Method, Others
from speculon.control.known import Text as Known
from speculon.control.policy import Fixed, Policy
from speculon.control.simulate import Played, Text, Way, World, play
from speculon.core import Decision, Draft, Load, Reason, Sequence
from tests.builders import make_sequence

# measured with the demo pair, one thread: ms of a step, of a look-up, of a draft model's call
STEP: Callable[[int, int], float] = lambda texts, drafts: 4.0 + 0.55 * (texts - 1) + 0.27 * drafts  # noqa: E731
LOOKUP: Callable[[int, int], float] = lambda texts, k: 0.02 * texts  # noqa: E731
MODEL: Callable[[int, int], float] = lambda texts, k: (0.45 + 0.03 * texts) * k  # noqa: E731


DEAR: Callable[[int, int], float] = lambda texts, k: 0.2 + (1.0 + 0.22 * texts) * k  # noqa: E731
READ = 0.022  # of a token of a text that the draft model has not seen


def world(accept: Callable[[int, int], float], texts: Callable[[int], int] = lambda number: 1, **more: object) -> World:
    return World(STEP, {"model": Way(accept, MODEL)}, texts, **more)  # type: ignore[arg-type]


def fixed(accept: float, texts: int, k: int) -> float:
    return play(Fixed(), world(lambda *_: accept, lambda _: texts, most=k), 2000).rate()


def plain(texts: int) -> float:
    return texts / STEP(texts, 0)


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_acceptance_is_learned(truth: float) -> None:
    random, known = Random(1), Acceptance()
    for _ in range(400):
        accepted = next((i for i in range(8) if random.random() >= truth), 8)
        known.observe([0] * min(accepted + 1, 8), accepted)
    assert known.chance(0) == pytest.approx(truth, abs=0.12)


def test_what_was_never_judged_counts_for_nothing() -> None:
    known, blind = Acceptance(), Acceptance()
    for _ in range(50):
        known.observe([0] * 3, 2)
        blind.observe([0] * 8, 2)  # planted: what follows the first wrong draft is taken for wrong, too
    assert known.chance(5) == pytest.approx(known.chance(15)) and known.chance(5) > blind.chance(5) + 0.3
    assert known.chance(0) > 0.9 and known.chance(2) < 0.1


def test_a_drafters_own_confidence_parts_its_drafts() -> None:
    grades = grades_of((0.0, 0.01, 0.5, 0.67, 0.75, 0.8, 0.99), 7)
    assert grades == sorted(set(grades))
    known, sure, unsure = Acceptance(), grades_of((0.95,), 1), grades_of((0.2,), 1)
    for _ in range(100):
        known.observe(sure, 1)
        known.observe(unsure, 0)
    assert known.chances(sure)[0] > 0.9 and known.chances(unsure)[0] < 0.1


def test_a_text_of_its_own_kind_is_found_out() -> None:
    own, known = Own(), acceptance(0.8)
    for number in range(60):
        own.observe(known, [0], int(number % 5 == 4))  # no run of bad luck
    assert own.chances(known, [0])[0] < 0.5 and Own().chances(known, [0])[0] == pytest.approx(0.8, abs=1e-3)


def acceptance(chance: float) -> Acceptance:
    known = Acceptance()
    known._overall.add(1e4 * chance, 1e4, 1.0)
    return known


@pytest.mark.parametrize(("chance", "fails", "counts"), [(0.95, 4, True), (0.6, 6, False), (0.45, 10, False), (0.45, 16, True)])
def test_a_run_of_bad_luck_counts_once_it_is_unlikely(
    chance: float, fails: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for nats in (BAD_LUCK, float("inf")):
        monkeypatch.setattr(estimate, "BAD_LUCK", nats)
        own, known = Own(), acceptance(chance)
        for _ in range(fails):
            own.observe(known, [0], 0)
        found.append(own.kind(known))
    assert (found[0] < found[1]) is counts


def test_hope_ends_with_experience() -> None:
    known, first = Acceptance(), Acceptance().survival(0, 1)[0]
    for number in range(4000):
        known.observe([0], number % 2)
    assert first > 0.8, "nothing is known: try it"
    assert known.survival(0, 1)[0] == pytest.approx(known.chance(0), abs=0.01)


def test_a_text_begins_with_what_look_ups_brought_to_others_of_its_kind() -> None:
    policy, poor, other = Auto(), make_sequence([8], method="suffix"), make_sequence([8], method="ngram")
    plain = make_sequence([8], method="suffix", off=Reason.OFF_REQUEST)
    others = policy._others.setdefault(poor.kind, Others())
    for _ in range(200):
        others.asked("suffix", 0.0)
    assert policy._meet(poor).of("suffix").worth < HOPE / 10
    assert not policy._meet(plain).own and not policy._meet(other).own, "what they do tells nothing of it"


def test_step_costs_are_learned_and_never_fall_with_rows() -> None:
    random, costs = Random(2), StepCost()
    for _ in range(600):
        texts, drafts = random.choice([1, 2, 4, 8]), random.choice([0, 0, 2, 4, 8, 16])
        ms = STEP(texts, drafts) * random.gauss(1, 0.05) * random.choice([1] * 19 + [8])
        costs.observe(texts, texts if drafts else 0, drafts, ms)
    for texts, drafts in ((1, 0), (1, 4), (8, 0), (8, 16), (4, 8)):
        assert costs.at(texts, texts if drafts else 0, drafts) == pytest.approx(STEP(texts, drafts), rel=0.2), (texts, drafts)
    assert all(costs.at(3, 3, drafts) <= costs.at(3, 3, drafts + 1) for drafts in range(64))
    again = StepCost()
    again.restore(costs.state())
    assert again.at(5, 2, 7) == costs.at(5, 2, 7)


def test_a_step_is_never_believed_to_cost_nothing() -> None:
    auto, seqs = Auto(), [make_sequence([1, 2, 3]) for _ in range(3)]
    auto.costs.restore([-1.0, 0.0, 0.0, 0.5])  # what noise can make of the parts
    assert auto.costs.at(3, 0, 0) > 0 and len(auto.decide(seqs, Load(3, 0, 9))) == 3


def test_proposal_costs_are_learned() -> None:
    random, cost = Random(3), ProposalCost()
    for _ in range(400):
        k = random.choice([1, 2, 4, 8])
        cost.observe(1, k, (0.3 + 0.5 * k) * random.gauss(1, 0.05))
    assert [cost.at(1, k) for k in (1, 4, 8)] == pytest.approx([0.8, 2.3, 4.3], rel=0.2)


def test_what_a_proposal_reads_first_has_a_price_of_its_own() -> None:
    random, cost, blind = Random(4), ProposalCost(), ProposalCost()
    assert cost.at(8, 2) == 0, "nothing is known: it is asked"
    for unread in (2048, 0, 0):
        cost.observe(8, 2, DEAR(8, 2) + READ * unread, unread)
    assert cost.at(8, 2) == pytest.approx(DEAR(8, 2), rel=0.3)
    for _ in range(400):
        k, texts, unread = random.choice([1, 2, 4]), random.choice([1, 4, 8]), random.choice([0, 0, 0, 300, 900])
        ms = (DEAR(texts, k) + READ * unread) * random.gauss(1, 0.05)
        cost.observe(texts, k, ms, unread)
        blind.observe(texts, k, ms)  # planted: nobody said that it read
    assert cost.read == pytest.approx(READ, rel=0.2)
    assert [cost.at(t, k) for t, k in ((1, 2), (8, 4))] == pytest.approx([DEAR(1, 2), DEAR(8, 4)], rel=0.2)
    ms = DEAR(8, 2) + READ * 2048
    assert cost.at(8, 2, 2048) == pytest.approx(ms, rel=0.1) and blind.at(8, 2, 2048) < 0.8 * ms


def test_what_a_call_for_one_text_costs_is_known_from_calls_for_many() -> None:
    cost = ProposalCost()
    for _ in range(2):
        cost.observe(64, 16, DEAR(64, 16))
    cost.observe(1, 2, DEAR(1, 2))
    assert cost.at(1, 2) == pytest.approx(DEAR(1, 2), rel=0.5), "no part is negative, and none is left too large for it"


@pytest.mark.parametrize("texts", [1, 8])
@pytest.mark.parametrize("accept", [0.6, 0.8, 0.95])
def test_auto_comes_close_to_the_best_fixed_number_of_drafts(accept: float, texts: int) -> None:
    best = max(plain(texts), *(fixed(accept, texts, k) for k in (1, 2, 4, 6, 8, 12, 16)))
    rates = [play(Auto(), world(lambda *_: accept, lambda _: texts), 2000, seed).rate(200) for seed in range(6)]
    assert mean(rates) > 0.95 * best, "bad luck at first keeps a drafter out for long in one of six"


@pytest.mark.parametrize("texts", [1, 8])
def test_a_drafter_that_never_helps_costs_next_to_nothing(texts: int) -> None:
    auto = play(Auto(), world(lambda *_: 0.02, lambda _: texts), 3000)
    assert auto.rate(200) > 0.98 * plain(texts)
    assert fixed(0.02, texts, 4) < 0.9 * plain(texts), "the planted drafter does harm where nobody minds it"


def test_a_drafter_that_comes_to_its_senses_is_used_again() -> None:
    """Both drafts of a probe stand in two of three: of 40 seeds 39 are in time, half within 90 rounds."""
    waited = []
    for seed in range(8):
        auto = play(Auto(), world(lambda number, _: 0.0 if number < 1000 else 0.8), 2600, seed)
        waited.append(next(i for i in range(1600) if all(auto.drafted[1000 + i : 1005 + i])))
        assert auto.rate(1000 + waited[-1]) > 0.9 * fixed(0.8, 1, 6)
    assert sum(rounds < 400 for rounds in waited) >= 7 and median(waited) < 150, waited


def test_a_drafter_that_collapses_is_out_soon() -> None:
    auto = play(Auto(), world(lambda number, _: 0.8 if number < 500 else 0.0), 800)
    assert sum(bool(drafted) for drafted in auto.drafted[520:]) < 15
    assert all(auto.drafted[i] for i in range(480, 500))


class Gaps(World):
    """Where the look-up has nothing the model is right once, and then the look-up has something again behind its draft."""

    stands = 0.9

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        return Draft() if method == "lookup" else super().draft(number, text, method, k, random)

    def join(self, number: int, text: Text, draft: Draft, k: int, random: Random) -> Draft:
        fate = (float(random.random() < self.stands) for _ in range(k))
        return draft.join(Draft(tuple(int(stood) for stood in fate), ("lookup",) * k, confidence=(0.5,) * k))


class Wrong(Gaps):
    stands = 0.05


def gaps(world: type[Gaps], policy: type[Policy] = Auto, rounds: int = 1500, **fields: Any) -> Played:
    ways = {"lookup": Way(lambda *_: 0.0, lambda texts, k: 0.02 * texts), "model": Way(lambda *_: 0.8, MODEL)}
    return play(policy(), Joining(world(STEP, ways, lambda number: 1), **fields), rounds)  # type: ignore[arg-type]


class Joining:
    """A world whose texts say whether drafts are joined, and want two of the model's at most."""

    def __init__(self, world: World, join: bool | None = None):
        self.world, self.joins = world, join

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def crowds(self) -> Any:
        for running in self.world.crowds():
            for text in running:
                text.join, text.limits = self.joins, {"model": 2}
            yield running


def joined_rows(played: Played) -> float:
    return sum(drafted["lookup"] for drafted in played.drafted[200:]) / len(played.drafted[200:])


def test_auto_joins_where_that_pays_and_learns_where_it_does_not() -> None:
    good, never = gaps(Gaps), gaps(Gaps, join=False)
    assert good.rate(200) > 1.2 * never.rate(200) and joined_rows(never) == 0 < 3 < joined_rows(good)
    bad, apart = gaps(Wrong), gaps(Wrong, join=False)
    assert bad.rate(200) > 0.97 * apart.rate(200) and joined_rows(bad) < 0.3


def test_whoever_keeps_all_that_is_joined_loses_by_it() -> None:
    class Keeping(Auto):
        def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
            kept = super().trim(seq, method, draft)
            return draft if kept.tokens else kept

    assert gaps(Wrong, Keeping).rate(200) < 0.9 * gaps(Wrong, join=False).rate(200)


def test_a_lookup_that_goes_on_behind_a_draft_is_believed_to_be_back() -> None:
    stays = []
    for world, join in ((Gaps, None), (Gaps, False), (Wrong, None)):
        auto = Auto()
        gaps(world, lambda: auto, join=join)  # type: ignore[arg-type]  # noqa: B023
        stays.append(auto._others[""].stay)
    joined, apart, wrong = stays
    assert joined < 0.8 and apart > 0.9 and wrong > 0.9


def test_what_is_joined_teaches_nothing_of_the_method_itself() -> None:
    auto = Auto()
    gaps(Wrong, lambda: auto)  # type: ignore[arg-type]
    again = Auto()
    again.restore(auto.state())
    for known in (auto, again):
        assert known.methods["model"].acceptance.chance(0) > 0.7
        assert known.methods["model+lookup"].acceptance.chances(grades_of((0.5,), 1))[0] < 0.3


PHASES = {1: 2500, 64: 250}  # texts -> rounds


class Stuck(Auto):
    """Planted: goes on as it did after 200 rounds."""

    last: Decision | None = None

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        decisions = super().decide(seqs, load)
        if self._round.number >= 200 and self.last is None:
            self.last = decisions[0]
        return [self.last] * len(seqs) if self.last else decisions

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        return ks if self.last else super().confirm(method, seqs, ks)


def swing(policy: type[Policy], first: int, seeds: int = 3) -> list[float]:
    """What a policy reaches in each phase of a load that swings, over the better of plain and best fixed there: means."""
    phases = [first, 65 - first] * 2
    ends = list(accumulate(PHASES[texts] for texts in phases))
    scene = swinging(lambda number: next(texts for texts, end in zip(phases, ends, strict=True) if number < end))
    runs = [play(policy(), scene, ends[-1], seed) for seed in range(seeds)]
    spans = [(t, end - PHASES[t], end) for t, end in zip(phases, ends, strict=True)]
    return [mean(played.rate(first, last) for played in runs) / BEST[t] for t, first, last in spans]


def swinging(texts: Callable[[int], int], most: int = 16) -> World:
    return World(STEP, {"model": Way(lambda *_: 0.8, DEAR)}, texts, most)


BEST = {  # the draft model pays for one text, plain decoding in a crowd
    t: max(plain(t), *(play(Fixed(), swinging(lambda _, t=t: t, k), PHASES[t]).rate() for k in (1, 2, 3, 4, 6)))  # type: ignore[misc]
    for t in PHASES
}


@pytest.mark.parametrize("first", PHASES)
def test_load_that_swings_is_followed(first: int) -> None:
    assert min(swing(Auto, first)) > 0.97


@pytest.mark.parametrize("first", PHASES)
def test_a_policy_that_is_stuck_would_be_seen(first: int) -> None:
    assert min(swing(Stuck, first)) < 0.97


class Endless(Others):
    def left(self, seq: Sequence) -> float:
        return 1e9


class Blind(Auto):
    """Planted: reading is believed to be shared by no end of drafts."""

    def _meet(self, seq: Sequence) -> Known:
        self._others.setdefault(seq.kind, Endless())
        return super()._meet(seq)

    def _book(self, seq: Sequence, text: Known, *args: Any) -> None:
        super()._book(seq, text, *args)
        text.wanted.clear()  # nor is it found out


def short(policy: Policy, read_ms: float, most: int = 16) -> float:
    """Eight texts of a long prompt and 16 tokens at once, one after the other."""
    way = Way(lambda *_: 0.9, DEAR, read_ms)
    return play(policy, World(STEP, {"model": way}, lambda _: 8, most, prompt=256, length=16), 1200).rate(300)


def test_a_text_too_short_for_what_must_be_read_is_left_alone() -> None:
    assert short(Auto(), READ) > 0.97 * plain(8)
    assert short(Blind(), READ) < 0.9 * plain(8), "the planted error costs what the policy saves"
    best = max(short(Fixed(), 0.0, k) for k in (2, 4, 6))
    assert best > 1.05 * plain(8) and short(Auto(), 0.0) > 0.95 * best, "where reading costs nothing it drafts"


def test_a_probe_is_due_however_long_the_text_has_become() -> None:
    """What a text adds in a round may cost as much to read as is saved for probes meanwhile."""
    way = Way(lambda number, _: 0.0 if number < 3000 else 0.8, MODEL, 0.04)
    auto = play(Auto(), World(STEP, {"model": way}, lambda _: 1), 4000)
    assert any(auto.drafted[1500:3000]) and all(auto.drafted[3900:])


class Patchy(World):
    """Look-ups have nothing in every other round, and much in the others."""

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        return Draft() if method == "lookup" and number % 2 else super().draft(number, text, method, k, random)


class Greedy(Auto):
    """Planted: what look-ups would soon write is not held against a draft."""

    def _meet(self, seq: Sequence) -> Known:
        text = super()._meet(seq)
        self._others[seq.kind].back.tries = 1e9
        return text


def test_a_draft_is_shorter_where_look_ups_are_soon_back() -> None:
    ways = {"lookup": Way(lambda *_: 0.98, LOOKUP), "model": Way(lambda *_: 0.95, DEAR)}
    auto, greedy = (play(policy, Patchy(STEP, ways, lambda _: 1), 1500) for policy in (Auto(), Greedy()))
    drafts = [sum(drafted["model"] for drafted in played.drafted[300:]) for played in (auto, greedy)]
    assert 2 * drafts[0] < drafts[1] and auto.rate(300) > 1.02 * greedy.rate(300)


def test_a_costly_method_is_weighed_again_when_it_is_known_who_wants_it() -> None:
    auto, seqs = Auto(), [Text(i, ("model",), 8) for i in range(8)]
    auto.costs.restore([3.85, 0.55, 0.7, 0.2])
    known = auto.methods["model"] = Method()
    known.cost.restore([0.2, 1.0, 0.2, 0.0])
    for _ in range(50):
        known.of("").observe([0] * 8, 8)
    decisions = auto.decide(cast(Any, seqs), Load(8, 0, 9))
    assert all(decision.k >= 4 for decision in decisions)
    together = auto.confirm("model", cast(Any, seqs), [decision.k for decision in decisions])
    assert all(k >= 4 for k in together), "all of them share its calls"
    auto._round.kept_tokens, auto._round.kept_ms = 7 * 12.0, 7 * 3.0  # seven have found a match meanwhile
    assert auto.confirm("model", cast(Any, seqs[:1]), [8]) == [0], "in that time all the others write more"
    assert auto.confirm("look-up", cast(Any, seqs[:1]), [8]) == [8]


class Counting(Auto):
    """Notes the rounds in which it thought, and those in which something was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds, self.thought, self.asked = 0, [], []  # type: ignore[var-annotated]

    def _begin(self, seqs: list[Sequence]) -> Any:
        self.thought.append(self.rounds)
        return super()._begin(seqs)

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        self.rounds += 1
        decisions = super().decide(seqs, load)
        self.asked += [self.rounds] * any(decision.k for decision in decisions)
        return decisions


def test_texts_that_nothing_can_be_guessed_of_rest_together() -> None:
    policy = Counting()
    played = play(
        policy, World(STEP, {"lookup": Way(lambda *_: 0.0, LOOKUP), "model": Way(lambda *_: 0.0, DEAR)}, lambda _: 8), 1200
    )
    late = [number for number in policy.thought if number > 600]
    assert len(late) < 0.35 * 600, "it thinks in most rounds"
    assert played.rate(600) > 0.97 * plain(8)
    assert [number for number in policy.asked if number > 600], "nothing is ever tried again"


def test_whoever_comes_wakes_them() -> None:
    policy = Auto()
    policy.costs.restore([4.0, 0.5, 0.1, 0.3])
    seqs = [make_sequence([1, 2, 3], methods=()) for _ in range(3)]
    first = policy.decide(seqs, Load(3, 0, 9))
    assert policy.decide(seqs, Load(3, 0, 9)) is first, "they do not rest"
    assert len(policy.decide(seqs[:2], Load(2, 0, 9))) == 2
    assert len(policy.decide([*seqs, make_sequence([4], methods=())], Load(4, 0, 9))) == 4


def test_a_new_method_is_tried_on_one_text() -> None:
    policy = Auto()
    policy.costs.restore([4.0, 0.5, 0.1, 0.3])
    decisions = policy.decide([make_sequence([1, 2, 3], method="model") for _ in range(8)], Load(8, 0, 9))
    assert sum(decision.k > 0 for decision in decisions) == 1
