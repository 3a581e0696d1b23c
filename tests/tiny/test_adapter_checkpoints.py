"""Folders of adapters: what is read of them, what is refused and why, and how LLM and commands take them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from speculon import LLM, SamplingParams
from speculon.checkpoints.adapter_config import read_adapter
from speculon.cli import app
from speculon.cli.options import engine_settings
from speculon.core.config import EngineConfig
from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    InvalidParameter,
    MissingWeights,
    ModelError,
    ModelNotFound,
    UnknownModel,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from speculon.runtimes.torch.loading.adapters import add_adapters
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.memory import largest_step, process_memory
from tests.tiny.adapter_files import FEW, differs_from_stock, stock_with, with_adapters, write, write_adapter
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import build, tiny_model
from tests.tiny.recurrent import recurrent_model
from tests.tiny.scripted import Request

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("adapters") / "model")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    """An adapter for the model of `folder`."""
    return write_adapter(folder.parent / "tuned", tiny_qwen(folder), 5, base_model_name_or_path="org/model")


def sizes(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {name: config[name] for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}


# what is read


def test_an_adapter_is_read_from_its_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patterns = {"rank_pattern": {}, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 12, "v_proj": 2}}
    path = write_adapter(tmp_path / "a", model, rank=4, alpha=6, ends=FEW, use_rslora=True, **patterns)
    read = read_adapter("a", path)
    assert (read.rank, read.targets, len(read.layers)) == (4, ("down_proj", "q_proj", "v_proj"), 6)
    scaling = {name.removeprefix("model."): layer.scaling for name, layer in read.layers.items()}
    assert scaling["layers.0.self_attn.q_proj"] == 3 and scaling["layers.1.self_attn.q_proj"] == 6
    assert scaling["layers.1.self_attn.v_proj"] == 1 and scaling["layers.1.mlp.down_proj"] == 3
    assert read.num_parameters == 2 * 4 * (32 + 32 + 32 + 16 + 48 + 32)
    same = write_adapter(tmp_path / "b", model, rank=4, alpha=6, ends=FEW, use_rslora=True, **patterns)
    other = write_adapter(tmp_path / "c", model, rank=4, alpha=7, ends=FEW, use_rslora=True, **patterns)
    digests = {read_adapter("a", path).digest() for path in (path, same)}
    assert len(digests) == 1 and read_adapter("a", other).digest() not in digests


def pickled(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def cut(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


FILES: dict[str, tuple[Callable[[Path], Any], type[ModelError], str]] = {
    "a pickle": (pickled, UnsafeCheckpoint, "adapter_model.bin is a pickle, which can run code"),
    "no weights": (lambda p: (p / "adapter_model.safetensors").unlink(), MissingWeights, "no adapter_model"),
    "no config": (lambda p: (p / "adapter_config.json").unlink(), ModelNotFound, "no adapter_config.json"),
    "no JSON": (lambda p: (p / "adapter_config.json").write_text("{"), ModelError, "not readable as JSON"),
    "a list": (lambda p: (p / "adapter_config.json").write_text("[]"), ModelError, "not a JSON object"),
    "no tensors": (
        lambda p: save_file({}, p / "adapter_model.safetensors"),
        MissingWeights,
        "adapter_model.safetensors has no tensors",
    ),
    "truncated": (cut, CorruptWeights, "truncated"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_missing_or_damaged(case: str, tmp_path: Path) -> None:
    change, error, message = FILES[case]
    change(write_adapter(tmp_path / "a", tiny_model("llama")))
    with pytest.raises(error, match=message):
        read_adapter("sql", tmp_path / "a")
    with pytest.raises(ModelNotFound, match=r"adapter 'sql': .*nowhere: no such folder"):
        read_adapter("sql", tmp_path / "nowhere")


# what a target takes


def test_layers_of_recurrent_mixers_are_refused_and_others_are_not(tmp_path: Path) -> None:
    model = recurrent_model("qwen3_next")
    target = wrap_model(model, name="hybrid")
    with pytest.raises(UnsupportedModel, match="recurrent layers run apart for each group of sequences"):
        with_adapters(target, {"a": write_adapter(tmp_path / "a", model)})
    attention = write_adapter(tmp_path / "b", model, ends=("q_proj", "o_proj"))
    with_adapters(target, {"b": attention})
    params = GREEDY.model_copy(update={"logprobs": 1})
    requests = [(Request([7, 30, 4, 61][: 2 + i], params, None, f"r{i}"), ("b", "")[i % 2]) for i in range(3)]
    results = write(target, requests)
    truth = {"b": stock_with(model, attention), "": model}
    for request, adapter in requests:
        assert differs_from_stock(truth[adapter], request.prompt, results[request.id]) < 1e-3


def test_a_base_of_another_name_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    for i, base in enumerate(("org/tiny", "org/other", None)):
        path = write_adapter(tmp_path / f"{i}", model, base_model_name_or_path=base)
        target = wrap_model(model, name="/models/tiny", share=False)
        with caplog.at_level(logging.WARNING):
            add_adapters(target, [read_adapter("a", path)])
    (record,) = caplog.records
    assert record.getMessage() == "adapter 'a' was made for org/other, and the model is /models/tiny"


# LLM


@pytest.fixture(scope="module")
def llm(folder: Path, tuned: Path) -> LLM:
    speculation = {"policy": "fixed"}
    return LLM(str(folder), adapters={"tuned": str(tuned)}, warmup=False, speculation=speculation)


def test_llm_takes_an_adapter_for_all_or_one_for_each_prompt(llm: LLM) -> None:
    prompts = ["def add", "def add", "x = 1"]
    base = [output.text for output in llm.generate(prompts, GREEDY)]
    every = [output.text for output in llm.generate(prompts, GREEDY, adapter="tuned")]
    mixed = [output.text for output in llm.generate(prompts, GREEDY, adapter=["tuned", "", "tuned"])]
    assert mixed == [every[0], base[1], every[2]] and every[0] != base[0]
    assert "".join(llm.stream("def add", GREEDY, adapter="tuned")) == every[0]
    message = [{"role": "user", "content": "def add"}]
    answer = llm.chat(message, GREEDY, adapter="tuned").text
    assert llm.session(GREEDY, adapter="tuned").send("def add").text == answer
    assert llm.chat(message, GREEDY).text != answer
    with pytest.raises(UnknownModel, match="adapter = 'other': this model has the adapters 'tuned'"):
        llm.generate(prompts, GREEDY, adapter=["tuned", "other", ""])


def test_the_capability_table_has_a_row_of_adapters(llm: LLM, folder: Path) -> None:
    row = llm.engine.capabilities()["adapters"]
    assert row.status == "on" and row.limits == {"adapters": 1}
    assert row.reason.startswith("tuned: rank 4, 14 layers (down_proj, gate_proj, k_proj")


def test_memory_is_estimated_with_the_adapters(folder: Path, tuned: Path, llm: LLM) -> None:
    config = EngineConfig(model=str(folder), adapters={"tuned": str(tuned)}, num_blocks=8)
    without = EngineConfig(model=str(folder), num_blocks=8)
    held = [process_memory(c, largest_step(c), [], 2**34).estimate.held for c in (config, without)]
    (adapter,) = llm.engine.runtime.target.adapters.values()
    assert adapter.num_bytes <= held[0] - held[1] <= 2 * adapter.num_bytes


def test_what_was_learned_is_kept_by_what_the_adapters_are(folder: Path, tuned: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", tiny_qwen(folder), 6)
    restored = []
    for path in (None, tuned, tuned, other):
        adapters = {} if path is None else {"tuned": str(path)}
        with LLM(str(folder), adapters=adapters, warmup=False, state=tmp_path / "kept") as made:
            restored.append(made.engine.counters.restored["pools"])
            made.generate("def add", GREEDY, adapter=next(iter(adapters), ""))
    assert [count > 0 for count in restored] == [False, False, True, False]


def tiny_qwen(folder: Path) -> Any:
    return build("qwen3", **sizes(folder))


def test_a_rounded_base_takes_adapters(tmp_path: Path) -> None:
    model = build("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    paths = {name: write_adapter(tmp_path / name, model, i) for i, name in enumerate(("one", "two"))}
    prompts, names = [[(7 * i + j) % 90 for j in range(9)] for i in range(6)], ["one", "", "two"] * 2
    with LLM(
        str(tmp_path / "model"),
        dtype="bfloat16",
        quantization="int4",
        tokenizer=None,
        adapters={name: str(path) for name, path in paths.items()},
        warmup=False,
        speculation={"method": "ngram", "policy": "fixed"},
    ) as llm:
        target = llm.engine.runtime.target
        assert target.batch_invariant and target.packed and target.runner.one_loop
        together = [output.token_ids for output in llm.generate(prompts, GREEDY, adapter=names)]
        for prompt, name, ids in zip(prompts, names, together, strict=True):
            alone = llm.generate(prompt, GREEDY, adapter=name, speculation={"method": "off"})
            assert alone[0].token_ids == ids
        base = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        assert [a == b for a, b in zip(base, together, strict=True)] == [not name for name in names]


@pytest.mark.parametrize("adapters", [{"a:b": "x"}, {"": "x"}, {"a b": "x"}, {"a": ""}])
def test_names_have_no_colon_and_folders_are_named(adapters: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        EngineConfig(adapters=adapters)


# commands


def speculon(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_flags_name_adapters_one_by_one() -> None:
    assert engine_settings({"adapters": ["a=/x", "b=y=z"]}) == {"adapters": {"a": "/x", "b": "y=z"}}
    for wrong in ("a", "a=", "=x"):
        with pytest.raises(InvalidParameter, match="must be NAME=FOLDER"):
            engine_settings({"adapters": [wrong]})


def test_generate_writes_under_its_adapter(folder: Path, tuned: Path, llm: LLM) -> None:
    options = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")
    flags = ("generate", "--model", str(folder), "-p", "def add", *options)
    done = speculon(*flags, "--adapter", f"tuned={tuned}")
    assert done.stdout.rstrip("\n") == llm.generate("def add", GREEDY, adapter="tuned")[0].text.rstrip("\n")
    several = speculon(*flags, "--adapter", f"a={tuned}", "--adapter", f"b={tuned}")
    assert several.exit_code == 2 and "this command takes one adapter" in several.stderr


def test_inspect_shows_an_adapter(folder: Path, tuned: Path) -> None:
    facts = json.loads(speculon("inspect", str(tuned), "--json").stdout)
    assert (facts["rank"], facts["base"], facts["supported"]) == (4, "org/model", True)
    shown = " ".join(speculon("inspect", str(tuned)).stdout.split())
    assert "a LoRA adapter of a target" in shown and "down_proj, gate_proj" in shown
    loaded = json.loads(speculon("inspect", str(folder), "--adapter", f"sql={tuned}", "--json").stdout)
    assert loaded["adapters"] == [loaded["capabilities"]["adapters"]["reason"].partition(". ")[0]]
    headers = json.loads(
        speculon("inspect", str(folder), "--adapter", f"sql={tuned}", "--json", "--no-load").stdout
    )
    assert headers["adapters"][0].startswith("sql: rank 4, 14 layers")


def test_an_adapter_in_the_place_of_a_model_names_its_base(tuned: Path, tmp_path: Path) -> None:
    advice = f"it is an adapter of org/model: speculon serve --model org/model --adapter NAME={tuned}"
    with pytest.raises(ModelNotFound) as caught:
        LLM(str(tuned))
    assert str(caught.value) == f"{tuned}: no config.json; {advice}"
    refused = write_adapter(tmp_path / "a", tiny_model("llama"), use_dora=True)
    done = speculon("inspect", str(refused))
    assert done.exit_code == 2 and "use_dora = True" in " ".join(done.stdout.split())
