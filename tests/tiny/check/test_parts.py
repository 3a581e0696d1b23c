"""The parts of a check: regret, noise, seeds, plans, planted errors."""

from __future__ import annotations

from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.errors import InvalidParameter, TooLong
from speculon.engine.llm import Completion
from speculon.measure.check import sampled as check_sampled
from speculon.measure.check.arms import ArmStats, watched, with_stop_token
from speculon.measure.check.exact import Divergence, ExactResult, Margin, judge, row_after
from speculon.measure.check.plan import QUICK, SAMPLERS, CheckPlan, named
from speculon.measure.check.regret import token_regret
from speculon.measure.check.run import Findings, check, count_tokens
from tests.tiny.check.plans import PROMPTS, SMALL, TINY


def test_the_margin_in_fp32_is_the_law_and_what_moves_is_measured(sound: Findings) -> None:
    assert not sound.margin.half and sound.margin.limit == 1e-4
    assert sound.margin.largest < 1e-4 and len(sound.margin.moved) > 60
    assert Margin([0.01, 0.3], half=True).limit == 0.3 and Margin([], half=True).limit == 1e-4
    assert Margin([0.01], half=False, invariant=True).limit == 0.0


def test_where_rows_are_invariant_any_difference_fails() -> None:
    tie = Divergence(0, 3, 5, 7, 0.0, 0.0)
    for limit, failures in ((1e-4, 0), (0.0, 1)):
        result = ExactResult("greedy", "speculation", 1, 8, ArmStats(), limit, [tie])
        assert (len(result.failures), len(result.ties)) == (failures, 1 - failures)


def test_a_changed_token_is_judged_by_its_regret(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPTS[0])
    plain = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=12, logprobs=2), speculation={"method": "off"}
    )[0]
    assert plain.logprobs
    (best, high), (second, low) = plain.logprobs[5].top
    texts = [[*plain.token_ids[:5], second, *plain.token_ids[6:]], plain.token_ids[:7], plain.token_ids]
    wrong, short = judge(llm, [prompt] * 3, [plain.token_ids] * 3, texts)
    assert (wrong.text, wrong.at, wrong.plain, wrong.token) == (0, 5, best, second)
    assert wrong.regret == pytest.approx(high - low, abs=1e-4)
    assert wrong.regret_of_plain == pytest.approx(0, abs=1e-6)
    assert short == Divergence(1, 7, plain.token_ids[7], None, None, None)


def test_a_sampled_token_has_no_regret_and_all_others_have_some(llm: LLM) -> None:
    """The judge scores with the noise of the seed that the engine draws with."""
    prompt = llm.tokenizer.encode(PROMPTS[1])
    params = SamplingParams(temperature=0.7, max_tokens=6, seed=11, n=2, logprobs=100)
    for n, one in enumerate(llm.generate([prompt], params, speculation={"method": "off"})[0].outputs):
        for position, logprobs in enumerate(one.logprobs or ()):
            logits, row = row_after(llm.engine, prompt, one.token_ids[:position], (params, n))
            regrets = {token: token_regret(logits, row, token) for token, _ in logprobs.top}
            assert [token for token, regret in regrets.items() if not regret] == [one.token_ids[position]]
    llm.engine.check_integrity()


def test_a_stop_token_belongs_to_the_output() -> None:
    assert with_stop_token(Completion(token_ids=[5, 6], stop=2)) == [5, 6, 2]
    for stop in (None, "\n"):
        assert with_stop_token(Completion(token_ids=[5, 6], stop=stop)) == [5, 6]


def test_planting_ends_with_its_arm(llm: LLM) -> None:
    before = dict(vars(llm.engine))
    with pytest.raises(ZeroDivisionError), watched(llm.engine, 1.0, CheckPlan().chance("x")):
        assert "forward_and_verify" in vars(llm.engine)
        raise ZeroDivisionError
    assert vars(llm.engine).keys() == before.keys()


def test_no_two_arms_share_a_seed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    generate = llm.generate

    def spy(prompts: Any, params: Any, **rest: Any) -> Any:
        if isinstance(params, list) and params[0].max_tokens == SMALL["positions"]:
            seen.extend(p.seed for p in params)
        return generate(prompts, params, **rest)

    monkeypatch.setattr(llm, "generate", spy)
    monkeypatch.setattr(check_sampled, "MAX_SAMPLES", 12)
    check(llm, CheckPlan(**TINY))
    assert len(seen) == len(set(seen)) >= 6 * 2 and None not in seen


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": ("a", "a")},
        {"prompts": ("",)},
        {"samplers": (SamplingParams(temperature=0),)},
        {"samplers": (SamplingParams(seed=3),)},
        {"control": 0.0},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        CheckPlan(**wrong)


def test_a_plan_in_words_and_numbers() -> None:
    plan = CheckPlan()
    assert plan.cells == 4 * 3 * 13 and 1 / (1 + plan.permutations) < 0.05 / plan.cells
    assert named(plan.samplers[1]) == "T 0.8, top_p 0.95" and len(set(plan.prompts)) == 16
    assert plan.chance("a").random() == plan.chance("a").random() != plan.chance("b").random()
    assert CheckPlan(seed=1).chance("a").random() != plan.chance("a").random()


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        pytest.param({}, 0.03, id="as it is"),
        pytest.param({"samplers": SAMPLERS}, 0.05, id="with all samplers"),
        pytest.param({"cases": 2}, 0.06, id="with another prompt"),
    ],
)
def test_a_quick_check_writes_few_tokens(sizes: dict[str, Any], share: float) -> None:
    assert count_tokens(CheckPlan(**QUICK | sizes)) < share * count_tokens(CheckPlan())


def test_what_is_written_is_what_was_announced(llm: LLM) -> None:
    done: list[int] = []
    plan = CheckPlan(**TINY)
    found = check(llm, plan, done.append)
    again = 16 * 4 * sum((2 if one.role == "plain" else 3) for one in found.sampled if one.again)
    assert sum(done) == count_tokens(plan) + again


def test_too_long_a_prompt_is_refused_before_anything_is_written(llm: LLM) -> None:
    with pytest.raises(TooLong, match="positions 12 "):
        check(llm, CheckPlan(prompts=("x " * 510,), max_tokens=2, positions=12))
