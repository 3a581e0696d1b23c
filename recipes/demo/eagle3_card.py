"""The head's card, and its record without this machine's paths."""

import argparse
import json
from pathlib import Path

from manifest import manifest

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: code
library_name: speculators
tags: [python, speculative-decoding, eagle3, demo]
---

# speculon demo EAGLE-3 head

{layers} layer, {millions:.1f} M parameters: it reads the hidden states of the demo target beside it and \
drafts for it; it is of no use alone. EAGLE-3 in the speculators format, hidden size {hidden}, intermediate \
size {intermediate}, the target's whole vocabulary of {vocabulary:,} tokens, and its embeddings, which are \
not in the file. It reads the outputs of the target's layers {taps}.

## How it was made

`speculon train eagle3` on {answers:,} tokens that the target wrote after beginnings of training files \
(greedily and at temperatures 0.7 and 1.0, cut where they begin to repeat themselves; what they were \
written after counts {prompt_weight} of them), and {files:,} tokens of such files. It was trained on \
{steps} consecutive drafts, the training-time test of EAGLE-3; the loss is the divergence from the target's \
own distribution. Corpus, licence and held-out files are those of the target's card.

## Measures

| measure | value |
|---|---|
| greedy texts after held-out files: drafts 1, 2, ... are right, with all before them | {chain} |
| tokens per target call in the engine, {drafts} drafts a round, {prompts} held-out prompts | \
{per_call:.2f} |
| tokens seen in training | {seen:,} |
| optimizer steps | {optimizer_steps:,} |
| training time, at most one thread of a shared CPU | {minutes:.0f} minutes |

## Make it again

    python recipes/demo/eagle3.py --target TARGET --stdlib STDLIB --out HEAD --minutes {minutes:.0f}

The other options were the recipe's own; `training.json` beside this file lists them.
"""


def finish(args: argparse.Namespace, files: int) -> None:
    """README.md, and training.json with the corpus in the place of paths."""
    folder = args.out
    record = json.loads((folder / "training.json").read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    config["speculators_config"]["verifier"]["name_or_path"] = "demo"
    settings, tried, layer = record["settings"], record["evaluation"], config["transformer_layer_config"]
    card = CARD.format(
        layers=layer["num_hidden_layers"],
        millions=(folder / "model.safetensors").stat().st_size / 2e6,
        hidden=layer["hidden_size"],
        intermediate=layer["intermediate_size"],
        vocabulary=layer["vocab_size"],
        taps=", ".join(str(entered - 1) for entered in config["eagle_aux_hidden_state_layer_ids"]),
        answers=record["data"]["answer_tokens"] - files,
        prompt_weight=settings["prompt_weight"],
        files=files,
        steps=record["form"]["ttt"],
        chain=", ".join(f"{share:.0%}" for share in record["held_out"]["accuracy_full"]),
        drafts=tried["drafts_per_round"],
        prompts=tried["prompts"],
        per_call=tried["tokens_per_target_call"],
        seen=record["tokens_seen"],
        optimizer_steps=record["steps"],
        minutes=record["minutes"],
    )
    facts = tidied(record, args.stdlib, files, "head")
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def tidied(record: dict, stdlib: Path, files: int, form: str) -> dict:
    """The record with the corpus in the place of paths, and the drafter's own settings as `form`."""
    settings = record["settings"]
    paths = ("target", "data", "eval_data", "out", "work")
    shown = {name: value for name, value in settings.items() if name not in paths}
    kept = {name: value for name, value in record.items() if name not in ("settings", "form")}
    kept["sessions"] = [
        {name: value for name, value in one.items() if name != "argv"} for one in record["sessions"]
    ]
    own = {name: value for name, value in record["form"].items() if name not in settings}
    return {**kept, "settings": shown, form: own, "file_tokens": files, "corpus": manifest(stdlib)}
