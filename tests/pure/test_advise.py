"""What an advice computes, without a model: rounds walked over drafts, costs, thresholds, answers, settings as TOML."""

from __future__ import annotations

import random
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.bench.advise import Advice, Outcome, Wish
from speculon.bench.advise_check import Candidate, Check, Pair, Result, result_of
from speculon.bench.advise_maths import (
    Fit,
    Recorded,
    Text,
    Timed,
    Walk,
    Way,
    best,
    break_even,
    by_position,
    dearest_draft,
    estimate,
    fits,
    speed,
    total,
    walk,
)
from speculon.bench.advise_measure import FIXED, Written, asking
from speculon.bench.advise_prompts import GROUP, Split, read_lines
from speculon.bench.advise_settings import as_flags, as_toml, merged, next_command, settings, whole, write
from speculon.bench.advise_words import answer, checked, headline, rows
from speculon.bench.workloads import Case
from speculon.config import EngineConfig, SamplingParams, SpeculationConfig
from speculon.control.acceptance import FADE, Acceptance
from speculon.core import Proposal
from speculon.errors import BenchError, ConfigError, InvalidParameter

DRAFT, LOOK = Way("draft_model", ("draft_model",)), Way("suffix", ("suffix",))
BOTH = Way("auto", ("suffix", "draft_model"))
KS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 2, 4, 8)
PROMPT = 20

Drafts = list[dict[str, Recorded]]


def rounds_of(
    draft: float,
    row: float = 0.05,
    more: float = 0.3,
    batches: Sequence[int] = BATCHES,
    read: float = 0.0,
    also: Sequence[str] = (),
) -> list[Timed]:
    """A plain step of one sequence takes 10 ms; a draft, a row, a sequence more and a token read cost shares of it. No noise."""
    found = []
    for batch, k, stride in [(b, k, s) for b in batches for k in (0, 0, *KS) for s in (1, 2) if s == 1 or k and b > 1]:
        n = batch // stride * bool(k)
        calls = {"draft_model": Proposal(n, k, 10 * draft * k), "suffix": Proposal(n, k, 0.01)} if k else {}
        calls |= {name: calls["draft_model" if name == "liar" else "suffix"] for name in also if k}
        found += [Timed(batch, n, n * k, 10 * (1 + more * (batch - 1)) + 10 * row * n * k, calls)] * 3
    first = {"draft_model": Proposal(1, 1, 10 * draft + 10 * read * PROMPT, PROMPT)}
    return found + [Timed(1, 1, 1, 10 * (1 + row), first)] * (6 * bool(read))


def fit_of(draft: float, **more: float) -> Fit:
    return Fit.of(rounds_of(draft, **more), random.Random(0))


def texts_of(acceptance: float, method: str = "draft_model", texts: int = 6, length: int = 200, k: int = 8) -> list[Drafts]:
    """Whether the draft at a place is right depends on the place alone, so that drafts from everywhere agree."""
    rng = random.Random(1)
    found: list[Drafts] = []
    for _ in range(texts):
        right = [rng.random() < acceptance for _ in range(length)]
        found.append([{method: draft_at(right[at : at + k])} for at in range(length)])
    return found


def draft_at(right: list[bool]) -> Recorded:
    return Recorded(len(right), (right + [False]).index(False))


def written(drafts: list[Drafts], loops: Sequence[int] = ()) -> list[Written]:
    return [
        Written(Case(f"{GROUP} {i}", [1], SamplingParams()), Text(PROMPT, text), len(text) + 1, i in loops)
        for i, text in enumerate(drafts)
    ]


def advise(drafts: list[Drafts], rounds: list[Timed], ways: list[Way], loops: Sequence[int] = (), **wish: int) -> Advice:
    texts = written(drafts, loops)
    groups = {one.case.name: GROUP for one in texts}
    base = SpeculationConfig(draft="some/draft")
    return Advice(Wish(BATCHES, **wish), ways, {}, rounds, fits(rounds), texts, groups, base)


