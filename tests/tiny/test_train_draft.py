"""Training a small draft model: it starts from its target, drafts in the engine, and names its reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speculon import LLM, SamplingParams
from speculon.core.types import Reason
from speculon.train.draft_model import DraftModelTraining
from speculon.train.run import train
from speculon.train.settings import DraftSettings
from speculon.train.teacher import Teacher
from tests.tiny.test_train import rows_of
from tests.tiny.training import Silent, make_world, settings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("draft"))


def test_a_draft_model_starts_from_its_target_and_drafts_in_the_engine(world: Path) -> None:
    given = settings(world, "draft", steps=80, eval_prompts=2)
    done = train(DraftModelTraining(DraftSettings(layers=1)), given, Silent())
    assert done.record is not None
    assert done.record["evaluation"]["tokens_per_target_call"] > 1
    assert done.record["loss_at_last"] < done.record["loss_at_first"]
    teacher = Teacher(given.target, (), "fp32", "cpu")
    fresh = DraftModelTraining(DraftSettings(layers=2)).drafter(teacher, rows_of(teacher))
    for name, parameter in fresh.model.named_parameters():
        assert torch.equal(parameter, teacher.model.get_parameter(name)), name


@pytest.mark.parametrize("tokens", [32, 48])
def test_a_draft_model_drafts_as_far_as_it_was_trained(world: Path, tokens: int) -> None:
    given = settings(world, f"draft-{tokens}", steps=1, length=tokens)
    method = DraftModelTraining(DraftSettings(layers=1))
    train(method, given, Silent())
    with LLM(
        given.target, device="cpu", speculation={**method.speculation(given.out), "policy": "fixed"}
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for prompt, reached in ((tokens - 16, False), (tokens, True)):
            stats = llm.generate([[7] * prompt], params)[0].outputs[0].stats
            assert (Reason.CONTEXT_LIMIT in stats.reasons) == reached
