"""`speculon serve --replicas` as users start it, and the commands of docs/cluster.md."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx

from speculon.operations.cluster import app
from tests.cluster.conftest import FILE
from tests.server.outside import LOCAL_HTTP, REAL, Outside, started

LISTENING = "0A"  # as the kernel writes it
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    flags = ("--model", "demo", "--replicas", "1", "--threads", "1", "--method", "off", "--state", "kept")
    with started(tmp_path, *flags, program=REAL, SPECULON_SERVE__API_KEY="secret") as server:
        server.wait_for(lambda: "ready in" in server.stderr, 300)
        url, key = server.url(), {"authorization": "Bearer secret"}
        assert url.startswith("http://127.0.0.1:")
        check_listens_on_loopback(server)
        body: dict[str, Any] = {"prompt": "def f(", "max_tokens": 300, "temperature": 0, "stream": True}
        assert httpx.post(url + "/v1/completions", json=body, **LOCAL_HTTP).status_code == 401
        began, lines = threading.Event(), list[str]()

        def read() -> None:
            with httpx.stream(
                "POST", url + "/v1/completions", json=body, headers=key, timeout=60, **LOCAL_HTTP
            ) as reply:
                for line in reply.iter_lines():
                    lines.append(line)
                    began.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(30)
        assert server.end(180) == 0, server.stderr
        reader.join(10)
        assert "data: [DONE]" in lines, "a running request is finished"
        assert server.stderr.rstrip().endswith("stopped")
    assert [path.name for path in (tmp_path / "kept").glob("replica-0/pools-*")]


def check_listens_on_loopback(server: Outside) -> None:
    """No process below the command accepts connections of other machines; one port of each of Ray Serve's
    replicas does, which Ray opens everywhere, and which asks for its token.
    """
    below = {server.process.pid}
    for _ in range(4):
        below |= {pid for pid in pids() if parent_of(pid) in below}
    owners = {inode: pid for pid in below for inode in sockets_of(pid)}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and (pid := owners.get(fields[9])):
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                assert fields[1].partition(":")[0] in LOOPBACK or b"ServeReplica" in title, (fields, title)


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def sockets_of(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            found |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    return found


def test_the_file_of_the_document_builds() -> None:
    (application,) = FILE["applications"]
    assert application["import_path"] == "speculon.operations.cluster:app"
    made = app({**application["args"], "state": None})
    assert made._bound_deployment.name == "Ingress"
