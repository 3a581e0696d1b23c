"""Batch-invariant targets in bf16: logits and texts are bitwise equal in every batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon import LLM, SamplingParams, SpeculativeDecoder
from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.kv.store import SpanView
from speculon.runtimes.torch.loading import batch_check, invariant
from speculon.runtimes.torch.loading.batch_check import Attending, RandomLayer, differing, uneven_keys
from speculon.runtimes.torch.loading.invariant import cheapest_padding, decide, make_invariant
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model import attention, fuse
from speculon.runtimes.torch.model.block import CannotReplace
from speculon.runtimes.torch.model.grouping import KEY_BLOCK, aligned_keys, padded_keys
from speculon.runtimes.torch.model.linear import Linear, packable
from speculon.runtimes.torch.model.pieces import (
    CannotBeInvariant,
    InPieces,
    InvariantProducts,
    ProductPieces,
    measured,
)
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import LayerSpec, Padding
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import TINY, tiny_model
from tests.tiny.kernels import by_place, one_by_one, plant, where_invariant

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
# Grouped heads, latent attention, windows, sinks, soft caps, experts, fused layers and others. The soak
# has all architectures.
STRUCTURES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2")
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "off"},
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 16},
)


def stock(name: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    return wrap_model(copy.deepcopy(tiny_model(name)).to(dtype), name=name, share=False)


@cache
def known_keys(layer: Attending, step: int, device: torch.device) -> tuple[int, ...]:
    return uneven_keys(layer, step, device)


@cache
def known_padding(layer: Attending, max_context: int) -> Padding:
    """That of layers of one shape, which several models have."""
    target: Any = SimpleNamespace(max_context=max_context, device=torch.device("cpu"))
    return cheapest_padding(layer, target, known_keys)


def padding_of_shape(layer: Attending, target: Target, _: object) -> Padding:
    return known_padding(layer, target.max_context)


@cache
def outcome(name: str, dtype: torch.dtype) -> Target | CannotBeInvariant:
    """The target, which no test may change for good, or why it is not invariant on this machine."""
    target = stock(name, dtype)
    try:
        with patch.object(invariant, "cheapest_padding", padding_of_shape):
            make_invariant(target)
    except CannotBeInvariant as reason:
        return reason
    return target


def invariant_or_skipped(name: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    with where_invariant():
        found = outcome(name, dtype)
        if isinstance(found, CannotBeInvariant):
            raise found
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in STRUCTURES)) for name in TINY]
)
def test_logits_are_bitwise_equal_in_every_batch(name: str) -> None:
    target = invariant_or_skipped(name)
    assert target.batch_invariant and differing(target) is None


def test_a_packed_head_is_in_pieces_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise CannotReplace("planted")

    monkeypatch.setattr(fuse, "choose_loop", refused)
    monkeypatch.setattr(fuse, "head_is_packed", lambda *_: True)
    target = stock("llama")
    assert isinstance(head := target.model.get_output_embeddings(), fuse.Fused)
    with where_invariant():
        make_invariant(target)
    assert isinstance(head.inner, InPieces)


def test_what_is_refused_is_refused_for_its_kernels() -> None:
    """None of the 14 on an Intel Xeon with AMX, and one on an AMD EPYC with AVX-512."""
    refused = [found for name in STRUCTURES if isinstance(found := outcome(name, torch.bfloat16), Exception)]
    known = r"(a product of|attention of heads) .* differs by its numbers? of rows|depend on their batch"
    assert all(re.search(known, str(reason)) for reason in refused), refused


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_kernels_that_depend_on_the_number_of_rows_are_found_and_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever those of this machine do. In fp32 the change is within the limits of all other checks."""
    plant(monkeypatch, lambda multiply, x: one_by_one(multiply, x) * (1 + (len(x) > 8) * 2**-20))
    target = stock(name, torch.float32)
    assert differing(target) is not None
    make_invariant(target)
    assert differing(target) is None


