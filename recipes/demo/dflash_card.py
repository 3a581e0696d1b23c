"""The block drafter's card, and its record without this machine's paths."""

import argparse
import json

from eagle3_card import tidied

from speculon.drafters.dflash.config import read_dflash
from speculon.drafters.formats import open_source

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: code
library_name: speculon
tags: [python, speculative-decoding, dflash, demo]
---

# speculon demo block drafter

{layers} layers, {millions:.1f} M parameters: it reads the hidden states of the demo target beside it and \
drafts for it, {drafts} tokens in one call; it is of no use alone. DSpark in the layout of its authors, that \
is DFlash whose drafts depend on those before: blocks of {block} rows, hidden size {hidden}, intermediate \
size {intermediate}, a Markov head of type {markov} and rank {rank}. Embeddings and output head are the \
target's, and not in the file. It reads the outputs of the target's layers {taps}.

## How it was made

`speculon train dspark` on {answers:,} tokens that the target wrote greedily after beginnings of training \
files, cut where they begin to repeat themselves. What they were written after is read, not learned: a block \
is drafted before its tokens are known, and only a greedy text is the one that the target would write. In \
each row of {length} tokens it learned {anchors} blocks a step; the loss is the divergence from the target's \
own distribution. Corpus, licence and held-out files are those of the target's card.

## Measures

| measure | value |
|---|---|
| greedy texts after held-out files: drafts 1, 2, ... are right, with all before them | {chain} |
{tried}| tokens seen in training | {seen:,} |
| optimizer steps | {optimizer_steps:,} |
| training time, at most one thread of a shared CPU | {minutes:.0f} minutes |

## Make it again

    python recipes/demo/dflash.py --target TARGET --stdlib STDLIB --out DRAFTER --minutes {limit:g}

The options for learning were the recipe's own; `training.json` beside this file lists them.
"""
TRIED = """| tokens per target call in the engine, {drafts} drafts a round, {prompts} held-out prompts | \
{each:.2f} |
"""


def finish(args: argparse.Namespace, files: int) -> None:
    """README.md, and training.json with the corpus in the place of paths."""
    folder = args.out
    record = json.loads((folder / "training.json").read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    block = read_dflash(open_source(folder))
    settings, tried = record["settings"], record.get("evaluation")
    card = CARD.format(
        layers=config["num_hidden_layers"],
        millions=(folder / "model.safetensors").stat().st_size / 2e6,
        drafts=block.max_drafts,
        block=config["block_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        taps=", ".join(map(str, block.tap_ids or ())),
        answers=record["data"]["answer_tokens"] - files,
        markov=block.markov,
        rank=block.markov_rank,
        length=settings["length"],
        anchors=record["form"]["anchors"],
        chain=", ".join(f"{share:.0%}" for share in record["held_out"]["accuracy_full"]),
        tried=""
        if tried is None
        else TRIED.format(
            drafts=tried["drafts_per_round"], prompts=tried["prompts"], each=tried["tokens_per_target_call"]
        ),
        seen=record["tokens_seen"],
        optimizer_steps=record["steps"],
        minutes=record["minutes"],
        limit=settings["minutes"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    facts = tidied(record, args.stdlib, files, "drafter")
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
