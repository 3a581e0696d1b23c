"""The survey of types: one supported, one refused, and one that is planted to differ or to fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.survey import coarse, run
from recipes.survey.compare import TIE, Text, difference
from recipes.survey.models import small_model
from transformers import PreTrainedModel

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import FURTHER
from speculon.runtimes.torch.model.target import Target, TargetOutput

SUPPORTED, REFUSED, PLANTED = "gemma3n_text", "xlnet", "gpt2"  # the first has a list of layer widths
Wrong = Callable[[Batch], bool]


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    """After its load check the planted type gives other logits wherever `wrong`."""

    def spoiled(model: PreTrainedModel, **settings: Any) -> Target:
        target = wrap_model(model, **settings)
        if model.config.model_type == PLANTED:
            forward = target.forward

            def other(batch: Batch, view: View) -> TargetOutput:
                out = forward(batch, view)
                return replace(out, logits=out.logits.roll(1, -1)) if wrong(batch) else out

            target.forward = other  # type: ignore[method-assign]
        return target

    monkeypatch.setattr(run, "wrap_model", spoiled)


def outcomes(folder: Path, *types: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the command, and its rows."""
    status = run.main(["--only", *types, "--out", str(folder)])
    return status, json.loads((folder / "architectures.json").read_text(encoding="utf-8"))["types"]


def test_a_supported_and_a_refused_type_pass(tmp_path: Path) -> None:
    status, rows = outcomes(tmp_path, SUPPORTED, REFUSED, PLANTED)
    assert status == 0
    assert [row["outcome"] for row in rows.values()] == ["supported", "refused", "supported"]
    assert rows[REFUSED]["reason"] == "XLNetLMHeadModel takes no `position_ids`"
    for name in (SUPPORTED, PLANTED):
        assert 0 < rows[name]["accepted"] < rows[name]["drafted"]
        assert 0.5 < rows[name]["bf16"] < FURTHER
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "**2 of 3 types are supported**, 1 are refused" in page


@pytest.mark.parametrize(
    ("wrong", "arm"),
    [
        pytest.param(lambda batch: True, "plain", id="always"),
        pytest.param(
            lambda batch: batch.score_rows.numel() > 1 == len(batch.placed), "with drafts", id="drafts"
        ),
        pytest.param(lambda batch: len(batch.placed) > 1, "in a batch", id="batch"),
    ],
)
def test_a_type_that_differs_fails_the_command(
    wrong: Wrong, arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, wrong)
    status, rows = outcomes(tmp_path, REFUSED, PLANTED)
    assert status == 1
    assert rows[PLANTED]["outcome"] == "differs"
    assert rows[PLANTED]["reason"].startswith(f"{arm}: token ")
    assert "1 differ or fail" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_type_that_is_far_from_fp32_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse, "wrap_model", lambda model, share: wrap_model(wrong(model), share=share))
    _, rows = outcomes(tmp_path, PLANTED)
    assert rows[PLANTED]["bf16"] > 2


def test_results_apart_by_the_rounding_of_their_dtype_are_no_error() -> None:
    assert (
        coarse.bf16_error_ratio(small_model("gemma2")) <= FURTHER
    )  # 0.32 of the largest logit from the stock model


def wrong(model: PreTrainedModel) -> PreTrainedModel:
    """With a late norm's weights too large by 2 %."""
    model = deepcopy(model)
    with torch.no_grad():
        model.transformer.ln_f.weight *= 1.02
    return model


def test_an_error_that_is_no_refusal_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Target:
        raise RuntimeError("planted")

    monkeypatch.setattr(run, "wrap_model", broken)
    status, rows = outcomes(tmp_path, PLANTED)
    assert (status, rows[PLANTED]["reason"]) == (1, "RuntimeError at load: planted")


def test_a_type_that_cannot_be_made_is_told_apart(tmp_path: Path) -> None:
    status, rows = outcomes(tmp_path, "reformer")
    assert (status, rows["reformer"]["outcome"]) == (0, "not made")


def test_the_models_depend_on_their_whole_prompt() -> None:
    model = small_model(PLANTED)
    ids = torch.arange(3, 23)[None]
    other = ids.clone()
    other[0, 0] = 40
    with torch.inference_mode():
        a, b = (model(input_ids=given).logits[0, -1] for given in (ids, other))
    assert float((a - b).abs().max() / a.abs().max()) > 0.01


def test_only_a_tie_excuses_another_token() -> None:
    text = Text([5], [7, 8, 9], [1.0, TIE / 2, 1.0])
    assert difference(text, [7, 8, 9]) is None
    assert difference(text, [7, 3, 4]) is None
    assert difference(text, [6, 8, 9]) == "token 0 after 1 is 6, stock 7 by 1 nat"
    assert difference(text, [7, 8, 1]) == "token 2 after 1 is 1, stock 9 by 1 nat"
    assert difference(text, [7, 8]) == "2 tokens instead of 3"
