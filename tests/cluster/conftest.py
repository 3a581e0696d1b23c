"""A Ray cluster of this machine, the application on it, and texts of undisturbed runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from speculon.cli.serve import own_ray

os.environ |= own_ray() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}

from tests.cluster.load import Case, cases
from tests.server.outside import LOCAL_HTTP

# A shell starts a background job with interrupts ignored, and children inherit it; a test sends some.
signal.signal(signal.SIGINT, signal.default_int_handler)
SETTINGS: dict[str, Any] = {"model": "demo", "threads": 1, "cpus": 0.5, "num_blocks": 1024}
SETTINGS["batch_invariant"] = True  # a text alone and in any batch is the same, bit for bit
SETTINGS["serve"] = {"engine_timeout": 8}
NAME = "speculon"
DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
FILE, SCALED, AUTOSCALED = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
BIN = Path(sys.executable).parent


def until(true: Callable[[], Any], seconds: float = 60.0) -> float:
    """Waits until it is so; returns the seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "the condition stayed false"
        time.sleep(0.1)
    return time.monotonic() - began


def ready(url: str) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            return httpx.get(url + "/ready", **LOCAL_HTTP).status_code == 200
        except httpx.HTTPError:
            return False

    return asked


class Cluster:
    """A Ray cluster of this machine with its dashboard, which takes the files of `serve deploy`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port, self.ray, self.dashboard, self.clients = (free_port() for _ in range(4))
        self.url, self._api = (f"http://127.0.0.1:{port}" for port in (self.port, self.dashboard))
        self._headers = {"authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
        self.env = os.environ | {
            "RAY_ADDRESS": f"127.0.0.1:{self.ray}",
            "RAY_DASHBOARD_ADDRESS": self._api,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }

    @contextmanager
    def started(self) -> Iterator[Cluster]:
        flags = f"--head --block --node-ip-address 127.0.0.1 --num-cpus 8 --port {self.ray}"
        flags += f" --dashboard-port {self.dashboard} --ray-client-server-port {self.clients}"
        command = ["ray", "start", *flags.split(), "--object-store-memory", str(100 * 2**20)]
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        with (self.folder / "ray.txt").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(self._answers, 300)
            yield self
        finally:
            process.terminate()
            process.wait(180)

    def _answers(self) -> bool:
        try:
            return self._applications() is not None
        except httpx.HTTPError:
            return False

    def _applications(self) -> dict[str, Any] | None:
        url = self._api + "/api/serve/applications/"
        reply = httpx.get(url, headers=self._headers, timeout=30, **LOCAL_HTTP)
        return reply.json()["applications"] if reply.status_code == 200 else None

    def deploy(self, *, engine: dict[str, Any] | None = None, **args: Any) -> None:
        """The file of the document with these arguments, and Ray's own options of the engines."""
        content = deepcopy(FILE)
        content["http_options"]["port"] = self.port
        (application,) = content["applications"]
        state = {"state": str(self.folder / "state")}
        application["args"] |= {"max_replicas": None, **SETTINGS, **state, **args}
        application["deployments"] = [engine] if engine is not None else []
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(content))
        command = ["serve", "deploy", "cluster.yaml"]
        subprocess.run(command, cwd=self.folder, env=self.env, check=True, capture_output=True, timeout=180)

    def engines(self) -> dict[str, str]:
        """Id -> state of every replica of the engine."""
        deployments = (self._applications() or {}).get(NAME, {}).get("deployments", {})
        replicas = deployments["Engine"]["replicas"] if "Engine" in deployments else []
        return {replica["replica_id"]: replica["state"] for replica in replicas}

    def wait_for(self, count: int, without: Set[str] = frozenset()) -> set[str]:
        """So many engines run, and nothing else; returns their ids."""

        def there() -> bool:
            engines = self.engines()
            return [*engines.values()] == ["RUNNING"] * count and not engines.keys() & without

        until(there, 300)  # a machine that does more than this test loads slowly
        until(lambda: sum(self.metric("speculon_replicas").values()) == count, 60)
        return set(self.engines())

    def metric(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples by the values of their labels."""
        page = httpx.get(self.url + "/metrics", timeout=30, **LOCAL_HTTP).text
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", page, re.MULTILINE)
        return {tuple(re.findall(r'="(.*?)"', labels)): float(value) for labels, value in lines}


def processes(part: bytes) -> list[int]:
    """Ids of the processes whose title or command has this part."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if part in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass
    return sorted(found)


def replica_processes() -> list[int]:
    return processes(f"ray::ServeReplica:{NAME}:Engine".encode())


def children(pid: int) -> list[int]:
    """Those that multiprocessing has started: engines."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def known() -> tuple[list[Case], list[Case]]:
    """Short ones and long ones, both at once."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        mixed, long = pool.submit(cases, 200, (4, 24)), pool.submit(cases, 16, (180, 240), 1)
        return mixed.result(), long.result()


@pytest.fixture(scope="session")
def mixed(known: tuple[list[Case], list[Case]]) -> list[Case]:
    return known[0]


@pytest.fixture(scope="session")
def long(known: tuple[list[Case], list[Case]]) -> list[Case]:
    return known[1]


@pytest.fixture(scope="session")
def cluster(known: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests: each deploys what it needs."""
    with Cluster(tmp_path_factory.mktemp("cluster")).started() as cluster:
        yield cluster
