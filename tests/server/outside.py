"""`speculon serve` as users start it: a process, a port, and what it leaves on stderr."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx

from speculon.core.config.file import CACHE, MODELS

ROOT = Path(__file__).resolve().parents[2]
LISTENS = re.compile(r"listens on (http://\S+)")
REAL = ("-m", "speculon.cli")
SCRIPTED = (str(Path(__file__).with_name("scripted_serve.py")),)
# of HTTP clients: no proxies, and no certificates, which take 40 ms to load
LOCAL_HTTP: dict[str, Any] = {"trust_env": False, "verify": False}
PATIENCE = 90.0  # seconds to load the model on a busy machine


class Outside:
    def __init__(self, folder: Path, arguments: tuple[str, ...], program: tuple[str, ...], **env: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._log = folder / "stderr.txt"
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SPECULON_") or name in (MODELS, CACHE)
        }
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        clean |= {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SCRIPTED_STEP": "0.01"}
        clean |= {"SPECULON_MODEL": "demo"}  # where no flag names one
        with self._log.open("wb") as log:
            command = [sys.executable, *program, "serve", *arguments]
            self.process = subprocess.Popen(
                command, cwd=folder, env=clean | env, stdout=subprocess.DEVNULL, stderr=log
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def url(self) -> str:
        """Once it listens."""
        self.wait_for(lambda: LISTENS.search(self.stderr))
        found = LISTENS.search(self.stderr)
        assert found
        return found[1]

    def wait_for(self, true: object, seconds: float = PATIENCE) -> None:
        until = time.monotonic() + seconds
        while not true():  # type: ignore[operator]
            assert self.process.poll() is None, f"it has ended with {self.process.returncode}: {self.stderr}"
            assert time.monotonic() < until, f"it does not come true: {self.stderr}"
            time.sleep(0.02)

    def ready(self) -> str:
        """Its address, once it takes requests."""
        url = self.url()
        self.wait_for(lambda: httpx.get(url + "/ready", timeout=PATIENCE, **LOCAL_HTTP).status_code == 200)
        return url

    def children(self) -> list[int]:
        """The engine's process; without the one that Python keeps to tidy up."""
        pid = self.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = []
        for child in listed:
            with suppress(OSError):  # it has ended meanwhile
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def end(self, seconds: float = 30.0) -> int:
        """TERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@contextmanager
def started(
    folder: Path, *arguments: str, program: tuple[str, ...] = SCRIPTED, **env: str
) -> Iterator[Outside]:
    outside = Outside(folder, ("--port", "0", *arguments), program, **env)
    try:
        yield outside
    finally:
        if outside.process.poll() is None:
            outside.process.kill()
            outside.process.wait()
