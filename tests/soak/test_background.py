"""Programs that the real compiler makes in the background change no bit, in the middle of a text neither."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import background
from speculon.runtimes.torch.model.background import BackgroundCompiler
from speculon.runtimes.torch.model.compiled import FEW, BetweenProgram
from speculon.runtimes.torch.model.target import Runner, Target
from tests.soak import hurried_compiler
from tests.tiny.conftest import TINY, build

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
PROMPTS = ["def add(a, b):", "import os\n\n\nclass Path:\n", "for i in range("]
PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)

Expected = tuple[list[list[int]], Tensor]  # texts, and logits


@pytest.fixture(autouse=True, scope="module")
def in_a_hurry() -> Iterator[None]:
    """Processes begin at once, and take the time of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "PAUSE", 0.0)
        patch.setattr(background, "compile_process", hurried_compiler)
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the programs. All workers of a run have one, and the process of one compiles: those
    of the others find what it has made.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "filled"
    with pytest.MonkeyPatch.context() as patch:
        llm = made(folder, patch)
        for compiler in compilers_of(llm):
            assert compiler.process is not None and compiler.process.wait(1500) == 0
        llm.close()
    return folder


def made(cache: Path | str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    """The test ends its engine where a process may still run."""
    monkeypatch.setenv("SPECULON_CACHE", str(cache))
    speculation: Any = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 4}
    given: Any = {"quantization": "int4", "dtype": "bfloat16", "max_num_seqs": 4, "warmup": False}
    return LLM("demo-draft", **{**given, "speculation": speculation, **settings})


def target_of(llm: LLM) -> Target:
    target: Target = llm.engine.runtime.target  # type: ignore[attr-defined]
    return target


def runner_of(llm: LLM) -> Runner:
    return target_of(llm).runner


def compilers_of(llm: LLM) -> list[BackgroundCompiler]:
    compilers: list[BackgroundCompiler] = llm.engine.runtime.compilers  # type: ignore[attr-defined]
    return compilers


def process_of(llm: LLM) -> subprocess.Popen[bytes]:
    (compiler,) = compilers_of(llm)
    assert compiler.process is not None and runner_of(llm).programs == "compiling in the background"
    return compiler.process


def wait_for_process(llm: LLM) -> None:
    process_of(llm).wait(1500)


def written(llm: LLM, at: int = 0, wait: Callable[[LLM], None] | None = None) -> list[list[int]]:
    """The texts; `wait` is called after `at` rounds, in the middle of all of them."""
    engine: Engine = llm.engine
    names = [engine.add_request(llm.tokenizer.encode(prompt), PARAMS) for prompt in PROMPTS]
    texts: dict[str, list[int]] = {name: [] for name in names}
    rounds = 0
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.tokens
        rounds += 1
        if rounds == at and wait is not None:
            assert all(0 < len(text) < 60 for text in texts.values())
            wait(llm)
    return list(texts.values())


@pytest.fixture(scope="module")
def expected() -> Expected:
    """What the loop writes, and its logits."""
    with pytest.MonkeyPatch.context() as patch:
        llm = made("", patch, compile="off")
        texts = written(llm)
        assert runner_of(llm).form == "loop" and all(len(text) == 96 for text in texts)
        return texts, paged_logits(target_of(llm))


def test_programs_change_over_in_the_middle_of_texts(
    tmp_path: Path, filled: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process finds what another one has compiled meanwhile, and ends."""

    def wait(llm: LLM) -> None:
        shutil.copytree(filled / "programs", tmp_path / "programs", dirs_exist_ok=True)
        wait_for_process(llm)

    monkeypatch.setattr(background, "PAUSE", 1.0)
    llm = made(tmp_path, monkeypatch)
    assert runner_of(llm).form == "loop"
    texts = written(llm, at=8, wait=wait)
    runner: Any = runner_of(llm)
    assert (runner.form, runner.programs, compilers_of(llm)) == ("compiled", "ready", [])
    assert all(isinstance(run, BetweenProgram) for run in runner.run.between)
    assert texts == expected[0]
    assert torch.equal(paged_logits(target_of(llm)), expected[1])
    assert llm.engine.capabilities()["compiled"].status == "on"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_start_finds_them_with_any_number_of_threads(
    threads: int, filled: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        llm = made(filled, monkeypatch, threads=threads)
        assert (runner_of(llm).form, compilers_of(llm)) == ("compiled", [])
        assert written(llm) == expected[0]
    finally:
        torch.set_num_threads(before)


def test_finding_them_imports_no_compiler(filled: Path) -> None:
    code = (
        "import sys, torch; from speculon import LLM;"
        "llm = LLM('demo-draft', quantization='int4', dtype='bfloat16', max_num_seqs=4, warmup=False);"
        "compiler = {'torch._inductor.compile_fx', 'torch._inductor.package', 'torch.export.pt2_archive'};"
        "print(llm.engine.runtime.target.runner.form, not compiler & {*sys.modules})"
    )
    environment = os.environ | {"SPECULON_CACHE": str(filled)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["compiled", "True"], found


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("gemma3", "int8"), ("qwen3", "none")],
)
def test_programs_have_the_bits_of_the_loop(
    name: str, quantization: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of heads and around parts, both activations; 8 bits, and no packed weights. The other tests of
    this file have 4 bits.
    """
    monkeypatch.setenv("SPECULON_CACHE", str(tmp_path / "cache"))
    model_type, settings = TINY[name]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    build(model_type, **{**settings, **sizes}).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype="bfloat16", quantization=quantization, batch_invariant=None)
    expected = paged_logits(target)
    compiler = BackgroundCompiler(target)
    assert compiler.process is not None
    compiler.process.wait(1500)
    while not compiler.ended:
        compiler.advance()
    assert (target.runner.form, target.runner.programs) == ("compiled", "ready")
    assert torch.equal(paged_logits(target), expected)


