"""vLLM's server with the plug-in, started as docs/vllm.md says and asked by the official client."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

import pytest

from tests.documents import ROOT
from tests.vllm_cpu.test_inside import PROMPTS

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm-test"),
    pytest.mark.timeout(600),
]

SECONDS = 240  # for a start
PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
DRAFTS = json.loads(shlex.split(PAGE[PAGE.index("'{") :].partition("```")[0])[0])
USUAL = "--dtype float32 --max-model-len 512 --max-num-seqs 8 --enforce-eager".split()
USUAL += ["--served-model-name", "demo"]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server on loopback."""
    from speculon.checkpoints.locate import locate

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(locate("demo"))]
    command += ["--host", "127.0.0.1", "--port", str(port), *USUAL, *options]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield answering(server, f"http://127.0.0.1:{port}", folder / "server.log")
        finally:
            server.terminate()
            server.wait(60)


def answering(server: subprocess.Popen[bytes], address: str, log: Path) -> str:
    end = monotonic() + SECONDS
    while server.poll() is None and monotonic() < end:
        try:
            urlopen(f"{address}/health", timeout=5).close()
            return address
        except OSError:
            sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8")[-4000:])


def asked(address: str) -> dict[str, Any]:
    """Greedy texts, a stream and a chat."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
    how: dict[str, Any] = {"model": "demo", "max_tokens": 64, "temperature": 0}
    stream = client.completions.create(prompt=PROMPTS[0], stream=True, **how)
    chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPTS[1]}], **how)
    return {
        "texts": [one.text for one in client.completions.create(prompt=PROMPTS, **how).choices],
        "stream": "".join(part.choices[0].text for part in stream),
        "chat": chat.choices[0].message.content,
    }


def test_the_server_writes_vllms_own_greedy_texts(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "ours")]
    for folder in folders:
        folder.mkdir()
    with served(folders[0]) as address:
        plain = asked(address)
    with served(folders[1], "--speculative-config", json.dumps(DRAFTS)) as address:
        assert asked(address) == plain
        metrics = urlopen(f"{address}/metrics", timeout=30).read().decode()
    accepted = [
        line for line in metrics.splitlines() if line.startswith("speculon_vllm_accepted_tokens_total{")
    ]
    assert sum(float(line.split()[-1]) for line in accepted) > 10, metrics
