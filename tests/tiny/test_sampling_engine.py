"""Sampling through the whole engine: the drawn tokens follow the target's law, and each parameter does what
it says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from speculon.core.config import SamplingParams
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.scripted import Request, Result, run, spell

PROMPT = [42, 58, 67, 89, 48, 70, 44]
DRAFTED = {"method": "ngram", "num_speculative_tokens": 4}


def write(prompt: list[int] = PROMPT, **params: Any) -> list[Result]:
    request = Request(
        prompt, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 5, **params}), DRAFTED
    )
    results = run(tiny_target("llama"), [request])
    return [results["r", i] for i in range(request.params.n)]


def text(**params: Any) -> list[int]:
    return write(**params)[0].tokens


def first_probs(temperature: float) -> torch.Tensor:
    with torch.inference_mode():
        return (tiny_model("llama")(torch.tensor([PROMPT])).logits[0, -1].double() / temperature).softmax(-1)


def test_first_tokens_follow_the_softmax_of_the_stock_model() -> None:
    """Over 1,024 samples of 16 requests with different seeds."""
    requests = [
        Request(
            PROMPT,
            SamplingParams(n=64, max_tokens=1, temperature=1.5, ignore_eos=True, seed=seed),
            None,
            f"r{seed}",
        )
        for seed in range(16)
    ]
    results = run(tiny_target("llama"), requests, max_num_seqs=64)
    counts = Counter(result.tokens[0] for result in results.values())
    p = first_probs(1.5)
    likely = [i for i in range(96) if float(p[i]) * len(results) >= 5]
    expected = torch.tensor([*(float(p[i]) for i in likely), 1 - sum(float(p[i]) for i in likely)]) * len(
        results
    )
    found = torch.tensor([*(counts[i] for i in likely), len(results) - sum(counts[i] for i in likely)])
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert len(likely) > 5 and chi2.sf(statistic, len(likely)) > 1e-3
    assert chi2.sf(float(((found.roll(1) - expected) ** 2 / expected).sum()), len(likely)) < 1e-6  # the twin


def test_samples_differ_and_come_again() -> None:
    texts = [tuple(result.tokens) for result in write(n=6)]
    assert len(set(texts)) == 6
    assert [tuple(result.tokens) for result in write(n=6)] == texts
    assert [tuple(result.tokens) for result in write(n=2)] == texts[:2]
    assert text() == list(texts[0])


def test_without_a_seed_every_request_draws_its_own() -> None:
    assert len({tuple(text(seed=None)) for _ in range(4)}) == 4


def test_seeds_of_any_size_give_different_outputs() -> None:
    seeds = [0, 1, 2, -1, -(2**63), 2**63 - 1, 2**32, 2**32 + 1, -2]
    assert len({tuple(text(seed=seed)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 1e-50}],
    ids=str,
)
def test_the_narrowest_choice_is_greedy(params: dict[str, Any]) -> None:
    assert text(**params) == text(temperature=0.0)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}], ids=str)
def test_filters_keep_what_they_say(params: dict[str, Any]) -> None:
    """Every written token is one of those that the stock model's own distribution allows."""
    tokens = text(**params)
    with torch.inference_mode():
        logits = tiny_model("llama")(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
    for token, p in zip(tokens, logits.softmax(-1), strict=True):
        before = float(p[p > p[token]].sum())
        rank = int((p > p[token]).sum())
        assert rank < params.get("top_k", 96) and before < params.get("top_p", 1) + 1e-6
        assert float(p[token]) >= params.get("min_p", 0) * float(p.max()) - 1e-6
    assert tokens != text(temperature=0.0)


def test_a_bias_forces_and_forbids() -> None:
    assert text(logit_bias={7: 1000.0}) == [7] * 20
    free = text()
    forbidden = dict.fromkeys(free, -1000.0)
    assert not set(text(logit_bias=forbidden)) & set(free)


@pytest.mark.parametrize(("length", "temperature"), [(1, 1.0), (2, 0.0), (3, 1.0)])
def test_bad_words_are_never_completed(length: int, temperature: float) -> None:
    """Each text is kept from its own most recent words, again and again."""
    words: list[str] = []
    for _ in range(6):
        tokens = text(temperature=temperature, bad_words=tuple(words))
        assert not any(word in spell(tokens) for word in words)
        words.append(spell(tokens[5 : 5 + length]))
    assert len(set(words)) == 6


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    first = text(temperature=0.0)[0]
    word = spell([PROMPT[-1], first])
    assert text(temperature=0.0, bad_words=(word,))[0] != first


def test_penalties_drive_repetition_out_and_rewards_bring_it_in() -> None:
    repeats = {name: 60 - len(set(text(max_tokens=60, **params))) for name, params in PENALTIES.items()}
    assert repeats["presence"] < repeats["none"] > repeats["frequency"]
    assert repeats["repetition"] < repeats["none"] < repeats["reward"]


PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "presence": {"presence_penalty": 2.0, "temperature": 1.0},
    "frequency": {"frequency_penalty": 2.0},
    "repetition": {"repetition_penalty": 3.0},
    "reward": {"frequency_penalty": -2.0},
}


def test_the_first_token_feels_the_repetition_penalty_of_the_prompt_and_no_other() -> None:
    changed = 0
    for start in range(3, 60, 3):
        prompt = list(range(start, start + 36))
        with torch.no_grad():
            x = tiny_model("llama")(torch.tensor([prompt])).logits[0, -1]
        best = int(x.argmax())
        x[prompt] = torch.where(x[prompt] > 0, x[prompt] / 3, x[prompt] * 3)
        changed += int(x.argmax()) != best
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
        assert write(prompt, **settings, presence_penalty=2.0, frequency_penalty=2.0)[0].tokens == [best]
        assert write(prompt, **settings, repetition_penalty=3.0)[0].tokens == [int(x.argmax())]
    assert changed > 3
