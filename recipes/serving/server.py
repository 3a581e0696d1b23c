"""`speculon serve` as a process beside this one, and a client that costs as little as a client can.

Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

HOST = "127.0.0.1"
SECONDS = 120  # to load a model, and to end
LISTENS = re.compile(r"listens on http://.*:(\d+)")


class Server:
    """Ready inside `with`; ended in order at its end, which raises if the exit status is not 0."""

    def __init__(self, *flags: str, log: Path, env: dict[str, str] | None = None):
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, "-m", "speculon.cli", "serve", "--port", "0", *flags]
            self.process = subprocess.Popen(command, stderr=file, env=env)
        self.port = 0

    def __enter__(self) -> Self:
        try:
            until = time.monotonic() + SECONDS
            while not self._ready():
                assert self.process.poll() is None and time.monotonic() < until, (
                    f"no server: {self.log.read_text()}"
                )
                time.sleep(0.1)
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.process.terminate()
        try:
            status = self.process.wait(SECONDS)
        finally:
            self.process.kill()
        assert kind or status == 0, f"exit status {status}: {self.log.read_text()[-2000:]}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pids(self) -> dict[str, int]:
        """Of the process that serves and of the one that owns the device."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        names = {
            int(pid): Path(f"/proc/{pid}/cmdline").read_bytes()
            for file in children
            for pid in file.read_text().split()
        }
        (engine,) = (pid for pid, line in names.items() if b"spawn_main" in line)
        return {"serving": self.process.pid, "engine": engine}

    def metrics(self) -> dict[str, float]:
        """Every sample under its name and its labels, and the sum of its kind under the name alone."""
        with urlopen(f"{self.url}/metrics", timeout=SECONDS) as page:
            return read_metrics(page.read().decode())

    def _ready(self) -> bool:
        if not self.port:
            found = LISTENS.search(self.log.read_text())
            self.port = int(found[1]) if found else 0
        try:
            with urlopen(f"{self.url}/ready", timeout=SECONDS):
                return True
        except (URLError, OSError):
            return False


def read_metrics(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            for key in {name, name.partition("{")[0]}:
                found[key] = found.get(key, 0.0) + float(value)
    return found


async def chunks(port: int, route: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The JSON of each chunk as it arrives.

    Raises `Refused` for any status but 200; closing the iterator hangs up.
    """
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**22)
    try:
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {route} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        head += "connection: close\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            raise Refused(status, (await reader.read()).decode())
        async for line in reader:
            if line.startswith(b"data: {"):
                yield line[6:]
    finally:
        writer.close()


class Refused(Exception):
    def __init__(self, status: int, body: str):
        super().__init__(f"{status}: {body}")
        self.status = status
