"""Folders made in a test: a whole model with random weights and a tokenizer of its own, and a small library
of held-out files.
"""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from speculon.measure.bench import corpus
from tests.tiny.checkpoint import SPECIALS, byte_tokenizer
from tests.tiny.conftest import build

CONTEXT = 1024
TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "class Stack:\n    def __init__(self, items=None):\n        self.items = list(items or [])\n",
    "Repeat this function with `old` renamed to `new`.\n\n```python\n```\n",
    "for value in self.values:\n        raise ValueError(name)\n",
]


def make_folder(folder: Path) -> Path:
    """Greedy texts of this model soon repeat themselves, so that prompt lookup has something to find."""
    tokenizer = byte_tokenizer(TEXTS, 400)
    tokenizer.pad_token = SPECIALS[0]
    tokenizer.save_pretrained(folder)
    settings = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    model = build("llama", seed=1, **settings)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # sure of itself at temperature 1, too
        # the next token hangs mostly on the last one: texts run into circles
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    return folder


def heavy_draft(target: Path, folder: Path, layers: int = 2) -> Path:
    """A draft for the model in `target` with its tokenizer, and weights and pages that show in the memory of
    a process.
    """
    PreTrainedTokenizerFast.from_pretrained(target).save_pretrained(folder)
    # the vocabulary is padded
    sizes = {"vocab_size": 48_000, "hidden_size": 512, "head_dim": 512, "num_attention_heads": 2}
    build(
        "llama", max_position_embeddings=CONTEXT, eos_token_id=2, num_hidden_layers=layers, **sizes
    ).save_pretrained(folder)
    return folder


MODULE = '''"""Module {n} keeps values in order. It is written for tests, in plain words, so that there is \
some prose
to continue: every value has a name, every name has a place, and a place that is empty says so at once.
"""


def first_{n}(values, default=None):
    for value in values:
        return value
    return default


class Store{n}:
    """Keeps what it is given. A store of kind {n} hands its values out in the order in which they came, \
forgets
    nothing before it is told to, and refuses a value that it has seen already, naming the value.
    """

    def put(self, value):
        if value in self.values:
            raise ValueError(value)
        self.values.append(value)

    def take_{n}(self):
        return self.values.pop(0)
'''


def make_library(root: Path, files: int = 12) -> Path:
    """Files whose names make them held out, in the place of the standard library's."""
    root.mkdir()
    held_out = (n for n in count() if corpus.is_held_out(f"module_{n}.py"))
    for n in islice(held_out, files):
        (root / f"module_{n}.py").write_text(
            MODULE.format(n=n) + "\n\n".join(f"PLACE_{i} = {i * n}" for i in range(60))
        )
    return root
