"""Captured steps compute what the loop does in every bucket, or are refused with a reason.

Here a recorder calls a piece again on the same buffers in place of a CUDA graph. Graphs run in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import SpanView, View
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.loading.memory import model_needs
from speculon.runtimes.torch.model import captured as capturing
from speculon.runtimes.torch.model.block import CannotReplace, Loop
from speculon.runtimes.torch.model.captured import BUCKETS, Captured, CapturedPiece, CaptureSizes, sizes
from speculon.runtimes.torch.model.compare import alike, close
from speculon.runtimes.torch.model.taps import Taps
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.trial import Trial
from tests.rounding import assert_near
from tests.tiny.conftest import build, tiny_model, tiny_target
from tests.tiny.requests import assert_same, drafting, plain, requests_of
from tests.tiny.scripted import run, script

NAMES = ["llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"]
LAYERS = (-1, 0, 1)


def replayed(piece: CapturedPiece) -> CapturedPiece:
    piece()
    return piece


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.RECORDERS, "cpu", lambda device: replayed)


class Noted:
    """A loop that notes something of each step's batch."""

    def __init__(self, loop: Any, note: Callable[[Batch], Any]):
        self.loop, self.note, self.steps = loop, note, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def __call__(self, batch: Batch, *others: Any) -> Any:
        self.steps.append(self.note(batch))
        return self.loop(batch, *others)


def made(model: Any = None) -> Target:
    return wrap_model(model or tiny_model("qwen3"), share=False, compile=True)


def both(name: str = "qwen3") -> tuple[Target, Captured, Loop]:
    target = made(tiny_model(name))
    assert isinstance(target.runner.run, Captured)
    return target, target.runner.run, target.runner.run.loop


def reasons(target: Target) -> str:
    assert target.runner.one_loop and target.runner.form != "captured"
    assert isinstance(target.runner.run, Loop)
    return str(target.runner)


