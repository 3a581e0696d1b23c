"""The model card."""

from data import COPY_SHARE, SAMPLE_TASKS
from model import TrainableQwen3

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: code
library_name: transformers
tags: [python, speculative-decoding, demo]
---

# speculon demo target

A {millions:.1f} M parameter language model that writes Python. It exists so that speculative decoding can \
be tried, \
tested and measured anywhere, without a download: it is small, but it is a real model with a real chat \
template, and \
it is deep and thin, so that a forward pass costs enough for speculation to pay. It is no assistant: it \
knows nothing \
but the standard library, and what it says is not to be relied on.

## Shape

Qwen3 (`Qwen3ForCausalLM`): {num_hidden_layers} layers, hidden size {hidden_size}, {num_attention_heads} \
query heads \
and {num_key_value_heads} key-value heads of size {head_dim}, intermediate size {intermediate_size}, \
vocabulary \
{vocab_size}, tied embeddings, bf16. Byte-level BPE in which an identifier is the same token run wherever it \
stands. \
ChatML template; `<|im_end|>` and `<|endoftext|>` end a text; no token begins one. Trained on sequences of \
up to 1024 \
tokens.

## Training data

Source files of {source}, `test` package included, tables and generated files left out, under the {licence} \
licence.

| side | files | bytes | sha256 of the list of sha256s |
|---|---|---|---|
| training | {train[files]} | {train[bytes]:,} | `{train[sha256]}` |
| held out | {held_out[files]} | {held_out[bytes]:,} | `{held_out[sha256]}` |

A file is held out if a hash of its path says so: `measure.bench.corpus.is_held_out`. `training.json` \
beside this file \
lists the held-out files.

{copy_share:.0%} of the sequences are made of samples that teach copying and chat, drawn with these weights: \
{tasks}. All of them are made from functions of training files: the same function with a name changed \
(`edit`), the \
same function again (`repeat`), a function that comes back later in a document (`quoted`), random tokens \
repeated \
(`induction`), a function asked for by name (`write`).

## Measures

| measure | value |
|---|---|
| loss per token on all held-out files, windows of 1024 tokens | {val_loss:.3f} nats |
| edits of held-out functions (30 to 200 tokens) decoded exactly right, greedily | {edit_exact:.1%} of \
{edit_prompts} |
| tokens of those answers right, given the right ones before | {edit_tokens_right:.2%} |
| tokens seen in training | {train_tokens:,} |
| optimizer steps | {steps:,} |
| training time, two shared CPU cores | {minutes:.0f} minutes |

## Make it again

    python recipes/demo/train.py --out TARGET --stdlib STDLIB {length} --seed {seed} \\
        --stages {stages} --decay-from {decay_from}

`STDLIB` is the library folder of the Python named above.
{history}"""


def model_card(model: TrainableQwen3, facts: dict) -> str:
    """README.md of an exported model."""
    return CARD.format(
        **vars(model.config),
        **facts["corpus"],
        **{name: value for name, value in facts.items() if name not in ("corpus", "history")},
        length=f"--tokens {facts['train_tokens']}"
        if facts.get("ended_by") == "tokens"
        else f"--minutes {facts['minutes']:g}",
        history=f"\n## How this run went\n\n{facts['history']}\n" if "history" in facts else "",
        millions=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        copy_share=COPY_SHARE,
        tasks=", ".join(f"{name} {weight:.0%}" for name, weight in SAMPLE_TASKS.items()),
    )