def estimates(drafts: list[Drafts], ways: list[Way], ks: Sequence[int], rounds: list[Timed]):
    return estimate([Text(PROMPT, text) for text in drafts], ways, ks, [1], fits(rounds))


def walked(drafts: Drafts, chain: Sequence[str], k: int) -> Walk:
    return walk(Text(PROMPT, drafts), chain, k, Acceptance(fade=1.0))


def result(candidate: Candidate, ratio: float, spread: float = 0.05) -> Result:
    return Result(candidate, ratio, ratio - spread, ratio + spread, 2.0)


def measure(advice: Advice, *results: Result, batch: int = 1, again: float = 1.0) -> Advice:
    advice.checks.append(Check(batch, results, again, 9, True))
    return advice


# rounds


def test_a_walk_goes_over_what_is_accepted_and_one_token_more() -> None:
    text: Drafts = [{"a": Recorded(3, 2)}, {}, {}, {"a": Recorded(4, 4)}, {}, {}, {}, {}, {}]
    acceptance = Acceptance(fade=1.0)
    done = walk(Text(PROMPT, text), ["a"], 4, acceptance)
    assert done == Walk(rounds=3, tokens=9, drafting=2, drafts=7, accepted=6, asked=(3,), unread=(PROMPT + 1,))
    assert by_position(acceptance) == [1, 1, 0.5, 1] and acceptance.rate() == 6 / 7
    assert done.tokens_per_call == 3


def test_the_end_of_a_text_judges_nothing_beyond_it() -> None:
    acceptance = Acceptance(fade=1.0)
    walk(Text(PROMPT, [{"a": Recorded(4, 2)}, {}]), ["a"], 4, acceptance)
    assert by_position(acceptance) == [1, 1]


def test_a_chain_asks_the_next_where_the_first_has_nothing() -> None:
    text: Drafts = [
        {"b": Recorded(2, 1)}, {"a": Recorded(1, 1), "b": Recorded(2, 2)}, {"a": Recorded(2, 0), "b": Recorded(2, 2)}, {}
    ]  # fmt: skip
    done = walked(text, ["a", "b"], 2)
    assert (done.rounds, done.tokens, done.asked) == (3, 4, (3, 2))
    whole = total([done, done])
    assert (whole.rounds, whole.tokens, whole.asked, whole.unread) == (6, 8, (6, 4), tuple(2 * n for n in done.unread))


def test_a_drafter_reads_the_prompt_and_what_others_drafted() -> None:
    """A lookup has the draft at the second token: the drafter reads the three tokens of that round when it is next asked."""
    text: Drafts = [{"b": Recorded(2, 0)}, {"a": Recorded(2, 2)}, {}, {}, {"b": Recorded(2, 0)}]
    assert walked(text, ["a", "b"], 2).unread[1] == PROMPT + 3
    every_time: Drafts = [{"b": Recorded(2, 0)}] * 5
    assert walked(every_time, ["b"], 2).unread == (PROMPT,)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_a_walk_counts_every_token_once(k: int, told: list[tuple[int, int]]) -> None:
    left = len(told)
    text = [{"a": Recorded(n, min(n, right, left - i))} if n else {} for i, (n, right) in enumerate(told)]
    done = walked(text, ["a"], k)
    assert done.tokens == left and 1 <= done.rounds <= left
    assert done.tokens - done.rounds <= done.accepted <= done.drafts and done.drafting <= done.rounds


def test_a_mean_over_all_positions_is_too_high() -> None:
    """The twin of walking: half of the text is easy, half is hard, and rounds begin mostly in the hard half."""
    hard = {"a": Recorded(4, 0)}
    text = [{"a": Recorded(4, min(4, max(0, 50 - i)))} if i < 50 else hard for i in range(100)]
    naive = mean(1 + here["a"].accepted for here in text)
    assert walked(text, ["a"], 4).tokens_per_call < 0.6 * naive


