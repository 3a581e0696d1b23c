"""What an advice says and sets: by prediction alone, and by what was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from speculon.advise.advice import Advice, Speedup
from speculon.advise.answer import answer, headline, measured, warnings
from speculon.advise.maths import Cascade, DraftTrace, TimedRound, best, bootstrap_fits, break_even
from speculon.advise.measure import FIXED, Continuation, request_at
from speculon.advise.plan import AdvisePlan
from speculon.advise.tables import rows, speed_table, threshold_table
from speculon.advise.trial import Candidate, Pair, Result, Trial, result_of
from speculon.bench.workloads import Case
from speculon.config import SamplingParams, SpeculationConfig
from tests.pure.screens import cut_off, on_screen
from tests.pure.test_advise import BATCHES, BOTH, DRAFT, LOOK, PROMPT, Drafts, rounds_of, texts_of

GROUP = "prompts"


def written(drafts: list[Drafts], loops: Sequence[int] = ()) -> list[Continuation]:
    return [
        Continuation(
            Case(f"{GROUP} {i}", [1], SamplingParams()), DraftTrace(PROMPT, text), len(text) + 1, i in loops
        )
        for i, text in enumerate(drafts)
    ]


def advise(
    drafts: list[Drafts],
    rounds: list[TimedRound],
    cascades: list[Cascade],
    loops: Sequence[int] = (),
    **plan: int,
) -> Advice:
    texts = written(drafts, loops)
    groups = {one.case.name: GROUP for one in texts}
    base = SpeculationConfig(draft="some/draft")
    return Advice(
        AdvisePlan(BATCHES, **plan), cascades, {}, rounds, bootstrap_fits(rounds), texts, groups, base
    )


def result(candidate: Candidate, ratio: float, spread: float = 0.05) -> Result:
    return Result(candidate, ratio, ratio - spread, ratio + spread, 2.0)


def measure(advice: Advice, *results: Result, batch: int = 1, again: float = 1.0) -> Advice:
    advice.trials.append(Trial(batch, results, again, 9, True))
    return advice


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
    lines = answer(advice)
    assert lines[0].startswith(f"Yes: use `draft_model`, K = {k}. Predicted ") and lines[0].endswith(
        "; not measured live."
    )


def test_a_draft_that_is_never_accepted_is_advised_against() -> None:
    advice = advise(texts_of(0.0), rounds_of(draft=0.05), [DRAFT])
    lines = answer(advice)
    assert not advice.helps and advice.settings == {"method": "off"} and advice.up_to is None
    assert lines[0].startswith(
        "No: leave speculation off. `draft_model`, K = 1 is the best prediction: predicted 0."
    )
    assert any("found: 0%. At that rate not even a free draft pays" in line for line in lines)
    assert not any("It pays up to" in line for line in lines)


def test_the_target_as_its_own_draft_is_advised_against() -> None:
    """Everything is accepted, and every draft costs what a token costs."""
    advice = advise(texts_of(1.0), rounds_of(draft=1.0), [DRAFT])
    lines = answer(advice)
    assert (
        not advice.helps
        and advice.forecast.acceptance.rate() == 1
        and break_even(advice.round_costs(DRAFT, 1)) is None
    )
    begins = "By the cost model `draft_model` could not pay even if every draft were accepted (found: 100%)"
    line = next(line for line in lines if line.startswith(begins))
    assert "a draft costs 1.0" in line and "much smaller drafter" in line


@pytest.mark.parametrize("draft, helps", [(1.0, False), (0.1, True)])
def test_the_same_drafts_at_another_cost_are_another_answer(draft: float, helps: bool) -> None:
    """The twin of both: only the cost, or only the acceptance, is changed."""
    assert advise(texts_of(1.0), rounds_of(draft), [DRAFT]).helps is helps
    assert advise(texts_of(0.0), rounds_of(draft), [DRAFT]).helps is False


def test_lookup_and_drafter_together_or_not() -> None:
    drafts, looks = texts_of(0.8), texts_of(0.95, "suffix")
    mixed = [
        [
            {**here, **(there if at % 40 < 20 else {})}
            for at, (here, there) in enumerate(zip(a, b, strict=True))
        ]
        for a, b in zip(drafts, looks, strict=True)
    ]
    together = advise(mixed, rounds_of(draft=0.3), [LOOK, DRAFT, BOTH])
    assert together.chosen.cascade == BOTH and together.settings["draft"] == "some/draft"
    costly = advise(mixed, rounds_of(draft=3.0), [LOOK, DRAFT, BOTH])
    # empty, so that the model's usual one is not loaded in its place
    assert costly.chosen.cascade == LOOK and costly.settings["draft"] == {}


def test_a_batch_in_which_rows_are_dear_ends_it() -> None:
    advice = advise(texts_of(0.7), rounds_of(draft=0.02, row=0.1, more=0.05), [DRAFT])
    assert advice.helps and advice.up_to == 4
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert "8: predicted 0." in line and "(`draft_model`, K = 1: predicted 1." in line
    assert line.endswith("It pays up to concurrency 4, by prediction.")
    everywhere = advise(texts_of(0.85), rounds_of(draft=0.02, row=0.01), [DRAFT])
    assert everywhere.up_to == 8


def test_texts_that_loop_are_left_out_and_reported() -> None:
    drafts = [*texts_of(0.3, texts=4), *texts_of(1.0, texts=3)]
    advice = advise(drafts, rounds_of(draft=0.3), [DRAFT], loops=(4, 5, 6))
    flattered = advise(drafts, rounds_of(draft=0.3), [DRAFT])
    assert not advice.helps and flattered.forecast.ratio > advice.forecast.ratio
    assert any(
        "3 of 7 texts end repeating themselves, which is easily drafted; they are left out" in s
        for s in answer(advice)
    )
    forced = advise(drafts, rounds_of(draft=0.3), [DRAFT], loops=(1, 2, 3, 4, 5))
    assert forced.rests_on_loops and any("these figures are too high" in line for line in answer(forced))


# answers, measured


def some_advice(**plan: int) -> Advice:
    return advise([*texts_of(0.8)], rounds_of(draft=0.1), [LOOK, DRAFT, BOTH], **plan)


def test_the_candidates_are_the_best_its_half_the_drafter_and_the_policy() -> None:
    advice = some_advice()
    first, policy, half, *rest = advice.candidates
    assert (
        first == advice.chosen
        and first.k is not None
        and (policy.cascade, policy.policy) == (BOTH, "goodput")
    )
    assert half.cascade == first.cascade and half.k is not None and half.k <= (first.k + 1) // 2
    assert len(advice.candidates) <= 5 and len(set(advice.candidates)) == len(advice.candidates)
    assert any(
        one.cascade == DRAFT and one.k == best(advice.at(1, "draft_model")).k for one in [first, *rest]
    )
    alone = advise(texts_of(0.8, "suffix"), rounds_of(draft=0.1), [LOOK])
    assert alone.candidates[1].cascade == Cascade("auto", ("suffix",))


def test_every_request_names_its_policy() -> None:
    """Whatever the engine's default is: a K is measured under `fixed`, and no K under `goodput` with its own
    most drafts.
    """
    config = SpeculationConfig(num_speculative_tokens=3)
    assert (
        request_at("suffix", 2) == {**Candidate(LOOK, 2).request(config)}
        and request_at("suffix", 2)["policy"] == FIXED
    )
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
    assert advice.helps and "disagree" in warnings(advice)[0]


def test_the_best_prediction_is_not_advised_where_another_is_measured_faster() -> None:
    """PlaceholderProposers: the prediction is best for one setting, and the measurement for another."""
    advice = some_advice()
    predicted, policy, half, *_ = advice.candidates
    measure(advice, result(predicted, 1.2), result(policy, 0.9), result(half, 1.5))
    assert advice.chosen == half != predicted
    assert advice.settings["num_speculative_tokens"] == half.k and advice.settings["policy"] == "fixed"
    lines = answer(advice)
    assert lines[0].startswith(
        f"Yes: use {half.label}. Measured 1.50x (1.45 to 1.55) over plain decoding at concurrency 1; "
        "predicted "
    )
    assert lines[1].index(half.label) < lines[1].index(predicted.label) < lines[1].index(policy.label)
    table = {row[:2]: row[2] for row in rows(advice, 1)}
    assert table[half.cascade.name, str(half.k)] == "1.50x" and table["auto+goodput", "-"] == "0.90x"


def test_the_policy_is_advised_where_it_is_fastest() -> None:
    advice = some_advice()
    fixed, policy, *_ = advice.candidates
    measure(advice, result(fixed, 1.2), result(policy, 1.4))
    assert advice.settings == {"method": "auto", "policy": "goodput", "draft": "some/draft"}
    lines = answer(advice)
    assert (
        lines[0].startswith("Yes: use `auto`, policy `goodput`. Measured 1.40x")
        and "not predicted" in lines[0]
    )
    line = next(line for line in lines if "at other concurrency" in line)
    assert "4: neither measured nor predicted" in line and line.endswith("It pays up to concurrency 1.")


def contradictions(advice: Advice) -> list[str]:
    """Lines of an answer that give a speed which is not the measured one, of a setting at a concurrency that
    was measured.
    """
    found = []
    for line in answer(advice):
        for batch, part in re.findall(r"(\d+): ((?:measured|predicted) [\d.]+x)", line):
            live = advice.trial_at(int(batch))
            if live and (one := live.of(advice.chosen)) and part != f"measured {one.ratio:.2f}x":
                found.append(line)
    return found


def test_no_statement_contradicts_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted to pay at 4, and measured slower there: no line says that it pays at 4, or at 8.

    The twin has one that does.
    """
    advice = advise(texts_of(0.85), rounds_of(draft=0.02, row=0.01), [DRAFT])
    assert advice.up_to == 8
    measure(advice, result(advice.chosen, 1.4))
    measure(advice, result(advice.chosen, 0.9), batch=4)
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert (
        "2: predicted" in line
        and "4: measured 0.90x (0.85 to 0.95), does not pay" in line
        and "8: predicted" in line
    )
    assert line.endswith("It pays up to concurrency 2, in part by prediction.") and advice.up_to == 2
    assert contradictions(advice) == []
    one = advice.forecast
    monkeypatch.setattr(Advice, "speedup", lambda *_: Speedup(one.ratio, one.low, one.high, False))
    assert contradictions(advice) != []