def test_kernels_that_depend_on_the_place_of_a_row_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, by_place)
    target = stock("llama", torch.float32)
    with pytest.raises(UnsupportedModel, match="batch_invariant: llama: a product of 64 x 32 differs"):
        decide(target, True)
    assert not target.batch_invariant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unless_it_is_set_coarse_dtypes_have_it(dtype: torch.dtype) -> None:
    invariant_or_skipped("llama", dtype)
    target = stock("llama", dtype)
    decide(target, None)
    assert target.batch_invariant and target.invariance.startswith("yes")
    without = stock("llama", dtype)
    decide(without, False)
    assert not without.batch_invariant


def test_in_fp32_it_is_tried_only_if_asked_for() -> None:
    target = stock("llama", torch.float32)
    decide(target, None)
    assert not target.batch_invariant and "near-ties are rare in fp32" in target.invariance


@pytest.mark.parametrize("window", [700, 2048])
def test_attention_behind_a_long_window_is_equal(window: int) -> None:
    """Its first key moves from row to row, and with it what SDPA reads as one block."""
    layer = Attending(LayerSpec("attention", 2, 16, 16, torch.bfloat16, window), 2, True)
    target = SimpleNamespace(max_context=8192, device=torch.device("cpu"))
    with where_invariant():
        padding = cheapest_padding(layer, target)  # type: ignore[arg-type]
    rows = RandomLayer.of(layer, window + 700, padding, target.device)
    for at in range(window + 3, window + 700, 37):
        assert torch.equal(rows.attend((0, at - 20, at + 1))[-1], rows.attend((0, at, at + 1))[0]), at


def test_behind_a_window_calls_have_the_same_blocks_and_a_short_last_one() -> None:
    """Where blocks add in different orders, a call that begins within one has other bits."""
    layer = Attending(LayerSpec("attention", 2, 16, 16, torch.bfloat16, 700), 2, True)
    target: Any = SimpleNamespace(max_context=8192, device=torch.device("cpu"))
    with where_invariant():
        padding = cheapest_padding(layer, target, known_keys)
    if padding.start <= padding.keys:
        pytest.skip("this kernel needs no common blocks, or only whole ones")
    length = batch_check.LONGEST + 700  # as in the search, which refused what is planted here
    others = padding._replace(keys=KEY_BLOCK, uneven=()), padding._replace(start=padding.keys)
    short, whole, shifted = (RandomLayer.of(layer, length, one, target.device) for one in (padding, *others))
    alone = [(at, at + 1) for at in range(0, 1600, 41)]
    for span in (*alone, (0, 170), (650, 800), (1000, 1070), (1500, 1600)):
        assert torch.equal(short.attend((0, *span)), whole.attend((0, *span))), span
    assert shifted.differing() is not None


def test_a_product_of_torch_is_measured_like_ours() -> None:
    """By sums that cancel: those of its own weights do not show another order of addition."""
    for bias in (False, True):
        layer, pieces = nn.Linear(2048, 320, bias=bias, dtype=torch.bfloat16), ProductPieces()
        found = pieces.of(layer, 320, 2048, torch.bfloat16)
        known = measured(Linear(layer.weight, layer.bias), 320, 2048, torch.bfloat16)
        assert isinstance(found, InPieces) and found.rows == known