def test_nothing_is_discounted_in_an_advice() -> None:
    kept, fading = Acceptance(fade=1.0), Acceptance()
    for hits in (1,) * 100 + (0,) * 100:
        for one in (kept, fading):
            one.observe([0], hits)
    assert kept.rate() == 0.5 and fading.rate() < FADE**99


# costs


def test_the_fit_is_what_was_measured() -> None:
    fit = fit_of(draft=0.1)
    for batch in BATCHES:
        assert fit.costs.step(batch) == pytest.approx(10 * (1 + 0.3 * (batch - 1)), rel=0.02)
        assert fit.full_round(["draft_model"], batch, 4) == pytest.approx(fit.costs.step(batch) + 2 * batch + 4, rel=0.02)
    assert fit.misfit(rounds_of(0.1)) < 0.01 and fit.misfit(rounds_of(0.1, row=0.5)) > 0.1


def test_the_speed_is_tokens_times_plain_over_drafting_and_verification() -> None:
    fit = fit_of(draft=0.1)
    done = total(walked(text, DRAFT.chain, 4) for text in texts_of(0.8))
    found = speed(done, DRAFT, 4, 1, fit)
    assert found.plain_ms == pytest.approx(10, rel=0.01)
    assert found.verify_ms == pytest.approx(10 + 0.5 * done.drafts / done.rounds, rel=0.01)
    assert found.draft_ms == pytest.approx(4, rel=0.02) and found.read_ms == 0
    assert found.ratio == found.tokens_per_call * found.plain_ms / found.round_ms
    assert done.tokens_per_call == pytest.approx(expected_tokens(0.8, 4), rel=0.05)


def test_reading_the_prompt_has_its_price() -> None:
    rounds = rounds_of(draft=0.1, read=0.01)
    done = total(walked(text, DRAFT.chain, 4) for text in texts_of(0.8, length=20))
    found = speed(done, DRAFT, 4, 1, Fit.of(rounds, random.Random(0)))
    assert found.read_ms == pytest.approx(0.1 * done.unread[0] / done.rounds, rel=0.1) and found.read_ms > 0.2


def test_of_many_sequences_few_ask_a_drafter_that_comes_second() -> None:
    fit = fit_of(draft=0.2)
    alone, rarely = fit.proposal_ms("draft_model", 1.0, 8, 4), fit.proposal_ms("draft_model", 0.05, 8, 4)
    assert alone == pytest.approx(8, rel=0.02) and rarely == pytest.approx(8 * (1 - 0.95**8), rel=0.05)
    assert fit.proposal_ms("draft_model", 0.0, 8, 4) == 0


def test_a_step_is_a_mean_over_who_drafts() -> None:
    fit = fit_of(draft=0.2)
    drafting = Walk(rounds=100, tokens=200, drafting=50, drafts=200, accepted=100, asked=(100,), unread=(0,))
    assert fit.step_ms(4, drafting) == pytest.approx(19 + 0.5 * 4 * 2, rel=0.02)  # 4 sequences, 2 rows of each on average
    assert fit.step_ms(4, drafting._replace(drafting=0, drafts=0)) == fit.costs.step(4)


# thresholds

round_costs = st.lists(st.floats(0.01, 3), min_size=1, max_size=8).map(
    lambda more: [1 + sum(more[: i + 1]) for i in range(len(more))]
)


def expected_tokens(acceptance: float, k: int) -> float:
    """E = sum_{i=0..K} a^i."""
    return sum(acceptance**i for i in range(k + 1))


def pays(a: float, costs: list[float]) -> bool:
    return any(expected_tokens(a, k) > cost for k, cost in enumerate(costs, 1))


