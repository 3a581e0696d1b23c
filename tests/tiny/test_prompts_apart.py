"""Batch-invariant targets with prompts in pieces of their own: their bits differ from generated tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.runtimes.torch.batch import joined
from speculon.runtimes.torch.loading.batch_check import PROMPT, differing
from speculon.runtimes.torch.model import target as target_module
from speculon.runtimes.torch.model.linear import packable
from speculon.runtimes.torch.model.pieces import (
    InPieces,
    InvariantProducts,
    ProductPieces,
    PromptsApart,
    with_prompts,
)
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.kernels import plant, where_invariant

FEW = 32  # rows up to which the kernel of these tests adds in another order
PROMPTS = [[*range(3, 3 + n)] * 2 for n in (60, 5, 33, 1, 48)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
in_bf16 = pytest.mark.skipif(
    not packable(torch.bfloat16, torch.device("cpu")), reason="no products in bf16 on this CPU"
)


def by_count(x: Tensor) -> Tensor:
    """A product with another result from 33 rows on."""
    return x + (len(x) > FEW)


def prompts_apart(product: Any) -> PromptsApart:
    found = ProductPieces().by_row(product, 16, 16, torch.float32)
    assert isinstance(found, PromptsApart)
    return found


def test_runs_of_rows_are_joined() -> None:
    assert joined([(0, 3), (3, 5), (7, 8)]) == ((0, 5), (7, 8))
    assert joined([]) == ()


def test_prompts_take_their_own_sizes_and_the_others_theirs() -> None:
    product = prompts_apart(by_count)
    assert product.sizes == (48, 64, 80, 96, 112, 128)
    for runs in ((), ((0, 1),), ((0, 300),), ((2, 5), (9, 200)), ((5, 300),)):
        x = torch.randn(300, 16)
        expected = x.clone()
        for first, last in runs:
            expected[first:last] += 1
        with with_prompts(runs):
            assert torch.equal(product(x), expected), runs


def test_where_larger_pieces_agree_prompts_are_not_apart() -> None:
    assert isinstance(ProductPieces().by_row(lambda x: x + 1, 16, 16, torch.float32), InPieces)


def test_a_size_with_which_the_order_of_rows_matters_is_not_taken() -> None:
    def product(x: Tensor) -> Tensor:
        shift = torch.arange(len(x))[:, None] * (48 < len(x) < 128)
        return by_count(x) + shift

    assert prompts_apart(product).sizes == (48, 128)


# a model with such products


@pytest.fixture(scope="module")
def patched() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, lambda multiply, x: multiply(x) * (1 + (len(x) > FEW) / 64))
        yield


@pytest.fixture(scope="module")
def llm(patched: None, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("apart"), num_blocks=20, max_batch_tokens=40)


def load(folder: Path, **settings: Any) -> LLM:
    path = str(write_checkpoint(folder / "model"))
    speculation = {"policy": "fixed", "draft": path}
    with where_invariant():
        return LLM(path, dtype="bfloat16", batch_invariant=True, speculation=speculation, **settings)


def written(llm: LLM, prompts: list[list[int]], params: SamplingParams, **speculation: Any) -> list[Any]:
    outputs = llm.generate(prompts, params, speculation=speculation or {"method": "off"})
    return [(out.token_ids, out.logprobs) for out in outputs]


@in_bf16
def test_logits_of_both_are_equal_in_every_batch(llm: LLM) -> None:
    target = llm.engine.runtime.target
    assert target.prompts_apart and 0 < PROMPT and differing(target) is None


@in_bf16
def test_where_all_layers_are_fused_no_product_is_cut_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode over the whole forward would cut those of prompts into the pieces of generated tokens."""

    def cut_again(*_: Any) -> None:
        raise AssertionError("a product of a fused layer ran in a mode")

    monkeypatch.setattr(InvariantProducts, "__enter__", cut_again)
    assert llm.engine.runtime.target.prompts_apart and written(llm, PROMPTS[:1], GREEDY)


@in_bf16
def test_a_row_of_a_prompt_that_runs_as_a_generated_one_is_seen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = llm.engine.runtime.target

    def longer(runs: Any) -> Any:
        return with_prompts(tuple(r for r in runs if r[1] - r[0] > 1))

    monkeypatch.setattr(target_module, "with_prompts", longer)
    assert differing(target) is not None


@in_bf16
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_texts_and_log_probabilities_are_equal_in_batches_with_drafts_and_after_preemption(
    llm: LLM, params: SamplingParams
) -> None:
    """Chunks of prompts end anywhere: a step has 40 rows."""
    alone = [written(llm, [prompt], params)[0] for prompt in PROMPTS]
    totals = llm.engine.counters.totals
    for method, k in (("off", 0), ("suffix", 9), ("draft_model", 3)):
        assert written(llm, PROMPTS, params, method=method, num_speculative_tokens=k) == alone, method
    assert totals.preemptions and totals.cached_tokens


@in_bf16
def test_a_prompt_that_holds_an_earlier_answer_computes_it_as_a_prompt(
    llm: LLM, patched: None, tmp_path: Path
) -> None:
    answer = written(llm, PROMPTS[:1], GREEDY)[0][0]
    longer = [[*PROMPTS[0], *answer, 7, 8, 9]]
    expected = written(load(tmp_path, prefix_cache=False), longer, GREEDY)
    assert written(llm, longer, GREEDY) == expected
    assert written(llm, longer, GREEDY) == expected, "from the prefix cache"


@in_bf16
def test_pages_of_generated_tokens_in_a_prompt_are_seen(patched: None, tmp_path: Path) -> None:
    """Planted: pages are found by their tokens alone."""
    llm = load(tmp_path)
    llm.engine.runtime.space.prompts_apart = False
    answer = written(llm, PROMPTS[:1], GREEDY)[0][0]
    longer = [[*PROMPTS[0], *answer, 7, 8, 9]]
    found = written(llm, longer, GREEDY)
    assert found != written(load(tmp_path / "other", prefix_cache=False), longer, GREEDY)


@in_bf16
def test_a_drafter_that_is_the_target_is_always_accepted(llm: LLM) -> None:
    """Its prompts are apart too."""
    for params in (GREEDY, SEEDED):
        for out in llm.generate(PROMPTS[:1], params, speculation={"method": "draft_model"}):
            assert out.speculation.acceptance_rate == 1.0
