"""Recurrent and hybrid targets: texts are those of transformers' generate, whatever was drafted, and states
after rejected drafts are those of the accepted tokens.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, UnsupportedModel
from speculon.engine.engine import Engine
from speculon.runtimes.torch.budget import MemoryBudget
from speculon.runtimes.torch.kv.states import StateSpan, StateStep
from speculon.runtimes.torch.loading.load import context_limit, wrap_model
from speculon.runtimes.torch.model import recurrent
from speculon.runtimes.torch.model.fuse import Fused
from tests.recording import read
from tests.tiny.checkpoint import byte_tokenizer
from tests.tiny.conftest import build
from tests.tiny.heads import folder_of as folder_of_head
from tests.tiny.heads import watch_heads, write_eagle3
from tests.tiny.recurrent import (
    DIFFERENT,
    RECURRENT,
    ROW_BY_ROW,
    generated,
    mixed,
    recurrent_model,
    recurrent_target,
    requests,
    wrong,
)
from tests.tiny.requests import accepted_lengths, drafting, row_error
from tests.tiny.scripted import Key, Result, drain, make_engine, proposer_of, run, script, states_of

ZAMBA2 = {
    "num_hidden_layers": 4,
    "mamba_d_state": 8,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1,
    "chunk_size": 8,
    "use_mem_rope": True,
    "adapter_rank": 4,
}

# one architecture of each class of mixer; the soak writes the texts of all, and compares their rows


@pytest.mark.parametrize("name", DIFFERENT)
def test_texts_are_those_of_generate(name: str) -> None:
    """Plain and alone, and in a batch of mixed methods and K, whose pages do not suffice for all."""
    target, truth = recurrent_target(name), generated(name)
    script(truth)
    assert not wrong(name, run(target, list(requests()[:1])))
    results = run(target, mixed(), max_batch_tokens=16, num_blocks=30)
    assert results.keys() == truth.keys() and not wrong(name, results)
    assert sum(result.stats.preemptions for result in results.values()) > 0
    assert not any(result.stats.cached_tokens for result in results.values())


@pytest.mark.parametrize("name", DIFFERENT)
def test_logits_of_verify_rows_are_the_stock_models(name: str) -> None:
    """Within 1e-4 of the largest, at every accepted length from 0 to 4, with prompts in pieces."""
    script(generated(name))
    engine, model = make_engine(recurrent_target(name), max_batch_tokens=24), recurrent_model(name)
    with torch.inference_mode():
        largest = float(model(torch.tensor([requests()[1].prompt])).logits.abs().max())
    assert row_error(name, engine, drafting(requests()[:4], 4), model) < 1e-4 * largest


@pytest.mark.parametrize("name", RECURRENT)
def test_how_a_state_is_continued_is_measured(name: str) -> None:
    mixers = recurrent_target(name).mixers
    assert mixers and {mixer.continues for mixer in mixers} == {name not in ROW_BY_ROW}
    assert {mixer.alone is not None and mixer.alone < recurrent.ANY for mixer in mixers} == {
        name not in ROW_BY_ROW
    }


def test_one_sequence_has_a_limit_of_its_own() -> None:
    mixer = replace(recurrent_target("mamba2").mixers[0], by_row=9, alone=3)
    store = recurrent_target("mamba2").states(6)
    assert store is not None
    spans = [StateSpan(4 * i, 4 * i + 4, 2 * i, 2 * i + 1, fresh=i == 2) for i in range(3)]
    assert [mixer.limit(StateStep(store, part)) for part in (spans, spans[1:], spans[:1])] == [9, 3, 3]


WAYS = {
    "states are kept after each row": (recurrent.ANY, 1 << 30),
    "rows are replayed one by one": (recurrent.ANY, 0),
    "rows are replayed in one call": (1, 0),
    "short spans go row by row, longer ones in one call": (3, 1 << 30),
}


def force(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the mixers of a target restore in this way, which no measurement has chosen."""
    by_row, kept_bytes = WAYS[way]
    monkeypatch.setattr(recurrent, "KEPT_BYTES", kept_bytes)
    for mixer in recurrent_target(name).mixers:
        monkeypatch.setattr(mixer, "by_row", by_row)
        monkeypatch.setattr(mixer, "alone", None)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("qwen3_next", way) for way in WAYS),
        *(("jamba", way) for way, (by_row, _) in WAYS.items() if by_row == recurrent.ANY),
        *zip(("falcon_h1", "lfm2") * 2, WAYS, strict=True),
    ],
)
def test_every_way_of_restoring_gives_the_texts(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script(generated(name))
    force(name, way, monkeypatch)
    results = run(recurrent_target(name), drafting(requests(), 4), max_batch_tokens=16, num_blocks=30)
    assert not wrong(name, results) and accepted_lengths(results) >= set(range(5))


# what else uses the states


@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_an_eagle3_head_taps_recurrent_layers(name: str, tmp_path: Path) -> None:
    """Texts are equal, and the states that the head reads are the stock model's, after rejections too."""
    taps = (-1, 0, 1)
    watch_heads(generated(name))
    head = write_eagle3(tmp_path, recurrent_model(name).config, taps=taps)
    settings = {"method": "eagle3", "num_speculative_tokens": 4}
    engine = make_engine(recurrent_target(name), speculation=folder_of_head(head), max_batch_tokens=24)
    for request in requests():
        engine.add_request(request.prompt, request.params, settings, request.id)
    results: dict[Key, Result] = {}
    for _ in range(10):
        for event in engine.step():
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    assert wrong_taps(engine, name, taps) < 1e-4
    drain(engine, results)
    assert not wrong(name, results) and accepted_lengths(results) >= set(range(4))


def wrong_taps(engine: Engine, name: str, taps: tuple[int, ...]) -> float:
    """The largest difference of a state in the pages from the stock model's, relative to the largest."""
    worst, model = 0.0, copy.deepcopy(recurrent_model(name))
    drafter = proposer_of(engine, "eagle3")
    assert len(engine.scheduler.running) > 2
    for seq in engine.scheduler.running:
        stored = drafter.pages.taps([(seq, 0, seq.committed)])
        with torch.inference_mode():
            ids = torch.tensor([seq.tokens[: seq.committed]])
            states = model(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap + 1][0] for tap in taps], -1)
        worst = max(worst, float((stored - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "recurrent_gemma",
            {"num_hidden_layers": 3, "lru_width": 32, "block_types": ["recurrent", "recurrent", "attention"]},
            "RecurrentGemmaRecurrentBlock keeps a recurrent state .* transformers' cache does not hold",
        ),
        (
            "minimax",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "refuses the cache that it is given",
        ),
        (
            "zaya",
            {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
            "ZayaCCAProjection of layer 0 returns more than a row per token",
        ),
        ("zamba2", ZAMBA2, r"calls attention 2 times in layers \[-1\]"),
    ],
)
def test_what_else_keeps_states_is_refused_by_name(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        wrap_model(build(model_type, **settings))


def test_compiled_operations_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="compile is not supported for recurrent models"):
        wrap_model(recurrent_model("mamba2"), compile=True)


def test_a_model_without_a_context_length_takes_the_one_that_is_set() -> None:
    model = build("mamba", **RECURRENT["mamba"][1], max_position_embeddings=None)
    target = wrap_model(model)
    assert target.max_context == 1 << 17 and "131072 is assumed, unless max_context" in target.notes[0]
    for length in (64, 1 << 18):
        target = wrap_model(model, max_context=length)
        assert target.max_context == length and not any("assumed" in note for note in target.notes)
    assert context_limit(model, attends=True)[0] == 4096
    with pytest.raises(ConfigError, match="max_context = 129: .* reaches 128"):
        wrap_model(recurrent_model("mamba"), max_context=129)


def test_states_are_part_of_the_memory_estimate() -> None:
    target = recurrent_target("falcon_h1")
    engine = make_engine(target, max_num_seqs=3, snapshot_memory_gb=0)
    held = sum(state.nbytes for layer in states_of(engine).states for state in layer)
    assert engine.runtime.estimate.states == held == 6 * target.state_bytes > 0
    parts = ("held", "drafters", "scratch", "remembered", "pages", "states", "snapshots", "additional")
    assert engine.runtime.estimate.total == sum(getattr(engine.runtime.estimate, part) for part in parts)


def test_states_that_do_not_fit_name_the_number_of_sequences() -> None:
    target = recurrent_target("mamba")
    needs = replace(target.needs(8, 8), bytes_states=1 << 60)
    budget = MemoryBudget(EngineConfig(max_num_seqs=4096, num_blocks=30), needs, 64, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"max_num_seqs = 4096: the recurrent states .* take \d+ bytes"):
        budget.pages([])


def test_the_load_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    wrap_model(recurrent_model("mamba2"))
    assert torch.equal(torch.rand(1), expected)


def test_what_a_repair_takes_is_counted_and_recorded(tmp_path: Path) -> None:
    script(generated("lfm2"))
    engine = make_engine(recurrent_target("lfm2"), events=tmp_path / "events.jsonl")
    for request in drafting(requests(), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    drain(engine)
    engine.close()
    recorded = [round_.repair_ms for round_ in read(tmp_path / "events.jsonl").rounds]
    assert 0 < engine.counters.repair_ms == pytest.approx(sum(recorded), abs=0.1)
    assert engine.counters.repair_ms < engine.counters.profile["commit"]
    assert 0.0 in recorded, "rounds in which nothing is rejected need no repair"


# checkpoint folders


def folder_of(name: str, folder: Path) -> Path:
    """A checkpoint of a recurrent model with the tokenizer of the others."""
    recurrent_model(name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_inspect_says_how_states_are_restored(tmp_path: Path) -> None:
    folder = folder_of("jamba", tmp_path / "jamba")
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    facts, target = json.loads(result.output), recurrent_target("jamba")
    assert facts["supported"] and len(facts["layers"]) == 1
    assert facts["states"] == {
        "mixers": 2,
        "bytes_per_sequence": 2 * target.state_bytes,
        "single_rows": {"JambaMambaMixer": None},
    }
    assert any("recurrent state" in note for note in facts["notes"])
    table = CliRunner().invoke(app, ["inspect", str(folder), "--all"]).output
    assert "recurrent states" in table and "JambaMambaMixer computes row by row" in table


def test_norms_of_which_a_layer_reads_more_are_left() -> None:
    """Nemotron-H's blocks read the dtype of a norm's weight."""
    assert not any(isinstance(module, Fused) for module in recurrent_target("nemotron_h").model.modules())


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2"])
def test_norms_outside_of_mixers_are_fused(name: str) -> None:
    target = recurrent_target(name)
    inside = {part for mixer in target.mixers for part in mixer.module.modules()}
    fused = {module for module in target.model.modules() if isinstance(module, Fused)}
    assert len(fused) > 2 * len(target.layers) and not fused & inside
    plain = wrap_model(recurrent_model(name), fused=False)
    assert not any(isinstance(module, Fused) for module in plain.model.modules())
