"""Random small models and adapters, and the GGUF files of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import gguf_files
from tests.tiny.gguf_files import ALL, ROTATED, SPECIAL, permuted, tiny, write_gguf
from tests.tiny.test_gguf_architectures import FIRST

# What llama.cpp cannot take, or leaves out: keys and values of two widths, and heads narrower than their
# three axes of positions; windows of these architectures, which it knows and does not use.
OTHERWISE = {
    **dict.fromkeys(("qwen35", "qwen35moe"), {"linear_key_head_dim": 16, "head_dim": 64}),
    **dict.fromkeys(("mistral", "phi3"), {"sliding_window": None}),
}


class SmallModel(NamedTuple):
    model_type: str
    config: dict[str, Any]
    quantise: str = "F32"  # the type of its matrices
    settings: dict[str, Any] = {}


SAVED, IN_8_BITS = "lfm2, saved states", "llama, 8 bits"
# One of each architecture; as where llama.cpp cannot undo rows in place; and one whose rows have equal bits
# together and alone, where the chip's kernels allow it.
TARGETS = {
    **{name: SmallModel(of.model_type, of.config | OTHERWISE.get(name, {})) for name, of in FIRST.items()},
    SAVED: SmallModel(FIRST["lfm2"].model_type, FIRST["lfm2"].config),
    IN_8_BITS: SmallModel("llama", {}, "Q8_0", {"flash_attention": "on"}),
}
RECURRENT = ("lfm2", "qwen35", "qwen35moe", SAVED)


def stock_of(small: SmallModel) -> PreTrainedModel:
    """The model as transformers has it, with weights as they are in the file."""
    model, kind = tiny(small.model_type, **small.config), gguf.GGMLQuantizationType[small.quantise]
    for weight in model.parameters():
        if weight.dim() > 1:
            data = gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind)
            weight.data = torch.from_numpy(data).reshape(weight.shape)
    return model


class Lora(NamedTuple):
    seed: int
    rank: int
    alpha: float
    modules: tuple[str, ...]


LORA = {
    "one": Lora(1, 4, 8.0, ("q_proj", "down_proj")),
    "two": Lora(2, 3, 6.0, ("q_proj", "v_proj", "up_proj")),
}


def updates(model: PreTrainedModel, lora: Lora) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in] and B [out, rank] of each weight that an adapter changes, by its name."""
    chance, found = torch.Generator().manual_seed(lora.seed), {}
    for name, weight in model.state_dict().items():
        if name.split(".")[-2] in lora.modules:
            rows, columns = weight.shape
            sizes = (lora.rank, columns), (rows, lora.rank)
            a, b = (torch.randn(size, generator=chance) * 0.3 for size in sizes)
            found[name] = a, b
    return found


def with_lora(model: PreTrainedModel, lora: Lora) -> PreTrainedModel:
    """Adds an adapter to the weights of a model."""
    state = model.state_dict()
    for name, (a, b) in updates(model, lora).items():
        state[name] += lora.alpha / lora.rank * b @ a
    return model


def write_lora(path: Path, model: PreTrainedModel, lora: Lora) -> Path:
    """An adapter as llama.cpp's converter would write it."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf_files.ARCHITECTURES.get(config.model_type, config.model_type))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", lora.alpha)
    for name, (a, b) in updates(model, lora).items():
        if heads := ROTATED.get(name.split(".")[-2]):
            b = permuted(b, getattr(config, heads))
        own = gguf_files.gguf_name(config, name)
        writer.add_tensor(f"{own}.lora_a", a.numpy())
        writer.add_tensor(f"{own}.lora_b", b.contiguous().numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def reordered(folder: Path, seed: int = 0, lacking: int = 0) -> Path:
    """The random model with its tokens, but for special ones, under other ids, and without some of them."""
    special, others = range(len(SPECIAL)), range(len(SPECIAL), len(ALL))
    order = [*special, *random.Random(3).sample(others, len(others))]
    tokens = [ALL[token] for token in order]
    tokens[len(tokens) - lacking :] = [chr(0xC0 + i) for i in range(lacking)]
    model = tiny("llama", seed)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "ALL", tuple(tokens))
        return write_gguf(model, folder / "reordered.gguf")
