"""Programs take the place of a running loop with equal bits, or not at all. tests/soak has the compiler."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import background, compile_process
from speculon.runtimes.torch.model.background import BackgroundCompiler
from speculon.runtimes.torch.model.block import CannotReplace, Loop
from speculon.runtimes.torch.model.compiled import BetweenProgram, BetweenRows, Replacement, RunProgram
from speculon.runtimes.torch.model.target import Target
from tests.tiny.conftest import tiny_model
from tests.tiny.gguf_files import tiny_llama
from tests.tiny.scripted import make_engine

PROMPTS = [[5, 6, 7, 8, 5, 6], [40, 41], [9] * 20]


class Process:
    """In the place of the one that compiles, until it has ended with a code."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.stdin = open(os.devnull, "wb")

    def poll(self) -> int | None:
        return self.code


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Programs are operations in the compiler's terms, run as they are, once a process has made them."""
    monkeypatch.setenv("SPECULON_CACHE", str(tmp_path))
    modules: dict[str, Any] = {}
    find = background.replacements_of

    def found(loop: Loop) -> Iterator[Replacement]:
        for one in find(loop):
            modules.update({wanted.key: wanted.module for wanted in one.wanted})
            yield one

    def load(key: Any) -> RunProgram:
        module = modules[key]
        several = isinstance(module, BetweenRows)
        return lambda inputs: [*module(*inputs)] if several else [module(*inputs)]

    def start(compiler: BackgroundCompiler, missing: Any) -> None:
        compiler.process, compiler.output = made, BytesIO()  # type: ignore[assignment]

    made = Process()
    monkeypatch.setattr(background, "replacements_of", found)
    monkeypatch.setattr(background, "files_of", lambda key: [key, key])
    monkeypatch.setattr(background, "load_program", load)
    monkeypatch.setattr(background, "missing_programs", lambda wanted: wanted if made.code is None else [])
    monkeypatch.setattr(BackgroundCompiler, "start", start)
    yield made
    made.stdin.close()


def packed(folder: Path) -> Target:
    tiny_llama(num_hidden_layers=3).save_pretrained(folder)
    return load_target(folder, dtype="bfloat16", quantization="int4", batch_invariant=None)


def engine_over(target: Target, **settings: Any) -> Engine:
    engine = make_engine(target, max_num_seqs=4, **settings)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return engine


def written(engine: Engine, then: Callable[[], None] = lambda: None, at: int = 8) -> dict[str, list[int]]:
    """The texts; `then` is called after `at` rounds."""
    texts: dict[str, list[int]] = {}
    rounds = 0
    while engine.has_work:
        for event in engine.step():
            texts.setdefault(event.request_id, []).extend(event.tokens)
        rounds += 1
        if rounds == at:
            then()
    return texts


def test_programs_replace_the_loop_in_the_middle_of_texts(tmp_path: Path, process: Process) -> None:
    expected = written(engine_over(packed(tmp_path), compile="off"))
    target = packed(tmp_path)
    engine = engine_over(target)
    forms = []

    def ended() -> None:
        forms.append(target.runner.form)
        process.code = 0

    assert written(engine, ended) == expected
    runner: Any = target.runner
    assert (forms, runner.form, runner.programs) == (["loop"], "compiled", "ready")
    assert all(isinstance(run, BetweenProgram) for run in runner.run.between)
    assert engine.capabilities()["compiled"].status == "on"


def test_programs_of_an_earlier_start_run_at_once(tmp_path: Path, process: Process) -> None:
    expected = paged_logits(packed(tmp_path))
    process.code = 0
    target = packed(tmp_path)
    engine = engine_over(target)
    assert (target.runner.form, target.runner.programs) == ("compiled", "ready")
    assert torch.equal(paged_logits(target), expected)
    assert not engine.runtime.between_rounds()


