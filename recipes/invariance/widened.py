"""Writes the demo model with wider MLPs, whose added columns change no logit.

python -m recipes.invariance.widened FOLDER --millions 85
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from speculon.loading.locate import locate
from speculon.loading.reading import load_tokenizer
from speculon.measure.bench.widen import gated_mlps, parts, widen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--millions", type=int, default=85)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(locate("demo"), dtype=torch.bfloat16)
    widen(model, arguments.millions, "demo")
    model.config.intermediate_size = len(parts(next(gated_mlps(model)))[0].weight)
    model.save_pretrained(arguments.folder)
    load_tokenizer("demo").save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
