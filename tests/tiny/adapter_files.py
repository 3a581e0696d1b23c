"""LoRA adapters in peft's format with random numbers, targets that have some, and what a stock model says."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculon.checkpoints.adapter_config import read_adapter
from speculon.core.config import SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.loading.adapters import add_adapters
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from tests.formats.writer import write_checkpoint
from tests.tiny.conftest import tiny_model
from tests.tiny.scripted import Request, Result, drain, make_engine

FEW = ("q_proj", "v_proj", "down_proj", "query_key_value", "qkv_proj")
NAMES = ("", "one", "two")  # the base, and the adapters of `adapted`


def linear_shapes(model: nn.Module, ends: tuple[str, ...] | None = None) -> dict[str, tuple[int, ...]]:
    """The linear layers of a model but its head and experts; with `ends`, those with such last names."""
    found = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    inner = {n: m for n, m in found.items() if n not in ("lm_head", "embed_out") and ".experts." not in n}
    return {
        name: tuple(module.weight.shape)
        for name, module in inner.items()
        if ends is None or name.rpartition(".")[2] in ends
    }


def write_adapter(
    folder: Path,
    model: nn.Module,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 6.0,
    ends: tuple[str, ...] | None = None,
    **config: Any,
) -> Path:
    """An adapter of all such layers, as peft would save it."""
    linears = linear_shapes(model, ends)
    sizes = {"rank": rank, "alpha": alpha, "linears": linears, "target_modules": list(ends or ())}
    return write_checkpoint(folder, "lora/peft", seed=seed, config=config, **sizes)


def stock_with(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The stock model with the updates of an adapter, added after each of its layers."""
    made = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")] * (config["lora_alpha"] / root)

            def add(module: Any, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                return out + args[0] @ a.to(out.dtype).T @ b.to(out.dtype).T

            made.get_submodule(name).register_forward_hook(add)
    return made


@cache
def folders(name: str) -> dict[str, Path]:
    """Two adapters for a tiny model: of all layers, and of some with another rank and scaling."""
    root, model = Path(mkdtemp()), tiny_model(name)
    return {
        "one": write_adapter(root / "one", model, 1),
        "two": write_adapter(root / "two", model, 2, rank=3, ends=FEW, use_rslora=True),
    }


def with_adapters(target: Target, paths: dict[str, Path]) -> Target:
    add_adapters(target, [read_adapter(name, path) for name, path in paths.items()])
    return target


def make_adapted(name: str, fused: bool = True, dtype: str = "float32") -> Target:
    """A tiny model with both adapters."""
    model = tiny_model(name)
    if dtype != "float32":
        model = copy.deepcopy(model).to(getattr(torch, dtype))
    return with_adapters(wrap_model(model, name=name, fused=fused, share=False), folders(name))


@cache
def adapted(name: str, fused: bool = True) -> Target:
    """The same for many tests. Treat it as read-only."""
    return make_adapted(name, fused)


def ask(engine: Engine, request: Request, adapter: str = "") -> None:
    engine.add_request(request.prompt, request.params, request.speculation, request.id, adapter=adapter)


def write(target: Target, requests: list[tuple[Request, str]], **settings: Any) -> dict[str, Result]:
    """Requests under their adapters in an engine of their own, by their ids."""
    engine = make_engine(target, **settings)
    for request, adapter in requests:
        ask(engine, request, adapter)
    return {name: result for (name, _), result in drain(engine).items()}


def differs_from_stock(model: PreTrainedModel, prompt: list[int], result: Result) -> float:
    """The largest difference of a greedy text's log-probabilities from those of a stock model; nat."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *result.tokens]])).logits[0].float().log_softmax(-1)
    rows = logits[len(prompt) - 1 : -1]
    expected = [float(row[token]) for row, token in zip(rows, result.tokens, strict=True)]
    return max(abs(a - b.logprob) for a, b in zip(expected, result.logprobs, strict=True))


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
