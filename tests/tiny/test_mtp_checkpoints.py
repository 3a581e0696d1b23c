"""Where prediction layers are found, how an engine takes them, and what they take of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from speculon import LLM, SpeculativeDecoder
from speculon.cli.app import app
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import ConfigError, MemoryExceeded, ModelError, SpeculonError
from speculon.core.types import Reason
from speculon.runtimes.torch.drafters.choose import with_drafts
from speculon.runtimes.torch.drafters.mtp.tensors import find_mtp
from tests.formats.writer import change_checkpoint
from tests.tiny.conftest import build, tiny_target
from tests.tiny.mtp_forms import H, target_of, written
from tests.tiny.scripted import Request, drain, make_engine, proposer_of

MTP = {"method": "mtp", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def unknown_layout(folder: Path) -> Path:
    return change_checkpoint(written("qwen3_5").folder, folder, rename={"mtp.": "mtp.depth."})


@pytest.mark.parametrize(
    ("name", "family", "modules"),
    [
        ("deepseek, two modules", "DeepSeek", 2),
        ("glm", "DeepSeek", 1),
        ("qwen3_next", "Qwen", 1),
        ("mimo, three modules", "MiMo", 3),
    ],
)
def test_each_layout_is_found(name: str, family: str, modules: int) -> None:
    found = find_mtp(written(name).folder)
    assert found is not None
    assert (found.family, len(found.modules), found.hidden) == (family, modules, H)
    assert found.hidden_first == (family == "MiMo")


def test_a_model_without_such_layers_has_none(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    assert find_mtp(tmp_path) is None
    with pytest.raises(ModelError, match="method mtp needs MTP layers, and this checkpoint has none"):
        LLM(str(tmp_path), tokenizer=None, speculation=MTP, warmup=False)
    with pytest.raises(ConfigError, match="this target came from no folder"):
        make_engine(tiny_target("llama"), speculation=MTP)


def test_a_model_object_is_read_from_its_folder() -> None:
    model = AutoModelForCausalLM.from_pretrained(written("mimo").folder, dtype=torch.float32)
    decoder = SpeculativeDecoder(model, method="mtp", num_speculative_tokens=3)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert decoder.generate([5, 6, 7, 8], GREEDY).token_ids == plain[0, 4:].tolist()


def test_auto_takes_them_where_they_are(tmp_path: Path) -> None:
    folder = str(written("mimo").folder)
    chosen = with_drafts(EngineConfig(model=folder, speculation={"draft": f"auto:{tmp_path}"}))
    assert chosen.speculation.drafts == {"mtp": folder}
    engine = make_engine(target_of("mimo"), speculation={"draft": chosen.speculation.draft})
    assert engine.proposers.chain("auto") == ("suffix", "mtp")
    build("qwen2").save_pretrained(tmp_path / "bare")
    chosen = with_drafts(EngineConfig(model=str(tmp_path / "bare"), speculation={"draft": "auto"}))
    assert chosen.speculation.drafts == {}


def test_layers_that_cannot_be_used_do_not_stop_auto(tmp_path: Path) -> None:
    folder = unknown_layout(tmp_path / "model")
    chosen = with_drafts(EngineConfig(model=str(folder), speculation={"draft": "auto"}))
    assert chosen.speculation.drafts == {}


@pytest.mark.parametrize("name", ["mimo", "llama"])
def test_a_request_cannot_load_them(name: str) -> None:
    engine = make_engine(
        tiny_target(name) if name == "llama" else target_of(name), speculation={"method": "off"}
    )
    assert engine.proposers.lacking("mtp") is Reason.NO_DRAFTER
    row = engine.capabilities()["methods.mtp"]
    assert (row.status, row.reason.split(";")[0]) == ("off", "not loaded")
    request = Request([5, 6, 7], GREEDY, MTP)
    engine.add_request(request.prompt, request.params, request.speculation, request.id)
    assert set(drain(engine)["r", 0].stats.reasons) == {Reason.NO_DRAFTER}


def test_the_estimate_counts_weights_pages_and_taps() -> None:
    """Three layers of keys and values, three of states: the taps, and what two modules yield."""
    target = target_of("mimo, three modules")
    engine = make_engine(target, speculation=MTP)
    needs = proposer_of(engine, "mtp").needs
    found = find_mtp(written("mimo, three modules").folder)
    assert found is not None
    assert needs.bytes_fixed == 4 * found.num_parameters
    assert [(layer.k_dim, layer.v_dim) for layer in needs.layers] == [(H, 0), *[(8, 8)] * 3, *[(H, 0)] * 2]
    assert sum(layer.bytes_per_token for layer in needs.layers) == 4 * (3 * H + 3 * 2 * 2 * 8)
    assert needs.max_context == target.max_context
    with pytest.raises(MemoryExceeded):
        make_engine(target, speculation={**MTP, "memory_policy": "fail", "memory_limit_gb": 1e-3})


def test_copies_of_the_targets_tensors_are_shared() -> None:
    sizes = {}
    for name in ("deepseek", "deepseek, own head"):
        needs = proposer_of(make_engine(target_of(name), speculation=MTP), "mtp").needs
        found = find_mtp(written(name).folder)
        assert found is not None
        sizes[name] = 4 * found.num_parameters - needs.bytes_fixed
    table = 4 * 96 * H
    assert sizes == {"deepseek": 2 * table, "deepseek, own head": table}


@pytest.mark.parametrize(
    ("name", "fuse", "layer", "norm"),
    [
        pytest.param("mimo", True, "FusedLayer", "Fused", id="fused"),
        pytest.param("mimo", False, "Qwen2DecoderLayer", "Qwen2RMSNorm", id="not asked for"),
        pytest.param("glm", True, "Glm4MoeDecoderLayer", "Fused", id="the fused layer differs"),
        pytest.param("qwen3_5", True, "Qwen3_5DecoderLayer", "Fused", id="the fused layer fails"),
        pytest.param("deepseek", True, "DeepseekV3DecoderLayer", "Fused", id="no fused layer"),
    ],
)
def test_layers_are_fused_where_the_result_is_equal(name: str, fuse: bool, layer: str, norm: str) -> None:
    drafter: Any = make_engine(target_of(name), speculation=MTP, fuse=fuse).proposers.find("mtp")
    (module,) = drafter.head.modules
    assert (type(module.layer).__name__, type(module.norm).__name__) == (layer, norm)


def test_inspect_names_them(tmp_path: Path) -> None:
    def line(folder: Path) -> Any:
        out = CliRunner().invoke(app, ["inspect", str(folder), "--no-load", "--json"])
        return json.loads(out.stdout)["mtp"]

    assert line(written("mimo").folder).startswith("MTP, 1 module named as MiMo's")
    assert "not supported: " in line(unknown_layout(tmp_path / "model"))


def test_a_target_whose_logits_are_scaled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head would read states that the target's does not."""
    target = target_of("mimo")
    run = target.runner.run
    monkeypatch.setattr(target.runner, "run", lambda *args: run(*args) * 0.5)
    with pytest.raises(SpeculonError, match=r"its logits differ from head\(norm\(states\)\)"):
        make_engine(target, speculation=MTP)