@given(round_costs)
def test_break_even_lies_between_what_does_not_pay_and_what_does(costs: list[float]) -> None:
    found = break_even(costs)
    if found is None:
        assert not pays(1.0, costs)
        return
    a, k = found
    assert not pays(max(0.0, a - 1e-6), costs)
    if a < 1 - 1e-6:
        assert pays(a + 1e-6, costs) and expected_tokens(a + 1e-6, k) > costs[k - 1] * (1 - 1e-9)


@pytest.mark.parametrize("draft", [0.1, 0.3])
def test_a_draft_may_cost_what_makes_the_speed_one(draft: float) -> None:
    """At the dearest draft speculation is as fast as plain: a little cheaper pays, a little dearer does not."""
    texts = texts_of(0.7)
    most = dearest_draft(estimates(texts, [DRAFT], KS, rounds_of(draft)))
    assert 0.1 < most < 1
    for cost, faster in ((most * 0.97, True), (most * 1.03, False)):
        assert (best(estimates(texts, [DRAFT], KS, rounds_of(cost))).ratio > 1) == faster


def test_among_equals_the_shallowest_is_best() -> None:
    one = estimates(texts_of(0.5, texts=2), [DRAFT], [1], rounds_of(0.1))[0]
    assert best([replace(one, k=2), one]).k == 1


def test_the_interval_is_wide_where_texts_differ() -> None:
    alike = best(estimates(texts_of(0.7), [DRAFT], [4], rounds_of(0.1)))
    mixed = best(estimates([*texts_of(0.4, texts=3), *texts_of(1.0, texts=3)], [DRAFT], [4], rounds_of(0.1)))
    assert mixed.high - mixed.low > 2 * (alike.high - alike.low) > 0


def test_the_interval_is_wide_where_times_are_noisy() -> None:
    rng = random.Random(0)
    noisy = [one._replace(ms=one.ms * rng.uniform(0.6, 1.4)) for one in rounds_of(0.1)]
    quiet, loud = (best(estimates(texts_of(1.0), [DRAFT], [4], rounds)) for rounds in (rounds_of(0.1), noisy))
    assert loud.high - loud.low > 2 * (quiet.high - quiet.low)


# answers, by prediction alone


def test_a_good_draft_is_advised_with_its_k() -> None:
    advice = advise(texts_of(0.85), rounds_of(draft=0.1, row=0.02), [DRAFT])
    k = advice.chosen.k
    assert advice.helps and advice.settings == {
        "method": "draft_model", "policy": "fixed", "num_speculative_tokens": k, "draft": "some/draft"
    }  # fmt: skip
    speeds = {one.k: one.ratio for one in advice.at(1)}
    assert k == max(speeds, key=speeds.__getitem__) > 1
    assert advice.forecast.low <= advice.forecast.ratio <= advice.forecast.high
    said = answer(advice)
    assert said[0].startswith(f"Yes: use `draft_model`, K = {k}. Predicted ") and said[0].endswith("; not measured live.")


def test_a_draft_that_is_never_accepted_is_advised_against() -> None:
    advice = advise(texts_of(0.0), rounds_of(draft=0.05), [DRAFT])
    said = answer(advice)
    assert not advice.helps and advice.settings == {"method": "off"} and advice.up_to is None
    assert said[0].startswith("No: leave speculation off. `draft_model`, K = 1 is the best prediction: predicted 0.")
    assert any("found: 0%. At that rate not even a free draft pays" in line for line in said)
    assert not any("It pays up to" in line for line in said)


def test_the_target_as_its_own_draft_is_advised_against() -> None:
    """Everything is accepted, and every draft costs what a token costs."""
    advice = advise(texts_of(1.0), rounds_of(draft=1.0), [DRAFT])
    said = answer(advice)
    assert not advice.helps and advice.forecast.acceptance.rate() == 1 and break_even(advice.round_costs(DRAFT, 1)) is None
    begins = "By the cost model `draft_model` could not pay even if every draft were accepted (found: 100%)"
    line = next(line for line in said if line.startswith(begins))
    assert "a draft costs 1.0" in line and "much smaller drafter" in line


