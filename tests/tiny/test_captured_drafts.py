"""Captured networks of drafters compute what the networks do, or are refused with a reason.

Here a recorder calls a piece again on the same buffers in place of a CUDA graph. Graphs run in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.engine.engine import Engine
from speculon.runtimes.torch.budget import TENSORS_OF_STATES
from speculon.runtimes.torch.drafters.layers import rope_config
from speculon.runtimes.torch.drafters.runner import SEEN, CapturedDraft, trial_view, trials
from speculon.runtimes.torch.model import captured as capturing
from speculon.runtimes.torch.model.captured import BUCKETS, GRAPH, CaptureSizes, of_buckets
from tests.rounding import assert_near
from tests.tiny.blocks import ask as ask_for_blocks
from tests.tiny.blocks import drafter_of, watch_blocks, write_dflash, wrong_blocks
from tests.tiny.heads import deep_model, deep_target, head_of, watch_heads, write_eagle3, wrong_rows
from tests.tiny.scripted import drain, make_engine, texts_of
from tests.tiny.test_captured import deaf, failing, replayed
from tests.tiny.test_dflash import SPARK
from tests.tiny.test_eagle3 import VARIANTS, ask, plain, requests_of, whole

HEADS = ("usual", "newest", "another width")
BLOCKS: dict[str, dict[str, Any]] = {
    "usual": {},
    "window": {"windows": (5, None)},
    "spark": SPARK,
    "convolutions": {"format": "dflash2"},
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.RECORDERS, "cpu", lambda device: replayed)


def engine_with(method: str, folder: Path, compile: bool = True, **variant: Any) -> Engine:
    """A target that runs its loop, and such a drafter."""
    write = write_eagle3 if method == "eagle3" else write_dflash
    path = write(folder, deep_model().config, **variant)
    when = "now" if compile else "off"
    return make_engine(deep_target(), speculation={"draft": {method: str(path)}}, compile=when)


def captured_of(engine: Engine, method: str) -> CapturedDraft:
    drafter: Any = engine.proposers.find(method)
    assert isinstance(drafter.runner.run, CapturedDraft), str(drafter.runner)
    assert engine.capabilities()[f"captured.{method}"].status == "on"
    return drafter.runner.run


def drained(engine: Engine, asked: dict[str, Any]) -> Any:
    for request in requests_of("greedy"):
        engine.add_request(request.prompt, request.params, asked, request.id)
    return texts_of(drain(engine))


@pytest.mark.parametrize("variant", HEADS)
def test_rows_of_a_captured_head_are_those_of_the_formula(
    variant: str, recorder: None, tmp_path: Path
) -> None:
    watch = watch_heads(plain("greedy"))
    engine = engine_with("eagle3", tmp_path, **VARIANTS[variant])
    captured_of(engine, "eagle3")
    assert drained(engine, ask(4)) == plain("greedy")
    assert not wrong_rows(watch, head_of(**VARIANTS[variant]), whole("greedy"))


@pytest.mark.parametrize("variant", BLOCKS)
def test_captured_blocks_are_those_of_the_formula(variant: str, recorder: None, tmp_path: Path) -> None:
    watch = watch_blocks(plain("greedy"))
    engine = engine_with("dflash", tmp_path, **BLOCKS[variant])
    captured_of(engine, "dflash")
    assert drained(engine, ask_for_blocks(4)) == plain("greedy")
    assert not wrong_blocks(watch, drafter_of(**BLOCKS[variant]), whole("greedy"))


def numbers_of_one_block(self: CapturedDraft, rows: int) -> Any:
    """Captured pieces whose convolutions read another sequence's rows."""
    ids, positions, numbers = (kept[:rows] for kept in self.inputs)
    return self.network.begin(ids, positions, torch.arange(rows, out=numbers.new_empty(rows)))


def test_a_captured_convolution_across_sequences_is_found(
    recorder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedDraft, "start", numbers_of_one_block)
    engine = engine_with("dflash", tmp_path, format="dflash2")
    assert "not captured: it computes something else" in why_not(engine, "dflash")


METHODS = ("eagle3", "dflash")


def arguments(engine: Engine, method: str, rows: int) -> tuple[Any, ...]:
    """Of a call of the drafter's network over two sequences."""
    drafter: Any = engine.proposers.find(method)
    layers = drafter.needs.layers[1:]
    for ids, positions, store, lengths in trials(layers, engine.runtime.target, of_buckets()):
        if len(ids) == rows:
            view = trial_view(store, lengths, written=method == "eagle3")
            width = len(drafter.runner.run.x[0])
            states = [torch.linspace(-1, 1, rows * width).view(rows, width)] * (method == "eagle3")
            numbers = [positions - SEEN] * (method == "dflash")
            return ids, *states, positions, *numbers, view
    raise AssertionError(f"no trial of {rows} rows")


