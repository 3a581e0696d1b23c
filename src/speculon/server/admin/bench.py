"""`speculon bench` in a process of its own: one at a time, ended with the server."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from contextlib import suppress
from time import perf_counter, time

from speculon.errors import InvalidRequest
from speculon.server.admin.schemas import BenchOptions, BenchView

MOST_LINES = 200  # of its standard error that are kept
LINE_LIMIT = 2**20  # bytes
END_SECONDS = 10.0  # to end after SIGTERM


class BenchRunner:
    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", "speculon.cli")):
        self._command = command
        self._view = BenchView(state="none")
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None

    @property
    def view(self) -> BenchView:
        seconds = perf_counter() - self._began if self._view.state == "running" else self._view.seconds
        return self._view.model_copy(update={"seconds": seconds, "lines": list(self._lines)})

    def start(self, options: BenchOptions, model: str) -> BenchView:
        """Raises `InvalidRequest` while another one runs."""
        if self._view.state == "running":
            raise InvalidRequest("a benchmark runs already; cancel it, or wait for its end")
        self._lines.clear()
        self._began = perf_counter()
        self._view = BenchView(state="running", options=options, started=time())
        self._task = asyncio.create_task(self._run([*self._command, *arguments(options, model)]))
        return self.view

    async def cancel(self) -> BenchView:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            if self._view.state == "running":  # it had not begun
                self._finish("cancelled")
        return self.view

    async def _run(self, command: list[str]) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=PIPE, stderr=PIPE, limit=LINE_LIMIT
            )
            out, _, code = await asyncio.gather(
                self._process.stdout.read(),  # type: ignore[union-attr]
                self._read_lines(self._process),
                self._process.wait(),
            )
            if code:
                return self._finish("failed", error=f"speculon bench ended with status {code}")
            self._finish("done", result=json.loads(out))
        except asyncio.CancelledError:
            self._finish("cancelled")
            raise
        except (OSError, ValueError) as error:
            self._finish("failed", error=f"{type(error).__name__}: {error}")
        finally:
            await self._end_process()

    async def _read_lines(self, process: Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._lines.append(line.decode(errors="replace").rstrip())

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _finish(self, state: str, **fields: object) -> None:
        done = {"state": state, "seconds": perf_counter() - self._began, **fields}
        self._view = self._view.model_copy(update=done)


def arguments(options: BenchOptions, model: str) -> list[str]:
    """The command line: the options are checked, and no shell reads it."""
    found = ["bench", f"--model={model}", "--json", f"--workloads={','.join(options.workloads)}"]
    if options.modes:
        found.append(f"--modes={','.join(options.modes)}")
    found.append(f"--concurrency={','.join(map(str, options.concurrency))}")
    numbers = {
        "--prompts": options.prompts,
        "--max-tokens": options.max_tokens,
        "--repeats": options.repeats,
    }
    return found + [f"{flag}={value}" for flag, value in numbers.items()]
