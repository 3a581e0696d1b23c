"""Compiled steps compute what the loop does, or are refused. The compiler itself runs in tests/soak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speculon import SamplingParams
from speculon.core.config import SpeculationConfig
from speculon.core.types import LayerSpec
from speculon.decoding.kv.store import PageStore, SpanView
from speculon.drafters.draft_model.proposer import DraftModel
from speculon.engine.decoder import SpeculativeDecoder
from speculon.loading.load import wrap_model
from speculon.loading.load_check import paged_logits
from speculon.speculation.proposers.base import TargetFacts
from speculon.target import compiled as compiling
from speculon.target import compiled_layers, footprint, linear, programs
from speculon.target.block import Loop
from speculon.target.fuse import fuse
from speculon.target.linear import Layout, Linear, packed
from speculon.target.target import Target
from speculon.target.trial import Trial
from tests.tiny.conftest import CONTEXT, MIXED, VOCAB, build, tiny_model
from tests.tiny.scripted import Request, proposer_of, run


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers in the compiler's terms, run as they are."""
    monkeypatch.setattr(programs, "program", lambda layers, *_: layers)


PROMPTS = {"a": [1, 2, 3, 1, 2, 3, 1, 2], "b": [5, 6, 7, 8, 5, 6, 7, 8, 5, 6], "c": [1, 2, 3, 4] * 9}


def made(model: Any = None, *, share: bool = False) -> Target:
    return wrap_model(model or tiny_model("qwen3"), share=share, compile=True)


def mixed() -> Any:
    """Layers with a window among others without."""
    return build("qwen2", **MIXED, use_sliding_window=True, max_window_layers=0)


def reasons(target: Target) -> str:
    assert target.runner.one_loop and target.runner.form != "compiled"
    assert not isinstance(target.runner.run, compiling.Compiled)
    return str(target.runner)


