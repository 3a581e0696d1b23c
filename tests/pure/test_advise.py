"""What an advice computes, without a model: rounds walked over guesses, prices, thresholds, settings as TOML."""

from __future__ import annotations

import random
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.bench.advise import Wish, decide
from speculon.bench.advise_check import Check
from speculon.bench.advise_maths import (
    Costs,
    Estimate,
    Grid,
    Guess,
    Guesses,
    Prices,
    Way,
    best,
    best_k,
    break_even,
    dearest_guess,
    estimate,
    expected_tokens,
    largest_crowd,
    levelled,
    speed,
    total,
    walk,
)
from speculon.bench.advise_measure import Written
from speculon.bench.advise_prompts import GROUP, Split, read_lines
from speculon.bench.advise_settings import as_flags, as_toml, merged, settings, write
from speculon.bench.advise_words import answer, checked, headline
from speculon.bench.workloads import Case
from speculon.config import EngineConfig, SamplingParams, SpeculationConfig
from speculon.errors import BenchError, ConfigError, InvalidParameter

DRAFT, LOOK = Way("draft_model", ("draft_model",)), Way("suffix", ("suffix",))
BOTH = Way("auto", ("suffix", "draft_model"))
KS = (1, 2, 3, 4, 6, 8)
CROWDS = (1, 2, 4, 8)


def costs_of(guess: float, row: float = 0.05, crowd_row: float = 0.3, crowds: Sequence[int] = CROWDS) -> Costs:
    """A plain step of one text takes 10 ms; a guess and a row cost these shares of it. Nothing is noisy."""
    costs = Costs(start={"draft_model": [10 * guess], "suffix": [0.0]})
    for crowd in crowds:
        base = 10 * (1 + crowd_row * (crowd - 1))
        for k in (0, *KS):
            costs.verify[crowd, k] = [base + 10 * row * k * crowd] * 3
            if k:
                costs.draft.setdefault("draft_model", {})[crowd, k] = [10 * guess * k] * 3
                costs.draft.setdefault("suffix", {})[crowd, k] = [0.01] * 3
    return costs


def texts_of(acceptance: float, method: str = "draft_model", texts: int = 6, length: int = 200, k: int = 8) -> list[Guesses]:
    """Whether the guess at a place is right hangs on the place alone, so that drafts from everywhere tell the same story."""
    rng = random.Random(1)
    found: list[Guesses] = []
    for _ in range(texts):
        right = [rng.random() < acceptance for _ in range(length)]
        found.append([{method: draft_at(right[at : at + k])} for at in range(length)])
    return found


def draft_at(right: list[bool]) -> Guess:
    return Guess(len(right), (right + [False]).index(False))


def written(guesses: list[Guesses], loops: Sequence[int] = ()) -> list[Written]:
    return [
        Written(Case(f"{GROUP} {i}", [1], SamplingParams()), text, len(text) + 1, i in loops) for i, text in enumerate(guesses)
    ]


def advise(guesses: list[Guesses], costs: Costs, ways: list[Way], loops: Sequence[int] = (), **wish: int):
    texts = written(guesses, loops)
    groups = {text.case.name: GROUP for text in texts}
    return decide(Wish(CROWDS, **wish), ways, {}, texts, costs, groups, SpeculationConfig(draft="some/draft"))


# rounds


def test_a_walk_goes_over_what_stands_and_one_token_more() -> None:
    text = [{"a": Guess(3, 2)}, {}, {}, {"a": Guess(4, 4)}, {}, {}, {}, {}, {}]
    done = walk(text, ["a"], 4)
    assert (done.rounds, done.tokens, done.drafts) == (3, 9, 7)  # 2 + 1, then 4 + 1, then 1 plain
    assert (done.judged, done.stood, done.asked) == ({0: 2, 1: 2, 2: 2, 3: 1}, {0: 2, 1: 2, 2: 1, 3: 1}, {"a": 3})
    assert done.per_position == [1, 1, 0.5, 1] and done.acceptance == 6 / 7
    assert done.tokens_per_round == pytest.approx(1 + sum(done.survival)) == 3
    assert walk(text, ["a"], 0).tokens_per_round == 1


