"""Copies of a checkout, in which an error is planted and tests run."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from threading import Timer
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
PRELOADED = Path(__file__).with_name("preloaded.py")
LIBRARIES = ("torch", "transformers.models.llama.modeling_llama", "fastapi", "openai", "llguidance")
# lines of pytest's summary; logged errors have more blanks
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)
ARGUMENTS = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-n", "0"]
# plugins and libraries are imported before pytest could rewrite their asserts
ARGUMENTS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
PASSED, NOTHING_COLLECTED = 0, 5


class TestsFailed(Exception):
    """pytest itself has failed, or tests are red where they must be green."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    seconds: float
    red: tuple[str, ...] = ()  # the first test that failed, or all that ran where they had to be killed
    hung: bool = False  # whether it failed by its time limit


class Checkout:
    """A copy whose package is the one that its tests import."""

    def __init__(self, source: Path, root: Path, libraries: Sequence[str] = LIBRARIES):
        self.root = root
        shutil.copytree(source, root, ignore=NOT_COPIED)
        # by time stamps, a file that changes twice within a second could be taken for an older one
        by_content = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(root / "src", quiet=1, invalidation_mode=by_content)
        self.sources = read_sources(root)
        paths = os.pathsep.join(filter(None, (str(root / "src"), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
        self._output = root.with_name(f"{root.name}.txt")  # of the latest run
        self._child: int | None = None  # the process that runs tests, and leads a group
        self._runner = subprocess.Popen(
            [sys.executable, "-P", str(PRELOADED), *libraries],
            cwd=root,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

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

    def test(self, tests: list[str], marks: str = QUICK) -> Run:
        """Runs tests up to the first that fails. Raises `TestsFailed` where pytest cannot run them."""
        arguments = [*ARGUMENTS, "-m", marks, "--timeout", str(TEST_SECONDS[marks]), *tests]
        self._send({"arguments": arguments, "output": str(self._output)})
        self._child = int(self._answer())  # once the libraries are there
        began, late = perf_counter(), Timer(RUN_SECONDS[marks], self.stop)
        late.start()
        status = int(self._answer())
        late.cancel()
        self._child, seconds = None, perf_counter() - began
        if status in (PASSED, NOTHING_COLLECTED):
            return Run(seconds)
        if status == -signal.SIGKILL:
            return Run(seconds, tuple(tests), hung=True)
        output = self._output.read_text(encoding="utf-8", errors="replace")
        failure = FAILED.search(output)
        if failure is None:
            raise TestsFailed(f"pytest {' '.join(tests)} ended with {status}:\n{output[-2000:]}")
        return Run(seconds, (failure[1],), "Timeout" in (failure[2] or ""))

    def stop(self) -> None:
        """Kills the tests that run, with the servers that they have started."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)

    def close(self) -> None:
        self.stop()
        self._runner.communicate()

    def _send(self, order: dict[str, object]) -> None:
        assert self._runner.stdin is not None
        self._runner.stdin.write(json.dumps(order) + "\n")
        self._runner.stdin.flush()

    def _answer(self) -> str:
        assert self._runner.stdout is not None
        if not (answer := self._runner.stdout.readline()):
            raise TestsFailed("the process that runs the tests has ended")
        return answer
