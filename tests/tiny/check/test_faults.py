"""`speculon check` passes a sound engine and fails for every planted fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.decoding import verify as verifying
from speculon.decoding.rounds import Drafted, Judged
from speculon.decoding.sampling import Draw, ScoredRow, sample
from speculon.decoding.verify import Scored
from speculon.engine import engine as engine_module
from speculon.measure.check import run as gate
from speculon.measure.check.exact import Margin
from speculon.measure.check.plan import QUICK, CheckPlan
from speculon.measure.check.run import Findings, check
from tests.tiny.check.plans import SMALL, TINY, credulous
from tests.tiny.kernels import plant

pytestmark = pytest.mark.soak
match = verifying.match


def one_off(spans: list[Scored], logits: Tensor, draw: Draw | None = None) -> verifying.Accepted:
    """The correction is read from the row before, where there is one."""
    outcomes, first = match(spans, logits, draw), 0
    tokens = sample(*verifying.scored_rows(spans, logits), draw) if spans else []
    for i, span in enumerate(spans):
        kept, accepted = outcomes[i]
        if 0 < len(accepted) < len(span.draft.tokens):
            outcomes[i] = (*kept[:-1], tokens[first + len(accepted) - 1]), accepted
        first += len(span.draft.tokens) + 1
    return outcomes


def test_a_sound_engine_passes(sound: Findings) -> None:
    assert (sound.outcome, sound.problems, sound.gaps) == ("passed", [], [])
    roles = [one.role for one in sound.exact]
    assert roles == ["plain", "speculation", "speculation", "control", "speculation", "control"]
    for one in sound.exact:
        assert one.texts == (3 if one.label.startswith("greedy") else 4)
        assert bool(one.failures) == (one.role == "control"), one.label
        assert one.identical + len(one.ties) + len(one.failures) == one.texts
    null, matching, matching_control, rejection, rejection_control, block, block_control = sound.sampled
    assert not any(one.confirmed for one in (null, matching, rejection, block))
    assert matching_control.found and rejection_control.found and block_control.found
    assert min(matching.work.rounds, matching.work.accepted, rejection.work.by_q, block.work.by_q) > 0
    assert min(rejection_control.work.planted, block_control.work.planted) > 0
    assert matching.work.by_q == null.work.rounds == matching.work.planted == 0
    assert matching.runs == (128, 64) and matching.cells == 5 == CheckPlan(**SMALL).cells


@pytest.mark.parametrize(("fault", "in_distribution"), [(credulous, True), (one_off, False)])
def test_a_wrong_match_fails(
    llm: LLM, fault: Any, in_distribution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "match", fault)
    found = check(llm, CheckPlan(**SMALL if in_distribution else TINY))
    assert found.outcome == "failed"
    text = " ".join(found.problems)
    assert "greedy, batch size 1: " in text and "greedy, batched: " in text and "same seed: " in text
    assert "matching: " in text or not in_distribution
    assert "plain" not in text


def test_a_coin_that_always_accepts_fails_in_distribution_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q in place of p, and only where drafts are judged with q."""
    monkeypatch.setattr(verifying, "flip", lambda p, q, rows: torch.ones_like(p, dtype=torch.bool))
    found = check(llm, CheckPlan(**SMALL))
    assert found.outcome == "failed" and len(found.problems) == 2
    for rule, problem in zip(("rejection", "block"), found.problems, strict=True):
        assert (
            problem.startswith(f"{rule}: another distribution than the target's, in two tests: ")
            and "p = " in problem
        )
    assert found.sampled[3].again is not None and found.sampled[3].again.cells == len(
        found.sampled[3].rejected
    )


def test_the_quick_check_passes_a_sound_engine_and_fails_for_a_wrong_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(llm, CheckPlan(**QUICK))
    assert found.outcome == "passed", (found.problems, found.gaps)
    monkeypatch.setattr(verifying, "flip", lambda p, q, rows: torch.ones_like(p, dtype=torch.bool))
    assert check(llm, CheckPlan(**QUICK)).outcome == "failed"