def another_order_alone(product: Linear, x: Tensor) -> Tensor:
    """A kernel whose sums are off in their last bits where a row is alone."""
    sums = torch.stack([(row * product.weight.double()).sum(-1) for row in x.double()])
    bias = 0 if product.bias is None else product.bias
    return (sums + (len(x) == 1) * 2**-20 + bias).to(x.dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_does_not_hide_another_order_of_addition(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "__call__", another_order_alone)
    layer = nn.Linear(32, 96, bias=bias, dtype=torch.bfloat16)
    assert measured(Linear(layer.weight, layer.bias), 96, 32, torch.bfloat16).min_rows > 1


def test_the_matrix_of_an_expert_is_in_pieces_too() -> None:
    experts, pieces = nn.Parameter(torch.randn(4, 32, 96).bfloat16()), ProductPieces()
    x = torch.randn(5, 32).bfloat16()
    with torch.inference_mode(), where_invariant(), InvariantProducts(pieces):
        _ = x @ x.t()  # of rows alone
        assert not pieces.known
        _ = x @ experts[torch.tensor(2)]
    assert len(pieces.known) == 1


def test_scores_with_sinks_are_never_few_enough_for_another_kernel() -> None:
    cpu = torch.device("cpu")
    layer = Attending(LayerSpec("attention", 2, 8, 8, torch.bfloat16), 2, False)
    with where_invariant():
        padding = cheapest_padding(layer, SimpleNamespace(max_context=64, device=cpu), known_keys)  # type: ignore[arg-type]
    assert 2 * padding.rows * padding.keys * 8 > 4096


def test_where_model_code_fails_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise TypeError("of model code")

    monkeypatch.setattr(invariant, "differing", fail)
    target = stock("qwen3_moe")
    decide(target, None)
    assert not target.batch_invariant and target.invariance == "no: TypeError when it was tried"
    with pytest.raises(TypeError, match="of model code"):
        decide(target, True)
    assert not target.batch_invariant


def test_a_model_object_is_invariant_where_it_is_set() -> None:
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    with where_invariant():
        assert SpeculativeDecoder(model, batch_invariant=True).engine.runtime.target.batch_invariant
    assert not SpeculativeDecoder(model, batch_invariant=False).engine.runtime.target.batch_invariant


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("invariant") / "model")
    settings: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 24, "max_num_seqs": 8}
    speculation = {"policy": "fixed"}
    with where_invariant():
        return LLM(str(folder), dtype="bfloat16", batch_invariant=True, speculation=speculation, **settings)


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "seeded"])
def test_texts_and_log_probabilities_are_equal_alone_in_batches_with_drafts_and_after_preemption(
    llm: LLM, params: SamplingParams
) -> None:
    """Filters, noise and log-probabilities of a row do not depend on the others."""
    filtered = params.model_copy(update={"logprobs": 4, "top_p": 0.9, "top_k": 20, "min_p": 0.01})
    alone = [llm.generate(prompt, filtered, speculation={"method": "off"})[0] for prompt in PROMPTS]
    expected = [(out.token_ids, out.logprobs) for out in alone]
    before = llm.engine.counters.totals.preemptions
    for method in METHODS:
        for batch in (2, len(PROMPTS)):
            for i in range(0, len(PROMPTS), batch):
                outputs = llm.generate(PROMPTS[i : i + batch], filtered, speculation=method)
                found = [(out.token_ids, out.logprobs) for out in outputs]
                assert found == expected[i : i + batch], (method, batch)
    assert llm.engine.counters.totals.preemptions > before, "pages were to run out"


# planted faults


