"""Checkpoints that other libraries quantised are read as numbers or refused, never wrong in silence."""

from __future__ import annotations

import copy
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from speculon.runtimes.torch.loading.load_check import paged_logits
from tests.rounding import assert_near
from tests.tiny.conftest import tiny_model

LARGEST = 448  # of float8_e4m3fn
SIDE = 16  # of a block
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SIDE, SIDE]}


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a weight [O, D]: in float8, its scales [O / 16, D / 16], and as numbers again."""
    rows, columns = weight.shape
    blocks = weight.view(rows // SIDE, SIDE, columns // SIDE, SIDE)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    q = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return q.view(rows, columns), scales, (q.float() * scales[:, None, :, None]).view(rows, columns)


def write(folder: Path, config: dict[str, Any] | None, scale: str) -> Any:
    """A checkpoint in float8 with scales of that name; returns the model with the same weights as numbers."""
    model = copy.deepcopy(tiny_model("llama"))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight"):
            tensors[name], scales, numbers = in_blocks(weight)
            tensors[name.replace("weight", scale)] = scales
            model.get_parameter(name).data.copy_(numbers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    if config is not None:
        settings["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(settings))
    return model


def test_fp8_in_blocks_is_computed_as_numbers(tmp_path: Path) -> None:
    expected = paged_logits(wrap_model(write(tmp_path, FP8, "weight_scale_inv")))
    target = load_target(tmp_path, dtype="float32")
    assert_near(paged_logits(target), expected, len(target.layers))
    assert "quantised by fp8, whose library made numbers of it" in target.notes


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "does not know the quantisation 'modelopt'"),
        (None, "ignores 14 scales of its weights, first model.layers.0.mlp.down_proj.weight_scale"),
        (FP8, "ignores 14 scales of its weights"),
    ],
    ids=["unknown method", "no method", "other scales"],
)
def test_weights_whose_scales_would_be_ignored_are_refused(
    config: dict[str, Any] | None, reason: str, tmp_path: Path
) -> None:
    """transformers loads them with a warning, and then each layer is wrong by its scales."""
    write(tmp_path, config, "weight_scale")
    with pytest.raises(UnsupportedModel, match=f"{re.escape(str(tmp_path))}: .*{reason}"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("method", "package"),
    [("gptq", "optimum"), ("awq", "gptqmodel"), ("compressed-tensors", "compressed-tensors")],
)
def test_a_missing_library_is_named(method: str, package: str, tmp_path: Path) -> None:
    if find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    write(tmp_path, {"quant_method": method, "bits": 4, "group_size": 128}, "scales")
    with pytest.raises(UnsupportedModel, match=package):
        load_target(tmp_path)


def test_a_scale_of_no_weight_is_ignored(tmp_path: Path) -> None:
    """As that of a KV cache: its module has no weight."""
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_target(tmp_path).runner.one_loop
