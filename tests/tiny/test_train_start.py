"""Training: a head starts from another one, and Muon computes in fp32 where bf16 is emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculon.core.errors import InvalidParameter, ModelError
from speculon.train.eagle3 import Eagle3Training
from speculon.train.settings import HeadSettings
from speculon.train.teacher import Teacher
from speculon.train.trainer import in_fp32
from tests.tiny.test_train import head_of, rows_of
from tests.tiny.training import make_world


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    return Teacher(str(make_world(tmp_path_factory.mktemp("train")) / "target"), None, "fp32", "cpu")


def newton_schulz(gradient: Tensor) -> Tensor:
    """The matrix that Muon (Jordan 2024) steps along, in fp64."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = gradient.double() / gradient.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_muon_computes_in_fp32_where_bf16_is_emulated() -> None:
    torch.manual_seed(0)
    steps = {}
    for name, kind in {"bf16": torch.optim.Muon, "fp32": in_fp32(torch.optim.Muon)}.items():
        weight = torch.nn.Parameter(torch.zeros(24, 40))
        weight.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
        kind([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        steps[name] = -weight.detach()
    expected = newton_schulz(torch.randn(24, 40, generator=torch.Generator().manual_seed(1))).float()
    torch.testing.assert_close(steps["fp32"], expected, rtol=1e-4, atol=1e-4)
    assert (steps["bf16"] - expected).abs().max() > 1e-3  # what the comparison would see


def test_a_head_starts_from_another(teacher: Teacher, tmp_path: Path) -> None:
    rows = rows_of(teacher)
    method, head = head_of(teacher, rows, {"draft_vocab": 40})
    method.write(head, teacher, "somewhere", tmp_path)
    again = Eagle3Training(HeadSettings(ttt=3, draft_vocab=40, start=str(tmp_path))).drafter(teacher, rows)
    assert torch.equal(again.ids, head.ids)
    for (name, one), (_, other) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other), name
    wider = Eagle3Training(HeadSettings(ttt=3, draft_vocab=40, start=str(tmp_path), intermediate=24))
    with pytest.raises(InvalidParameter, match=r"start = .*mlp.* is \[.*\] there and \[24, "):
        wider.drafter(teacher, rows)
    for other, name in (
        ({"draft_vocab": 30}, "draft_vocab_size is 40 there and 30 here"),
        ({"draft_vocab": 40, "norm_output": False}, "norm_output is True there and False here"),
        ({"draft_vocab": 40, "start": str(tmp_path / "none")}, "must be a folder with config.json"),
    ):
        with pytest.raises(InvalidParameter, match=name):
            Eagle3Training(HeadSettings(**{"ttt": 3, "start": str(tmp_path), **other})).check(teacher)
    training = Eagle3Training(HeadSettings(ttt=3, draft_vocab=40, start=str(tmp_path)))
    training.check(teacher)
    for file in ("model.safetensors", "config.json"):
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-90])
        with pytest.raises(ModelError, match=file):
            training.check(teacher)


def test_a_folder_named_as_one_is_no_drafter_by_name() -> None:
    """`./NAME` is a folder, where NAME alone is the drafter that comes with speculon."""
    assert HeadSettings(start="./smollm2-eagle3").start == "./smollm2-eagle3"
