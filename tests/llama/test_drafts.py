"""Drafts over llama.cpp: they are accepted and rejected, and leave the text and the memory as they were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon import LLM, SamplingParams
from speculon.checkpoints.gguf.header import parse_once
from speculon.core.errors import EngineError, ModelError, WrongPair
from speculon.runtimes.llama.model import LlamaModel
from speculon.runtimes.llama.runtime import LlamaRuntime
from speculon.speculation.proposers.translation import Translation
from tests.llama.conftest import TOY, Toy
from tests.llama.toys import TARGETS, reordered

PROMPTS = [[5, 9, 13] * 4, [7] * 20, [*range(4, 60)], [20, 21]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
PLAIN = {"method": "off"}
PEAKED = 0.4  # weights of this size: some 50 pairs of first tokens are drawn five times in 1,500


def runtime_of(llm: LLM) -> LlamaRuntime:
    assert isinstance(llm.engine.runtime, LlamaRuntime)
    return llm.engine.runtime


def with_lies(tokens: list[int], every: int = 5) -> tuple[int, ...]:
    """The expected text with a wrong token now and then."""
    return tuple(
        (token + 1) % 90 + 4 if place % every == every - 1 else token for place, token in enumerate(tokens)
    )


def texts(llm: LLM, params: SamplingParams, speculation: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts, params, speculation=speculation)]


def check_drafts(llm: LLM, params: SamplingParams = GREEDY) -> None:
    plain = texts(llm, params, PLAIN)
    drafted = [
        {
            "method": "prediction",
            "policy": "fixed",
            "num_speculative_tokens": k,
            "prediction": with_lies(text),
        }
        for text, k in zip(plain, (1, 3, 7, 4), strict=True)
    ]
    outs = llm.generate(PROMPTS, params, speculation=drafted)
    assert [out.token_ids for out in outs] == plain
    stats = [out.speculation for out in outs]
    accepted, rejected = (sum(getattr(one, name) for one in stats) for name in ("accepted", "rejected"))
    assert accepted > 10 and rejected > 3, stats
    llm.engine.check_integrity()


def toy_of(name: str, toy: Toy) -> str:
    return str(toy(TARGETS[name].model_type, **TARGETS[name].config))


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_states_that_lie_in_another_order_go_back(name: str, toy: Toy) -> None:
    with LLM(toy_of(name, toy), tokenizer=None, prefix_cache=False, **TOY) as llm:
        for length in (7, 3, 9, 5, 2, 8):  # streams are given back in another order than they were taken
            texts(llm, GREEDY.model_copy(update={"max_tokens": length}), PLAIN)
        check_drafts(llm)


def test_a_state_that_cannot_go_back_is_restored(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculon.runtimes.llama.backend.ROLLBACK", 0)
    with LLM(toy_of("lfm2", toy), tokenizer=None, **TOY) as llm:
        assert runtime_of(llm).model.recurrent and not runtime_of(llm).model.rollback
        check_drafts(llm)
        assert llm.engine.counters.repair_ms > 0


def test_a_repair_that_fails_is_made_before_the_next_step(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(toy_of("lfm2", toy), tokenizer=None, **TOY) as llm:
        plain, calls = texts(llm, GREEDY, PLAIN), 0
        decode = LlamaModel.decode

        def failing(model: LlamaModel, parts: Any) -> torch.Tensor:
            nonlocal calls
            logits = decode(model, parts)
            calls += 1
            if calls in (2, 7, 11):  # after it was computed: what is in the memory must go
                calls += 1
                raise EngineError("the device is gone")
            return logits

        monkeypatch.setattr(LlamaModel, "decode", failing)
        engine, done = llm.engine, dict[str, list[int]]()
        for number, prompt in enumerate(PROMPTS):
            suffix = {"method": "suffix", "policy": "fixed"}
            engine.add_request(prompt, GREEDY, suffix, request_id=str(number))
        while engine.has_work:
            try:
                for event in engine.step():
                    done.setdefault(event.request_id, []).extend(event.tokens)
            except EngineError:
                continue
        assert [done[str(number)] for number in range(len(PROMPTS))] == plain


# draft models


def test_a_draft_model_that_is_the_target_is_always_right(toy: Toy) -> None:
    """Also where later sequences take over its streams, in another order."""
    path = str(toy())
    own = {"draft": path, "method": "draft_model", "policy": "fixed", "num_speculative_tokens": 3}
    prompts = [*PROMPTS, *([token] * 12 for token in (30, 40, 50, 60))]
    params = [GREEDY.model_copy(update={"max_tokens": 12 + 5 * (i % 3)}) for i in range(len(prompts))]
    with LLM(path, tokenizer=None, speculation=own, **TOY) as llm:
        plain = [out.token_ids for out in llm.generate(prompts, params, speculation=PLAIN)]
        outs = llm.generate(prompts, params)
        assert [out.token_ids for out in outs] == plain
        assert all(out.speculation.acceptance_rate == 1 for out in outs)


def test_each_file_is_read_once(toy: Toy) -> None:
    """A second vocabulary of the target would read its header anew."""
    read = parse_once.cache_info().misses
    with LLM(str(toy()), speculation={"draft": str(toy(seed=1))}, **TOY):
        assert parse_once.cache_info().misses == read + 2


@pytest.mark.parametrize("acceptance", ["block", "rejection", "matching"])
def test_sampled_output_has_the_targets_distribution(toy: Toy, acceptance: str) -> None:
    """The first two tokens of many samples, counted: chi-square against the product of the target's p."""
    check_distribution(toy, str(toy(seed=1)), acceptance)


