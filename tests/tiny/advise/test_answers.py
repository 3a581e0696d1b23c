"""The answer of an advice is what was planted, and a measurement overrules a prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.advise import run as advise_module
from speculon.advise import trial as check_module
from speculon.advise.advice import Advice
from speculon.advise.answer import answer
from speculon.advise.maths import Cascade, best
from speculon.advise.plan import AdvisePlan
from speculon.advise.prompts import Split
from speculon.advise.run import advise
from speculon.advise.trial import Candidate, Result, Trial
from speculon.bench.measure import Measurement
from speculon.bench.workloads import Case
from speculon.core import Draft
from speculon.errors import InvalidParameter
from speculon.proposers import registry
from speculon.sequence import Sequence
from tests.tiny.advise.plans import PROMPTS, K, plant, split
from tests.tiny.scripted import Scripted


def advised(llm: LLM, **more: Any) -> Advice:
    return advise(llm, split(llm, **more), AdvisePlan(k=K, repeats=0))


def test_a_drafter_that_never_hits_is_advised_against(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts at which lookups find nothing, either.

    A row costs a twentieth of a step: here it would cost nothing.
    """

    class Liar(Scripted):
        def _draft(self, seq: Sequence, k: int) -> Draft:
            return Draft((seq.tokens[-1],) * k, ("liar",) * k)

    plant(monkeypatch, ("ngram", "liar"), draft=0.01)
    monkeypatch.setattr(registry, "_registered", {"liar": lambda config, target: Liar({})})
    llm = LLM(str(folder), prefix_cache=False, speculation={"num_speculative_tokens": K})
    never = SamplingParams(temperature=30.0, seed=1, max_tokens=40)
    some = [Case(text, llm.tokenizer.encode(text), never) for text in PROMPTS]
    advice = advise(llm, Split.of({"prompts": some}), AdvisePlan((1, 2), k=K, method="liar", repeats=0))
    lines = answer(advice)
    assert (
        not advice.helps
        and advice.settings == {"method": "off"}
        and lines[0].startswith("No: leave speculation off")
    )
    assert all((one.acceptance.rate() or 0) < 0.1 and one.ratio < 1 for one in advice.at(1, "liar"))
    assert any("`liar` pays from" in line and "not even a free draft pays" in line for line in lines)


def test_the_target_as_its_own_draft_is_advised_against(own: LLM, as_dear: None) -> None:
    advice = advised(own, temperature=30.0)
    one = advice.at(1, "draft_model", K)[0]
    assert one.acceptance.rate() == 1 and one.ratio < 1 and not advice.helps
    assert any(
        line.startswith(
            "By the cost model `draft_model` could not pay even if every draft were accepted (found: 100%)"
        )
        for line in answer(advice)
    )


def test_the_same_draft_at_a_tenth_of_the_cost_is_advised(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the two above: only the cost is another."""
    plant(monkeypatch, draft=0.1)
    advice = advised(own, temperature=30.0)
    assert advice.helps and "draft_model" in advice.chosen.cascade.methods and advice.chosen.k == K


def test_several_candidates_are_measured_in_one_run(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them on the same prompts, each request with its policy, the best prediction and the policy
    `goodput` among them.
    """
    plant(monkeypatch, draft=0.1)
    requests: list[tuple[str, str, str]] = []
    measured = check_module.measure

    def noted(llm: LLM, group: list[Case], speculation: Any) -> Measurement:
        requests.append((group[0].name, speculation["method"], speculation["policy"]))
        return measured(llm, group, speculation)

    monkeypatch.setattr(check_module, "measure", noted)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1,), k=K, repeats=2))
    candidates = [result.candidate for result in advice.trials[0].results]
    assert Candidate(Cascade("auto", ("suffix", "draft_model"))) in candidates and len(candidates) == 5
    by_group = Counter(name for name, *_ in requests)
    # 2 repeats; the other one warms up, too
    assert set(by_group) == {PROMPTS[1], PROMPTS[3]} and by_group[PROMPTS[3]] == 2 * 7
    assert (
        Counter(requests)[PROMPTS[3], "auto", "goodput"] == 2
        and Counter(requests)[PROMPTS[3], "off", "fixed"] == 4
    )
    assert {policy for _, _, policy in requests} == {"fixed", "goodput"}


def test_a_measurement_overrules_what_was_predicted(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are planted at which a draft pays fourfold; the measurement finds otherwise, and the answer says
    so.
    """
    plant(monkeypatch, draft=0.0, row=0.0)
    measured = check_module.result_of

    def half_as_fast(*arguments: Any) -> Any:
        return replace(measured(*arguments), ratio=0.5, low=0.4, high=0.6)

    monkeypatch.setattr(check_module, "result_of", half_as_fast)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1,), k=K, repeats=1))
    lines = answer(advice)
    assert best(advice.at(1)).low > 1 and advice.settings == {"method": "off"} and len(advice.trials) == 1
    assert "measured 0.50x (0.40 to 0.60) over plain decoding" in lines[0]
    assert any(line.startswith("Prediction and measurement disagree") for line in lines)


@pytest.mark.parametrize("policy, higher", [(True, [2, 4]), (False, [4])])
def test_higher_concurrency_is_measured_where_a_setting_helps(
    own: LLM, monkeypatch: pytest.MonkeyPatch, policy: bool, higher: list[int]
) -> None:
    """A fixed K at the highest at which it is predicted to pay, the policy at each: of it nothing is
    predicted.
    """
    plant(monkeypatch, draft=0.0, row=0.0)

    def found(llm: LLM, batch: int, candidates: Any, *_: Any) -> Trial:
        ratios = {one: 1.5 if (one.k is None) is policy else 1.2 for one in candidates}
        results = (Result(one, ratio, ratio - 0.1, ratio + 0.1, 2.0) for one, ratio in ratios.items())
        return Trial(batch, tuple(results), 1.0, 2, True)

    monkeypatch.setattr(advise_module, "run_trial", found)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1, 2, 4), k=K))
    assert [check.concurrency for check in advice.trials] == [1, *higher] and advice.up_to == 4
    assert advice.settings["policy"] == ("goodput" if policy else "fixed") and not any(
        "neither" in s for s in answer(advice)
    )


def test_a_batch_beyond_the_engines_is_refused(own: LLM) -> None:
    with pytest.raises(InvalidParameter, match="max_num_seqs is 32"):
        advise(own, split(own), AdvisePlan((1, 33), k=1))
