"""Drafters are found near a target, paths are recognised, and `speculon inspect` says what fits."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from speculon import LLM, SamplingParams
from speculon.checkpoints.headers import read_checkpoint
from speculon.cli import app
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, UnsupportedModel, WrongPair
from speculon.engine.decoder import SpeculativeDecoder
from speculon.runtimes.torch.drafters.choose import with_drafts
from speculon.runtimes.torch.drafters.pairing import search
from tests.tiny.blocks import write_dflash
from tests.tiny.checkpoint import write_checkpoint, write_stranger
from tests.tiny.conftest import build, tiny_model
from tests.tiny.heads import write_eagle3


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a head within and other folders beside it."""
    home = tmp_path_factory.mktemp("household")
    target = write_checkpoint(home / "target")
    config = build("qwen3", num_hidden_layers=8, vocab_size=320, max_position_embeddings=512, eos_token_id=2)
    config.save_pretrained(target)
    facts = SimpleNamespace(
        hidden_size=32, vocab_size=320, num_hidden_layers=8, architectures=["Qwen3ForCausalLM"]
    )
    write_eagle3(target / "eagle", facts, "specforge")
    write_eagle3(home / "beside", facts, "speculators", draft_vocab=64)
    write_eagle3(home / "narrow", SimpleNamespace(**{**vars(facts), "hidden_size": 16}), "speculators")
    write_eagle3(home / "broken", facts, "specforge", tensors={"fc.bias": (1,)})
    write_eagle3(home / "damaged", facts, "specforge", draft_vocab=64, tensors={"d2t": None})
    draft = write_checkpoint(home / "draft")
    other = write_checkpoint(home / "other")
    file = json.loads((other / "tokenizer.json").read_text())
    names = list(file["model"]["vocab"])
    file["model"]["vocab"][names[5]], file["model"]["vocab"][names[6]] = 6, 5
    (other / "tokenizer.json").write_text(json.dumps(file))
    shutil.copytree(target, home / "twin", ignore=shutil.ignore_patterns("eagle"))
    write_eagle3(home / "beam", facts, "specforge", config={"architectures": ["DFlash2BeamDraftModel"]})
    (home / "empty").mkdir()
    assert draft.is_dir()
    return home


def test_drafters_are_found_and_every_folder_is_logged(household: Path) -> None:
    target = household / "target"
    found = search("auto", read_checkpoint(target))
    assert found.drafts == {"eagle3": str(target / "eagle"), "draft_model": str(household / "draft")}
    lines = {Path(line.split(": ")[0]).name: line for line in found.lines}
    assert lines["eagle"].endswith(": taken as eagle3") and lines["draft"].endswith(": taken as draft_model")
    assert f"left out: fits, but {target / 'eagle'} is preferred" in lines["beside"]
    for name, why in {
        "narrow": "width 16, the target's are 32",
        "broken": "fc.bias is [1], not [32]",
        "damaged": "no d2t says which",
        "other": "another tokenizer: 100% of the tokens of a sample text and 100% of the vocabulary have a ",
        "twin": "the target has",
        "beam": "DFlash2 with a beam (its selector keeps several paths) is recognised, but not supported",
    }.items():
        assert why in lines[name] and "left out" in lines[name], name
    assert len(lines) == 9


def test_a_named_folder_is_searched(household: Path) -> None:
    target = read_checkpoint(household / "target")
    assert search(f"auto:{household / 'beside'}", target).drafts == {"eagle3": str(household / "beside")}
    assert search(f"auto:{household / 'empty'}", target) == search(f"auto:{household / 'empty'}", target)
    assert search(f"auto:{household / 'empty'}", target).drafts == {}
    for name in ("auto:", f"auto:{household / 'nowhere'}"):
        with pytest.raises(ConfigError, match="needs a folder that is there"):
            search(name, target)


def test_a_head_for_another_architecture_comes_last(household: Path, tmp_path: Path) -> None:
    target = read_checkpoint(household / "target")
    facts = SimpleNamespace(
        hidden_size=32, vocab_size=320, num_hidden_layers=8, architectures=["LlamaForCausalLM"]
    )
    write_eagle3(tmp_path / "a", facts, "speculators")
    assert search(f"auto:{tmp_path}", target).drafts == {"eagle3": str(tmp_path / "a")}
    assert (
        "made for LlamaForCausalLM, the target is Qwen3ForCausalLM"
        in search(f"auto:{tmp_path}", target).lines[0]
    )
    facts.architectures = ["Qwen3ForCausalLM"]
    write_eagle3(tmp_path / "b", facts, "speculators")
    assert search(f"auto:{tmp_path}", target).drafts == {"eagle3": str(tmp_path / "b")}


def drafts_of(model: Path, draft: Any) -> Any:
    return with_drafts(EngineConfig(model=str(model), speculation={"draft": draft})).speculation.draft


def test_a_path_without_method_is_recognised(household: Path) -> None:
    target = household / "target"
    assert drafts_of(target, str(household / "beside")) == {"eagle3": str(household / "beside")}
    assert drafts_of(target, str(household / "draft")) == str(household / "draft")
    assert drafts_of(target, {"draft_model": "x"}) == {"draft_model": "x"}
    assert drafts_of(target, None) is None
    assert drafts_of(Path("demo"), None) == {"draft_model": "demo-draft"}
    assert drafts_of(target, str(household / "nowhere")) == str(household / "nowhere")
    with pytest.raises(UnsupportedModel, match="beam: DFlash2 with a beam"):
        drafts_of(target, str(household / "beam"))