def last_bit(run: background.RunProgram) -> background.RunProgram:
    """Another last bit in one column."""

    def other(inputs: list[Tensor]) -> list[Tensor]:
        first, *others = run(inputs)
        first.view(torch.int16)[..., -1] ^= 1
        return [first, *others]

    return other


def few_differ(run: background.RunProgram) -> background.RunProgram:
    """The same for few rows alone."""
    return lambda inputs: (last_bit(run) if len(inputs[0]) <= FEW else run)(inputs)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (last_bit, "the bits of a program are not those of the loop"),
        (few_differ, "a row depends on how many there are"),
    ],
)
def test_a_program_with_another_bit_is_refused_and_the_loop_goes_on(
    wrong: Any, why: str, filled: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = background.load_program
    monkeypatch.setattr(background, "load_program", lambda file: wrong(load(file)))
    llm = made(filled, monkeypatch)
    assert runner_of(llm).programs == f"failed: {why}"
    assert written(llm) == expected[0] and runner_of(llm).form == "loop"


def test_without_a_compiler_no_process_is_started(
    tmp_path: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    llm = made(tmp_path, monkeypatch)
    assert compilers_of(llm) == []
    assert runner_of(llm).programs == "off: there is no C++ compiler (no-such-compiler)"
    assert written(llm) == expected[0] and runner_of(llm).form == "loop"


def no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "file").touch()  # not even root may write below it
    return folder / "file" / "cache"


def killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder / "cache"


@pytest.mark.parametrize("without", [no_folder, killed])
def test_where_compiling_fails_the_loop_goes_on_and_one_line_says_so(
    without: Any,
    tmp_path: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wait(llm: LLM) -> None:
        if without is killed:
            process_of(llm).kill()
        wait_for_process(llm)

    llm = made(without(tmp_path, monkeypatch), monkeypatch)
    with caplog.at_level(logging.WARNING):
        texts = written(llm, at=8, wait=wait)
    assert runner_of(llm).form == "loop" and texts == expected[0]
    state = runner_of(llm).programs
    assert state.startswith("failed: the compiling process ended with ")
    (line,) = [line for line in caplog.messages if "the loop goes on without programs" in line]
    assert state.removeprefix("failed: ") in line
    assert state in llm.engine.capabilities()["compiled"].reason
    assert {no_folder: "Errno", killed: "-9"}[without] in state


def test_a_damaged_file_is_removed(tmp_path: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    damaged, whole = sorted((cache / "programs").glob("*.pt2"))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    llm = made(cache, monkeypatch)
    assert runner_of(llm).form == "loop" and "is damaged" in runner_of(llm).programs
    assert whole.exists() and not damaged.exists()


def in_a_minute(becomes_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (true := becomes_true()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return true


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie of a parent that does not wait."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def scheduling_group(of: int | str) -> list[str]:
    """`/NAME nice N` of the group of its session, which shares time with other groups as an equal.
    Nothing where there are no such groups, and for what runs in the session of the first process.
    """
    group = Path(f"/proc/{of}/autogroup")
    return group.read_text().split() if group.exists() else []


def yields(pid: int) -> bool:
    """Whether it gets only time that nobody else asks for: by itself, and as a session of its own."""
    try:
        low = os.getpriority(os.PRIO_PROCESS, pid) == 19 and os.sched_getscheduler(pid) == os.SCHED_IDLE
        name, *nice = scheduling_group(pid) or ["", "nice", "19"]
    except OSError:  # it has ended
        return False
    return low and nice == ["nice", "19"] and (not name or name not in scheduling_group("self"))


def test_the_engines_end_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(tmp_path, monkeypatch)
    process = process_of(llm)
    assert process.poll() is None
    llm.engine.close()
    assert process.poll() == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it reads /proc")
def test_the_process_yields_and_a_killed_engine_leaves_none(tmp_path: Path) -> None:
    code = (
        "import time; from speculon import LLM;"
        "llm = LLM('demo-draft', quantization='int4', dtype='bfloat16', warmup=False);"
        "print(llm.engine.runtime.compilers[0].process.pid, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"SPECULON_CACHE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        try:
            pid = int(engine.stdout.readline())
            yielded = in_a_minute(lambda: yields(pid)) and not ended(pid)
        finally:
            engine.kill()
    assert in_a_minute(lambda: ended(pid)) and yielded
