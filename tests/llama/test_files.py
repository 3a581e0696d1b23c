"""Files and settings that runtime llama cannot use are refused by name, before llama.cpp ends the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speculon import LLM, SamplingParams
from speculon.core.config import EngineConfig
from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    ModelError,
    ModelNotFound,
    SpeculonError,
    UnsupportedModel,
)
from speculon.runtimes.llama.memory import LENGTHS, bytes_per_token, plan_memory
from speculon.runtimes.llama.model import Rows
from speculon.runtimes.llama.runtime import measure
from speculon.runtimes.registry import chosen
from tests.llama.conftest import TOY, Toy
from tests.llama.test_drafts import GREEDY, PLAIN, PROMPTS, runtime_of, texts, with_lies
from tests.tiny.gguf_files import tiny, write_gguf

OWN = {"runtime": "llama", "warmup": False, "max_context": 256, "max_num_seqs": 2, "repack": False}


def test_a_truncated_file(toy: Toy, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(toy().read_bytes()[:-4000])
    with pytest.raises(CorruptWeights, match="truncated"):
        LLM(str(cut), **OWN)


def test_a_split_file(toy: Toy, tmp_path: Path) -> None:
    first = write_gguf(tiny("llama", max_position_embeddings=256), tmp_path / "model.gguf", split=5)
    with LLM(str(toy()), **TOY) as llm:
        expected, weights = texts(llm, GREEDY, PLAIN), runtime_of(llm).plan.weights
    with LLM(str(first), **TOY) as llm:
        assert texts(llm, GREEDY, PLAIN) == expected and runtime_of(llm).plan.weights == weights
        assert runtime_of(llm).facts.name == "model"


def test_parts_that_are_wrong_are_named(tmp_path: Path) -> None:
    first = write_gguf(tiny("llama"), tmp_path / "model.gguf", split=5)
    _, second, *_, last = sorted(tmp_path.iterdir())
    with pytest.raises(UnsupportedModel, match=f"part 2 of 5; .* {first.name}"):
        LLM(str(second), **OWN)
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(CorruptWeights, match=f"{last.name}: .*truncated"):
        LLM(str(first), **OWN)
    last.unlink()
    with pytest.raises(ModelNotFound, match=f"{last.name}: no such file"):
        LLM(str(first), **OWN)


def test_a_model_without_a_tokenizer_takes_token_ids(toy: Toy, tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(toy().read_bytes().replace(b"gpt2", b"none"))
    with LLM(str(bare), **{**TOY, "tokenizer": None}) as llm:
        assert len(llm.generate([[5, 6]], GREEDY)[0].token_ids) > 1


def test_an_unknown_architecture(toy: Toy, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(toy().read_bytes().replace(b"llama", b"lxama"))
    with pytest.raises(UnsupportedModel, match="lxama"):
        LLM(str(other), **OWN)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime = 'llama'.*GGUF"):
        LLM(str(tmp_path), **OWN)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization": "int4"}, "quantization = 'int4' is a setting of runtime torch"),
        ({"compile": "now"}, "compile = 'now' is a setting of runtime torch"),
        (
            {"speculation": {"draft": "smollm2", "draft_quantization": "int8"}},
            "draft_quantization = 'int8' is a setting",
        ),
        ({"max_context": 1 << 20}, "max_context = 1048576: .* reaches [0-9]+$"),
        ({"tensor_split": (1.0, -1.0)}, "tensor_split"),
        ({"device": "cuda:1"}, "gpu_layers"),
        ({"device": "cpu", "gpu_layers": 2}, "leaves none for a GPU"),
        ({"speculation": {"method": "eagle3"}}, "method = 'eagle3' needs runtime torch"),
        ({"speculation": {"draft": "smollm2-eagle3"}}, "needs runtime torch"),
        ({"adapters": {"a": "folder"}}, "adapter 'folder' needs runtime torch"),
        ({"kv_memory_gb": 1e-6}, "a sequence of 256 tokens takes"),
        ({"kv_cache_type": "q8_0", "flash_attention": "off"}, "q8_0"),
    ],
)
def test_settings_that_it_cannot_follow(toy: Toy, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SpeculonError, match=why):
        LLM(str(toy()), **{**OWN, **settings})


def test_auto_takes_it_for_a_gguf_file_unless_a_setting_needs_torch(toy: Toy) -> None:
    path = str(toy())
    assert chosen(EngineConfig(model=path)) == "llama"
    assert chosen(EngineConfig(model=path, dtype="float32")) == "torch"
    assert chosen(EngineConfig(model=path, speculation={"method": "mtp"})) == "torch"
    assert chosen(EngineConfig(model="some/folder")) == "torch"
    with pytest.raises(ConfigError, match="gpu_layers = 3 is a setting of runtime llama, and dtype"):
        chosen(EngineConfig(model=path, gpu_layers=3, dtype="float32"))
    with pytest.raises(ConfigError, match="runtime = 'torch': mmap"):
        chosen(EngineConfig(model=path, runtime="torch", mmap=False))


def test_the_memory_plan(toy: Toy) -> None:
    from speculon.checkpoints.gguf.header import read_gguf

    header = read_gguf(toy(max_position_embeddings=128))
    each = bytes_per_token(header, "f16")
    assert each == 2 * 2 * 2 * 8 * 2  # layers, heads, K and V, width, bytes
    config = EngineConfig(model="x", max_num_seqs=8, kv_memory_gb=5 * LENGTHS * each / 2**30)
    plan = plan_memory(header, config, 2**34)
    assert (plan.streams, plan.length) == (5, 128), "one of 128 tokens takes 256 in llama.cpp"
    with pytest.raises(ConfigError, match="max_context"):
        plan_memory(header, EngineConfig(model="x", max_context=10**9), 2**30)


def test_what_it_tells_of_itself(toy: Toy) -> None:
    with LLM(str(toy()), **TOY) as llm:
        table = llm.engine.capabilities()
        assert table["batch_invariant"].status == "off" and "rows" in table["batch_invariant"].limits
        assert table["rollback.streams"].status == "on" and table["images"].status == "refused"
        assert table["methods.eagle3"].status == "off"
        assert runtime_of(llm).describe()["supported"]


class Kernels:
    """A model with one stream whose logits lack their last bit in spans of more than `exact` rows."""

    vocab_size, recurrent = 50, False

    def __init__(self, exact: int):
        self.exact = exact

    def run(self, parts: list[Rows]) -> tuple[torch.Tensor, float]:
        (part,) = parts
        places = torch.arange(part.start + part.scored, part.start + len(part.tokens))
        logits = (1 + places[:, None]) / torch.arange(1, 1 + self.vocab_size)
        return logits * (1 if part.outputs <= self.exact else 1 + 2**-23), 0.0

    def cut(self, stream: int, length: int) -> None: ...


@pytest.mark.parametrize("exact", [1, 2, 3, 4])
def test_rows_are_equal_to_the_last_bit(exact: int) -> None:
    assert measure(Kernels(exact), SimpleNamespace(streams=[0]))[0] == exact  # type: ignore[arg-type]


def test_a_kv_cache_of_8_bits(toy: Toy) -> None:
    own = {**OWN, "kv_cache_type": "q8_0", "flash_attention": "on"}
    with LLM(str(toy(head_dim=32, hidden_size=128)), tokenizer=None, **own) as llm:
        plain = texts(llm, GREEDY, PLAIN)
        predicted = [{"prediction": with_lies(text), "policy": "fixed"} for text in plain]
        outs = llm.generate(PROMPTS, GREEDY, speculation=predicted)
        assert sum(out.speculation.accepted for out in outs) > 0
        # two may part at near-ties: numbers of 8 bits are coarse, and rows of a draft are computed together
        assert sum(out.token_ids == text for out, text in zip(outs, plain, strict=True)) >= 2


def test_images_are_refused(toy: Toy) -> None:
    with LLM(str(toy()), **TOY) as llm, pytest.raises(SpeculonError, match="image"):
        llm.generate([{"prompt": "x", "images": [b"no image"]}], SamplingParams(max_tokens=1))


def test_an_adapter_of_another_model(toy: Toy) -> None:
    with pytest.raises(ModelError, match="adapter"):
        LLM(str(toy()), adapters={"a": str(toy(seed=1))}, **TOY)
