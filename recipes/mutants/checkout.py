"""Copies of a checkout, in which an error is planted and tests run."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from time import perf_counter

from recipes.mutants.planted import Mutant, read_sources

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "node_modules")
ENVIRONMENT = {
    "CI": "true",  # Hypothesis draws the same examples in every run
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# the marks of `make test` and of `make soak`
QUICK, LONG = "not soak and not gpu", "soak and not gpu and not alone"
TEST_SECONDS = {QUICK: 120, LONG: 1800}  # of one test; beyond, it hangs, and is red
RUN_SECONDS = {QUICK: 5400, LONG: 7200}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
PASSED, NOTHING_COLLECTED = 0, 5


class TestsFailed(Exception):
    """pytest itself has failed, or tests are red where they must be green."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    seconds: float
    red: str = ""  # the first test that failed; empty: none has
    hung: bool = False  # whether it failed by its time limit


class Checkout:
    """A copy whose package is the one that its tests import."""

    def __init__(self, source: Path, root: Path):
        self.root = root
        shutil.copytree(source, root, ignore=NOT_COPIED)
        # by time stamps, a file that changes twice within a second could be taken for an older one
        by_content = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(root / "src", quiet=1, invalidation_mode=by_content)
        self.sources = read_sources(root)
        self._process: subprocess.Popen[str] | None = None
        self._environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root / "src")}

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[Path]:
        """Within the context the package has this error, in the file that is returned."""
        place = mutant.place(self.sources)
        (self.root / place).write_text(mutant.applied(self.sources[place]), encoding="utf-8")
        try:
            yield place
        finally:
            (self.root / place).write_text(self.sources[place], encoding="utf-8")

    def imports_itself(self) -> bool:
        """Whether tests import this copy; another installed one would make every mutant survive."""
        code = "import speculon; print(speculon.__file__)"
        command = [sys.executable, "-c", code]
        found = subprocess.check_output(command, cwd=self.root, env=self._environment, text=True)
        return Path(found.strip()).resolve().is_relative_to(self.root.resolve())

    def existing(self, tests: tuple[str, ...]) -> list[str]:
        return [test for test in tests if (self.root / test.partition("::")[0]).exists()]

    def stop(self) -> None:
        """Kills the tests that run, with the servers that they have started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def test(self, tests: list[str], marks: str = QUICK) -> Run:
        """Runs tests up to the first that fails. Raises `TestsFailed` where pytest cannot run them."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
        command += ["-n", "0", "-m", marks, "--timeout", str(TEST_SECONDS[marks]), *tests]
        began = perf_counter()
        process = self._process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS[marks])
        except subprocess.TimeoutExpired:
            self.stop()
            process.communicate()
            return Run(perf_counter() - began, " ".join(tests), hung=True)
        seconds = perf_counter() - began
        if process.returncode in (PASSED, NOTHING_COLLECTED):
            return Run(seconds)
        failure = FAILED.search(output)
        if failure is None:
            raise TestsFailed(f"pytest {' '.join(tests)} ended with {process.returncode}:\n{output[-2000:]}")
        return Run(seconds, failure[1], "Timeout" in (failure[2] or ""))
