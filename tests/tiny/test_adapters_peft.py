"""Adapters that peft wrote, against peft's own texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.runtimes.torch.loading.load import wrap_model
from tests.tiny.adapter_files import with_adapters, write
from tests.tiny.conftest import tiny_model
from tests.tiny.scripted import Request

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft.*")
TOKENS = 24
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "some": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 3},
    },
}
# whose weights are transposed, as peft has to be told
GPT2 = {
    "all": {**CONFIGS["all"], "fan_in_fan_out": True},
    "some": {
        **CONFIGS["some"],
        "fan_in_fan_out": True,
        "target_modules": ["c_attn", "c_proj"],
        "rank_pattern": {"c_attn": 5},
        "alpha_pattern": {r"h\.1\.mlp\.c_proj": 3},
    },
}


def saved(model: PreTrainedModel, folder: Path, seed: int, config: dict[str, Any]) -> PeftModel:
    """An adapter of random numbers, written by peft and read again by it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = get_peft_model(
            copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        )
    made.save_pretrained(folder)
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    return list(map(int, out[0, len(prompt) :]))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_texts_are_those_of_peft(name: str, tmp_path: Path) -> None:
    stock = tiny_model(name)
    models: dict[str, Any] = {"": stock}
    for seed, (adapter, config) in enumerate((GPT2 if name == "gpt2" else CONFIGS).items()):
        models[adapter] = saved(stock, tmp_path / adapter, seed, config)
    target = with_adapters(
        wrap_model(stock, name=name, share=False), {adapter: tmp_path / adapter for adapter in CONFIGS}
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    requests = [
        (Request([3 + i, 5, 7, 9, 11 + i, 20, 31][: 3 + i], params, drafts, f"r{i}"), [*models][i % 3])
        for i in range(5)
    ]
    results = write(target, requests)
    for request, adapter in requests:
        assert results[request.id].tokens == generated(models[adapter], request.prompt), adapter
    texts = {adapter: generated(model, [3, 5, 7]) for adapter, model in models.items()}
    assert len({tuple(text) for text in texts.values()}) == 3
