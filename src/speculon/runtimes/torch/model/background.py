"""Programs for a loop that already runs: a process of the lowest priority compiles them.

They take the place of the loop's parts between two rounds, and only where they give the bits of the loop.
So a sequence may have begun under the loop, cached pages may be the loop's, and its checks stay true.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from speculon.checkpoints.locate import first_line
from speculon.core.config.file import cache_folder
from speculon.runtimes.torch.model import compile_process
from speculon.runtimes.torch.model.block import CannotReplace, Loop
from speculon.runtimes.torch.model.compiled import (
    BETWEEN,
    ONE_THREAD,
    THREADS,
    Program,
    Replacement,
    RunProgram,
    Wanted,
    check_rows,
    compile_program,
    load_program,
    program_file,
    program_name,
    replacements_of,
)
from speculon.runtimes.torch.model.target import Target

TensorForm = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides
Job = tuple[str, nn.Module, list[TensorForm], list[TensorForm]]  # key, module, rows, weights

PAUSE = 5.0  # s before it begins, a guess: what ends sooner has no use for programs
CXX = "clang++" if sys.platform == "darwin" else "g++"  # unless the variable of that name has another
ONE_AT_A_TIME = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # threads and compilers

log = logging.getLogger("speculon")


class BackgroundCompiler:
    """Has programs of one target compiled, checks them, and puts them in the place of the loop's parts.

    `Runner.programs` has the state. An error of any kind ends it with one line in the log: the loop goes on.
    """

    def __init__(self, target: Target):
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes] | None = None  # of the process
        self.replacements: list[Replacement] = []
        self.made: dict[str, Program] = {}
        self.pieces: Iterator[None] | None = None  # of the check
        self.ended = False
        with self.or_the_loop(), torch.inference_mode():
            self.begin()

    def begin(self) -> None:
        loop = self.target.runner.run
        if why := obstacle(self.target):
            return self.end(f"off: {why}")
        assert isinstance(loop, Loop)
        self.replacements = chosen(replacements_of(loop))
        if missing := missing_programs(self.wanted):
            self.start(missing)
        else:
            self.pieces = self.check()

    @property
    def wanted(self) -> list[Wanted]:
        return [wanted for one in self.replacements for wanted in one.wanted]

    @contextmanager
    def or_the_loop(self) -> Iterator[None]:
        """Within it an error leaves the loop as it is, and the log says why."""
        try:
            yield
        except Exception as error:
            why = first_line(error)
            log.warning("%s: %s; the loop goes on without programs", self.target.name, why)
            self.end(f"failed: {why}")

    def start(self, missing: list[Wanted]) -> None:
        """Begins the process, if there is a compiler. Its input stays open until the engine ends."""
        if shutil.which(compiler := os.environ.get("CXX", CXX)) is None:
            why = f"there is no C++ compiler ({compiler})"
            log.info("%s: %s; the loop goes on without programs", self.target.name, why)
            return self.end(f"off: {why}")
        jobs: list[Job] = [
            (one.key, one.module, [*map(form_of, one.rows)], [*map(form_of, one.weights)]) for one in missing
        ]
        self.output = tempfile.TemporaryFile()
        weakref.finalize(self, self.output.close)  # where nobody closes the engine
        with tempfile.TemporaryFile() as given:
            pickle.dump((PAUSE, str(program_file("", ONE_THREAD).parent), pickle.dumps(jobs)), given)
            given.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", compile_process.__name__, str(given.fileno())],
                pass_fds=[given.fileno()],
                stdin=subprocess.PIPE,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ONE_AT_A_TIME,
                start_new_session=True,  # so that its compilers end with it
            )
        weakref.finalize(self, kill, self.process)
        self.target.runner.programs = "compiling in the background"
        log.info("%s: programs are compiled in the background; the loop runs until then", self.target.name)

    def advance(self) -> bool:
        """A small piece of what is left to do; whether programs have just replaced parts of the loop."""
        if self.ended:
            return False
        with self.or_the_loop(), torch.inference_mode():
            if self.pieces is None and self.compiled():
                self.pieces = self.check()
            if self.pieces is None or next(self.pieces, self) is not self:
                return False
            for one in self.replacements:
                one.take_place(self.made)
            self.target.runner.form = "compiled"
            log.info("%s: programs run in the place of the loop, with equal bits", self.target.name)
            self.end("ready")
            return True
        return False

    def finish(self) -> None:
        """All that can be done without waiting for the process."""
        while self.pieces is not None and not self.ended:
            self.advance()

    def compiled(self) -> bool:
        """Whether the process has done its work. Raises `CannotReplace` where it ended without."""
        assert self.process is not None
        code = self.process.poll()
        if code:
            assert self.output is not None
            self.output.seek(0)
            lines = self.output.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            raise CannotReplace(f"the compiling process ended with {code}" + (f": {last}" if last else ""))
        return code == 0

    def check(self) -> Iterator[None]:
        """Loads each program and compares it with the loop, in pieces of some tens of milliseconds.

        Raises `CannotReplace` where one differs.
        """
        self.target.runner.programs = "checking"
        for wanted in self.wanted:
            new = wanted.key not in self.made
            if new:
                self.made[wanted.key] = Program(*map(load_or_remove, files_of(wanted.key)))
                yield
            run = self.made[wanted.key]
            results = run(*wanted.rows, *wanted.weights)
            if not all(map(same_bits, results, wanted.plain(*wanted.rows))):
                raise CannotReplace("the bits of a program are not those of the loop")
            yield
            if new:
                check_rows(run, wanted, results)
                yield

    def end(self, state: str | None = None) -> None:
        """Kills the process, and frees what the check holds."""
        self.ended = True
        if state is not None:
            self.target.runner.programs = state
        if self.process is not None:
            kill(self.process)
        self.replacements, self.made, self.pieces = [], {}, None
        if self.output is not None:
            self.output.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """With the compilers that it has started. May be called again."""
    if process.poll() is None:
        with suppress(OSError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def chosen(found: Iterator[Replacement]) -> list[Replacement]:
    """One program of all between attentions, or else programs of operations.

    Beside the first, the others would run at both ends of the loop alone, and are not worth their time.
    """
    first = next(found)
    return [first] if first.name == BETWEEN else [first, *found]


def obstacle(target: Target) -> str | None:
    """Why nothing is compiled in the background for a target on a CPU."""
    if not isinstance(target.runner.run, Loop):
        return "no loop runs in the place of the model's forward"
    if target.dtype is torch.float32:  # without a rounding between a product and a sum
        return "in float32 a program rounds otherwise than the loop, as --compile now allows"
    if cache_folder() is None:
        return "there is no cache folder to keep programs in (set SPECULON_CACHE)"
    if not hasattr(os, "killpg"):
        return "this system has no process groups"
    return None


def missing_programs(wanted: list[Wanted]) -> list[Wanted]:
    """Of each program that has no file."""
    return list({one.key: one for one in wanted if not all(map(Path.exists, files_of(one.key)))}.values())


def files_of(key: str) -> list[Path]:
    """For few rows, and for many."""
    return [program_file(key, settings) for settings in (ONE_THREAD, THREADS)]


def load_or_remove(file: Path) -> RunProgram:
    """Raises `CannotReplace` for a file that cannot be loaded, and removes it if it is damaged. A whole one
    stays, because another would not load either: say, where libraries in the temporary folder may not run.
    """
    try:
        return load_program(file)
    except RuntimeError as error:
        if is_whole(file):
            raise CannotReplace(f"{file} cannot be loaded here ({str(error):.80})") from error
        file.unlink(missing_ok=True)
        raise CannotReplace(f"{file} is damaged, and is compiled anew at the next start") from error


def is_whole(file: Path) -> bool:
    try:
        with ZipFile(file) as package:
            return package.testzip() is None
    except (OSError, BadZipFile):
        return False


def form_of(x: Tensor) -> TensorForm:
    return x.shape, x.stride(), x.dtype


def made_of(form: TensorForm) -> Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype)


def same_bits(result: Tensor, expected: Tensor) -> bool:
    return result.dtype is expected.dtype and torch.equal(result, expected)


def compile_jobs(folder: Path, jobs: list[Job]) -> None:
    """In the process of low priority: the programs that the folder lacks."""
    for key, module, rows, weights in jobs:
        for settings in (ONE_THREAD, THREADS):
            path = folder / program_name(key, settings)
            if not path.exists():
                inputs = [*map(made_of, rows)], [*map(made_of, weights)]
                compile_program(path, module, *inputs, settings)
