"""A target small enough to enumerate, and what it should write, from the definitions alone (nothing of
decoding/sampling.py).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache

from speculon.core.config import SamplingParams

V = 4
Text = tuple[tuple[int, ...], str]  # the visible tokens, and how they ended
Distribution = dict[Text, float]


@cache
def toy_logits(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """Random eighths in [-2.5, 2.5], ties included; fp32 holds them exactly."""
    chance = random.Random(repr(prefix))
    return tuple(chance.randrange(-20, 21) / 8 for _ in range(V))


@dataclass(frozen=True)
class Case:
    """A request over the toy target."""

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: frozenset[int] = frozenset()
    prompt: tuple[int, ...] = field(default=(2, 0, 1))


def reference_probs(case: Case, output: tuple[int, ...]) -> list[float]:
    """The target's law for the next token: penalties, bias, bad words, min_tokens, temperature, top-k, top-p,
    min-p.
    """
    p, context = case.params, case.prompt + output
    x = list(toy_logits(context))
    for token in range(V):
        if token in context:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
        x[token] += p.logit_bias.get(token, 0.0)
    for word in case.bad_words:
        if len(context) >= len(word) - 1 and context[len(context) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for token in case.stop_ids:
            x[token] = -math.inf
    order = sorted(range(V), key=lambda token: (-x[token], token))
    if p.temperature == 0:
        return [float(token == order[0]) for token in range(V)]
    weight = [math.exp((x[token] - x[order[0]]) / p.temperature) for token in range(V)]
    kept = order[: p.top_k] if p.top_k > 0 else order
    total, reached, nucleus = sum(weight[token] for token in kept), 0.0, []
    for token in kept:
        if reached >= p.top_p:
            break
        nucleus.append(token)
        reached += weight[token] / total
    kept = [token for token in nucleus if weight[token] >= p.min_p * weight[order[0]]]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(V)]


def reference_texts(case: Case, output: tuple[int, ...] = ()) -> Distribution:
    """Every text the target itself can write, token by token, with its probability."""
    if len(output) == case.params.max_tokens:
        return {(output, "length"): 1.0}
    texts: Distribution = {}
    for token, chance in enumerate(reference_probs(case, output)):
        if not chance:
            continue
        if token in case.stop_ids and len(output) >= case.params.min_tokens:
            follow: Distribution = {(output, "stop"): 1.0}
        else:
            follow = reference_texts(case, (*output, token))
        for text, part in follow.items():
            texts[text] = texts.get(text, 0.0) + chance * part
    return texts


def distance(a: Distribution, b: Distribution) -> float:
    """The largest difference of any text's probability."""
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())