def test_an_engine_drafts_with_what_it_found(household: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(str(household / "target"), warmup=False, speculation={"method": "off"}).generate(
        "def add(", params
    )[0]
    with caplog.at_level(logging.INFO, logger="speculon"):
        llm = LLM(
            str(household / "target"),
            speculation={"policy": "fixed", "draft": "auto", "num_speculative_tokens": 3},
        )
    assert sum(message.startswith("draft auto: ") for message in caplog.messages) == 9
    assert set(llm.config.speculation.drafts) == {"eagle3", "draft_model"}
    for method in ("eagle3", "draft_model"):
        done = llm.generate("def add(", params, speculation={"method": method})[0]
        assert done.token_ids == plain.token_ids
        assert set(done.speculation.by_source) == {method}


def test_without_a_drafter_the_engine_uses_lookups(household: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="speculon"):
        llm = LLM(
            str(household / "target"), speculation={"policy": "fixed", "draft": f"auto:{household / 'empty'}"}
        )
    assert f"draft auto: no drafter for {household / 'target'}: lookups only" in caplog.messages
    params = SamplingParams(temperature=0, max_tokens=4)
    for method in ("eagle3", "draft_model"):
        assert "no_drafter" in llm.generate("def add(", params, speculation={"method": method})[0].reasons
    assert "no_drafter" not in llm.generate("def add(", params)[0].reasons  # `auto` has its lookups


def test_a_model_object_has_no_folder_to_search() -> None:
    with pytest.raises(ConfigError, match="draft = 'auto': a model object lies in no folder"):
        SpeculativeDecoder(tiny_model("llama"), "auto")


# -- inspect


def inspect(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)


def test_inspect_says_what_a_drafter_is(household: Path) -> None:
    facts = json.loads(inspect(household / "beside", "--json").stdout)
    assert (facts["method"], facts["format"], facts["verifier"]) == (
        "eagle3",
        "speculators",
        ["Qwen3ForCausalLM"],
    )
    assert facts["found"].startswith(
        "EAGLE-3 head by speculators: 1 layer of 32, 3 taps of width 32 after layers 1, N/2 - 1"
    )
    done = inspect(household / "beside")
    assert done.exit_code == 0
    assert "4 heads of 8, 2 for keys and values, full" in done.stdout and "64 of 320 tokens" in done.stdout


def test_inspect_says_whether_a_drafter_fits(household: Path, tmp_path: Path) -> None:
    target = household / "target"
    facts = json.loads(inspect(household / "beside", "--target", target, "--json").stdout)
    taps = "after layers 1, 3, 4 (assumed: its config names no layers)"
    assert (facts["fits"], facts["taps"]) == (True, taps)
    refused = inspect(household / "narrow", "--target", target)
    assert refused.exit_code == 2
    assert "no: " in refused.stdout and "width 16, the target's are 32" in refused.stdout.replace("\n", " ")
    model = json.loads(inspect(household / "draft", "--target", target, "--json").stdout)
    assert (model["fits"], model["method"]) == (True, "draft_model")
    other = json.loads(inspect(household / "other", "--target", target, "--json").stdout)
    share = "100% of the tokens of a sample text and 100% of the vocabulary have a partner of equal bytes"
    assert (other["fits"], other["odd"]) == (True, [f"another tokenizer: {share}"])
    stranger = write_stranger(tmp_path / "stranger")
    wrong = inspect(stranger, "--target", target, "--json")
    error = json.loads(wrong.stdout)["error"]
    assert (wrong.exit_code, error["type"]) == (2, WrongPair.__name__)
    assert "different tokenizers: 0% of the tokens of a sample text and 0% of the" in error["message"]


def test_a_block_drafter_is_found_inspected_and_used(household: Path, tmp_path: Path) -> None:
    target, model = household / "target", AutoModelForCausalLM.from_pretrained(household / "target")
    facts = SimpleNamespace(
        hidden_size=32, vocab_size=320, num_hidden_layers=8, architectures=["Qwen3ForCausalLM"]
    )
    block = write_dflash(tmp_path / "block", facts, "deepspec", taps=(1, 3, 5), markov="gated")
    assert drafts_of(target, str(block)) == {"dflash": str(block)}
    assert search(f"auto:{tmp_path}", read_checkpoint(target)).drafts == {"dflash": str(block)}
    shown = inspect(block, "--target", target).stdout
    assert "DSpark drafter by DeepSpec" in shown and "after layers 1, 3, 5" in shown and "yes: " in shown
    assert "8 rows, the anchor's row drafts, a gated Markov head of rank 6" in shown.replace("\n", " ")
    decoder = SpeculativeDecoder(model, str(block), method="dflash", num_speculative_tokens=12)
    assert len(decoder.draft([5, 6, 7]).tokens) == 8, "as many as the block has"
    params = SamplingParams(temperature=0, max_tokens=12)
    speculation = {"draft": str(block), "method": "dflash", "policy": "fixed"}
    llm = LLM(str(target), warmup=False, speculation=speculation)
    plain = LLM(str(target), warmup=False, speculation={"method": "off"}).generate("def add(", params)[0]
    out = llm.generate("def add(", params)[0]
    assert (out.text, out.token_ids) == (plain.text, plain.token_ids)
    assert out.speculation.by_source["dflash"]["drafted"] > 4