@pytest.mark.parametrize("layout", [Linear, packed])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "smollm3"])
def test_the_exportable_layers_compute_the_same(
    name: str, layout: Layout, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    target, plain = made(tiny_model(name)), wrap_model(tiny_model(name), share=False)
    assert isinstance(target.runner.run, compiling.Compiled) and str(target.runner).endswith(
        "one loop, compiled"
    )
    assert target.num_bytes == plain.num_bytes + (
        footprint.JOINT_BYTES if layout is Linear else footprint.COPIES * plain.num_bytes
    )
    found, expected = paged_logits(target), paged_logits(plain)  # calls of 13 rows, and of 4
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("layout", [Linear, packed])
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "mistral", "mixed"])
def test_outputs_are_those_of_the_loop(
    name: str, layout: Layout, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    batch = [
        Request(prompt, params, {"method": "ngram", "num_speculative_tokens": 4}, id)
        for id, prompt in PROMPTS.items()
    ]
    outputs, variants, arguments = {}, set[str](), compiling.Compiled.arguments

    def recorded(self: compiling.Compiled, *step: Any) -> tuple[str, compiled_layers.Arguments]:
        variant, given = arguments(self, *step)
        variants.add(variant)
        return variant, given

    monkeypatch.setattr(compiling.Compiled, "arguments", recorded)
    for compile in (False, True):
        target = wrap_model(mixed() if name == "mixed" else tiny_model(name), share=False, compile=compile)
        assert isinstance(target.runner.run, compiling.Compiled) == compile, target.runner
        variants.clear()
        results = [run(target, given, block_size=64) for given in (batch, batch[:1])]
        outputs[compile] = [{key: result.tokens for key, result in found.items()} for found in results]
    assert outputs[True] == outputs[False]
    assert variants == set(compiling.plan_for(torch.float32, torch.device("cpu")).settings), "each program"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each step that goes the compiled way, and whether they are of one text in consecutive slots."""
    seen, forward = [], compiled_layers.Layers.forward

    def recorded(self: compiled_layers.Layers, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((len(ids), rest[2] is None))
        return forward(self, ids, *rest)

    monkeypatch.setattr(compiled_layers.Layers, "forward", recorded)
    return seen


def test_a_step_that_scores_nothing_takes_the_loop(uncompiled: None, rows: list[tuple[int, bool]]) -> None:
    target = made()
    rows.clear()
    run(
        target,
        [Request(list(range(40)), SamplingParams(temperature=0, max_tokens=2), {"method": "off"}, "a")],
        max_batch_tokens=16,
    )
    assert rows == [(8, True), (1, True)], "the last chunk of the prompt, and the one row after it"


def test_with_other_threads_nothing_compiled_runs(uncompiled: None, rows: list[tuple[int, bool]]) -> None:
    target, threads = made(), torch.get_num_threads()
    rows.clear()
    torch.set_num_threads(threads + 1)
    try:
        paged_logits(target)
    finally:
        torch.set_num_threads(threads)
    assert not rows


@pytest.mark.parametrize(
    ("layout", "dtype"), [(Linear, "float32"), (packed, "float32"), (packed, "bfloat16")]
)
def test_the_estimate_counts_what_compiling_takes(
    layout: Layout, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(footprint, "fastest_layout", lambda dtype, device: layout)
    tiny_model("llama").save_pretrained(tmp_path)
    facts = TargetFacts(VOCAB, CONTEXT, dtype=dtype)
    build = partial(DraftModel.build, SpeculationConfig(draft=str(tmp_path)))
    plain, compiled = (build(replace(facts, compile=compile)).needs.bytes_fixed for compile in (False, True))
    more = footprint.JOINT_BYTES if layout is Linear else footprint.COPIES * plain
    assert compiled == plain + more * (dtype == "float32")


def planted(*args: Any) -> torch.Tensor:
    return args[0]


def test_a_wrong_program_is_not_used(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "rotate", planted)
    assert "not compiled: it computes something else" in reasons(made())


def test_a_program_without_a_trial_step_is_not_used(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: Linear)
    monkeypatch.setattr(compiling, "is_joint", lambda *given: False)
    assert "not compiled: no step was tried for ['joint']" in reasons(made())


def test_a_joint_call_with_exchanged_rows_is_not_used(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: Linear)
    right = compiled_layers.attend_joint

    def wrong(
        keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, joint: Any, *given: Any
    ) -> torch.Tensor:
        rows, order, *rest = joint
        return right(keys, values, slots, (rows, order.flip(0), *rest), *given)

    monkeypatch.setattr(compiled_layers, "attend_joint", wrong)
    assert "not compiled: it computes something else" in reasons(made())


def test_sequences_share_a_call_with_little_padding(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: Linear)
    target = made()
    assert isinstance(target.runner.run, compiling.Compiled)
    batch, single = Trial.of(target, (8, 3)), Trial.of(target, (33, 5))
    steps = {
        "one": batch.last(1),
        "few": batch.last(5),
        "joint": batch.last(2, 3),
        "many": (single.batch, single.view),
    }
    for variant, step in steps.items():
        found, given = target.runner.run.arguments(*step)
        assert found == variant
        assert all(x is None or x.is_contiguous() for x in given), "programs take it for granted"
    spec = LayerSpec("attention", 2, 16, 16, torch.float32)
    rows, keys = [SpanView(0, 20, slice(0, 20), 20)], [SpanView(0, 2, slice(0, 30), 30)]
    rows += [SpanView(20 + i, 21 + i, slice(0, 15), 15) for i in range(5)]
    keys += [SpanView(2 + i, 3 + i, slice(0, 3), 3) for i in range(5)]
    assert not compiling.is_joint(rows, spec, 2), "25 rows, padded to 120"
    assert not compiling.is_joint(keys, spec, 2), "45 keys, padded to 180"
    assert compiling.is_joint(keys, replace(spec, window=3), 2), "19 keys, padded to 24"
    assert not compiling.is_joint(keys, replace(spec, window=3, k_dim=1 << 20), 2), "too much to copy"
    assert not compiling.is_joint(keys, replace(spec, window=3), 1 << 20), "masks too large"


@pytest.mark.parametrize(
    ("layout", "which"),
    [(Linear, "one"), (Linear, "few"), (Linear, "joint"), (Linear, "many"), (packed, "scattered")],
)
def test_a_program_that_writes_no_pages_is_not_used(
    layout: Layout, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)

    def forgetful(layers: compiled_layers.Layers, variant: str, *how: Any) -> compiled_layers.Program:
        return (lambda *args: layers(*args[:4], *copy.deepcopy(args[4:]))) if variant == which else layers

    monkeypatch.setattr(programs, "program", forgetful)
    assert "not compiled: it computes something else" in reasons(made())


def test_a_draft_models_masks_are_of_its_own_dtype(uncompiled: None) -> None:
    target = made()
    assert isinstance(target.runner.run, compiling.Compiled)
    store = PageStore((LayerSpec("attention", 2, 16, 16, torch.bfloat16), *target.layers), 2, 16, "cpu")
    for rows in (1, 2):
        spans = [SpanView(i * rows, (i + 1) * rows, slice(16 * i, 16 * i + 2), 2) for i in range(2)]
        *_, mask = target.runner.run.joint(store.view_of(spans, first_layer=1))
        assert mask is not None and mask.shape == (2, 1, rows, 2) and mask.dtype is torch.float32


def test_programs_over_weights_in_rows_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: Linear)
    loop = wrap_model(tiny_model("qwen3"), share=False).runner.run
    assert isinstance(loop, Loop)
    layers, given = compiled_layers.Layers(loop, [0] * len(loop.blocks)), {}

    class Package:
        loader = SimpleNamespace(boxed_run=None)

        def get_constant_fqns(self) -> list[str]:
            return ["head.weight", "layers.1.qkv.weight", "rotary.inv_freq"]

        def load_constants(self, weights: dict[str, torch.Tensor], **how: bool) -> None:
            given.update(weights)
            assert how == {"check_full_update": True, "user_managed": True}

    monkeypatch.setattr(programs, "aoti_load_package", lambda path, **how: Package())
    programs.loaded(Path("package"), layers, compiling.FOLDED)
    assert not given
    programs.loaded(Path("package"), layers, compiling.SHARED)
    monkeypatch.setattr(Package, "get_constant_fqns", lambda self: ["lifted_0"])
    with pytest.raises(LookupError, match="lifted_0 is a constant, but no weight"):
        programs.loaded(Path("package"), layers, compiling.SHARED)
    qkv, head = loop.blocks[1].attention.qkv, loop.head
    assert isinstance(qkv, Linear) and isinstance(head, torch.nn.Linear) and len(given) == 3
    assert given["layers.1.qkv.weight"].data_ptr() == qkv.weight.data_ptr()
    assert given["head.weight"].data_ptr() == head.weight.data_ptr()


def test_a_damaged_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **how: Any) -> Any:
        if Path(path).read_text() != "whole":
            raise RuntimeError("not a package")
        return SimpleNamespace(loader=SimpleNamespace(boxed_run=lambda given: [None]))

    def compile(made: Any, package_path: str, **how: Any) -> str:
        Path(package_path).write_text("whole")
        return package_path

    for name, stand_in in {
        "cache_dir": lambda: tmp_path,
        "aoti_load_package": load,
        "aoti_compile_and_package": compile,
    }.items():
        monkeypatch.setattr(programs, name, stand_in)
    layers: Any = SimpleNamespace(layer_kinds=[0], sizes=compiled_layers.Layers.sizes)
    given: compiled_layers.Arguments = [*[torch.arange(3)] * 4, *[torch.zeros(8, 2, 4)] * 2]
    monkeypatch.setattr(programs, "export", lambda *args, **how: None)
    assert programs.program(layers, "scattered", compiling.FOLDED, given, "key")
    (file,) = (tmp_path / "speculon").iterdir()
    file.write_text("hal")
    assert (
        programs.program(layers, "scattered", compiling.FOLDED, given, "key") and file.read_text() == "whole"
    )
    monkeypatch.setattr(programs, "aoti_compile_and_package", failing(AssertionError("it is kept")))
    assert programs.program(layers, "scattered", compiling.FOLDED, given, "key")


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **how: Any) -> Any:
        raise error

    return fail


def test_without_a_compiler_the_loop_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(
        programs, "export", failing(RuntimeError("No working C++ compiler found\nin a long text"))
    )
    assert "not compiled: No working C++ compiler found" in reasons(made())


@pytest.mark.parametrize(
    "error", [PermissionError("no room to write"), AssertionError("planted"), KeyError("planted")], ids=repr
)
def test_after_any_compiler_error_the_loop_is_used(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(programs, "export", failing(error))
    assert f"not compiled: {error}" in reasons(made())


def test_without_a_writable_cache_the_loop_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    # no folder: not even root may write below it
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path / "file")
    assert "not compiled: [Errno" in reasons(made())


def program_key(**config: Any) -> str:
    """Of a model with the same weights, whatever the config says."""
    model = tiny_model("qwen3")
    parameters = {**model.config.to_dict()["rope_parameters"], **config.pop("rope", {})}
    like = type(model)(
        type(model.config)(**{**model.config.to_dict(), **config, "rope_parameters": parameters})
    )
    like.load_state_dict(model.state_dict())
    loop = wrap_model(like.eval(), share=False).runner.run
    assert isinstance(loop, Loop)
    return programs.program_key(compiled_layers.Layers(loop, [0] * len(loop.blocks)))


@pytest.mark.parametrize(
    "config", [{"rms_norm_eps": 1e-3}, {"rope": {"rope_theta": 77.0}}, {"hidden_act": "gelu"}], ids=str
)
def test_a_program_of_another_config_is_not_used(config: dict[str, Any]) -> None:
    assert program_key() == program_key()
    assert program_key() != program_key(**config)


def test_a_program_for_other_layer_kinds_is_not_used() -> None:
    loop = wrap_model(tiny_model("qwen3"), share=False).runner.run
    assert isinstance(loop, Loop)
    count = len(loop.blocks)
    keys = {
        programs.program_key(compiled_layers.Layers(loop, kinds))
        for kinds in ([0] * count, [0, 1] * (count // 2), [1, 0] * (count // 2))
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("model", "share", "reason"),
    [
        (lambda: build("qwen3").to(torch.bfloat16), False, "torch.bfloat16 on cpu was never measured"),
        (lambda: build("qwen3"), True, "the weights of a model object stay where they are"),
        (lambda: tiny_model("qwen3_moe"), False, "its layers are more than products and plain attention"),
        (lambda: tiny_model("gpt_oss"), False, "its layers are more than products and plain attention"),
    ],
    ids=["bf16", "shared", "experts", "sinks"],
)
def test_the_reason_for_not_compiling_is_reported(
    model: Callable[[], Any], share: bool, reason: str, uncompiled: None
) -> None:
    assert f"not compiled: {reason}" in reasons(made(model(), share=share))


def test_a_model_object_reports_why_it_is_not_compiled() -> None:
    decoder = SpeculativeDecoder(tiny_model("qwen3"), tiny_model("llama"), method="draft_model", compile=True)
    drafter = proposer_of(decoder.engine, "draft_model")
    assert isinstance(drafter, DraftModel)
    for target in (decoder.engine.target, drafter.model):
        assert "not compiled: the weights of a model object stay where they are" in reasons(target)


@pytest.mark.parametrize("chunk", [None, 7])
def test_attention_in_chunks_is_not_compiled(chunk: int | None, uncompiled: None) -> None:
    """The loop runs as it is; the same layers without chunks are compiled."""
    target = wrap_model(tiny_model("llama"), share=False, fused=False)
    target.layers = tuple(replace(layer, chunk=chunk) for layer in target.layers)
    fuse(target, share=False, compile=True)
    assert target.runner.one_loop
    assert (target.runner.form == "compiled") == (chunk is None)
    assert target.runner.refused["not compiled: attention in chunks"] == (chunk is not None)
