"""CUDA graphs of the target's pieces: the logits of the loop in every bucket, and the same texts."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from speculon.runtimes.torch.budget import held_memory
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.captured import Captured, CaptureSizes, bucket_for, sizes
from speculon.runtimes.torch.model.compare import close
from speculon.runtimes.torch.model.taps import Taps
from speculon.runtimes.torch.model.target import Target
from tests.tiny.conftest import build, tiny_model
from tests.tiny.requests import MODES, assert_same, drafting, plain, requests_of
from tests.tiny.scripted import run, script
from tests.tiny.test_captured import LAYERS, kept_after_another_step, logits, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORKSPACES = 96 << 20  # guess: of the products, one for each stream, and what the allocator takes at once


@cache
def captured_target(name: str, dtype: torch.dtype = torch.float32) -> Target:
    return wrap_model(copy.deepcopy(tiny_model(name)).to("cuda", dtype), name=name, share=False, compile=True)


def captured_of(target: Target) -> Captured:
    assert isinstance(target.runner.run, Captured) and (target.runner.form == "captured"), str(target.runner)
    return target.runner.run


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"])
def test_logits_and_taps_are_the_loops(name: str) -> None:
    target = captured_target(name)
    captured = captured_of(target)
    for rows in [*sizes(), *reversed([*sizes()])]:  # graphs of one pool of memory, in any order
        found = []
        for way in (captured, captured.loop):
            batch, view, _ = step(target, rows)
            taps = Taps(LAYERS)
            found.append([logits(way, batch, view, taps), *taps.take().values()])
        assert all(close(a, b) for a, b in zip(*found, strict=True)), (rows, bucket_for(rows))


def test_the_next_step_changes_nothing_that_was_given() -> None:
    target = captured_target("qwen3")
    assert kept_after_another_step(target, captured_of(target))


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_those_of_the_cpu_with_and_without_drafts(mode: str) -> None:
    target, truth = captured_target("llama"), plain(mode)
    assert_same(requests_of(mode), run(target, list(requests_of(mode))), truth)
    script(truth)
    for k in (1, 4, 16):
        assert_same(requests_of(mode), run(target, drafting(requests_of(mode), k)), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_captured(dtype: torch.dtype) -> None:
    captured_of(captured_target("qwen3", dtype))


def test_what_it_takes_is_what_is_counted() -> None:
    model = build("qwen3", hidden_size=512, intermediate_size=2048, vocab_size=32768).to("cuda")
    took = []
    for compile in (False, True):
        torch.cuda.empty_cache()
        before = held_memory(torch.device("cuda"))
        target = wrap_model(model, compile=compile)
        torch.cuda.empty_cache()
        took.append(held_memory(torch.device("cuda")) - before)
        del target
    counted = CaptureSizes.of_target(model.config, captured_target("qwen3").layers).num_bytes(torch.float32)
    assert took[1] - took[0] <= counted + WORKSPACES


def test_a_model_that_waits_for_the_device_stays_the_loop() -> None:
    """Dynamic RoPE looks at the positions; a recording that it broke would break the next one."""
    waiting = build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).to(
        "cuda"
    )
    target = wrap_model(waiting, share=False, compile=True)
    assert "not captured: " in str(target.runner)
    captured_of(wrap_model(copy.deepcopy(tiny_model("llama")).to("cuda"), compile=True))
