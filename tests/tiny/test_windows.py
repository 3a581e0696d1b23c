"""Where all layers have windows, long sequences run in a pool that holds a part of their pages."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon import SamplingParams
from speculon.core.config import MAX_DRAFTS
from speculon.core.errors import NeverFits
from speculon.engine.decoder import SpeculativeDecoder
from speculon.engine.engine import Engine
from speculon.runtimes.torch.kv.reach import joint_reach
from speculon.runtimes.torch.kv.store import SpanView, tail_of
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import LayerSpec, Needs, Padding
from tests.builders import spread
from tests.engines import torch_runtime
from tests.tiny import heads
from tests.tiny.conftest import CHUNK, MIXED, WINDOW, build
from tests.tiny.drafting import DRAFT, NoisyModel, use_draft
from tests.tiny.heads import write_eagle3
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, store_of, texts_of

LONG = {"max_position_embeddings": 512}
MISTRAL = {**LONG, "sliding_window": WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", MISTRAL),
    "chunks": (
        "llama4_text",
        {
            **LONG,
            "layer_types": ["chunked_attention"] * 2,
            "no_rope_layers": [1, 1],
            "attention_chunk_size": CHUNK,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
    ),
    "sinks": (
        "gpt_oss",
        {
            **LONG,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "one global layer": ("gemma3_text", {**LONG, **MIXED, "query_pre_attn_scalar": 12}),
}
# of 4 tokens: with spans of 8 a window of 5 takes 4 and a chunk of 7 takes 5, a text of 170 tokens 43
SMALL: dict[str, Any] = {"num_blocks": 8, "max_batch_tokens": 8, "max_num_seqs": 3}
# a drafter may lag behind by 64 tokens: 20 pages, and 21
DRAFTED = {**SMALL, "num_blocks": 24}
LENGTHS = (5, 110, 1, 33)  # of the prompts; the second is longer than the small pool
OFF, SUFFIX = {"method": "off"}, {"method": "suffix", "num_speculative_tokens": 4}
Texts = dict[Key, list[int]]


@cache
def target(name: str) -> Target:
    model_type, settings = MODELS[name]
    return wrap_model(build(model_type, **settings), name=name, share=False)


@cache
def requests(shared: int = 0) -> tuple[Request, ...]:
    chance, found = random.Random(3), []
    common = [chance.randrange(3, 96) for _ in range(shared)]
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0, max_tokens=60 - i, ignore_eos=True)
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        found.append(Request(prompt, params, OFF, f"q{i}"))
    return tuple(found)


def write(engine: Engine, speculation: dict[str, Any] = OFF, shared: int = 0) -> dict[Key, Result]:
    for request in requests(shared):
        engine.add_request(request.prompt, request.params, speculation, request.id)
    return drain(engine)


@cache
def whole(name: str, shared: int = 0) -> Texts:
    """What an engine writes that keeps all pages."""
    engine = make_engine(target(name))
    engine.runtime.space.reach = None
    return texts_of(write(engine, shared=shared))


NAMES = ("windows", "chunks", "sinks")
SETTINGS = ({}, {"prefix_cache": False}, {"block_size": 1, "num_blocks": 32}, {"num_blocks": 100})


@pytest.mark.parametrize(("name", "settings", "speculation"), spread(NAMES, SETTINGS, (OFF, SUFFIX)))
def test_texts_are_those_of_all_pages(name: str, settings: dict[str, Any], speculation: Any) -> None:
    engine = make_engine(target(name), **SMALL | settings)
    results = write(engine, speculation)
    assert texts_of(results) == whole(name)
    if "num_blocks" not in settings and speculation is OFF:
        assert any(result.stats.preemptions for result in results.values())
    if speculation is SUFFIX:
        assert sum(result.stats.drafted_at.total() for result in results.values())


@pytest.mark.parametrize("change", [-1, -4], ids=["one position", "a page"])
def test_pages_released_too_early_are_found(change: int) -> None:
    """The planted error. One position is kept above what is read, so it may be missing."""
    engine = make_engine(target("windows"), **SMALL)
    engine.runtime.space.reach = WINDOW + change
    if change == -1:
        assert texts_of(write(engine)) == whole("windows")
        return
    with pytest.raises(AssertionError, match=r"positions of"):
        write(engine)


def test_a_model_with_a_global_layer_keeps_all_pages() -> None:
    engine = make_engine(target("one global layer"), **SMALL | {"num_blocks": 43})
    assert engine.runtime.space.reach is None
    assert texts_of(write(engine)) == whole("one global layer")
    small = make_engine(target("one global layer"), **SMALL)
    with pytest.raises(NeverFits, match="169 tokens need 43 KV pages of 4 tokens, but the pool has 8"):
        small.add_request(requests()[1].prompt, requests()[1].params)
    assert "of a context of" in small.facts().note
    assert not make_engine(target("windows"), **SMALL).facts().note


def test_what_can_never_fit_is_refused_with_the_pages_of_the_window() -> None:
    engine, request = make_engine(target("windows"), **SMALL | {"num_blocks": 3}), requests()[1]
    with pytest.raises(NeverFits, match="169 tokens need 4 KV pages of 4 tokens, but the pool has 3"):
        engine.add_request(request.prompt, request.params)
    engine.add_request(request.prompt[:4], SamplingParams(max_tokens=8))
    assert make_engine(target("windows"), **SMALL).runtime.space.most(500) == 4 * 4


def test_a_prefix_is_found_while_its_pages_are_cached() -> None:
    engine = make_engine(target("windows"), **SMALL | {"num_blocks": 120})
    first = write(engine, shared=40)
    assert texts_of(first) == whole("windows", 40)
    again = write(engine, shared=40)
    assert texts_of(again) == whole("windows", 40)
    assert all(result.stats.cached_tokens >= 40 for result in again.values())


# drafters


def drafting(draft: Any, **settings: Any) -> tuple[Engine, dict[Key, Result]]:
    use_draft(draft)
    engine = make_engine(target("windows"), speculation=DRAFT, **DRAFTED | settings)
    return engine, write(engine, {"method": "draft_model", "num_speculative_tokens": 3})


@pytest.mark.parametrize(("name", "settings"), [("windows", {}), ("chunks", {"num_blocks": 60})])
def test_a_draft_model_with_windows(name: str, settings: dict[str, Any]) -> None:
    engine, results = drafting(NoisyModel(target(name)), **settings)
    assert engine.runtime.space.reach is not None and texts_of(results) == whole("windows")
    assert sum(result.stats.drafted_at.total() for result in results.values()) > 40


def test_a_draft_that_has_read_all_in_time_is_that_of_all_pages() -> None:
    """The target as its own draft, where no prompt is longer than what a step keeps."""
    use_draft(target("windows"))
    found = []
    for pages, method in ((200, "off"), (44, "draft_model")):
        engine = make_engine(target("windows"), speculation=DRAFT, **SMALL | {"num_blocks": pages})
        for i in (0, 2):
            params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
            speculation = {"method": method, "num_speculative_tokens": 3}
            engine.add_request(requests()[i].prompt, params, speculation, f"q{i}")
        results = drain(engine)
        found.append(texts_of(results))
    assert found[0] == found[1]
    for result in results.values():
        done = result.stats.speculation()
        assert done.rounds and done.rejected == 0 and not result.stats.preemptions


def test_a_draft_model_without_windows_keeps_all_pages() -> None:
    engine, results = drafting(NoisyModel(wrap_model(build("llama", **LONG))), num_blocks=48)
    assert engine.runtime.space.reach is None and texts_of(results) == whole("windows")


def test_a_draft_reads_no_row_of_another_text() -> None:
    """A long prompt is released before the draft model is asked: its rows begin where there are pages.

    All that it has not written itself is a large number here.
    """
    use_draft(target("windows"))
    engine = make_engine(target("windows"), speculation=DRAFT, **DRAFTED)
    store, own = store_of(engine), len(target("windows").layers)
    for pool in (*store.k[own:], *store.v[own:]):
        pool.fill_(1e6)
    speculation = {"method": "draft_model", "num_speculative_tokens": 3}
    engine.add_request(requests()[1].prompt, requests()[1].params, speculation, "r")
    while not (running := engine.scheduler.running) or running[0].pending > 1:
        engine.step()
    pages = torch_runtime(engine).space.of(running[0])
    assert pages.released > 0 and not pages.drafted
    engine.step()
    assert pages.skipped == {"draft_model"}
    result = drain(engine)["r", 0]
    done = result.stats.speculation()
    assert result.tokens == whole("windows")["q1", 0][-len(result.tokens) :]
    assert done.rounds and done.rejected == 0, "what is left of the prompt is as much as layers see"


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Target:
    """The target of `tests.tiny.heads`, with windows in all layers."""
    model = build("mistral", **{**MISTRAL, "num_hidden_layers": heads.DEPTH})
    shown = copy.deepcopy(model)
    monkeypatch.setattr(heads, "deep_model", lambda: model)
    monkeypatch.setattr(heads, "observed", lambda: shown)
    return wrap_model(copy.deepcopy(model), name="deep", share=False)


@pytest.mark.parametrize("window", [WINDOW, 2])
def test_a_head_with_a_window_reads_its_own_rows(deep: Target, tmp_path: Path, window: int) -> None:
    """Prompts that one step takes: the head lags behind by nothing that is released."""
    write_eagle3(tmp_path, heads.deep_model().config, windows=window)
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    short = [Request(requests()[i].prompt[:5], params, OFF, f"q{i}") for i in (0, 1)]
    found = []
    for speculation in (OFF, {"method": "eagle3", "num_speculative_tokens": 3}):
        watch = heads.watch_heads(found[0] if found else None)
        drafter = heads.folder_of(tmp_path) if found else {}
        engine = make_engine(deep, **SMALL | {"num_blocks": 40}, speculation=drafter)
        assert engine.runtime.space.reach == (window + MAX_DRAFTS if found else WINDOW)
        for request in short:
            engine.add_request(request.prompt, request.params, speculation, request.id)
        found.append(texts_of(drain(engine)))
    assert found[0] == found[1] and len(watch.rows) > 30
    assert (
        heads.wrong_rows(
            watch, heads.head_of(windows=window), {(r.id, 0): [*r.prompt, *found[0][r.id, 0]] for r in short}
        )
        == []
    )


def test_a_head_that_lags_behind_changes_no_token(deep: Target, tmp_path: Path) -> None:
    write_eagle3(tmp_path, heads.deep_model().config, windows=4)
    plain = texts_of(write(make_engine(deep, **SMALL)))
    heads.watch_heads(plain)
    engine = make_engine(deep, **DRAFTED, speculation=heads.folder_of(tmp_path))
    results = write(engine, {"method": "eagle3", "num_speculative_tokens": 3})
    assert texts_of(results) == plain
    assert sum(result.stats.drafted_at.total() for result in results.values()) > 40


# the pieces


def test_the_decoder_writes_long_texts_and_refuses_drafts_without_pages() -> None:
    decoder = SpeculativeDecoder(build("mistral", **MISTRAL), method="off", block_size=4, **SMALL)
    request = requests()[1]
    params = request.params.model_copy(update={"max_tokens": 40})
    assert decoder.generate(request.prompt, params).token_ids == whole("windows")["q1", 0][:40]
    verdict = decoder.verify(request.prompt, whole("windows")["q1", 0][:3], params)
    assert verdict.accepted == 3
    with pytest.raises(NeverFits, match="30 drafts after 110 tokens"):
        decoder.verify(request.prompt, [5] * 30, params)


@pytest.mark.parametrize("padding", [Padding(64, 4), Padding(32, 4, start=64)])
def test_padded_keys_are_kept(padding: Padding) -> None:
    """As with `batch_invariant`, keys are read from a multiple of 64 on."""
    made = wrap_model(build(*MODELS["windows"][:1], **MISTRAL), name="padded", share=False)
    made.layers = tuple(replace(layer, padding=padding) for layer in made.layers)
    params, found = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True), []
    for pages in (20, 40):
        engine = make_engine(made, **SMALL | {"num_blocks": pages})
        assert engine.runtime.space.reach == WINDOW + 63
        engine.runtime.space.reach = engine.runtime.space.reach if pages == 20 else None
        engine.add_request(requests()[1].prompt[:8], params, OFF, "r")
        found.append(texts_of(drain(engine)))
    assert found[0] == found[1]
    engine = make_engine(made, **SMALL | {"num_blocks": 20})
    engine.runtime.space.reach = WINDOW
    engine.add_request(requests()[1].prompt[:8], params, OFF, "r")
    with pytest.raises(AssertionError, match="positions of"):
        drain(engine)


def test_chunks_begin_where_they_did_when_positions_are_hidden() -> None:
    for hidden in range(9):
        span = SpanView(0, 12, slice(100 + hidden, 120), 20 - hidden, hidden)  # positions 8 to 19
        parts = [(p.rows, p.where) for p in span.in_chunks(7)]
        assert parts == [(6, slice(100 + max(7, hidden), 114)), (6, slice(114, 120))]


def test_positions_that_are_not_there_are_not_read() -> None:
    for where in (slice(8, 12), torch.arange(8, 12)):
        assert len(torch.arange(20)[tail_of(where, 4)]) == 4
        with pytest.raises(AssertionError):
            tail_of(where, 5)


def test_layers_that_read_nothing_before_them_keep_nothing() -> None:
    layers, none = target("windows").layers, (0, 0, 0, torch.float32)
    assert joint_reach(layers) == WINDOW and joint_reach([]) is None
    assert joint_reach([LayerSpec("other", *none), LayerSpec("taps", *none)]) == 1
    assert joint_reach([], [Needs(layers=(LayerSpec("taps", *none),))]) == 1 + MAX_DRAFTS
    assert joint_reach([*layers, replace(layers[0], window=None)]) is None
    assert joint_reach(target("chunks").layers) == CHUNK
