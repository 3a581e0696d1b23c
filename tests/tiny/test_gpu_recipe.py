"""The parts of recipes/gpu that need no device."""

from __future__ import annotations

import sys

import pytest
import torch
from recipes.gpu.step import FORWARDS, WARM, covered, forward_of, main, weights_read

from tests.tiny.conftest import tiny_target


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([(0, 2), (3, 4)], 3, id="a gap"),
        pytest.param([(3, 4), (0, 2)], 3, id="any order"),
        pytest.param([(0, 5), (1, 2), (4, 7)], 7, id="side by side"),
        pytest.param([(0, 2), (2, 3)], 3, id="end to end"),
    ],
)
def test_work_side_by_side_counts_once(intervals: list[tuple[float, float]], length: float) -> None:
    assert covered(intervals) == length


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
def test_a_forward_is_timed_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_target("qwen3"), []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda batch, view: seen.append(batch.input_ids.shape[1]) or forward(batch, view)
    )
    one = forward_of(target, sequences=3, rows=5)
    assert one.ms > 0 and seen == [15] * (2 * WARM + FORWARDS)


def test_of_an_embedding_that_is_no_head_only_rows_are_read() -> None:
    target = tiny_target("qwen3")
    assert not target.model.config.tie_word_embeddings
    assert weights_read(target) == target.num_bytes - target.embedding.nbytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["step"])
    with pytest.raises(SystemExit, match="torch sees none here"):
        main()