def test_a_chain_asks_the_next_where_the_first_has_nothing() -> None:
    text: Guesses = [{"b": Guess(2, 1)}, {"a": Guess(1, 1), "b": Guess(2, 2)}, {"a": Guess(2, 0), "b": Guess(2, 2)}, {}]
    done = walk(text, ["a", "b"], 2)
    assert (done.rounds, done.tokens, done.asked) == (3, 4, {"a": 3, "b": 2})
    whole = total([done, done])
    assert (whole.texts, whole.rounds, whole.asked, whole.began) == (2, 6, {"a": 6, "b": 4}, {"a": 2, "b": 2})


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_a_walk_counts_every_token_once(k: int, said: list[tuple[int, int]]) -> None:
    left = len(said)
    text = [{"a": Guess(n, min(n, right, left - i))} if n else {} for i, (n, right) in enumerate(said)]
    done = walk(text, ["a"], k)
    assert done.tokens == left and 1 <= done.rounds <= left
    assert done.rounds >= walk(text, ["a"], k).rounds and sum(done.judged.values()) <= done.drafts
    assert sum(done.stood.values()) >= done.tokens - done.rounds


def test_a_mean_over_all_positions_would_promise_too_much() -> None:
    """The twin of walking: half of the text is easy, half is hard, and rounds begin mostly in the hard half."""
    hard, easy = {"a": Guess(4, 0)}, {"a": Guess(4, 4)}
    text = [easy] * 50 + [hard] * 50
    shortened = [{"a": Guess(4, min(4, max(0, 50 - i)))} if i < 50 else hard for i in range(len(text))]
    naive = mean(1 + here["a"].right for here in shortened)
    assert walk(shortened, ["a"], 4).tokens_per_round < 0.6 * naive


# prices


def test_a_grid_is_linear_between_and_constant_beyond() -> None:
    grid = Grid({(1, 0): 1.0, (1, 4): 3.0, (4, 0): 7.0, (4, 4): 15.0})
    assert grid.at(1, 2) == 2 and grid.at(2.5, 0) == 4 and grid.at(2.5, 2) == pytest.approx(6.5)
    assert grid.at(9, 9) == 15 and grid.at(0, -1) == 1
    assert Grid({(2, 3): 5.0}).at(1, 1) == 5


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_a_slow_cycle_is_levelled(slow: float) -> None:
    cycle = {(None, 0): [10.0, 10.0], (None, 4): [14.0], ("draft_model", 4): [8.0]}
    cycles = [{what: [ms * factor for ms in some] for what, some in cycle.items()} for factor in (1, 1, slow, 1, 1)]
    for made in levelled(cycles):
        assert {what: pytest.approx(some) for what, some in cycle.items()} == made


def test_the_speed_is_tokens_times_plain_over_drafting_and_checking() -> None:
    prices = Prices.of(costs_of(guess=0.1))
    done = total(walk(text, DRAFT.chain, 4) for text in texts_of(0.8))
    found = speed(done, DRAFT, 4, 1, prices)
    assert found.plain_ms == 10 and found.verify_ms == pytest.approx(10 + 0.5 * done.drafts / done.rounds)
    assert found.draft_ms == pytest.approx(4) and found.start_ms == 0
    spent = found.verify_ms + found.draft_ms
    assert found.ratio == pytest.approx(done.tokens_per_round * 10 / spent)
    assert done.tokens_per_round == pytest.approx(expected_tokens(0.8, 4), rel=0.05)


def test_of_many_texts_few_ask_a_drafter_that_comes_second() -> None:
    prices = Prices.of(costs_of(guess=0.2))
    alone, rarely = prices.call_ms("draft_model", 1.0, 8, 4), prices.call_ms("draft_model", 0.05, 8, 4)
    assert alone == 8 and rarely == pytest.approx(8 * (1 - 0.95**8))
    assert prices.call_ms("draft_model", 0.0, 8, 4) == 0


