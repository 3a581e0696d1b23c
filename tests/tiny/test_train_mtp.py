"""Training MTP modules: its rows are those of the proposer, and what it writes drafts better."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.config import SamplingParams
from speculon.proposers import registry
from speculon.train.data import Rows
from speculon.train.dataset import Dataset
from speculon.train.mtp import MtpTraining
from speculon.train.mtp_network import MtpDrafter
from speculon.train.settings import MtpSettings
from speculon.train.teacher import Batch, Teacher
from tests.tiny.mtp_forms import FORMS, Watch, target_of, watch_mtp, written
from tests.tiny.scripted import drain, make_engine

K = 4  # drafts of a round: more than any of the forms has modules
PROMPT = [5, 17, 80, 9, 33, 60, 21, 4, 77]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The table of methods as it was."""
    yield
    registry._registered.pop("mtp", None)


def network(form: str, **given: Any) -> tuple[Teacher, MtpDrafter]:
    method = MtpTraining(MtpSettings(**{"ttt": K, **given}))
    teacher = Teacher(str(written(form).folder), (), "fp32", "cpu")
    method.check(teacher)
    return teacher, method.drafter(teacher, Rows.__new__(Rows))


def batch_of(teacher: Teacher, ids: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    return teacher.batch(tokens, torch.ones(tokens.shape), teacher.states(tokens))


@cache
def drafted(form: str) -> tuple[Watch, list[int]]:
    """Rows and logits of the proposer while the engine writes, and what was written."""
    watch = watch_mtp()
    speculation = {"method": "mtp", "num_speculative_tokens": K}
    engine = make_engine(target_of(form), speculation=speculation, fuse=False)
    engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), None, "r")
    return watch, [*PROMPT, *drain(engine)["r", 0].tokens]


def off_by(form: str) -> float:
    """The largest difference between rows and logits in training and those of the proposer."""
    watch, ids = drafted(form)
    teacher, drafter = network(form)
    off, compared = 0.0, 0
    with torch.no_grad():
        steps = list(drafter.states(batch_of(teacher, ids)))
        for rows in watch.rows:  # of committed tokens
            first = rows.start - rows.module - 1
            found = steps[rows.module][0, first : first + len(rows.states)]
            off = max(off, float((found - rows.states[: len(found)]).abs().max()) if len(found) else 0)
        for made in watch.rounds:  # chains of drafts, right or wrong
            whole = [*ids[: made.length], *made.drafts]
            states = list(drafter.states(batch_of(teacher, [*whole, *[3] * (K - len(made.drafts))])))
            for k, logits in enumerate(made.logits):
                found = states[k][0, made.length - 2] @ drafter.head_of(k).T
                off, compared = max(off, float((found - logits).abs().max())), compared + 1
    assert compared > 20
    return off


@pytest.mark.parametrize("form", FORMS)
def test_training_computes_what_the_proposer_does(form: str) -> None:
    assert off_by(form) < 1e-4