def check_distribution(toy: Toy, draft: str, acceptance: str) -> None:
    own = {"draft": draft, "method": "draft_model", "policy": "fixed", "num_speculative_tokens": 2}
    path = toy(initializer_range=PEAKED)
    with LLM(str(path), tokenizer=None, speculation={**own, "acceptance": acceptance}, **TOY) as llm:
        assert surprise(llm) < 4.5


def test_planted_error_another_distribution_is_seen(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LlamaModel.decode
    own = {"draft": str(toy(seed=1)), "method": "draft_model", "policy": "fixed", "num_speculative_tokens": 2}
    with LLM(str(toy(initializer_range=PEAKED)), tokenizer=None, speculation=own, **TOY) as llm:
        expected = pairs(llm)
        target = runtime_of(llm).model

        def sharper(model: LlamaModel, parts: Any) -> torch.Tensor:
            return decode(model, parts) * (1.5 if model is target else 1.0)

        monkeypatch.setattr(LlamaModel, "decode", sharper)
        assert surprise(llm, expected) > 6


def pairs(llm: LLM) -> torch.Tensor:  # [V, V]
    """The probability of each pair of first tokens, by log-probabilities of single prompts."""
    size = llm.engine.runtime.facts.vocab_size
    all_of_them = SamplingParams(max_tokens=1, temperature=1.0, logprobs=size, ignore_eos=True)

    def law(prompts: list[list[int]]) -> torch.Tensor:
        rows = []
        for out in llm.generate(prompts, all_of_them, speculation=PLAIN):
            assert out.logprobs
            row = torch.full((size,), float("-inf"))
            for token, value in out.logprobs[0].top:
                row[token] = value
            rows.append(row.exp())
        return torch.stack(rows)

    first = law([PROMPTS[0]])[0]
    return first[:, None] * law([[*PROMPTS[0], token] for token in range(size)])


def surprise(llm: LLM, expected: torch.Tensor | None = None, draws: int = 1500) -> float:
    """How far the counts of pairs are from the expected ones: chi-square as standard deviations of a normal
    (Wilson and Hilferty 1931).
    """
    p = (pairs(llm) if expected is None else expected).flatten()
    params = SamplingParams(temperature=1.0, max_tokens=2, n=50, ignore_eos=True)
    seen = Counter[int]()
    size = llm.engine.runtime.facts.vocab_size
    for seed in range(draws // 50):  # fixed, so that a chip always draws the same ones
        (out,) = llm.generate([PROMPTS[0]], params.model_copy(update={"seed": seed}))
        seen.update(one.token_ids[0] * size + one.token_ids[1] for one in out.outputs)
    often = p * draws >= 5
    counts = torch.tensor([float(seen[pair]) for pair in range(len(p))])
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([p[often], p[~often].sum()[None]]) * draws
    chi = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    assert degrees > 30
    spread = 2 / (9 * degrees)
    return ((chi / degrees) ** (1 / 3) - 1 + spread) / spread**0.5


# draft models with another tokenizer


def acceptance_of(target: Path, draft: Path, params: SamplingParams) -> float:
    """Of drafts which change no text."""
    own = {"draft": str(draft), "method": "draft_model", "policy": "fixed", "num_speculative_tokens": 3}
    with LLM(str(target), tokenizer=None, speculation=own, **TOY) as llm:
        plain = texts(llm, params, PLAIN)
        outs = llm.generate(PROMPTS, params)
        assert [out.token_ids for out in outs] == plain
        llm.engine.check_integrity()
    stats = [out.speculation for out in outs]
    return sum(one.accepted for one in stats) / sum(one.drafted for one in stats)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_same_weights_under_other_ids_are_always_right(
    toy: Toy, tmp_path: Path, params: SamplingParams
) -> None:
    assert acceptance_of(toy(), reordered(tmp_path), params) == 1


@pytest.mark.parametrize("what", ["read", "logits"])
def test_planted_error_ids_that_are_not_translated(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(Translation, what, lambda self, ids: ids)
    assert acceptance_of(toy(), reordered(tmp_path), GREEDY) < 0.25


@pytest.mark.parametrize("acceptance", ["block", "rejection"])
def test_sampled_output_has_the_targets_distribution_where_the_draft_model_lacks_tokens(
    toy: Toy, tmp_path: Path, acceptance: str
) -> None:
    check_distribution(toy, str(reordered(tmp_path, seed=1, lacking=20)), acceptance)


def test_a_draft_model_with_too_few_of_the_tokens_is_refused(toy: Toy, files: dict[str, Path]) -> None:
    with pytest.raises(WrongPair, match="different tokenizers: .* of the tokens of a sample text"):
        LLM(str(files["smollm2"]), speculation={"draft": str(toy())}, **TOY)


def test_a_draft_model_without_a_tokenizer_is_refused(toy: Toy, tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(toy().read_bytes().replace(b"gpt2", b"none"))
    with pytest.raises(ModelError, match=r"bare\.gguf: it has no tokenizer"):
        LLM(str(toy()), tokenizer=None, speculation={"draft": str(bare)}, **TOY)