@pytest.mark.parametrize("draft, helps", [(1.0, False), (0.1, True)])
def test_the_same_drafts_at_another_cost_are_another_answer(draft: float, helps: bool) -> None:
    """The twin of both: only the cost, or only the acceptance, is changed."""
    assert advise(texts_of(1.0), rounds_of(draft), [DRAFT]).helps is helps
    assert advise(texts_of(0.0), rounds_of(draft), [DRAFT]).helps is False


def test_lookup_and_drafter_together_or_not() -> None:
    drafts, looks = texts_of(0.8), texts_of(0.95, "suffix")
    mixed = [
        [{**here, **(there if at % 40 < 20 else {})} for at, (here, there) in enumerate(zip(a, b, strict=True))]
        for a, b in zip(drafts, looks, strict=True)
    ]
    together = advise(mixed, rounds_of(draft=0.3), [LOOK, DRAFT, BOTH])
    assert together.chosen.way == BOTH and together.settings["draft"] == "some/draft"
    apart = advise(mixed, rounds_of(draft=3.0), [LOOK, DRAFT, BOTH])
    assert apart.chosen.way == LOOK and "draft" not in apart.settings  # nobody asks for it, so it is not loaded


def test_a_batch_in_which_rows_are_dear_ends_it() -> None:
    advice = advise(texts_of(0.7), rounds_of(draft=0.02, row=0.1, more=0.05), [DRAFT])
    assert advice.helps and advice.up_to == 4
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert "8: predicted 0." in line and "(`draft_model`, K = 1: predicted 1." in line
    assert line.endswith("It pays up to concurrency 4, by prediction.")
    everywhere = advise(texts_of(0.85), rounds_of(draft=0.02, row=0.01), [DRAFT])
    assert everywhere.up_to == 8


def test_texts_that_loop_are_left_aside_and_reported() -> None:
    drafts = [*texts_of(0.3, texts=4), *texts_of(1.0, texts=3)]
    advice = advise(drafts, rounds_of(draft=0.3), [DRAFT], loops=(4, 5, 6))
    flattered = advise(drafts, rounds_of(draft=0.3), [DRAFT])
    assert not advice.helps and flattered.forecast.ratio > advice.forecast.ratio
    assert any("3 of 7 texts end repeating themselves, which is easily drafted; they are left out" in s for s in answer(advice))
    forced = advise(drafts, rounds_of(draft=0.3), [DRAFT], loops=(1, 2, 3, 4, 5))
    assert forced.rests_on_loops and any("these figures are too high" in line for line in answer(forced))


# answers, measured


def some_advice(**wish: int) -> Advice:
    return advise([*texts_of(0.8)], rounds_of(draft=0.1), [LOOK, DRAFT, BOTH], **wish)


def test_the_candidates_are_the_best_its_half_the_drafter_and_the_policy() -> None:
    advice = some_advice()
    first, policy, half, *rest = advice.candidates
    assert first == advice.chosen and first.k is not None and (policy.way, policy.policy) == (BOTH, "goodput")
    assert half.way == first.way and half.k is not None and half.k <= (first.k + 1) // 2
    assert len(advice.candidates) <= 5 and len(set(advice.candidates)) == len(advice.candidates)
    assert any(one.way == DRAFT and one.k == best(advice.at(1, "draft_model")).k for one in [first, *rest])
    alone = advise(texts_of(0.8, "suffix"), rounds_of(draft=0.1), [LOOK])
    assert alone.candidates[1].way == Way("auto", ("suffix",))


def test_every_request_names_its_policy() -> None:
    """Whatever the engine's default is: a K is measured under `fixed`, and no K under `goodput` with its own most drafts."""
    config = SpeculationConfig(num_speculative_tokens=3)
    assert asking("suffix", 2) == {**Candidate(LOOK, 2).request(config)} and asking("suffix", 2)["policy"] == FIXED
    auto = Candidate(BOTH).request(config)
    assert (auto["method"], auto["policy"], auto["num_speculative_tokens"]) == ("auto", "goodput", 16)