def test_a_measured_concurrency_names_what_was_faster_there() -> None:
    advice = some_advice()
    one, policy, *_ = advice.candidates
    measure(advice, result(one, 1.4))
    measure(advice, result(one, 1.1, 0.2), result(policy, 1.3), batch=8)
    line = next(line for line in answer(advice) if "at other concurrency" in line)
    assert (
        "8: measured 1.10x (0.90 to 1.30), may not pay (`auto`, policy `goodput`: measured 1.30x (1.25 to "
        "1.35))" in line
    )


def test_a_noisy_machine_and_a_wrong_prediction_are_reported() -> None:
    advice = some_advice()
    one = advice.chosen
    fine = Trial(1, (result(one, advice.forecast.ratio),), 1.01, 4, True)
    wrong = replace(fine, results=(result(one, advice.forecast.low / 2, 0.0),))
    found = []
    for trial in (fine, replace(fine, again=1.2), wrong):
        advice.trials[:] = [trial]
        found.append([line for line in warnings(advice) if "concurrency 1" in line])
    assert found == [
        [],
        ["The machine was not quiet at concurrency 1: measure again."],
        [f"Prediction and measurement disagree at concurrency 1 for {one.label}: the measurement counts."],
    ]
    assert "on 4 held-out prompts" in measured(advice, wrong) and warnings(advice)[0] in answer(advice)