@pytest.mark.parametrize("method", METHODS)
def test_a_call_holds_its_own_results_and_reads_its_own_rows(
    method: str, recorder: None, tmp_path: Path
) -> None:
    """Later rows of a buffer have no effect, and the next call changes nothing that was given."""
    engine = engine_with(method, tmp_path)
    captured = captured_of(engine, method)
    layers = len(captured.blocks)
    small, large = (arguments(engine, method, rows) for rows in (5, 8))
    with torch.inference_mode():
        expected = captured.network(*small).clone()
        for buffer in (captured.x, captured.first, captured.heads, captured.attended, *captured.tables):
            buffer.fill_(torch.nan)
        found = captured(*small)
        assert_near(found, expected, layers)
        captured(*large)
        assert_near(found, expected, layers)


def test_a_call_of_many_rows_runs_the_network(recorder: None, tmp_path: Path) -> None:
    engine = engine_with("dflash", tmp_path)
    captured = captured_of(engine, "dflash")
    *inputs, view = arguments(engine, "dflash", BUCKETS[-1])
    span = view.spans[-1]
    span.last += 1
    more = (torch.cat([part, part[-1:]]) for part in inputs)
    captured.pieces = {}
    with torch.inference_mode():
        assert len(captured(*more, view)) == BUCKETS[-1] + 1


def short(rows: int) -> int:
    return max([size for size in BUCKETS if size < rows], default=1)


def without_positions(self: CapturedDraft, rows: int) -> Any:
    inputs = [kept[:rows] for kept in self.inputs]
    at = 2 if self.network.reads_states else 1
    inputs[at] = torch.zeros_like(inputs[at])
    return self.network.begin(*inputs)


def unfinished(self: CapturedDraft, x: torch.Tensor) -> torch.Tensor:
    return x


PLANTED_IN_DRAFTS: dict[str, tuple[Any, str, Any]] = {
    "captured short": (capturing, "bucket_for", short),
    "positions": (CapturedDraft, "start", without_positions),
    "the last norm": (CapturedDraft, "finish", unfinished),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("plant", PLANTED_IN_DRAFTS)
def test_a_planted_error_is_found(
    plant: str, method: str, recorder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLANTED_IN_DRAFTS[plant])
    variant = VARIANTS["newest"] if method == "eagle3" else {}
    assert "not captured: it computes something else" in why_not(
        engine_with(method, tmp_path, **variant), method
    )


def why_not(engine: Engine, method: str) -> str:
    """The reason in the table; the network runs as it is."""
    drafter: Any = engine.proposers.find(method)
    assert not isinstance(drafter.runner.run, CapturedDraft)
    return str(drafter.runner)


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_captured_runs_as_it_is(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made, reason in ((deaf, "it computes something else"), (failing, "called a synchronizing")):
        monkeypatch.setitem(capturing.RECORDERS, "cpu", made)
        assert f"not captured: {reason}" in why_not(engine_with(method, tmp_path), method)
    assert why_not(engine_with(method, tmp_path, compile=False), method).endswith("layers, one loop")


@pytest.mark.parametrize(("method", "more", "numbers"), [("eagle3", 3, 2), ("dflash", 0, 3)])
def test_buffers_are_counted(method: str, more: int, numbers: int, recorder: None, tmp_path: Path) -> None:
    engine = engine_with(method, tmp_path)
    captured, drafter = captured_of(engine, method), engine.proposers.find(method)
    assert drafter is not None
    kept = (captured.first, captured.x, captured.heads, captured.attended, *captured.tables)
    buffers = {tensor.data_ptr(): tensor.nbytes for tensor in (*kept, *captured.inputs)}
    sizes = rope_config(drafter.config if method == "dflash" else drafter.head_config)  # type: ignore[attr-defined]
    counted = CaptureSizes.of_drafter(sizes, len(captured.blocks), more, numbers)
    assert counted.static_bytes(torch.float32) == sum(buffers.values())
    took = counted.num_bytes(torch.float32)
    graphs = sum(map(len, captured.pieces.values())) * GRAPH
    assert took > sum(buffers.values()) + graphs + BUCKETS[-1] * TENSORS_OF_STATES * sizes.hidden_size
    plain = engine_with(method, tmp_path, compile=False).proposers.find(method)
    assert plain is not None and drafter.needs.bytes_fixed - plain.needs.bytes_fixed == took
