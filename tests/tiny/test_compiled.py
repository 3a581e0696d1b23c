"""Compiled operations compute what those of the loop do, or are refused. tests/soak has the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculon.engine.decoder import SpeculativeDecoder
from speculon.runtimes.torch.loading import invariant
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import compiled as compiling
from speculon.runtimes.torch.model import pieces
from speculon.runtimes.torch.model.block import Between, FusedNorm, Gating, Loop, Rotary
from speculon.runtimes.torch.model.compare import nearly
from speculon.runtimes.torch.model.compiled import BetweenProgram, BetweenRows, random_rows
from speculon.runtimes.torch.model.quantized import Packed4, Packed8
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.trial import cast
from tests.rounding import assert_near
from tests.tiny.adapter_files import write_adapter
from tests.tiny.conftest import TINY, build, tiny_model
from tests.tiny.gguf_files import tiny_llama
from tests.tiny.kernels import where_invariant
from tests.tiny.scripted import proposer_of

RUN = Callable[[list[Tensor]], list[Tensor]]


def as_it_is(key: str, module: nn.Module, *_: Any) -> RUN:
    if isinstance(module, BetweenRows):
        return lambda inputs: [*module(*inputs)]
    return lambda inputs: [module(*inputs)]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations in the compiler's terms, run as they are."""
    monkeypatch.setattr(compiling, "load_or_compile", as_it_is)


def made(model: Any = None, **settings: Any) -> Target:
    return wrap_model(model or tiny_model("qwen3"), compile=True, **{"share": False, **settings})


def loop_of(target: Target) -> Loop:
    assert isinstance(target.runner.run, Loop)
    return target.runner.run


def reason(target: Target) -> str:
    """Why it is not compiled; then nothing is replaced."""
    assert target.runner.form == "loop"
    loop = loop_of(target)
    assert all(isinstance(block.attention.rotary, Rotary) for block in loop.blocks)
    assert loop.norm.compute == loop.norm.few_operations
    return str(target.runner)


NAMES = ["llama", "qwen2", "qwen3", "phi3", "smollm3", "gemma3", "qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize(("name", "share"), [*((name, False) for name in NAMES), ("qwen3", True)])
def test_the_operations_compute_the_same(name: str, share: bool, uncompiled: None) -> None:
    model = tiny_model(name)
    target, plain = made(copy.deepcopy(model), share=share), wrap_model(model, share=share)
    assert str(target.runner).endswith("one loop, compiled")
    assert target.num_bytes == plain.num_bytes, "no copy of the weights"
    assert_near(paged_logits(target), paged_logits(plain), len(target.layers))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_compiled_operations_are_batch_invariant(quantization: str, uncompiled: None, tmp_path: Path) -> None:
    model = tiny_model("qwen3") if quantization == "none" else tiny_llama()
    model.save_pretrained(tmp_path)
    settings: Any = {"quantization": quantization}
    with where_invariant():
        target = load_target(tmp_path, dtype="bfloat16", compile=True, batch_invariant=True, **settings)
    assert target.runner.form == "compiled", target.runner
    assert target.batch_invariant
    assert bool(target.packed) == (quantization != "none") == between_programs(target)


def between_programs(target: Target) -> bool:
    """Whether all between two attentions is one program."""
    runs = loop_of(target).between
    return bool(runs) and all(isinstance(run, BetweenProgram) for run in runs)


def operation_programs(target: Target) -> bool:
    """Whether each norm, rotation and gated activation is a program."""
    loop = loop_of(target)
    norms = [loop.norm, *(norm for block in loop.blocks for norm in block.norms if norm is not None)]
    kept = [norm for norm in norms if norm.compute == norm.few_operations]
    for block in loop.blocks:
        kept += [part for part in (block.attention.rotary,) if isinstance(part, Rotary)]
        kept += [part for part in (block.mlp.gating,) if isinstance(part, Gating)]  # type: ignore[union-attr]
    return not kept


def packed(folder: Path, model: Any = None, **settings: Any) -> Target:
    (model or tiny_llama()).save_pretrained(folder)
    given: Any = {"dtype": "bfloat16", "quantization": "int4", "compile": True, **settings}
    return load_target(folder, **given)


def multiples_of_32(name: str) -> Any:
    """Packed weights have groups of 32 columns. The heads of a row are wider than its states."""
    model_type, settings = TINY[name]
    return build(model_type, **{**settings, "intermediate_size": 64, "head_dim": 16})


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", "int4"), ("qwen2", "int8"), ("qwen3", "int4"), ("gemma3", "int4"), ("gemma3", "int8")],
)
def test_one_program_between_attentions(
    name: str, quantization: str, uncompiled: None, tmp_path: Path
) -> None:
    target = packed(tmp_path, multiples_of_32(name), quantization=quantization)
    assert between_programs(target) and operation_programs(target), target.runner
    loop = loop_of(target)
    x = random_rows(loop.norm.weight.shape[-1], loop.embed).repeat(9, 1)  # more than are measured at once
    attention = loop.blocks[0].attention
    seen = torch.randn(attention.heads, len(x), attention.head_dim).to(x.dtype).transpose(0, 1)
    for number, program in enumerate(loop.between):
        plain = Between(*loop.blocks[number : number + 2])
        tables = loop.tables(x[None], torch.arange(len(x))[None], loop.kinds[number + 1])
        wide = cast((x, seen, tables), torch.float32)
        truth = cast(plain, torch.float32)(*wide)
        for three in zip(program(x, seen, tables), plain(x, seen, tables), truth, strict=True):
            assert nearly(*(part.float().flatten(1) for part in three))