LIVE = [
    pytest.param(0.5, 0.1, False, id="measured slower"),
    pytest.param(0.98, 0.01, False, id="a little slower"),
    pytest.param(1.4, 0.1, True, id="faster"),
    pytest.param(1.1, 0.2, False, id="open"),
]


@pytest.mark.parametrize("ratio, spread, helps", LIVE)
def test_the_measurement_decides(ratio: float, spread: float, helps: bool) -> None:
    advice = some_advice()
    assert advice.helps
    measure(advice, result(advice.chosen, ratio, spread))
    assert advice.helps is helps and (advice.settings == {"method": "off"}) is not helps
    assert advice.chosen.label in headline(advice) and f"easured {ratio:.2f}x" in headline(advice)
    assert headline(advice).startswith("Yes" if helps else "No")
    assert ("The interval includes 1" in headline(advice)) is (not helps and ratio > 1)


def test_what_is_predicted_slower_is_advised_where_it_is_measured_faster() -> None:
    advice = advise(texts_of(0.0), rounds_of(draft=0.1), [DRAFT])
    assert not advice.helps
    measure(advice, result(advice.chosen, 1.3))
    assert advice.helps and "DISAGREE" in answer(advice)[1]


def test_the_best_prediction_is_not_advised_where_another_is_measured_faster() -> None:
    """Planted: the prediction is best for one setting, and the measurement for another."""
    advice = some_advice()
    predicted, policy, half, *_ = advice.candidates
    measure(advice, result(predicted, 1.2), result(policy, 0.9), result(half, 1.5))
    assert advice.chosen == half != predicted
    assert advice.settings["num_speculative_tokens"] == half.k and advice.settings["policy"] == "fixed"
    said = answer(advice)
    assert said[0].startswith(
        f"Yes: use {half.label}. Measured 1.50x (1.45 to 1.55) over plain decoding at concurrency 1; predicted "
    )
    assert said[1].index(half.label) < said[1].index(predicted.label) < said[1].index(policy.label)
    table = {row[:2]: row[2] for row in rows(advice, 1)}
    assert table[half.way.name, str(half.k)] == "1.50x" and table["auto+goodput", "-"] == "0.90x"


def test_the_policy_is_advised_where_it_is_fastest() -> None:
    advice = some_advice()
    fixed, policy, *_ = advice.candidates
    measure(advice, result(fixed, 1.2), result(policy, 1.4))
    assert advice.settings == {"method": "auto", "policy": "goodput", "draft": "some/draft"}
    said = answer(advice)
    assert said[0].startswith("Yes: use `auto`, policy `goodput`. Measured 1.40x") and "not predicted" in said[0]
    line = next(line for line in said if "at other concurrency" in line)
    assert "4: neither measured nor predicted" in line and line.endswith("It pays up to concurrency 1.")


def contradictions(advice: Advice) -> list[str]:
    """Lines of an answer that give a speed which is not the measured one, of a setting at a concurrency that was measured."""
    found = []
    for line in answer(advice):
        for batch, told in re.findall(r"(\d+): ((?:measured|predicted) [\d.]+x)", line):
            live = advice.check_at(int(batch))
            if live and (one := live.of(advice.chosen)) and told != f"measured {one.ratio:.2f}x":
                found.append(line)
    return found


