"""One worker process, stopped by the kernel while another is measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.worker import Settings
from plan import COMPILED, OURS, Mode, Place

SECONDS = 600  # for an answer, or a start


class Worker:
    """A group of processes.

    If this program dies, the kernel sends SIGHUP to stopped groups, and they end.
    """

    def __init__(self, mode: Mode, place: Place, settings: Settings, log: Path):
        self.mode = mode
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(settings.threads),
            "NUMBA_NUM_THREADS": str(settings.threads),  # vLLM's ngram runs in it
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        if mode.engine not in (OURS, COMPILED):
            environment.pop("PYTHONPATH", None)
        self.log = log.open("w")
        self.child = subprocess.Popen(
            [place.python, place.script, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            process_group=0,
        )
        self.first = self.receive()
        self.refusal: str | None = self.first.get("refused")
        self.signal(signal.SIGSTOP)

    def ask(self, **ask: Any) -> dict[str, Any]:
        """The answer, or `refused` with the reason."""
        if self.refusal:
            return {"refused": self.refusal}
        assert self.child.stdin
        self.signal(signal.SIGCONT)
        self.child.stdin.write(json.dumps(ask).encode() + b"\n")
        self.child.stdin.flush()
        answer = self.receive()
        self.signal(signal.SIGSTOP)
        return answer

    def receive(self) -> dict[str, Any]:
        assert self.child.stdout
        if not select.select([self.child.stdout], [], [], SECONDS)[0]:
            self.signal(signal.SIGKILL)
            self.refusal = f"no answer in {SECONDS} s"
        elif line := self.child.stdout.readline():
            return json.loads(line)
        else:
            self.refusal = f"ended with code {self.child.wait()}; see {Path(self.log.name).name}"
        return {"refused": self.refusal}

    def signal(self, number: int) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, number)

    def close(self) -> None:
        """The end of its input ends a worker; one that does not react is killed, with its children."""
        assert self.child.stdin
        self.child.stdin.close()
        self.signal(signal.SIGCONT)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.child.wait()
        self.log.close()
