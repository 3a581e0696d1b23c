"""Attention that gets no keyword arguments, or is in a class's own code, sees the step of its own thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.loading.load import context_limit, wrap_model
from speculon.runtimes.torch.loading.load_check import run_pieces
from speculon.runtimes.torch.model import attention
from tests.tiny.conftest import CHUNK, CONTEXT, OTHERS, VOCAB, build, tiny_model, tiny_target
from tests.tiny.requests import TIE, row_error, short_requests
from tests.tiny.scripted import make_engine
from tests.tiny.test_architectures import (
    TOLERANCE,
    VISIBLE,
    attention_changed,
    difference,
    foreign_page,
    scaled,
    shifted_positions,
)


@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("name", OTHERS)
def test_ragged_spans_equal_the_stock_forward(name: str, scattered: bool) -> None:
    assert difference(name, scattered=scattered) < TOLERANCE


@pytest.mark.parametrize("name", OTHERS)
def test_a_planted_error_is_found(name: str) -> None:
    tiny_target(name, fused=False)  # before the error is planted, which its load check would find
    with attention_changed(scaled):
        assert difference(name, fused=False) > VISIBLE
    for wrong in (shifted_positions, foreign_page):
        assert difference(name, run=wrong) > VISIBLE


@pytest.mark.parametrize(
    "seen",
    [{"chunk": CHUNK - 1}, {"chunk": CHUNK + 1}, {"chunk": None}, {"chunk": None, "window": CHUNK}],
    ids=str,
)
def test_wrong_chunks_are_found(seen: dict[str, int | None]) -> None:
    layers = tiny_target("llama4").layers
    assert [spec.chunk for spec in layers] == [CHUNK, None, CHUNK]
    wrong = tuple(replace(spec, **seen) if spec.chunk else spec for spec in layers)
    assert difference("llama4", layers=wrong) > VISIBLE


@pytest.mark.parametrize(
    ("begin", "rows"), [(0, 1), (6, 1), (7, 1), (3, 4), (3, 5), (0, 21), (5, 17), (13, 2)]
)
def test_a_span_is_cut_where_chunks_begin(begin: int, rows: int) -> None:
    end, slots = begin + rows, torch.randperm(64)
    for where in (slice(10, 10 + end), slots[:end]):
        every = torch.arange(64)[where] if isinstance(where, slice) else where
        found = SpanView(4, 4 + rows, where, end).in_chunks(7)
        assert [row for part in found for row in range(part.first, part.last)] == list(range(4, 4 + rows))
        for part in found:
            last = begin + part.last - 5  # position of its last row
            first = last // 7 * 7
            assert part.context == last + 1 - first
            got = torch.arange(64)[part.where] if isinstance(part.where, slice) else part.where
            assert got.tolist() == every[first : last + 1].tolist()


def test_scales_by_row_limit_the_context() -> None:
    limit, notes = context_limit(build("llama4_text", **OTHERS["llama4"][1], floor_scale=40))
    assert limit == 39
    assert "scales by row" in notes[0]
    off = build("llama4_text", **OTHERS["llama4"][1], floor_scale=40, attn_temperature_tuning=False)
    assert context_limit(off) == (CONTEXT, ())


@pytest.mark.parametrize("name", OTHERS)
def test_logits_of_verify_rows_are_the_stock_models(name: str) -> None:
    requests = short_requests(name)
    assert row_error(name, make_engine(tiny_target(name), max_batch_tokens=24), requests) < TIE


def test_a_copy_of_the_model_keeps_its_own_attention() -> None:
    model = build("gptj", **OTHERS["gptj"][1])
    target = wrap_model(model)
    assert "_attn" in vars(target.model.transformer.h[0].attn)
    assert "_attn" not in vars(model.transformer.h[0].attn)
    assert model.config._attn_implementation == "eager"


def test_bf16_is_supported() -> None:
    for name in ("gptj", "falcon grouped"):
        target = wrap_model(build(OTHERS[name][0], **OTHERS[name][1]).to(torch.bfloat16))
        assert {spec.dtype for spec in target.layers} == {torch.bfloat16}


def test_a_group_of_heads_shares_one_stored_head() -> None:
    assert [spec.heads for spec in tiny_target("falcon grouped").layers] == [2, 2]
    assert [spec.heads for spec in tiny_target("falcon").layers] == [1, 1]


REFUSED = {
    "falcon": ({"alibi": True, "hidden_size": 32, "num_attention_heads": 4}, "a mask of its own|ALiBi"),
    "gpt_neo": (
        {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "GPTNeoForCausalLM keeps its own attention",
    ),
    "xglm": (
        {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
        "XGLMForCausalLM keeps its own attention",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_attention_that_cannot_be_routed_is_refused_by_name(model_type: str) -> None:
    settings, reason = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, num_hidden_layers=2, **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        wrap_model(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def test_attention_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(LookupError):
        tiny_target("stablelm", fused=False).model(torch.arange(4)[None], use_cache=False)


# one thread's step while another's is in the middle of its own


def together() -> tuple[list[bool], float]:
    """Two sequences, each in a thread and a store of its own, which meet in every attention.

    Whether each of these saw the thread's own store, and the largest error of a logit.
    """
    target = tiny_target("stablelm", fused=False)
    texts = [torch.arange(12) + 20 * i for i in (1, 2)]
    barrier, stores, own = threading.Barrier(len(texts), timeout=20), threading.local(), []

    def logits(text: Tensor) -> Tensor:
        stores.own = PageStore(target.layers, 4, 4, "cpu")
        return run_pieces(target, stores.own, [(text, [2, 0, 3], 0, 12)])[0]

    def meet(attend: Any, *args: Any, **kwargs: Any) -> Any:
        barrier.wait()
        own.append(attention.running_view().store is stores.own)
        return attend(*args, **kwargs)

    with attention_changed(meet), ThreadPoolExecutor(len(texts)) as threads:
        found = list(threads.map(logits, texts))
    with torch.inference_mode():
        true = [tiny_model("stablelm")(text[None]).logits[0] for text in texts]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, true, strict=True)]
    return own, max(errors)


def test_a_step_of_another_thread_is_not_seen() -> None:
    own, error = together()
    assert own == [True] * 4
    assert error < TOLERANCE


def test_one_view_for_all_threads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared:
        view: View

        def set(self, view: View) -> None:
            self.view = view

        def get(self) -> View:
            return self.view

        def reset(self, token: None) -> None:
            pass

    monkeypatch.setattr(attention, "_running_view", Shared())
    own, _ = together()
    assert False in own
