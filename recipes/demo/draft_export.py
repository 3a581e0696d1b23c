"""Write the draft's folder and its card."""

import json
from pathlib import Path

import export
from model import TrainableQwen3
from tokenizers import Tokenizer

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: code
library_name: transformers
tags: [python, speculative-decoding, demo]
---

# speculon demo draft

{num_hidden_layers} layers, {millions:.1f} M parameters: it drafts for the demo target beside it, and is of \
no use alone. Qwen3 (`Qwen3ForCausalLM`), hidden size {hidden_size}, intermediate size {intermediate_size}, \
the target's tokenizer and vocabulary, tied embeddings that began as the target's, bf16.

## How it was made

Distilled from the target: the loss is the cross-entropy to the target's own distribution, mixed with its \
best token, on {written_tokens:,} tokens that the target wrote after beginnings of training files (greedily \
and at temperatures 0.7 and 1.0, cut where they begin to repeat themselves), and on the stream the target \
was trained on. Corpus, licence and held-out files are those of the target's card.

## Measures

On texts that the target wrote after *held-out* files, cut where they begin to repeat themselves:

| measure | value |
|---|---|
| best token equals the target's, {probe_tokens[greedy]:,} tokens of greedy texts | {agreement_greedy:.1%} |
| mean of sum min(p, q), {probe_tokens[sampled]:,} tokens of texts at temperature 1 | \
{agreement_sampled:.1%} |
| context up to which it drafts (`max_position_embeddings`) | {reach} tokens |
| tokens seen in training | {train_tokens:,} |
| optimizer steps | {steps:,} |
| training time, one thread of a shared CPU | {minutes:.0f} minutes |

## Make it again

    python recipes/demo/draft.py --target TARGET --stdlib STDLIB --out DRAFT --minutes {minutes:g} --layers \
{layers}

Its other options were the defaults; `training.json` beside this file lists them. The target first writes \
for about ten minutes, which are not counted above.
"""


# of the length it was trained on: 98 drafts in 57 rounds at 1.25 of it, 8 in 144 at 1.6 (demo-draft, K = 4)
REACH = 1.25


def export_draft(model: TrainableQwen3, target: Path, folder: Path, facts: dict) -> None:
    """The folder of a draft, with the target's tokenizer; its config names the context that it drafts in."""
    export.export_model(model, Tokenizer.from_file(str(target / "tokenizer.json")), folder)
    reach, config = (
        round(REACH * facts["options"]["length"]),
        json.loads((folder / "config.json").read_text()),
    )
    config["max_position_embeddings"] = reach
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(
        CARD.format(**vars(model.config), **facts, millions=millions, reach=reach), encoding="utf-8"
    )