# thresholds

round_costs = st.lists(st.floats(0.01, 3), min_size=1, max_size=8).map(
    lambda more: [1 + sum(more[: i + 1]) for i in range(len(more))]
)


@given(round_costs, st.floats(0, 1), st.floats(0, 1))
def test_the_best_speed_grows_with_acceptance(costs: list[float], one: float, other: float) -> None:
    def fastest(a: float) -> float:
        k = best_k(a, costs)
        return expected_tokens(a, k) / costs[k - 1] if k else 1.0

    low, high = sorted((one, other))
    assert fastest(low) <= fastest(high) + 1e-12


@given(round_costs, st.floats(0, 1))
def test_no_draft_is_best_exactly_where_none_pays(costs: list[float], a: float) -> None:
    pays = any(expected_tokens(a, k) > cost for k, cost in enumerate(costs, 1))
    assert (best_k(a, costs) > 0) == pays


@given(round_costs)
def test_break_even_lies_between_what_does_not_pay_and_what_does(costs: list[float]) -> None:
    found = break_even(costs)
    if found is None:
        assert best_k(1.0, costs) == 0
        return
    a, k = found
    assert best_k(max(0.0, a - 1e-6), costs) == 0
    if a < 1 - 1e-6:
        assert best_k(a + 1e-6, costs) > 0 and expected_tokens(a + 1e-6, k) > costs[k - 1] * (1 - 1e-9)


@pytest.mark.parametrize("guess", [0.1, 0.3])
def test_a_guess_may_cost_what_makes_the_speed_one(guess: float) -> None:
    """At the dearest guess drafting is as fast as plain: a little cheaper pays, a little dearer does not."""
    texts, most = texts_of(0.7), dearest_guess(estimate(texts_of(0.7), [DRAFT], KS, [1], free_start(guess)))
    assert 0.1 < most < 1
    for cost, faster in ((most * 0.99, True), (most * 1.01, False)):
        assert (best(estimate(texts, [DRAFT], KS, [1], free_start(cost))).ratio > 1) == faster


def free_start(guess: float) -> Costs:
    costs = costs_of(guess)
    costs.start["draft_model"] = [0.0]
    return costs


def test_the_largest_crowd_has_no_gap_before_it() -> None:
    assert largest_crowd({1: True, 2: True, 4: False, 8: True}) == 2
    assert largest_crowd({4: True, 2: True}) == 4
    assert largest_crowd({1: False, 2: True}) is None


# answers


def test_a_good_draft_is_advised_with_its_k_and_crowds() -> None:
    advice = advise(texts_of(0.85), costs_of(guess=0.1, row=0.02), [DRAFT])
    assert advice.helps and advice.settings == {
        "method": "draft_model", "num_speculative_tokens": advice.candidate.k, "draft": "some/draft"
    }  # fmt: skip
    speeds = {one.k: one.ratio for one in advice.at(1)}
    assert advice.candidate.k == max(speeds, key=speeds.__getitem__) > 1
    assert advice.candidate.low <= advice.candidate.ratio <= advice.candidate.high
    assert answer(advice)[0].startswith(f"Yes, draft here: `draft_model`, K = {advice.candidate.k} is expected")


def test_a_draft_that_never_hits_is_advised_against() -> None:
    advice = advise(texts_of(0.0), costs_of(guess=0.05), [DRAFT])
    said = answer(advice)
    assert not advice.helps and advice.settings == {"method": "off"} and advice.up_to is None
    assert said[0].startswith("No, leave drafting off: nothing helps")
    assert any("found: 0%. So not even a free guess would pay" in line for line in said)
    assert "Nor does it pay for any other crowd measured." in said


