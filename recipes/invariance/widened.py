"""Writes the demo model with wider MLPs, whose added columns change no logit.

python -m recipes.invariance.widened FOLDER --millions 85
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer

STEP = 8  # columns: kernels are slow on odd widths
MILLION = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--millions", type=int, default=85)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(locate("demo"), dtype=torch.bfloat16)
    widened(model, arguments.millions).save_pretrained(arguments.folder)
    load_tokenizer("demo").save_pretrained(arguments.folder)


@torch.no_grad()
def widened(model: nn.Module, millions: int) -> nn.Module:
    """The same function with that many million parameters: the added columns are computed and add nothing."""
    config = model.config
    per_column = 3 * config.hidden_size * config.num_hidden_layers  # of gate, up and down
    columns = (millions * MILLION - model.num_parameters()) // per_column // STEP * STEP
    if columns < STEP:
        raise SystemExit(f"the model has {model.num_parameters() / MILLION:.1f} million parameters already")
    config.intermediate_size += columns
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in wide.named_parameters():
        own = model.get_parameter(name)
        if weight.shape != own.shape and "down_proj" in name:
            weight.zero_()
        weight[tuple(map(slice, own.shape))] = own
    return wide


if __name__ == "__main__":
    main()
