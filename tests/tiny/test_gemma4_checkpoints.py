"""Assistants of Gemma 4 are recognised and paired by name, those that do not fit are refused, and the memory
estimate is what they take.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.checkpoints.headers import read_checkpoint
from speculon.cli import app
from speculon.core.errors import WrongPair
from speculon.runtimes.torch.drafters.pairing import search
from speculon.runtimes.torch.kv.store import PageStore
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.needs import LayerSpec
from tests.rounding import assert_near
from tests.tiny.assistant_forms import FULL, LARGE, NAME, folder_of, stock, target_of
from tests.tiny.conftest import build, tiny_target
from tests.tiny.recurrent import recurrent_target
from tests.tiny.scripted import drain, make_engine, proposer_of
from tests.tiny.test_gemma4_assistant import PROMPTS, ask

WEIGHTS = "model.safetensors"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A target `small`, its assistant, and copies of that under other names."""
    shutil.copytree(folder_of("small").parent, tmp_path / "home")
    for name in ("assistant", "smaller-assistant"):
        shutil.copytree(tmp_path / "home" / "small-assistant", tmp_path / "home" / name)
    return tmp_path / "home"


def test_auto_pairs_a_target_with_the_assistant_of_its_name(home: Path, caplog: Any) -> None:
    found = search("auto", read_checkpoint(home / "small"))
    assert found.drafts == {NAME: str(home / "small-assistant")}
    shutil.rmtree(home / "small-assistant")
    assert search("auto", read_checkpoint(home / "small")).drafts == {NAME: str(home / "assistant")}


def test_a_model_drafts_with_the_assistant_that_auto_finds(home: Path) -> None:
    llm = LLM(str(home / "small"), tokenizer=None, speculation={"draft": "auto", "method": NAME})
    plain = llm.generate(PROMPTS, GREEDY, speculation={"method": "off"})
    drafted = llm.generate(PROMPTS, GREEDY, speculation={"policy": "fixed"})
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert sum(out.speculation.by_source[NAME]["drafted"] for out in drafted if out.speculation) > 20
    assert llm.engine.capabilities()[f"methods.{NAME}"].status == "on"


def test_inspect_says_what_it_is_and_whether_it_fits(home: Path) -> None:
    def inspect(*words: str) -> Any:
        done = CliRunner().invoke(app, ["inspect", str(home / "small-assistant"), *words, "--json"])
        return done.exit_code, json.loads(done.stdout)

    code, facts = inspect("--target", str(home / "small"))
    assert (code, facts["method"], facts["fits"]) == (0, NAME, True)
    assert facts["found"].startswith(
        "Gemma 4 assistant by Google: 3 layers of 24, states of width 32 and keys and values of the target, "
        "24 of 96 tokens; fp32"
    )
    assert facts["taps"] == "after layer 5, normed; keys and values of the last layer of each type"
    build("llama").save_pretrained(home / "llama")
    code, facts = inspect("--target", str(home / "llama"))
    expected = "reads keys and values of a Gemma 4, the target is LlamaForCausalLM"
    assert code == 2 and facts["error"]["message"].endswith(expected)


@pytest.mark.parametrize("form", ["small", "large"])
def test_the_memory_estimate_is_what_it_takes(form: str) -> None:
    drafter = proposer_of(make_engine(target_of(form), speculation=ask(form)), NAME)
    stored = sum(tensor.nbytes for tensor in load_file(folder_of(form) / WEIGHTS).values())
    assert drafter.needs.bytes_fixed == stored
    assert drafter.needs.layers == (LayerSpec("taps", 1, 32, 0, torch.float32),)
    assert drafter.needs.taps == (5,)


def test_its_layers_are_rounded_where_that_is_asked_for() -> None:
    sizes, texts = [], []
    for quantization in ("none", "int8", "int4"):
        speculation = {**ask("large"), "draft_quantization": quantization}
        engine = make_engine(target_of("large"), speculation=speculation)
        engine.add_request(PROMPTS[-1], GREEDY)
        sizes.append(proposer_of(engine, NAME).needs.bytes_fixed)
        texts += [result.tokens for result in drain(engine).values()]
    assert sizes[0] > 1.5 * sizes[1] > 1.5 * sizes[2]
    assert texts[0] == texts[1] == texts[2]


def test_another_target_is_refused() -> None:
    with pytest.raises(WrongPair, match="reads keys and values of a Gemma 4, the target is LlamaForCausalLM"):
        make_engine(tiny_target("llama"), speculation=ask("large"))
    with pytest.raises(WrongPair, match="the target is Qwen3NextForCausalLM"):  # a recurrent one
        make_engine(recurrent_target("qwen3_next"), speculation=ask("large"))
    wide = build("gemma4_text", **{**LARGE, "global_head_dim": 32})
    with pytest.raises(
        WrongPair, match="4 heads of 16 read full_attention, but the target's layer 5 has 1 he"
    ):
        make_engine(wrap_model(wide, share=False), speculation=ask("large"))
    flat = build("gemma4_text", **{**LARGE, "layer_types": [FULL] * 6})
    with pytest.raises(WrongPair, match="reads a layer of sliding_attention, which flat does not have"):
        make_engine(wrap_model(flat, name="flat", share=False), speculation=ask("large"))


@torch.inference_mode()
def test_a_unified_target_reads_text_as_the_stock_model_does() -> None:
    """Its config asks for attention in both directions within images."""
    assert stock("unified").config.get_text_config().use_bidirectional_attention == "vision"
    target = target_of("unified")
    assert target.vision is None and target.no_images
    ids = torch.tensor(PROMPTS[-1])
    logits, _ = target.tapped(ids, PageStore(target.layers, 1, len(ids), "cpu"), (5,))
    expected = stock("unified")(ids[None]).logits[0]
    assert_near(logits, expected, len(target.layers))