def test_the_target_as_its_own_draft_is_advised_against() -> None:
    """Everything stands, and every guess costs what a token costs."""
    advice = advise(texts_of(1.0), costs_of(guess=1.0), [DRAFT])
    said = answer(advice)
    assert not advice.helps and advice.candidate.walk.acceptance == 1 and advice.break_even(DRAFT, 1) is None
    line = next(line for line in said if line.startswith("`draft_model` could not pay even if every guess stood (found: 100%)"))
    assert "a guess costs 1.00 of a plain step" in line and "much smaller than its target" in line


@pytest.mark.parametrize("guess, helps", [(1.0, False), (0.1, True)])
def test_the_same_guesses_at_another_cost_are_another_answer(guess: float, helps: bool) -> None:
    """The twin of both: only the cost, or only the acceptance, is changed."""
    assert advise(texts_of(1.0), costs_of(guess), [DRAFT]).helps is helps
    assert advise(texts_of(0.0), costs_of(guess), [DRAFT]).helps is False


def test_lookup_and_draft_together_or_not() -> None:
    drafts, looks = texts_of(0.8), texts_of(0.95, "suffix")
    mixed = [
        [{**here, **(there if at % 40 < 20 else {})} for at, (here, there) in enumerate(zip(a, b, strict=True))]
        for a, b in zip(drafts, looks, strict=True)
    ]
    joined = advise(mixed, costs_of(guess=0.3), [LOOK, DRAFT, BOTH])
    assert joined.candidate.way == BOTH and any(line.startswith("Lookup and draft model, together") for line in answer(joined))
    apart = advise(mixed, costs_of(guess=3.0), [LOOK, DRAFT, BOTH])
    assert apart.candidate.way == LOOK and any("not together" in line for line in answer(apart))
    assert "draft" not in apart.settings  # nobody asks for it, so it is not loaded


def test_a_crowd_for_which_rows_are_dear_ends_it() -> None:
    advice = advise(texts_of(0.7), costs_of(guess=0.02, row=0.1, crowd_row=0.05), [DRAFT])
    assert advice.helps and advice.up_to == 4
    line = next(line for line in answer(advice) if line.startswith("It pays for up to 4 at once; at 8 it is 0."))
    assert "`draft_model`, K = 1 would pay (1." in line
    everywhere = advise(texts_of(0.85), costs_of(guess=0.02, row=0.01), [DRAFT])
    assert "It pays for all crowds measured, up to 8 texts at once." in answer(everywhere)


def test_texts_that_loop_are_left_aside_and_reported() -> None:
    guesses = [*texts_of(0.3, texts=4), *texts_of(1.0, texts=3)]
    advice = advise(guesses, costs_of(guess=0.3), [DRAFT], loops=(4, 5, 6))
    flattered = advise(guesses, costs_of(guess=0.3), [DRAFT])
    assert not advice.helps and flattered.candidate.ratio > advice.candidate.ratio
    assert any("3 of 7 texts end repeating themselves, which is easily guessed; they are left out" in s for s in answer(advice))
    forced = advise(guesses, costs_of(guess=0.3), [DRAFT], loops=(1, 2, 3, 4, 5))
    assert forced.rests_on_loops and any("these figures flatter" in line for line in answer(forced))


def test_the_interval_is_wide_where_texts_differ() -> None:
    alike = best(estimate(texts_of(0.7), [DRAFT], [4], [1], costs_of(0.1)))
    mixed = best(estimate([*texts_of(0.4, texts=3), *texts_of(1.0, texts=3)], [DRAFT], [4], [1], costs_of(0.1)))
    assert mixed.high - mixed.low > 2 * (alike.high - alike.low) > 0


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
    found = settings(base, "auto", 3, ("suffix", "draft_model"))
    path = tmp_path / "speculon.toml"
    path.write_text(
        'block_size = 32 # kept\n[speculation]\nmethod = "ngram"\n[speculation.options]\ny = 1\n[serve]\nport = 9000\n'
    )
    write(path, found)
    read = loads(path, monkeypatch)
    assert read == base.model_copy(update={"method": "auto", "num_speculative_tokens": 3})
    assert EngineConfig().serve.port == 9000 and EngineConfig().block_size == 32 and "# kept" in path.read_text()
    write(path, {"method": "off"})
    assert loads(path, monkeypatch) == SpeculationConfig(method="off")
    assert [*tmp_path.iterdir()] == [path]