def plant_attention(monkeypatch: pytest.MonkeyPatch, differs: Callable[[Tensor, Tensor], bool]) -> None:
    """A kernel with other results where queries and keys are such."""
    kernel = F.scaled_dot_product_attention

    def planted(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        return kernel(queries, keys, values, **options) * (1 + differs(queries, keys) * 2**-8)

    monkeypatch.setattr(F, "scaled_dot_product_attention", planted)


def test_keys_that_are_not_padded_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = invariant_or_skipped("llama")
    plant_attention(monkeypatch, lambda queries, keys: keys.shape[2] % 64 > 0)
    assert differing(target) is None
    monkeypatch.setattr(target, "layers", stock("llama").layers)
    assert differing(target) is not None


def test_a_padding_with_which_attention_differs_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_attention(monkeypatch, lambda queries, keys: queries.shape[2] % 16 > 0)
    monkeypatch.setattr(invariant, "PADDINGS", (Padding(1, 1), Padding(1, 4)))
    monkeypatch.setattr(batch_check, "KEY_STEP", 99)  # quicker than every number of keys
    with pytest.raises(CannotBeInvariant, match="attention of heads 8 x 2 differs"):
        make_invariant(stock("llama"))


@pytest.mark.parametrize("window", [None, 4096])
def test_numbers_of_keys_that_add_in_another_order_have_rows_of_their_own(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that changes one bit of each row where its last block has 128 keys."""
    kernel = F.scaled_dot_product_attention

    def uneven(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        attended = kernel(queries, keys, values, **options)
        if keys.shape[2] % KEY_BLOCK == 128:
            attended[..., 0] = torch.nextafter(attended[..., 0], torch.tensor(9.0).bfloat16())
        return attended

    layer = Attending(LayerSpec("attention", 2, 64, 64, torch.bfloat16, window), 2, True)
    cpu = torch.device("cpu")
    found = uneven_keys(layer, 64, cpu)
    monkeypatch.setattr(F, "scaled_dot_product_attention", uneven)
    assert set(uneven_keys(layer, 64, cpu)) == {*found, 128}
    padding = cheapest_padding(layer, SimpleNamespace(max_context=2048, device=cpu))  # type: ignore[arg-type]
    assert RandomLayer.of(layer, 700, padding, cpu).differing() is None
    assert RandomLayer.of(layer, 700, padding._replace(uneven=found), cpu).differing() is not None


def test_the_next_number_of_keys_is_even_or_exact() -> None:
    assert padded_keys(200, 4096, Padding(64, 4, uneven=(256,))) == 320, "within a window"
    assert padded_keys(760, 4096, Padding(64, 4, uneven=(256, 320))) == 896
    assert padded_keys(513, 4096, Padding(64, 4, uneven=(256,))) == 576
    assert padded_keys(200, None, Padding(64, 4, uneven=(256,))) == 256
    blocks = Padding(64, 4, uneven=(256, 320), start=KEY_BLOCK)
    for context, seen, read in ((100, 100, 128), (260, 260, 384), (1024, 512, 512), (1100, 588, 640)):
        span = SpanView(0, 1, slice(0, context), context)
        assert aligned_keys(span, 512, blocks.alignment) == seen
        assert padded_keys(seen, 512, blocks) == read


def test_layers_of_one_shape_have_what_each_of_them_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LayerSpec("attention", 2, 64, 64, torch.bfloat16, 512)
    found = {1: Padding(64, 8, 64, (256,), 64), 2: Padding(64, 4, 32, (320,), KEY_BLOCK)}
    monkeypatch.setattr(invariant, "distinct_layers", lambda _: [Attending(spec, n, True) for n in found])
    monkeypatch.setattr(invariant, "cheapest_padding", lambda layer, *_: found[layer.group])
    target: Any = SimpleNamespace(layers=(spec,))
    (layer,) = invariant.padded(target)
    assert layer.padding == Padding(64, 8, 32, (256, 320), KEY_BLOCK)


@pytest.mark.parametrize("row", [70, 99, 160])
def test_a_row_of_a_long_span_that_differs_is_seen(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = batch_check.attend_written

    def wrong(view: Any, layer: int, query: Tensor, *others: Any, **options: Any) -> Tensor:
        out = attend(view, layer, query, *others, **options)
        if len(query) > 100:
            out[row:] *= 1 + 1 / 64
        return out

    layer, cpu = Attending(LayerSpec("attention", 2, 16, 16, torch.bfloat16), 2, True), torch.device("cpu")
    padding = cheapest_padding(layer, SimpleNamespace(max_context=700, device=cpu))  # type: ignore[arg-type]
    monkeypatch.setattr(batch_check, "attend_written", wrong)
    assert RandomLayer.of(layer, 700, padding, cpu).differing() is not None


def test_numbers_of_keys_are_measured_once_for_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    target, measured = stock("gemma2"), list[Attending]()

    def none(layer: Attending, step: int, device: torch.device) -> tuple[int, ...]:
        measured.append(layer)
        return ()

    monkeypatch.setattr(invariant, "uneven_keys", none)
    assert len({spec.window for spec in target.layers}) == 2
    invariant.padded(target)
    assert len(measured) == 2, "one for each step of padding"


def test_attention_in_single_operations_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a soft cap or sinks."""
    inner = attention.eager_attention

    def by_rows(q: Tensor, *others: Any) -> Tensor:
        return inner(q, *others) * (1 + (q.shape[2] > 40) / 64)

    monkeypatch.setattr(attention, "eager_attention", by_rows)
    with pytest.raises(CannotBeInvariant, match="attention of heads 8 x 2 differs"):
        make_invariant(stock("gemma2"))


def test_a_lone_row_of_an_expert_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = invariant_or_skipped("qwen3_moe")

    def product(_: InvariantProducts, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) * (1 + (x.dim() == 2 and len(x) == 1) / 64)

    monkeypatch.setattr(InvariantProducts, "product", product)
    assert differing(target) is not None


# a kernel that depends on its number of rows, the pieces in which it runs, and what it adds in each of them
KERNELS: list[Any] = [
    pytest.param(lambda x: x + (len(x) > 8), (1, 8, ()), 0, id="another kernel from 9 rows on"),
    pytest.param(lambda x: x + (len(x) < 2), (4, 512, ()), 0, id="another one for a single row"),
    pytest.param(lambda x: x + (len(x) < 8), (8, 512, ()), 0, id="another one for few rows"),
    pytest.param(
        lambda x: x + (len(x) > 64 and len(x) % 128 > 0), (1, 64, (512, 256, 128)), 0, id="whole blocks"
    ),
    pytest.param(lambda x: x + len(x), (8, 8, ()), 8, id="no two numbers of rows agree"),
]


@pytest.mark.parametrize(("kernel", "pieces", "added"), KERNELS)
def test_a_kernel_is_run_in_pieces_that_agree(kernel: Any, pieces: tuple[Any, ...], added: int) -> None:
    product = ProductPieces().of(kernel, 16, 16, torch.float32)
    assert isinstance(product, InPieces) and product.rows[:3] == pieces
    for rows in (0, 1, 2, 3, 5, 7, 8, 9, 40, 64, 65, 200, 300, 513, 1000):
        x = torch.randn(rows, 16)
        assert torch.equal(product(x), x + added), rows


def test_a_product_that_never_agrees_is_refused() -> None:
    with pytest.raises(CannotBeInvariant, match="16 x 16 differs by its number of rows"):
        ProductPieces().of(lambda x: x + torch.arange(len(x))[:, None], 16, 16, torch.float32)


@pytest.mark.parametrize("rows", [range(4, 999), [2], [44], [33], [20], [6]], ids=str)
def test_a_product_that_is_not_in_pieces_is_seen(
    rows: Container[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = invariant_or_skipped("llama")
    loop: Any = target.runner.run
    inner = loop.head.product
    monkeypatch.setattr(loop, "head", lambda x: inner(x) * (1 + (len(x) in rows)))
    assert differing(target) is not None


def test_the_head_is_compared_apart_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured loop scores only the steps without a prompt, where prompts take other products."""
    target = invariant_or_skipped("llama")
    run: Any = target.runner.run

    def wrong_in_prompts(batch: Any, *others: Any) -> Tensor:
        logits: Tensor = run(batch, *others)
        return logits * (1 + (bool(batch.prompts) and len(logits) == 10))

    monkeypatch.setattr(batch_check, "PROMPT", 50)  # the first position is a generated token
    monkeypatch.setattr(target, "prompts_apart", True)
    monkeypatch.setattr(target.runner, "run", wrong_in_prompts)
    assert differing(target) is not None


def test_a_target_that_fails_its_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "differing", lambda target: 17)
    target = stock("llama")
    with pytest.raises(UnsupportedModel, match="position 17 depend on their batch"):
        decide(target, True)
    assert not target.batch_invariant
