"""Greedy tokens against the stock model's own greedy loop: plain, with drafts, and in a batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from speculon.core.config import EngineConfig, SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.runtime import TorchRuntime

TIE = 1e-4  # nat: where two tokens are closer, the order of additions decides between them
TOKENS, K, FIRST = 24, 3, 3  # tokens of a text, drafts per round, and the first id that is no special token
PROMPTS = (5, 17, 1, 30)  # lengths


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, what the stock model writes after it, and how far each token is ahead of the second best."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # nat


@dataclass(frozen=True, slots=True)
class Found:
    """The first token that differs, in words, or none; and how many drafts were verified."""

    difference: str | None
    drafted: int
    accepted: int


def compare(model: PreTrainedModel, target: Target) -> Found:
    """`target` was made from `model`."""
    texts = [stock_text(model, prompt) for prompt in prompts_of(model, target)]
    plain: dict[str, Any] = {"method": "off"}
    lookups = [lookup(text, i) for i, text in enumerate(texts)]
    mixed = [plain, *lookups[1:-1], {"method": "ngram", "num_speculative_tokens": K}]
    arms = {
        "plain": [([text], [plain]) for text in texts],
        "with drafts": [([text], [asked]) for text, asked in zip(texts, lookups, strict=True)],
        "in a batch": [(texts, mixed)],
    }
    drafted = accepted = 0
    for arm, runs in arms.items():
        for together, requested in runs:
            config = settings()
            engine = Engine(TorchRuntime(target, None, config), None, config)
            ids = [add(engine, text, asked) for text, asked in zip(together, requested, strict=True)]
            outputs, counts = drain(engine)
            drafted, accepted = drafted + counts[0], accepted + counts[1]
            for text, name in zip(together, ids, strict=True):
                if wrong := difference(text, outputs[name]):
                    return Found(f"{arm}: {wrong}", drafted, accepted)
    return Found(None, drafted, accepted)


def prompts_of(model: PreTrainedModel, target: Target) -> list[list[int]]:
    size, chance = min(target.vocab_size, len(model.get_input_embeddings().weight)), random.Random(0)
    return [[chance.randrange(FIRST, size) for _ in range(length)] for length in PROMPTS]


@torch.inference_mode()
def stock_text(model: PreTrainedModel, prompt: list[int]) -> Text:
    """One forward over the whole text per token, without a cache."""
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(TOKENS):
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
        best = logits.float().log_softmax(-1).topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Text(prompt, tokens, gaps)


def lookup(text: Text, number: int) -> dict[str, Any]:
    """Drafts from the true text with every fifth token changed, so that some are rejected."""
    expected = [token + 1 if (i + number) % 5 == 4 else token for i, token in enumerate(text.tokens)]
    highest = max(text.tokens)
    return {
        "method": "ngram",
        "num_speculative_tokens": K,
        "prediction": tuple(min(token, highest) for token in expected),
    }


def settings() -> EngineConfig:
    return EngineConfig(
        block_size=4, num_blocks=96, max_batch_tokens=24, warmup=False, speculation={"policy": "fixed"}
    )


def add(engine: Engine, text: Text, speculation: dict[str, Any]) -> str:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return engine.add_request(text.prompt, params, speculation)


def drain(engine: Engine) -> tuple[dict[str, list[int]], tuple[int, int]]:
    """Each request's tokens, and how many drafts were verified and accepted."""
    outputs: dict[str, list[int]] = {}
    drafted = accepted = 0
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.tokens)
            if event.stats is not None:
                drafted += event.stats.drafted_at.total()
                accepted += event.stats.accepted
    engine.check_integrity()
    return outputs, (drafted, accepted)


def difference(text: Text, tokens: list[int]) -> str | None:
    """Where the tokens leave the stock model's; None where they do not, or at a tie."""
    if len(tokens) != len(text.tokens):
        return f"{len(tokens)} tokens instead of {len(text.tokens)}"
    for place, (ours, true, gap) in enumerate(zip(tokens, text.tokens, text.gaps, strict=True)):
        if ours != true:
            if gap < TIE:
                return None
            return f"token {place} after {len(text.prompt)} is {ours}, stock {true} by {gap:.2g} nat"
    return None