def step(
    target: Target, rows: int, scored: list[int] | None = None, base: int = 0
) -> tuple[Batch, View, Trial]:
    """Two texts of so many rows together, or one of a row, whose ids begin at `base`."""
    trial = Trial.of(target, (rows - rows // 2, rows // 2) if rows > 1 else (1,))
    ids = (trial.batch.input_ids + base) % target.vocab_size
    rows_to_score = trial.batch.score_rows if scored is None else torch.tensor(scored, dtype=torch.long)
    return Batch([], ids, trial.batch.position_ids, rows_to_score), trial.view, trial


def logits(run: Any, batch: Batch, view: View, taps: Taps | None = None) -> Tensor:
    with torch.inference_mode():
        found = run(batch, view, taps)
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_captured_computes_the_same(name: str) -> None:
    target, stays = made(tiny_model(name)), tiny_target(name)
    assert isinstance(target.runner.run, Captured) and str(target.runner).endswith("one loop, captured")
    found, expected = paged_logits(target), paged_logits(stays)  # calls of 13 rows, and of 4
    assert_near(found, expected, len(target.layers))


def test_outputs_are_those_of_the_loop() -> None:
    target, truth = made(tiny_model("llama")), plain("sampled")
    assert_same(requests_of("sampled"), run(target, list(requests_of("sampled"))), truth)
    script(truth)
    assert_same(requests_of("sampled"), run(target, drafting(requests_of("sampled"), 4)), truth)


def test_no_step_is_captured_short() -> None:
    target, captured, loop = both()
    ran: list[tuple[str, int]] = []

    def noted(kind: str, size: int, piece: CapturedPiece) -> CapturedPiece:
        return lambda: (ran.append((kind, size)), piece())[1]

    captured.pieces = {
        size: [noted("rows", size, piece) for piece in pieces] for size, pieces in captured.pieces.items()
    }
    captured.scores = {size: noted("scored", size, piece) for size, piece in captured.scores.items()}
    for rows in sizes():
        ran.clear()
        batch, view, _ = step(target, rows, scored=[rows - 1])
        assert close(logits(captured, batch, view), logits(loop, batch, view))
        held = min(size for size in BUCKETS if size >= rows)
        assert ran == [("rows", held)] * (len(loop.blocks) + 1) + [("scored", 1)]
    ran.clear()
    batch, view, _ = step(target, BUCKETS[-1] + 1)
    assert close(logits(captured, batch, view), logits(loop, batch, view)) and not ran


@pytest.mark.parametrize("scored", [[0], [4], [4, 1], [0, 1, 2, 3, 4], [2, 2, 0]])
def test_the_requested_rows_are_scored(scored: list[int]) -> None:
    target, captured, loop = both()
    for rows in (16, 5):
        batch, view, _ = step(target, rows, scored)
        assert close(logits(captured, batch, view), logits(loop, batch, view))


def test_a_step_that_scores_nothing_writes_its_pages() -> None:
    target, captured, loop = both()
    pages = []
    for way in (captured, loop):
        batch, view, trial = step(target, 5, [])
        with torch.inference_mode():
            assert way(batch, view) is None
        pages.append([pool[view.slots] for pool in (*trial.store.k, *trial.store.v)])
    assert all(close(a, b) for a, b in zip(*pages, strict=True))


def kept_after_another_step(target: Target, captured: Captured) -> bool:
    """Whether what a step gave is still the same when another one has run."""
    taps = Taps(LAYERS)
    batch, view, _ = step(target, 5)
    gave = [logits(captured, batch, view, taps), *taps.take().values()]
    before = [tensor.clone() for tensor in gave]
    batch, view, _ = step(target, 7, base=11)
    logits(captured, batch, view, taps)
    return all(torch.equal(a, b) for a, b in zip(gave, before, strict=True))


def test_the_next_step_changes_no_earlier_result() -> None:
    assert kept_after_another_step(*both()[:2])


def test_a_view_of_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target, captured, _ = both()
    monkeypatch.setattr(capturing, "copied", lambda part: part)
    assert not kept_after_another_step(target, captured)


@pytest.mark.parametrize("rows", [3, 5, 9])
def test_later_rows_of_a_buffer_have_no_effect(rows: int) -> None:
    target, captured, loop = both()
    for buffer in (captured.x, captured.heads, captured.attended, captured.logits, *captured.tables):
        with torch.inference_mode():
            buffer.fill_(torch.nan)
    batch, view, _ = step(target, rows)
    assert close(logits(captured, batch, view), logits(loop, batch, view))


def slots_written_besides(run: Callable[[Batch, View], Any]) -> int:
    """Of a step of three rows, in a pool of more."""
    target = tiny_target("qwen3")
    batch, view, trial = step(target, 3)
    for pool in (*trial.store.k, *trial.store.v):
        pool.fill_(torch.nan)
    with torch.inference_mode():
        run(batch, view)
    others = torch.ones(trial.store.slots, dtype=torch.bool)
    others[view.slots] = False
    pools = (*trial.store.k, *trial.store.v)
    assert all(pool[view.slots].isfinite().all() for pool in pools)
    return sum(int(pool[others].isfinite().any(-1).any(-1).sum()) for pool in pools)


def padded_into_pages(batch: Batch, view: View) -> None:
    """A planted error: the fourth row of the bucket is a row of the step."""
    ids, positions = (
        torch.cat([part, part.new_zeros(1, 1)], 1) for part in (batch.input_ids, batch.position_ids)
    )
    longer = view.store.view_of([*view.spans, SpanView(3, 4, slice(15, 16), 1)])
    both()[2](Batch([], ids, positions, batch.score_rows), longer)


def test_only_rows_of_the_step_are_written_into_pages() -> None:
    assert slots_written_besides(both()[1]) == 0
    assert slots_written_besides(padded_into_pages) > 0


def stale_rows(self: Captured, batch: Batch, rows: int, scored: int) -> None:
    """A planted error: ids are handed in, positions and scored rows are not."""
    self.ids[:, :rows].copy_(batch.input_ids)


def deaf(device: torch.device) -> Any:
    """A planted error: what is recorded is run once, and never again."""
    return lambda piece: (piece(), lambda: None)[1]


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "captured short": (
        capturing,
        "bucket_for",
        lambda rows: max([size for size in BUCKETS if size < rows], default=1),
    ),
    "stale buffer": (Captured, "fill", stale_rows),
    "stale result": (capturing, "RECORDERS", deaf),
    "scored rows": (
        Captured,
        "score",
        lambda self, rows: self.logits[:rows].copy_(self.loop.end(self.x, self.score_rows[:1])),
    ),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_error_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong = PLANTED[plant]
    if name == "RECORDERS":
        monkeypatch.setitem(capturing.RECORDERS, "cpu", wrong)
    else:
        monkeypatch.setattr(place, name, wrong)
    assert "not captured: " in reasons(made())


def exchanged(states: list[Tensor]) -> list[Tensor]:
    return [x.flip(0) for x in states]


def a_layer_late(states: list[Tensor]) -> list[Tensor]:
    return [states[-1], *states[:-1]]


@pytest.mark.parametrize("wrong", [exchanged, a_layer_late])
def test_wrong_taps_are_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Captured.replay

    def planted(self: Captured, rows: int, view: View) -> Any:
        return iter(wrong([x.clone() for x in replay(self, rows, view)]))

    monkeypatch.setattr(Captured, "replay", planted)
    assert "not captured: it computes something else" in reasons(made())


def failing(device: torch.device) -> Any:
    def fail(piece: CapturedPiece) -> CapturedPiece:
        raise RuntimeError("called a synchronizing CUDA operation\nin a long text")

    return fail


def test_what_cannot_be_captured_uses_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.RECORDERS, "cpu", failing)
    assert reasons(made()).endswith("not captured: called a synchronizing CUDA operation (1)")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_not_captured(name: str) -> None:
    assert "not captured: it has experts" in reasons(made(tiny_model(name)))


def test_layers_of_different_shapes_are_not_captured() -> None:
    _, _, loop = both()
    first, last = loop.blocks
    other = replace(last, attention=replace(last.attention, heads=2))
    with torch.inference_mode(), pytest.raises(CannotReplace, match="different numbers of heads"):
        Captured(replace(loop, blocks=[first, other]), torch.device("cpu"), replayed)


def test_a_model_object_is_captured_where_its_weights_are() -> None:
    target = wrap_model(tiny_model("qwen3"), compile=True)
    assert isinstance(target.runner.run, Captured) and close(
        paged_logits(target), paged_logits(wrap_model(tiny_model("qwen3")))
    )


def test_in_fp32_rows_agree_up_to_the_rounding_of_other_kernels() -> None:
    exact = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    assert alike(exact * (1 + 5e-5), exact) and not close(exact * (1 + 5e-5), exact)
    assert not alike(exact * (1 + 2e-4), exact)


def test_in_half_precision_rows_agree_within_the_tolerance() -> None:
    target = made(build("llama").to(torch.bfloat16))
    assert isinstance(target.runner.run, Captured)
    exact = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    assert alike(exact.bfloat16(), (exact * 1.01).bfloat16())
    wrong = exact.clone()
    wrong[2] = exact[3]
    assert not alike(wrong.bfloat16(), exact.bfloat16())


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_buffers_are_counted(name: str) -> None:
    target, captured, _ = both(name)
    config = target.model.config.get_text_config()
    kept = (captured.x, captured.heads, captured.attended, captured.logits, *captured.tables)
    kept += (captured.ids, captured.positions, captured.score_rows)
    assert CaptureSizes.of_target(config, target.layers).static_bytes(target.dtype) == sum(
        tensor.nbytes for tensor in kept
    )
    took = CaptureSizes.of_target(config, target.layers).num_bytes(target.dtype)
    assert (
        target.num_bytes - tiny_target(name).num_bytes
        == took
        > CaptureSizes.of_target(config, target.layers).static_bytes(target.dtype)
    )


def test_the_estimate_counts_what_capturing_takes(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    cuda, target = torch.device("cuda"), tiny_target("llama")
    kept, recorded = (
        model_needs(tmp_path, torch.float16, cuda, 7, 5, compile=compile) for compile in (False, True)
    )
    took = CaptureSizes.of_target(target.model.config, recorded.layers).num_bytes(torch.float16)
    assert recorded.bytes_fixed - kept.bytes_fixed == took > 0