def test_the_process_has_its_turn_before_it_imports_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that many engines have one process of hundreds of megabytes, and not one each."""
    name, given, found = background.__name__, tmp_path / "given", list[str]()

    def find(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        with pytest.raises(Timeout):
            FileLock(tmp_path / "programs" / "lock").acquire(timeout=0)
        found.append(attribute)
        return lambda folder, jobs: None

    module = ModuleType(name)
    module.__getattr__ = find  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compile_process, "yield_to_others", lambda: None)
    monkeypatch.setattr(compile_process, "end_with_input", lambda: None)
    given.write_bytes(pickle.dumps((0.0, str(tmp_path / "programs"), pickle.dumps([]))))
    monkeypatch.setattr(sys, "argv", ["", str(os.open(given, os.O_RDONLY))])
    compile_process.main()
    assert found == ["compile_jobs"]


def test_without_packed_weights_operations_are_programs(process: Process) -> None:
    process.code = 0
    target = wrap_model(deepcopy(tiny_model("qwen3")).to(torch.bfloat16), share=False)
    loop: Any = target.runner.run
    expected = paged_logits(target)
    BackgroundCompiler(target).finish()
    assert target.runner.form == "compiled" and loop.norm.compute != loop.norm.few_operations
    assert torch.equal(paged_logits(target), expected)


def other_bit(run: RunProgram) -> RunProgram:
    def other(inputs: list[Tensor]) -> list[Tensor]:
        first, *others = run(inputs)
        first.view(torch.int16)[..., -1] ^= 1
        return [first, *others]

    return other


def other_bit_of_few(run: RunProgram) -> RunProgram:
    return lambda inputs: (other_bit(run) if len(inputs[0]) == 1 else run)(inputs)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (other_bit, "the bits of a program are not those of the loop"),
        (other_bit_of_few, "a row depends on how many there are"),
    ],
)
def test_planted_error_a_program_with_another_bit_is_refused(
    wrong: Any,
    why: str,
    tmp_path: Path,
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load, process.code = background.load_program, 0
    monkeypatch.setattr(background, "load_program", lambda file: wrong(load(file)))
    target = packed(tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = engine_over(target)
    assert (target.runner.form, target.runner.programs) == ("loop", f"failed: {why}")
    assert [line for line in caplog.messages if f"{why}; the loop goes on without programs" in line]
    assert why in engine.capabilities()["compiled"].reason
    written(engine)


def test_a_process_that_fails_leaves_the_loop(tmp_path: Path, process: Process) -> None:
    target = packed(tmp_path)
    engine = engine_over(target)

    def killed() -> None:
        process.code = -9

    written(engine, killed)
    assert target.runner.form == "loop"
    assert target.runner.programs == "failed: the compiling process ended with -9"


def test_a_whole_program_that_does_not_load_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each start would compile it again."""

    def refuse(file: Path) -> RunProgram:
        raise RuntimeError("failed to map segment from shared object")

    monkeypatch.setattr(background, "load_program", refuse)
    whole, damaged = tmp_path / "whole.pt2", tmp_path / "damaged.pt2"
    with ZipFile(whole, "w") as package:
        package.writestr("program", bytes(5000))
    damaged.write_bytes(whole.read_bytes()[:1000])
    for file, why in ((whole, "cannot be loaded here"), (damaged, "is damaged")):
        with pytest.raises(CannotReplace, match=why):
            background.load_or_remove(file)
    assert whole.exists() and not damaged.exists()


@pytest.mark.parametrize(
    ("dtype", "cache", "fused", "why"),
    [
        ("float32", None, True, "in float32 a program rounds otherwise"),
        ("bfloat16", "", True, "there is no cache folder"),
        ("bfloat16", None, False, "no loop runs in the place"),
    ],
)
def test_where_nothing_is_compiled_the_state_says_why(
    dtype: str, cache: str | None, fused: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache is not None:
        monkeypatch.setenv("SPECULON_CACHE", cache)
    tiny_llama().save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=dtype, quantization="int4", fused=fused)
    engine = make_engine(target)
    assert target.runner.programs.startswith(f"off: {why}")
    assert why in engine.capabilities()["compiled"].reason