def heads_flipped(module: BetweenRows) -> RUN:
    """The heads of keys in the place of those of queries."""
    return lambda inputs: [part.flip(1) if part.dim() == 3 else part for part in module(*inputs)]


def inputs_exchanged(module: BetweenRows) -> RUN:
    """States in the place of heads, which are as wide in this model."""
    return lambda inputs: [*module(inputs[1], inputs[0], *inputs[2:])]


def less_of(part: int) -> Callable[[BetweenRows], RUN]:
    def smaller(module: BetweenRows) -> RUN:
        changed: Any = module.parts[part]
        forward = changed.forward
        changed.forward = lambda *inputs: 0.9 * forward(*inputs)
        return lambda inputs: [*module(*inputs)]

    return smaller


@pytest.mark.parametrize(
    "wrong",
    [heads_flipped, inputs_exchanged, less_of(0), less_of(5)],
    ids=["heads flipped", "inputs exchanged", "less of attention", "less of the MLP"],
)
def test_a_wrong_program_between_attentions_is_not_used(
    wrong: Callable[[BetweenRows], RUN], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(key: str, module: nn.Module, *_: Any) -> RUN:
        return wrong(module) if isinstance(module, BetweenRows) else as_it_is(key, module)

    monkeypatch.setattr(compiling, "load_or_compile", load)
    assert "not compiled: it computes something else" in reason(packed(tmp_path))


def test_one_layer_has_programs_of_operations(uncompiled: None, tmp_path: Path) -> None:
    target = packed(tmp_path, tiny_llama(num_hidden_layers=1))
    assert target.runner.form == "compiled" and not between_programs(target) and operation_programs(target)


def test_where_the_last_layer_is_not_packed_nothing_between_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, compiled = packed(tmp_path, tiny_llama(num_hidden_layers=3), compile=False), list[nn.Module]()

    def load(key: str, module: nn.Module, *_: Any) -> RUN:
        compiled.append(module)
        return as_it_is(key, module)

    monkeypatch.setattr(compiling, "load_or_compile", load)
    loop = loop_of(target)
    loop.blocks[-1].attention.qkv = partial(torch.mm, mat2=torch.ones(32, 64).bfloat16())
    compiling.compile_parts(loop)
    assert operation_programs(target) and not any(isinstance(module, BetweenRows) for module in compiled)


def test_products_in_smaller_pieces_have_no_program_between_attentions(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pieces, "MEASURED_ROWS", 1024)
    with where_invariant():
        target = packed(tmp_path, batch_invariant=True)
    assert target.batch_invariant and target.runner.form == "compiled"
    assert not between_programs(target) and operation_programs(target)


def test_where_batches_differ_programs_between_attentions_are_put_back(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pieces, "MEASURED_ROWS", 1024)
    monkeypatch.setattr(invariant, "differing", lambda target: 1)
    target = packed(tmp_path, batch_invariant=None)
    assert not target.batch_invariant and "position 1" in target.invariance
    assert between_programs(target)


def test_adapters_have_no_program_between_attentions(uncompiled: None, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_llama())
    target = packed(tmp_path / "base", adapters={"one": str(adapter)})
    assert target.adapters and target.runner.form == "compiled"
    assert not between_programs(target) and operation_programs(target)


def test_layers_of_one_shape_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def counted(key: str, *given: Any) -> RUN:
        keys.append(key)
        return as_it_is(key, *given)

    monkeypatch.setattr(compiling, "load_or_compile", counted)
    made()
    assert len(keys) == 6 and len(set(keys)) == 3, "norm, rotary and gating, for few rows and for many"


def wrong_rotation(heads: Tensor, tables: Any) -> Tensor:
    return heads


def test_a_program_that_computes_something_else_is_not_used(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "rotate", wrong_rotation)
    assert "not compiled: it computes something else" in reason(made())


def test_a_program_of_another_precision_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(key: str, module: nn.Module, *_: Any) -> RUN:
        return lambda inputs: [module(*inputs).float()]

    monkeypatch.setattr(compiling, "load_or_compile", wider)
    model = copy.deepcopy(tiny_model("qwen3")).to(torch.bfloat16)
    assert "not compiled: it computes something else" in reason(made(model))


def test_a_program_whose_rows_depend_on_each_other_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def dependent(key: str, module: nn.Module, *_: Any) -> RUN:
        return lambda inputs: [module(*inputs) * (1 + 1e-6 * (len(inputs[0]) > 1))]

    monkeypatch.setattr(compiling, "load_or_compile", dependent)
    assert "not compiled: a row depends on how many there are" in reason(made())


def key(module: nn.Module, *inputs: Tensor) -> str:
    return compiling.program_key(module, list(inputs))


def test_programs_of_other_shapes_dtypes_and_activations_have_other_names() -> None:
    x = torch.zeros(4, 8)
    silu, gelu = (compiling.GatingRows(act) for act in (nn.SiLU(), nn.GELU()))
    assert key(silu, x) == key(compiling.GatingRows(nn.SiLU()), x)
    strided = torch.zeros(4, 16)[:, :8]
    others = [key(gelu, x), key(silu, x.bfloat16()), key(silu, x[:, :6]), key(silu, strided)]
    others += [key(compiling.GatingRows(nn.GELU("tanh")), x), key(compiling.NormRows(), x)]
    assert len({key(silu, x), *others}) == 7


@pytest.mark.parametrize("changed", [Packed4, Packed8])
def test_a_program_of_other_code_has_another_name(changed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(compiling.NormRows(), torch.zeros(4, 8))
    monkeypatch.setattr(compiling, "source_of", lambda part: "other" if part is changed else getsource(part))
    assert key(compiling.NormRows(), torch.zeros(4, 8)) != before


def test_a_damaged_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor as inductor
    from torch._inductor.runtime import cache_dir_utils

    def load(path: Path) -> RUN:
        if path.read_text() != "whole":
            raise RuntimeError("not a package")
        return lambda given: [torch.zeros(0)]

    def compile(made: Any, package_path: str, **how: Any) -> str:
        Path(package_path).write_text("whole")
        how["inductor_configs"]["added"] = True  # as torch does; the next name must be the same
        return package_path

    monkeypatch.setattr(cache_dir_utils, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compiling, "load_program", load)
    monkeypatch.setattr(inductor, "aoti_compile_and_package", compile)
    given = "key", compiling.GatingRows(nn.SiLU()), [torch.zeros(64, 8)], [], compiling.ONE_THREAD
    assert compiling.load_or_compile(*given)
    (file,) = (tmp_path / "speculon").iterdir()
    file.write_text("hal")
    assert compiling.load_or_compile(*given) and file.read_text() == "whole"
    monkeypatch.setattr(inductor, "aoti_compile_and_package", failing(AssertionError("it is kept")))
    assert compiling.load_or_compile(*given)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **how: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No working C++ compiler found\nin a long text"),
        KeyError("planted"),
    ],
    ids=repr,
)
def test_after_any_compiler_error_the_loop_is_used(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "load_or_compile", failing(error))
    assert f"not compiled: {str(error).partition(chr(10))[0]}" in reason(made())


def test_without_a_writable_cache_the_loop_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import cache_dir_utils

    (tmp_path / "file").touch()
    # no folder: not even root may write below it
    monkeypatch.setattr(cache_dir_utils, "cache_dir", lambda: tmp_path / "file")
    assert "not compiled: [Errno" in reason(made())


def test_a_model_object_and_its_draft_model_are_compiled(uncompiled: None) -> None:
    models = tiny_model("qwen3"), tiny_model("llama")
    decoder = SpeculativeDecoder(*models, method="draft_model", compile="now")
    drafter: Any = proposer_of(decoder.engine, "draft_model")
    for target in (decoder.engine.runtime.target, drafter.model):
        assert target.runner.form == "compiled" and operation_programs(target)


def test_a_norm_in_another_dtype_than_its_weight() -> None:
    weight, x = torch.rand(8), torch.randn(3, 8).bfloat16()
    norm = FusedNorm(weight, 1e-5)
    assert norm.native(x).dtype is norm.few_operations(x).dtype is torch.bfloat16
    assert torch.allclose(norm.native(x).float(), norm.few_operations(x).float(), rtol=2**-7)