def test_the_interval_of_a_measurement_is_of_groups_and_of_repeats() -> None:
    def pairs(*ratios: float) -> list:
        return [Pair(round(1000 * ratio), 100.0, 500, 1000, 100.0) for ratio in ratios]

    steady = result_of(Candidate(DRAFT, 3), [pairs(1.2, 1.2)] * 5)
    assert steady.ratio == steady.low == steady.high == 1.2 and steady.tokens_per_call == 2.4
    by_group = result_of(Candidate(DRAFT, 3), [pairs(0.8, 0.8), pairs(1.6, 1.6)] * 3)
    by_repeat = result_of(Candidate(DRAFT, 3), [pairs(0.8, 1.6)])
    assert by_group.low < 1 < by_group.high and by_repeat.low < 1 < by_repeat.high


@pytest.mark.parametrize("width", [80, 200])
def test_no_table_is_cut_off(width: int) -> None:
    advice = some_advice()
    measure(advice, *(result(one, 12.34) for one in advice.candidates))
    tables = [speed_table(advice), threshold_table(advice)]
    assert cut_off(tables, width) == []
    text = on_screen(tables, width)
    assert text.count("draft_model") >= len(BATCHES) + 1 and "auto+goodput" in text and "12.34x" in text
    assert "drafts at concurrency 1" in text and "never" not in text


def test_a_method_with_a_long_name_wraps() -> None:
    name = "a_method_of_my_own_with_a_long_name"
    cascade = Cascade(name, ("draft_model",))
    tables = [
        speed_table(advice := advise(texts_of(0.8), rounds_of(draft=0.1), [cascade])),
        threshold_table(advice),
    ]
    assert cut_off(tables, 80) == [] and name not in on_screen(tables, 60) and name in on_screen(tables, 200)
