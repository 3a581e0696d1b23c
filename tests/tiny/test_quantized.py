"""Layers in 4 and 8 bits: their products, what a GGUF file becomes, memory, and texts with drafts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from speculon import SpeculativeDecoder
from speculon.checkpoints.headers import read_checkpoint
from speculon.core.errors import ConfigError, CorruptWeights, MissingWeights, UnsupportedModel
from speculon.runtimes.torch.kv.store import PageStore
from speculon.runtimes.torch.loading import load, quantization
from speculon.runtimes.torch.loading.gguf.weights import four_bits
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.loading.memory import model_needs
from speculon.runtimes.torch.loading.quantization import FOUR_BITS, in_bits
from speculon.runtimes.torch.model import fuse, quantized
from speculon.runtimes.torch.model.block import FusedRows
from speculon.runtimes.torch.model.quantized import (
    GROUP,
    IntegerProduct,
    Packed4,
    Packed8,
    QuantizedLinear,
    has_integer_products,
    head_product,
    packed_layers,
    quantize,
)
from speculon.runtimes.torch.model.target import Target
from tests.tiny.blocks import write_dflash
from tests.tiny.gguf_files import tiny_llama, write_gguf
from tests.tiny.heads import deep_model, deep_target, write_eagle3
from tests.tiny.scripted import drain, make_engine, texts_of
from tests.tiny.test_eagle3 import ask, plain, requests_of

COARSE, FINE = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def layer(bits: int, dtype: torch.dtype, outputs: int = 96, width: int = 128) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, width, generator=generator)
    return quantize(weight, torch.randn(outputs, generator=generator).to(dtype), bits, dtype)


def rows(count: int, dtype: torch.dtype, width: int = 128) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [COARSE, FINE])
def test_a_product_is_that_of_the_numbers(bits: int, dtype: torch.dtype) -> None:
    stock, x = layer(bits, dtype), rows(7, dtype)
    assert stock.bias is not None
    truth = F.linear(x.double(), stock.numbers(torch.float64), stock.bias.double())
    error = (packed_layers([stock])(x).double() - truth).abs().max() / truth.abs().max()
    assert error < (1e-6 if dtype is FINE else 2**-7)  # the sum and the bias are rounded
    joined = packed_layers([stock, stock])(x)
    assert torch.equal(joined[:, :96], joined[:, 96:])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_joined_one_by_one(dim: int) -> None:
    """No part is kept until the others are there."""
    whole = torch.randn(30, 30)
    alive: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[tuple[torch.Tensor, ...]]:
        for begin in range(0, 30, 8):
            assert sum(part() is not None for part in alive) <= 2, "of the part before"
            made = whole.narrow(dim, begin, min(8, 30 - begin)).clone()
            alive.extend(map(weakref.ref, (made, double := 2 * made)))
            yield made, double
            del made, double

    one, two = quantized.filled(parts(), 30, dim)
    assert torch.equal(one, whole) and torch.equal(two, 2 * whole) and len(alive) == 8


def test_what_is_left_of_a_mapped_file_is_copied_and_a_gguf_files_is_not(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of an embedding takes as much memory as a head in 16 bits."""
    copied: list[str] = []
    monkeypatch.setattr(fuse, "unmap_file", lambda model: copied.append(type(model).__name__))
    load_target(write_gguf(model, tmp_path / "model.gguf", quantise="Q4_1"))
    assert copied == []
    model.save_pretrained(tmp_path / "folder")
    load_target(tmp_path / "folder", dtype="bfloat16", quantization="int4")
    assert copied == ["LlamaForCausalLM"]


