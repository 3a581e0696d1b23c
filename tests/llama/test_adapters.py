"""LoRA adapters in GGUF files: each request computes under its own, alone or beside others."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from speculon import LLM
from speculon.core.errors import UnknownModel
from tests.llama.build import adapters_of, file_of
from tests.llama.conftest import TOY, Toy
from tests.llama.test_drafts import GREEDY, PLAIN, PROMPTS, toy_of, with_lies

RANK, WIDTH = 4, 32


def write_adapter(
    path: Path, seed: int, architecture: str = "llama", layers: tuple[int, ...] = (0, 1)
) -> Path:
    chance = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in layers:
        for name, width in (("attn_q", WIDTH), ("ffn_down", 64)):
            a = chance.normal(size=(RANK, width)).astype(np.float32)
            b = chance.normal(size=(WIDTH, RANK)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", b)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def check_adapters(llm: LLM) -> None:
    """Requests of several adapters have their own texts, alone and together, with drafts and without."""
    names = ["a", "b", "", "a"]
    alone = [
        llm.generate([prompt], GREEDY, speculation=PLAIN, adapter=name)[0].token_ids
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    together = llm.generate(PROMPTS, GREEDY, speculation=PLAIN, adapter=names)
    assert [out.token_ids for out in together] == alone
    own = [
        {
            "method": "prediction",
            "policy": "fixed",
            "num_speculative_tokens": 4,
            "prediction": with_lies(text),
        }
        for text in alone
    ]
    drafted = llm.generate(PROMPTS, GREEDY, speculation=own, adapter=names)
    assert [out.token_ids for out in drafted] == alone
    base = llm.generate(PROMPTS, GREEDY, speculation=PLAIN)
    assert [out.token_ids == text for out, text in zip(base, alone, strict=True)] == [
        False,
        False,
        True,
        False,
    ]
    llm.engine.check_integrity()


def test_what_was_computed_under_one_is_not_found_by_another() -> None:
    own = {**TOY, "max_context": 128}
    with LLM(str(file_of("llama")), tokenizer=None, adapters=adapters_of("llama"), **own) as llm:

        def cached(adapter: str) -> int:
            return llm.generate([PROMPTS[2]], GREEDY, adapter=adapter)[0].outputs[0].stats.cached_tokens

        assert [cached(name) for name in ("", "one", "two", "one")] == [0, 0, 0, len(PROMPTS[2]) - 1]
        with pytest.raises(UnknownModel, match="adapter"):
            cached("three")


def test_a_restored_state_is_that_of_its_own(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted rows are computed again, each sequence's under its adapter."""
    monkeypatch.setattr("speculon.runtimes.llama.backend.ROLLBACK", 0)
    files = [write_adapter(tmp_path / f"{seed}.gguf", seed, "lfm2", layers=(1,)) for seed in range(2)]
    adapters = {name: str(file) for name, file in zip("ab", files, strict=True)}
    with LLM(toy_of("lfm2", toy), tokenizer=None, adapters=adapters, **TOY) as llm:
        check_adapters(llm)
