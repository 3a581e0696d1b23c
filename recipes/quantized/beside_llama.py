"""The perplexity of a GGUF file, here and in llama.cpp, over the same windows of the same text.

    python -m recipes.quantized.beside_llama FILE.gguf --text FILE.txt --llama build/bin/llama-perplexity

As llama-perplexity does: windows of 512 tokens, of which the second half is scored. recipes/peers/setup.sh
has the sources of llama.cpp; `cmake --build build --target llama-perplexity` makes the program.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
from pathlib import Path

import torch
from recipes.quantized.quality import log_probabilities
from torch import Tensor

from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config.speculation import Quantization
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.model.target import Target

WINDOW = 512
FIRST = WINDOW // 2  # the position whose successor is scored first
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+)")
HERE: tuple[tuple[Quantization, str], ...] = (("none", "float32"), ("auto", "bfloat16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=12)
    settings = parser.parse_args()
    windows = split(settings.model, settings.text, settings.windows)
    print("llama.cpp", in_llama(settings.llama, settings.model, settings.text, len(windows)), flush=True)
    for quantization, dtype in HERE:
        target = load_target(settings.model, quantization=quantization, dtype=dtype)
        print(quantization, dtype, round(perplexity(target, windows), 4), flush=True)


def split(model: Path, text: Path, count: int) -> list[Tensor]:
    """Windows of token ids; each begins with the token of the beginning, if the tokenizer adds one."""
    tokenizer = load_tokenizer(model)
    ids = torch.tensor(tokenizer(text.read_text()).input_ids)
    windows = list(ids[: len(ids) // WINDOW * WINDOW].split(WINDOW))[:count]
    if ids[0] == tokenizer.bos_token_id:
        windows = [torch.cat([ids[:1], window[1:]]) for window in windows]
    return windows


def perplexity(target: Target, windows: list[Tensor]) -> float:
    losses = []
    for ids in windows:
        scores = log_probabilities(target, ids)
        losses.append(-scores[FIRST:-1].gather(1, ids[FIRST + 1 :, None]))
    return math.exp(torch.cat(losses).mean())


def in_llama(program: Path, model: Path, text: Path, windows: int) -> str:
    command = [program, "-m", model, "-f", text, "-c", str(WINDOW), "--chunks", str(windows)]
    done = subprocess.run([*map(str, command), "-t", "2"], capture_output=True, text=True, check=False)
    match = FINAL.search(done.stdout + done.stderr)
    return match[1] if match else f"failed: {done.stderr[-300:]}"


if __name__ == "__main__":
    main()
