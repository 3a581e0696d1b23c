"""A Ray of this machine alone, the application on it, and texts of undisturbed runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon.cli.serve import own_ray

os.environ |= own_ray() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}

import ray
from ray import serve

from speculon.operations.cluster import app
from tests.cluster.load import Case, cases
from tests.server.outside import LOCAL_HTTP

# A shell starts a background job with interrupts ignored, and children inherit it; a test sends some.
signal.signal(signal.SIGINT, signal.default_int_handler)
SETTINGS: dict[str, Any] = {"model": "demo", "threads": 1, "cpus": 0.5, "num_blocks": 1024}
SETTINGS["batch_invariant"] = True  # a text alone and in any batch is the same, bit for bit
SETTINGS["serve"] = {"engine_timeout": 8}
NAME = "speculon"


def until(true: Callable[[], Any], seconds: float = 60.0) -> float:
    """Waits until it is so; returns the seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "the condition stayed false"
        time.sleep(0.1)
    return time.monotonic() - began


class Cluster:
    """The application, and what a test sees of its processes."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, **settings: Any) -> None:
        """Returns once all replicas serve; an application that runs is changed step by step."""
        serve.run(app({**SETTINGS, **settings}), name=NAME)

    def replicas(self) -> dict[str, str]:
        """Id -> state of every replica of the engine."""
        deployment = serve.status().applications[NAME].deployments["Engine"]
        return {state: count for state, count in deployment.replica_states.items() if count}

    def running(self) -> int:
        return int(self.replicas().get("RUNNING", 0))

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
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def known() -> tuple[list[Case], list[Case]]:
    """Short ones and long ones, both at once: a process writes 80 tokens a second."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        mixed, long = pool.submit(cases, 200, (4, 24)), pool.submit(cases, 16, (180, 240), 1)
        return mixed.result(), long.result()


@pytest.fixture(scope="session")
def mixed(known: tuple[list[Case], list[Case]]) -> list[Case]:
    return known[0]


@pytest.fixture(scope="session")
def long(known: tuple[list[Case], list[Case]]) -> list[Case]:
    return known[1]


@pytest.fixture(scope="module")
def cluster(known: object) -> Iterator[Cluster]:
    port = free_port()
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        made = Cluster(port)
        made.deploy(replicas=2)
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