def test_no_statement_contradicts_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted to pay at 4, and measured slower there: no line says that it pays at 4, or at 8. The twin has one that does."""
    advice = advise(texts_of(0.85), rounds_of(draft=0.02, row=0.01), [DRAFT])
    assert advice.up_to == 8
    measure(advice, result(advice.chosen, 1.4))
    measure(advice, result(advice.chosen, 0.9), batch=4)
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert "2: predicted" in line and "4: measured 0.90x (0.85 to 0.95), does not pay" in line and "8: predicted" in line
    assert line.endswith("It pays up to concurrency 2, in part by prediction.") and advice.up_to == 2
    assert contradictions(advice) == []
    one = advice.forecast
    monkeypatch.setattr(Advice, "outcome", lambda *_: Outcome(one.ratio, one.low, one.high, False))
    assert contradictions(advice) != []


def test_a_measured_concurrency_names_what_was_faster_there() -> None:
    advice = some_advice()
    one, policy, *_ = advice.candidates
    measure(advice, result(one, 1.4))
    measure(advice, result(one, 1.1, 0.2), result(policy, 1.3), batch=8)
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert "8: measured 1.10x (0.90 to 1.30), may not pay (`auto`, policy `goodput`: measured 1.30x (1.25 to 1.35))" in line


def test_a_noisy_machine_and_a_wrong_prediction_are_said() -> None:
    advice = some_advice()
    one = advice.chosen
    fine = Check(1, (result(one, advice.forecast.ratio),), 1.01, 4, True)
    assert not any(word in checked(advice, fine) for word in ("DISAGREE", "quiet"))
    assert "The machine was not quiet" in checked(advice, replace(fine, again=1.2))
    assert "DISAGREE" in checked(advice, replace(fine, results=(result(one, advice.forecast.low / 2, 0.0),)))


def test_the_interval_of_a_measurement_is_of_groups_and_of_repeats() -> None:
    def pairs(*ratios: float) -> list:
        return [Pair(round(1000 * ratio), 100.0, 500, 1000, 100.0) for ratio in ratios]

    steady = result_of(Candidate(DRAFT, 3), [pairs(1.2, 1.2)] * 5)
    assert steady.ratio == steady.low == steady.high == 1.2 and steady.tokens_per_call == 2.4
    by_group = result_of(Candidate(DRAFT, 3), [pairs(0.8, 0.8), pairs(1.6, 1.6)] * 3)
    by_repeat = result_of(Candidate(DRAFT, 3), [pairs(0.8, 1.6)])
    assert by_group.low < 1 < by_group.high and by_repeat.low < 1 < by_repeat.high


@pytest.mark.parametrize(
    "asked, name",
    [({"at_once": 3}, "at_once"), ({"k": 0}, "num_speculative_tokens"), ({"k": 65}, "num_speculative_tokens"),
     ({"concurrency": (0,)}, "concurrency"), ({"repeats": -1}, "repeats")],
)  # fmt: skip
def test_a_wish_that_cannot_be_is_refused(asked: dict, name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name} = "):
        Wish(**asked)


# prompts


def test_lines_are_prompts_and_chats() -> None:
    chat = '[{"role": "user", "content": "hi"}]'
    lines = f'"one"\n\n{{"prompt": "two"}}\n{{"messages": {chat}}}\n{chat}\n'
    messages = [{"role": "user", "content": "hi"}]
    assert [sample.content for sample in read_lines("a.jsonl", lines)] == ["one", "two", messages, messages]


@pytest.mark.parametrize("line", ["no json", "3", "{}", '""', '{"prompt": ""}', "[]", '[{"content": "x"}]'])
def test_a_line_that_is_no_prompt_is_refused_by_its_place(line: str) -> None:
    with pytest.raises(InvalidParameter, match=r"prompt-file = 'a.jsonl:2'"):
        read_lines("a.jsonl", f'"fine"\n{line}\n')


def test_half_of_every_group_is_held_out() -> None:
    def some(name: str, n: int) -> list[Case]:
        return [Case(f"{name}{i}", [1], SamplingParams()) for i in range(n)]

    split = Split.of({"a": some("a", 3), "b": some("b", 2), "c": some("c", 1)})
    assert [case.name for case in split.measured] == ["a0", "b0", "c0", "a2"]
    assert [case.name for case in split.held_out] == ["a1", "b1"]
    with pytest.raises(BenchError):
        Split.of({"a": []})


# settings


def loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> SpeculationConfig:
    monkeypatch.setenv("SPECULON_CONFIG", str(path))
    return EngineConfig().speculation


def test_what_is_written_loads_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = SpeculationConfig(draft={"draft_model": 'odd "name" \\ é 🙂'}, memory_limit_gb=2.5, options={"x": [1, True]})
    found = settings(base, "auto", "fixed", 3, ("suffix", "draft_model"))
    path = tmp_path / "speculon.toml"
    path.write_text(
        'block_size = 32 # kept\nmodel = "old"\n[speculation]\nmethod = "ngram"\n[speculation.options]\ny = 1\n'
        "[serve]\nport = 9000\n"
    )
    write(path, whole(EngineConfig(model="some/model", dtype="bfloat16", threads=2), found))
    read = loads(path, monkeypatch)
    assert read == base.model_copy(update={"method": "auto", "policy": "fixed", "num_speculative_tokens": 3})
    config = EngineConfig()
    assert (config.model, config.dtype, config.threads, config.block_size) == ("some/model", "bfloat16", 2, 32)
    assert config.serve.port == 9000 and "# kept" in path.read_text()
    write(path, {"model": "demo", "speculation": {"method": "off"}})
    assert loads(path, monkeypatch) == SpeculationConfig(method="off") and EngineConfig().model == "demo"
    assert [*tmp_path.iterdir()] == [path]


def test_the_model_is_in_the_file_though_it_is_the_default() -> None:
    values = whole(
        EngineConfig(events="x.jsonl"), settings(SpeculationConfig(draft="d"), "auto", "goodput", None, ("draft_model",))
    )
    assert values == {"model": "demo", "speculation": {"method": "auto", "policy": "goodput", "draft": "d"}}
    assert as_toml(values).startswith('model = "demo"\n\n[speculation]\nmethod = "auto"\n')


def test_flags_say_the_same() -> None:
    speculation = {"method": "auto", "num_speculative_tokens": 3, "draft": "a folder/draft", "join": False}
    said = shlex.split(as_flags({"model": "demo", "compile": True, "speculation": speculation}))
    assert said == [
        "--model", "demo", "--compile", "--method", "auto", "--num-speculative-tokens", "3",
        "--draft", "a folder/draft", "--no-join",
    ]  # fmt: skip


def test_the_next_command_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECULON_CONFIG", raising=False)
    values = {"model": "demo", "speculation": {"method": "off"}}
    assert next_command(Path("a folder/speculon.toml"), values) == "SPECULON_CONFIG='a folder/speculon.toml' speculon serve"
    assert next_command(Path("speculon.toml"), values) == "speculon serve"
    assert next_command(None, values) == "speculon serve --model demo --method off"
    monkeypatch.setenv("SPECULON_CONFIG", "other.toml")
    assert next_command(Path("speculon.toml"), values) == "SPECULON_CONFIG=speculon.toml speculon serve"


def test_a_file_that_cannot_be_merged_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "speculon.toml"
    for text in ('speculation = { method = "off", join = [\n1] }\n', 'speculation.method = "off"\n', "no toml ="):
        path.write_text(text)
        with pytest.raises(ConfigError, match="speculon.toml"):
            write(path, {"model": "demo", "speculation": {"method": "suffix"}})
        assert path.read_text() == text
    for wrong in (tmp_path, tmp_path / "none" / "x.toml"):
        with pytest.raises(InvalidParameter, match="^write = "):
            merged(wrong, {"model": "demo", "speculation": {"method": "off"}})


@given(st.dictionaries(st.sampled_from(["method", "draft"]), st.text(max_size=8), min_size=1))
def test_any_string_survives_toml(values: Mapping[str, str]) -> None:
    assert tomllib.loads(as_toml({"model": "x", "speculation": values})) == {"model": "x", "speculation": values}


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        as_toml({"speculation": {"options": {"x": None}}})
