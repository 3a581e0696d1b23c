"""CUDA graphs of drafters: no token changes, and each row and block is the formula's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.config import EngineConfig
from speculon.engine.engine import Engine
from speculon.runtimes.torch.drafters.runner import CapturedDraft
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.captured import Captured
from tests.engines import engine_on
from tests.gpu.test_cuda_capture import captured_target
from tests.tiny.blocks import ask as ask_for_blocks
from tests.tiny.blocks import drafter_of, watch_blocks, write_dflash, wrong_blocks
from tests.tiny.conftest import tiny_model
from tests.tiny.heads import deep_model, deep_target, head_of, watch_heads, write_eagle3, wrong_rows
from tests.tiny.requests import plain as plain_of_llama
from tests.tiny.requests import requests_of as requests_to_llama
from tests.tiny.scripted import drain, make_engine, proposer_of, texts_of
from tests.tiny.test_captured_drafts import BLOCKS, HEADS
from tests.tiny.test_eagle3 import VARIANTS, ask, plain, requests_of, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drained(engine: Engine, requests: Any, speculation: dict[str, Any]) -> Any:
    for request in requests:
        engine.add_request(request.prompt, request.params, speculation, request.id)
    return texts_of(drain(engine))


def engine_with(method: str, path: Path) -> Engine:
    engine = make_engine(deep_target("cuda"), speculation={"draft": {method: str(path)}}, compile="now")
    drafter: Any = engine.proposers.find(method)
    assert isinstance(drafter.runner.run, CapturedDraft), str(drafter.runner)
    assert engine.capabilities()[f"captured.{method}"].status == "on"
    return engine


@pytest.mark.parametrize("variant", HEADS)
def test_rows_of_a_captured_head_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    watch = watch_heads(plain("greedy"))
    engine = engine_with("eagle3", write_eagle3(tmp_path, deep_model().config, **VARIANTS[variant]))
    assert drained(engine, requests_of("greedy"), ask(4)) == plain("greedy")
    assert not wrong_rows(watch, head_of(**VARIANTS[variant]), whole("greedy"), atol=1e-3)


@pytest.mark.parametrize("variant", BLOCKS)
def test_captured_blocks_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    watch = watch_blocks(plain("greedy"))
    engine = engine_with("dflash", write_dflash(tmp_path, deep_model().config, **BLOCKS[variant]))
    assert drained(engine, requests_of("greedy"), ask_for_blocks(4)) == plain("greedy")
    assert not wrong_blocks(watch, drafter_of(**BLOCKS[variant]), whole("greedy"), atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_model_is_captured_beside_its_target(seed: int, tmp_path: Path) -> None:
    """Of seed 0 it is the target itself; two models record graphs and replay them in turn."""
    tiny_model("llama", seed).save_pretrained(tmp_path)
    speculation: Any = {"draft": {"draft_model": str(tmp_path)}, "policy": "fixed"}
    config = EngineConfig(block_size=4, compile="now", speculation=speculation)
    engine = engine_on(captured_target("llama"), None, config)
    drafter: Any = proposer_of(engine, "draft_model")
    assert isinstance(drafter.model.runner.run, Captured), str(drafter.runner)
    speculation = {"method": "draft_model", "num_speculative_tokens": 4}
    assert drained(engine, requests_to_llama("greedy"), speculation) == plain_of_llama("greedy")


def test_half_precision_is_captured(tmp_path: Path) -> None:
    model = copy.deepcopy(deep_model()).to("cuda", torch.bfloat16)
    target = wrap_model(model, share=False, compile=True)
    path = write_eagle3(tmp_path, deep_model().config)
    engine = make_engine(target, speculation={"draft": {"eagle3": str(path)}}, compile="now")
    drafter: Any = proposer_of(engine, "eagle3")
    assert isinstance(drafter.runner.run, CapturedDraft), str(drafter.runner)