@pytest.mark.parametrize(("bits", "most"), [(4, 1 / 30), (8, 1 / 250)])
def test_rounding_is_to_the_nearest(bits: int, most: float) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    groups = weight.view(96, -1, GROUP)
    spans = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    errors = (layer(bits, FINE).numbers(FINE) - weight).view(96, -1, GROUP).abs().amax(-1)
    assert bool((errors <= spans * most * 1.01).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_do_not_depend_on_each_other(bits: int) -> None:
    product, x = packed_layers([layer(bits, COARSE)]), rows(64, COARSE)
    whole = product(x)
    for count in range(1, 64):
        assert torch.equal(product(x[64 - count :]), whole[64 - count :])


# a head in integers

in_chip = pytest.mark.skipif(not has_integer_products(COARSE, CPU), reason="no products of integers here")


@in_chip
def test_a_head_in_integers_is_near_its_numbers() -> None:
    """Its weights are rounded to 1/254 of the largest of a row, after its columns are scaled."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = torch.randn(96, 128, generator=generator), torch.ones(96, dtype=COARSE), rows(7, COARSE)
    weight[:, 40:44] *= 100
    x[3] = 0
    stock = quantize(weight, bias, 8, COARSE)
    product = head_product(stock)
    assert isinstance(product, IntegerProduct) and stock.bias is not None
    weight = stock.numbers(torch.float64)
    columns = weight.abs().amax(0)
    steps = (weight / columns).abs().amax(1, keepdim=True) / 254 * columns  # [O, D]
    result, truth = product(x).double(), F.linear(x.double(), weight, stock.bias.double())
    limit = F.linear(x.double().abs(), steps) + truth.abs() * 2**-7 + 2**-8
    assert bool(((result - truth).abs() <= limit).all())
    assert torch.equal(result[3], stock.bias.double())


@in_chip
def test_rows_in_integers_do_not_depend_on_each_other() -> None:
    product, x = head_product(layer(8, COARSE)), rows(64, COARSE)
    x[5] *= 1000  # one scale for all rows would change the others
    whole = product(x)
    for count in range(1, 64):
        assert torch.equal(product(x[64 - count :]), whole[64 - count :])


@in_chip
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_integers_are_exact(sign: int) -> None:
    """A kernel that adds two products in 16 bits would overflow."""
    ones = quantize(sign * torch.ones(32, 4096), None, 8, COARSE)
    product, x = head_product(ones), torch.ones(3, 4096, dtype=COARSE)
    expected = ones.numbers(torch.float64).sum(1).to(COARSE)
    assert torch.equal(product(x), expected.expand(3, -1)) and torch.equal(product(-x), -product(x))


def test_where_the_chip_or_the_dtype_has_no_integers_a_head_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not has_integer_products(FINE, CPU) and not has_integer_products(torch.float16, CPU)
    assert not has_integer_products(COARSE, torch.device("cuda"))
    assert isinstance(head_product(layer(4, COARSE)), Packed4)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert isinstance(head_product(layer(8, COARSE)), Packed8)


def test_packed_weights_load_in_fp16(tmp_path: Path) -> None:
    """The load compares them with fp32, by a limit for fp16."""
    tiny_llama(vocab_size=112).save_pretrained(tmp_path)
    assert load_target(tmp_path, dtype="float16", quantization="int8", batch_invariant=None).packed


def with_integers(folder: Path) -> Target:
    tiny_llama(vocab_size=112).save_pretrained(folder)  # rows are packed by 16
    return load_target(folder, dtype="bfloat16", quantization="int8", batch_invariant=None)


@in_chip
def test_a_head_is_multiplied_in_integers_and_layers_are_not(tmp_path: Path) -> None:
    target: Any = with_integers(tmp_path)
    assert isinstance(target.runner.run.head, IntegerProduct), "and in no pieces"
    assert isinstance(target.runner.run.blocks[0].attention.qkv.product, Packed8)
    assert target.batch_invariant


@in_chip
def test_a_head_in_integers_that_depends_on_its_rows_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted error of batch invariance: nothing measures these products by themselves."""
    right = IntegerProduct.__call__

    def wrong(self: IntegerProduct, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) * (1 + (len(x) > 1) * 2**-8)

    monkeypatch.setattr(IntegerProduct, "__call__", wrong)
    monkeypatch.setenv("SPECULON_CACHE", "")
    target = with_integers(tmp_path)
    assert not target.batch_invariant and "depend on their batch" in target.invariance


@pytest.mark.parametrize("bits", [4, 8])
def test_the_first_rows_of_a_weight(bits: int) -> None:
    product, x = packed_layers([layer(bits, COARSE)]), rows(5, COARSE)
    assert torch.equal(product.first(64)(x), product(x)[:, :64]) and product.first(96) is product


@pytest.mark.parametrize("block_type", sorted(FOUR_BITS))
def test_blocks_are_read_as_the_library_reads_them(block_type: str) -> None:
    size = FOUR_BITS[block_type]
    per_block = 256 if block_type == "Q4_K" else 32
    data = np.random.default_rng(0).integers(0, 256, (8, 512 // per_block * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    for at in range(0, 2 if block_type == "Q4_0" else 4, 2):  # halves that are no numbers are in no file
        halves = np.random.default_rng(1).normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    q, scale, low = four_bits(data, block_type)
    ours = q.reshape(8, -1, GROUP) * scale[..., None] + low[..., None]
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType[block_type])
    np.testing.assert_allclose(ours.reshape(8, -1), theirs, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.mark.parametrize(
    ("block_type", "native"),
    [("Q4_0", True), ("Q4_1", False), ("Q5_0", True), ("Q5_1", False), ("Q8_0", True), ("Q8_0", False)],
)
def test_a_gguf_file_stays_packed(
    block_type: str, native: bool, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in 8 bits are numbers where bf16 is native, and all are in fp32."""
    monkeypatch.setattr(quantization, "native_bf16", lambda: native)
    path = write_gguf(model, tmp_path / "q.gguf", quantise=block_type)
    packed = load_target(path, dtype="bfloat16")
    numbers = load_target(path, dtype="float32")
    assert bool(packed.packed) == (not native or block_type in FOUR_BITS) and not numbers.packed
    assert packed.num_parameters == numbers.num_parameters
    ids = torch.arange(40) % packed.vocab_size
    ours, theirs = (logits_of(target, ids).float() for target in (packed, numbers))
    # a random model exaggerates a rounding in a few rows
    assert (ours - theirs).abs().median() / theirs.abs().max() < 0.01


@pytest.mark.parametrize("block_type", ["Q4_0", "Q5_0", "Q8_0", "F16"])
def test_a_head_in_blocks_stays_packed(block_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "native_bf16", lambda: True)
    assert in_bits(block_type, True, CPU) == (block_type != "F16")
    assert in_bits(block_type, False, CPU) == (block_type in FOUR_BITS)


def test_packed_weights_are_bf16_by_default(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Also on a CPU without bf16: the test of dtypes has others."""
    path = write_gguf(model, tmp_path / "q.gguf", quantise="Q8_0")
    checkpoint, config = read_checkpoint(path), load.load_config(read_checkpoint(path), False)
    with pytest.MonkeyPatch.context() as patch:
        for module in (load, quantization):
            patch.setattr(module, "native_bf16", lambda: False)
        dtypes = [load.dtype_of(checkpoint, config, "auto", setting, CPU) for setting in ("auto", "none")]
    assert dtypes == [COARSE, FINE]


def logits_of(target: Target, ids: torch.Tensor) -> torch.Tensor:
    return target.tapped(ids, PageStore(target.layers, 4, 16, target.device), (0,))[0]


def test_a_product_that_depends_on_its_rows_is_seen(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted error of batch invariance."""
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("SPECULON_CACHE", "")
    right = quantized.cpu_product

    def wrong(x: torch.Tensor, *others: object) -> torch.Tensor:
        return right(x, *others) * (1 + (x[-1, 0] > 0) * 2**-8)  # as its last row says

    monkeypatch.setattr(quantized, "cpu_product", wrong)
    target = load_target(tmp_path, dtype="bfloat16", quantization="int4", batch_invariant=None)
    assert not target.batch_invariant and "differs by its number of rows" in target.invariance


@pytest.mark.parametrize("quantization", ["auto", "int4", "int8"])
def test_memory_is_estimated(quantization: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf" if quantization == "auto" else tmp_path
    if quantization == "auto":
        write_gguf(model, path, quantise="Q4_1")
    else:
        model.save_pretrained(tmp_path)
    held = load_target(path, dtype="bfloat16", quantization=quantization).num_bytes
    expected = model_needs(path, COARSE, CPU, 1, 1, quantization=quantization).bytes_fixed
    assert held == pytest.approx(expected, rel=0.1)


def test_a_shape_that_the_config_does_not_have_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    other = {"blk.0.ffn_up.weight": torch.zeros(32, 32)}
    path = write_gguf(
        model, tmp_path / "q.gguf", quantise="Q4_1", leave_out="layers.0.mlp.up_proj", tensors=other
    )
    with pytest.raises(CorruptWeights, match=r"blk.0.ffn_up.weight"):
        load_target(path, dtype="bfloat16")


def test_a_missing_tensor_is_named(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "q.gguf", quantise="Q4_1", leave_out="layers.1.mlp.down_proj")
    with pytest.raises(MissingWeights, match=r"first model.layers.1.mlp.down_proj.weight"):
        load_target(path, dtype="bfloat16")


def test_a_model_without_linear_layers_is_refused_or_stays_numbers(tmp_path: Path) -> None:
    """GPT-2's layers are transposed ones of its own."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"quantization = 'int8': 0 of [\d,]+ weights are in linear"):
        load_target(tmp_path, quantization="int8")
    numbers = model_needs(tmp_path, FINE, CPU, 1, 1, quantization="none").bytes_fixed
    assert model_needs(tmp_path, FINE, CPU, 1, 1, quantization="int8").bytes_fixed == numbers


def test_a_model_object_is_not_rounded(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="quantization"):
        SpeculativeDecoder(model, quantization="int4")


def test_what_cannot_be_packed_is_refused_by_name(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"quantization = 'int4': experts are no linear layers"):
        load_target(tmp_path, quantization="int4")


@pytest.mark.parametrize(("method", "bits"), [("eagle3", "int4"), ("dflash", "int8")])
def test_a_head_is_rounded(method: str, bits: str, tmp_path: Path) -> None:
    """Its text is the target's, and the estimate knows its bits."""
    write = write_eagle3 if method == "eagle3" else write_dflash
    path, sizes = write(tmp_path, deep_model().config), []
    for rounded in ("auto", bits):
        speculation = {"draft": {method: str(path)}, "draft_quantization": rounded}
        engine = make_engine(deep_target(), speculation=speculation)
        for request in requests_of("greedy"):
            engine.add_request(request.prompt, request.params, ask(4) | {"method": method}, request.id)
        assert texts_of(drain(engine)) == plain("greedy")
        assert engine.counters.totals.drafted_at.total() > 0
        drafter: Any = engine.proposers.find(method)
        sizes.append(drafter.needs.bytes_fixed)
        network = drafter.head if method == "eagle3" else drafter.network
        products = network.fc, network.layers[0].self_attn.o_proj
        assert all(isinstance(product, FusedRows) == (rounded == bits) for product in products)
    assert sizes[1] < sizes[0]
