"""Batch-invariant targets in bf16: logits and texts are bitwise equal in every batch, or it is refused."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.errors import UnsupportedModel
from speculon.models import grouping, invariant
from speculon.models.grouping import Padding
from speculon.models.invariant import InPieces, Pieces, differing, equal_rows, make_invariant, obstacle
from speculon.models.linear import packable
from speculon.models.load import wrap_model
from speculon.models.target import Target
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import TINY, tiny_model

pytestmark = pytest.mark.skipif(
    not packable(torch.bfloat16, torch.device("cpu")), reason="no products in bf16 on this CPU"
)
PROMPTS = [
    "def add(first, second):\n    return first",
    "abcabcabcabcabc",
    "class Stack:",
    "for i in range(3):",
    "x",
]
SAMPLINGS = (
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True),
)
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "off"},
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 16},
)


def stock(name: str) -> Target:
    return wrap_model(copy.deepcopy(tiny_model(name)).bfloat16(), name=name, share=False)


@cache
def outcome(name: str) -> str:
    """Empty where the logits are invariant; otherwise why it was refused."""
    target = stock(name)
    try:
        make_invariant(target)
    except UnsupportedModel as error:
        return str(error)
    assert target.batch_invariant and differing(target) is None
    return ""


@pytest.mark.parametrize("name", sorted(TINY))
def test_logits_are_equal_in_every_batch_or_the_reason_is_told(name: str) -> None:
    reason = outcome(name)
    assert not reason or obstacle(stock(name)), f"tried, and failed: {reason}"


def test_common_families_are_invariant() -> None:
    assert sum(not outcome(name) for name in TINY) >= 3, {name: outcome(name) for name in TINY}


@pytest.mark.parametrize("change", ["fp32", "cuts"])
def test_what_cannot_be_invariant_is_refused_by_name(change: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"fp32": {"dtype": "float32"}, "cuts": {"dtype": "bfloat16", "fuse": False}}[
        change
    ]
    with pytest.raises(UnsupportedModel, match="only in bfloat16" if change == "fp32" else "not one loop"):
        LLM(str(write_checkpoint(tmp_path / "model")), batch_invariant=True, **settings)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("invariant") / "model")
    settings: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 24, "max_num_seqs": 8}
    speculation = {"policy": "fixed"}
    return LLM(str(folder), dtype="bfloat16", batch_invariant=True, speculation=speculation, **settings)


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "seeded"])
def test_texts_in_bf16_are_equal_alone_in_batches_with_drafts_and_after_preemption(
    llm: LLM, params: SamplingParams
) -> None:
    alone = [llm.generate(prompt, params, speculation={"method": "off"})[0].token_ids for prompt in PROMPTS]
    before = llm.engine.counters.totals.preemptions
    for method in METHODS:
        for batch in (1, 2, len(PROMPTS)):
            for i in range(0, len(PROMPTS), batch):
                outputs = llm.generate(PROMPTS[i : i + batch], params, speculation=method)
                assert [out.token_ids for out in outputs] == alone[i : i + batch], (method, batch)
    assert llm.engine.counters.totals.preemptions > before, "pages were to run out"


# planted faults


def test_keys_that_are_not_padded_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stock("llama")
    make_invariant(target)
    monkeypatch.setattr(grouping, "BITWISE", Padding(1, 1))
    assert differing(target) is not None


def by_row_count(x: Tensor) -> Tensor:
    """A product that chooses another kernel from 9 rows on."""
    return x + (len(x) > 8)


def test_a_kernel_chosen_by_the_number_of_rows_is_run_in_its_pieces() -> None:
    pieces, x = Pieces(torch.float32, torch.device("cpu")), torch.randn(64, 16)
    product = pieces.of(by_row_count, 16)
    assert (product.fewest, product.most) == (1, 8)
    for rows in (1, 2, 8, 9, 40, 64):
        assert torch.equal(product(x[:rows]), x[:rows])


def test_a_lone_row_is_doubled_where_it_takes_another_kernel() -> None:
    product = Pieces(torch.float32, torch.device("cpu")).of(lambda x: x + (len(x) == 1), 16)
    x = torch.randn(1, 16)
    assert product.fewest == 2 and torch.equal(product(x), x)


def test_a_product_that_never_agrees_is_refused() -> None:
    def never(x: Tensor) -> Tensor:
        return x + len(x)

    assert equal_rows(never, torch.randn(64, 16)) == (2, 0)
    with pytest.raises(UnsupportedModel, match="16 x 16 differs by its number of rows"):
        Pieces(torch.float32, torch.device("cpu")).of(never, 16)


def test_a_product_that_is_not_in_pieces_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stock("llama")
    make_invariant(target)
    loop: Any = target.run
    inner = loop.head.product
    monkeypatch.setattr(
        loop, "head", InPieces(lambda x: inner(x) * (1 + (len(x) > 3)), 1, 64, loop.head.outputs)
    )
    assert differing(target) is not None


def test_a_target_that_fails_its_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "differing", lambda target: 17)
    with pytest.raises(UnsupportedModel, match="position 17 depend on their batch"):
        make_invariant(stock("llama"))