def test_flags_say_the_same() -> None:
    said = shlex.split(as_flags({"method": "auto", "num_speculative_tokens": 3, "draft": "a folder/draft"}))
    assert said == ["--method", "auto", "--num-speculative-tokens", "3", "--draft", "a folder/draft"]


def test_a_file_that_cannot_be_merged_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "speculon.toml"
    for text in ('speculation = { method = "off" }\n', 'speculation.method = "off"\n', "no toml ="):
        path.write_text(text)
        with pytest.raises(ConfigError, match="speculon.toml"):
            write(path, {"method": "suffix"})
        assert path.read_text() == text
    for wrong in (tmp_path, tmp_path / "none" / "x.toml"):
        with pytest.raises(InvalidParameter, match="^write = "):
            merged(wrong, {"method": "off"})


@given(st.dictionaries(st.sampled_from(["method", "draft"]), st.text(max_size=8), min_size=1))
def test_any_string_survives_toml(values: Mapping[str, str]) -> None:
    assert tomllib.loads(as_toml(values)) == {"speculation": values}


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        as_toml({"options": {"x": None}})


def make_estimate(ratio: float, k: int) -> Estimate:
    text = texts_of(ratio, texts=2)
    return estimate(text, [DRAFT], [k], [1], costs_of(0.1))[0]


def test_among_equals_the_shallowest_is_best() -> None:
    one, deeper = make_estimate(0.0, 1), make_estimate(0.0, 1)
    assert best([deeper, one]).k == 1


LIVE = [
    pytest.param(1.5, 0.4, 0.5, 0.6, False, id="measured slower"),
    pytest.param(1.05, 0.96, 0.98, 0.99, False, id="a little slower"),
    pytest.param(1.5, 1.3, 1.4, 1.5, True, id="as predicted"),
    pytest.param(1.5, 0.9, 1.1, 1.2, False, id="far off, and open"),
    pytest.param(0.9, 1.3, 1.4, 1.5, False, id="predicted slower"),
]


@pytest.mark.parametrize("predicted, low, ratio, high, helps", LIVE)
def test_the_live_check_has_a_say(predicted: float, low: float, ratio: float, high: float, helps: bool) -> None:
    advice = advise(texts_of(0.8), costs_of(guess=0.1), [DRAFT])
    one = advice.candidate
    made = replace(one, speed=replace(one.speed, ratio=predicted), low=predicted - 0.02, high=predicted + 0.02)
    advice.estimates = [made]
    advice.checks = [Check(made, ratio, low, high, 1.0, made.speed.tokens_per_call, 4, True)]
    assert advice.helps is helps


@pytest.mark.parametrize("low, helps", [(1.1, True), (0.9, False)])
def test_where_the_prediction_is_open_the_check_decides(low: float, helps: bool) -> None:
    advice = advise(texts_of(0.8), costs_of(guess=0.1), [DRAFT])
    made = replace(advice.candidate, speed=replace(advice.candidate.speed, ratio=1.2), low=0.8)
    advice.estimates = [made]
    assert not advice.helps and "is not told from noise" in headline(advice)
    advice.checks = [Check(made, 1.2, low, 1.3, 1.0, 2.0, 4, True)]
    assert advice.helps is helps


def test_a_noisy_machine_and_a_wrong_prediction_are_said() -> None:
    made = advise(texts_of(0.8), costs_of(guess=0.1), [DRAFT]).candidate
    fine = Check(made, made.ratio, made.low, made.high, 1.01, made.speed.tokens_per_call, 4, True)
    assert not any(word in checked(fine) for word in ("DISAGREE", "quiet")) and fine.at_its_tokens == made.ratio
    assert "The machine was not quiet" in checked(replace(fine, again=1.2))
    assert "DISAGREE" in checked(replace(fine, ratio=made.low / 2, low=made.low / 2, high=made.low / 2))