def test_block_verification_without_p_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ratio p / q counts as 1, so that every draft is accepted."""
    ratios = verifying.joint_ratios
    monkeypatch.setattr(verifying, "joint_ratios", lambda p, q, lengths: ratios(q, q, lengths))
    found = check(llm, CheckPlan(**SMALL))
    assert found.outcome == "failed" and len(found.problems) == 1
    assert found.problems[0].startswith("block: another distribution than the target's, in two tests: ")


def test_noise_of_the_wrong_position_fails_with_the_same_seed_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's distribution is right, and its token is not the seed's."""
    position = ScoredRow.position.fget
    assert position is not None
    monkeypatch.setattr(ScoredRow, "position", property(lambda row: position(row) + 50 * bool(row.prefix)))
    found = check(llm, CheckPlan(**TINY))
    assert (
        found.outcome == "failed" and len(found.problems) == 1 and found.problems[0].startswith("same seed: ")
    )


def test_plain_decoding_that_departs_from_itself_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_is_worse(drafted: list[Drafted], *rest: Any) -> list[Judged]:
        judged = verify(drafted, *rest)
        if len(judged) > 1 and all(one.span.samples and not one.draft.tokens for one in judged):
            turned = [tuple((token + 1) % 100 for token in one.verdict.tokens) for one in judged]
            judged = [
                replace(one, verdict=replace(one.verdict, tokens=tokens))
                for one, tokens in zip(judged, turned, strict=True)
            ]
        return judged

    verify = engine_module.verify
    monkeypatch.setattr(engine_module, "verify", batch_is_worse)
    found = check(llm, CheckPlan(**TINY))
    assert any(line.startswith("greedy, plain batched: 3 of 3 texts differ") for line in found.problems)


def test_no_speculation_is_no_pass(folder: Path) -> None:
    idle = LLM(
        str(folder),
        speculation={"method": "ngram", "policy": "fixed", "prompt_lookup_min": 32, "prompt_lookup_max": 32},
    )
    found = check(idle, CheckPlan(**TINY))
    assert found.outcome == "inconclusive" and not found.problems
    assert sum("no round had drafts; no_match: " in line for line in found.gaps) == len(found.gaps) > 5


def test_a_control_that_is_not_found_is_no_pass(llm: LLM) -> None:
    found = check(llm, CheckPlan(**{**SMALL, "runs": 16, "positions": 3, "control": 0.2}))
    assert found.outcome == "inconclusive" and not found.problems
    assert any("planted errors were not found; raise --runs" in line for line in found.gaps)


def test_drafts_that_are_always_right_leave_nothing_to_plant(folder: Path) -> None:
    itself = LLM(str(folder), speculation={"method": "draft_model", "policy": "fixed", "draft": str(folder)})
    found = check(itself, CheckPlan(**TINY))
    assert found.outcome == "inconclusive" and any("every draft was right" in line for line in found.gaps)


def test_a_margin_that_says_nothing_is_no_pass() -> None:
    assert gate.margin_gaps(Margin([1.5], half=True)) and not gate.margin_gaps(Margin([0.5], half=True))


def test_half_precision_is_judged_by_what_was_measured(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # half a rounding, of more rows than the load check has
    plant(monkeypatch, lambda multiply, x: multiply(x) * (1 + (len(x) > 16) * 2**-8))
    fixed = {"method": "draft_model", "policy": "fixed", "draft": str(draft)}
    coarse = LLM(str(folder), dtype="bfloat16", batch_invariant=False, speculation=fixed)
    found = check(
        coarse,
        CheckPlan(**{**TINY, "samplers": (SamplingParams(top_p=0.9), SamplingParams(temperature=0.8))}),
    )
    assert found.margin.half and found.margin.limit == found.margin.largest > 1e-3
    assert not found.problems
    assert found.exact[4].texts == 4  # of the sampler without a filter: rounding at a filter's edge is no tie
