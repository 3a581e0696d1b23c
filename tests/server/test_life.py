"""How the server's process starts and ends: exit status, messages on stderr, the fate of running requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon.cli.serve import listen
from speculon.core.errors import ConfigError
from tests.server.outside import LOCAL_HTTP, PATIENCE, REAL, Outside, started

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")


class Reader(threading.Thread):
    """A client that reads a stream to its end. The engine may be started again between two lines."""

    def __init__(self, url: str, **body: Any):
        super().__init__(daemon=True)
        self.lines: list[dict[str, Any]] = []
        self.done, self.fault = False, ""
        self._url, self._body = url, {"prompt": "x", "stream": True, **body}
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url + "/v1/completions", json=self._body, timeout=PATIENCE, **LOCAL_HTTP
            ) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line:
                        self.lines.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.fault = repr(error)

    @property
    def finish(self) -> str | None:
        choices = [choice for line in self.lines for choice in line.get("choices", ())]
        return choices[-1]["finish_reason"] if choices else None

    def begun(self) -> bool:
        return bool(self.lines)


def check_clean(server: Outside, status: int = 0) -> None:
    assert server.end() == status, server.stderr
    assert "Traceback" not in server.stderr, server.stderr
    assert "Task exception" not in server.stderr and "never retrieved" not in server.stderr, server.stderr
    assert not server.children() if server.process.poll() is None else True


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_running_streams_are_finished_after_term(tmp_path: Path) -> None:
    with started(tmp_path, SCRIPTED_STEP="0.02") as server:
        url = server.ready()
        readers = [Reader(url, max_tokens=400) for _ in range(8)]
        server.wait_for(lambda: all(reader.begun() for reader in readers))
        (engine,) = server.children()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "\nfinishing 8 requests, for at most " in server.stderr)
        with pytest.raises(httpx.TransportError):
            httpx.get(url + "/health", **LOCAL_HTTP)
        assert server.process.poll() is None
        for reader in readers:
            reader.join(20)
        assert [(reader.finish, reader.done, reader.fault) for reader in readers] == [
            ("length", True, "")
        ] * 8
        check_clean(server)
        assert gone(engine)
        assert server.stderr.endswith("\nstopped\n")


def test_requests_beyond_the_drain_timeout_end_with_abort(tmp_path: Path) -> None:
    with started(tmp_path, "--drain-timeout", "0.4", "--max-num-seqs", "3", SCRIPTED_STEP="0.02") as server:
        url = server.ready()
        readers = [Reader(url, max_tokens=4000) for _ in range(3)]
        server.wait_for(lambda: all(reader.begun() for reader in readers))
        waiting = Reader(url, max_tokens=4000)
        metrics = partial(httpx.get, url + "/metrics", **LOCAL_HTTP)
        server.wait_for(lambda: 'speculon_requests_open{model="demo"} 4' in metrics().text)
        began = time.monotonic()
        check_clean(server)
        assert time.monotonic() - began < 20
        for reader in (*readers, waiting):
            reader.join(5)
            assert (reader.finish, reader.done, reader.fault) == ("abort", True, "")
        assert server.stderr.count(" abort | ") >= 4


def test_a_second_ctrl_c_ends_running_requests_at_once_and_in_order(tmp_path: Path) -> None:
    with started(tmp_path, SCRIPTED_STEP="0.02") as server:
        url = server.ready()
        readers = [Reader(url, max_tokens=4000) for _ in range(3)]
        whole = Reader(url, max_tokens=4000, stream=False)
        metrics = partial(httpx.get, url + "/metrics", **LOCAL_HTTP)
        server.wait_for(lambda: 'speculon_requests_open{model="demo"} 4' in metrics().text)
        server.wait_for(lambda: all(reader.begun() for reader in readers))
        server.process.send_signal(signal.SIGINT)
        server.wait_for(lambda: "\nfinishing 4 requests, for at most 30 s" in server.stderr)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        for reader in (*readers, whole):
            reader.join(20)
            assert (reader.finish, reader.fault) == ("abort", "")
        check_clean(server)
        assert all(reader.done for reader in readers) and time.monotonic() - began < 20


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with started(tmp_path, "--drain-timeout", "0", SCRIPTED_STEP="0") as server:
        url = httpx.URL(server.ready())
        body = json.dumps({"prompt": "x", "n": 8, "max_tokens": 4000, "stream": True, "logprobs": 2}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((url.host, url.port))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            sock.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
            time.sleep(1.0)
            began = time.monotonic()
            check_clean(server)
            assert time.monotonic() - began < 20


def test_term_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, SCRIPTED_LOAD="60") as server:
        server.url()
        server.wait_for(server.children)
        (engine,) = server.children()
        began = time.monotonic()
        check_clean(server)
        assert time.monotonic() - began < 20 and gone(engine)


def test_when_the_engine_is_killed_every_request_fails_and_the_server_ends(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        url = server.ready()
        streamed, whole = Reader(url, max_tokens=4000), Reader(url, max_tokens=4000, stream=False)
        server.wait_for(streamed.begun)
        server.wait_for(
            lambda: (
                'speculon_sequences_running{model="demo"} 2' in httpx.get(url + "/metrics", **LOCAL_HTTP).text
            )
        )
        os.kill(server.children()[0], signal.SIGKILL)
        streamed.join(60), whole.join(60)
        for reader in (streamed, whole):
            assert reader.lines[-1]["error"]["code"] in ("engine_error", "not_ready"), reader.lines[-1]
        assert server.process.wait(20) == 2
        last = server.stderr.splitlines()[-1]
        assert (
            last.startswith("EngineError: the engine's process has ended")
            and "Traceback" not in server.stderr
        )
        assert "stopped" not in server.stderr


def test_what_cannot_be_served_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with started(tmp_path, "--method", "telepathy", program=REAL) as server:
        assert server.process.wait(90) == 2, server.stderr
        lines = [
            line for line in server.stderr.splitlines() if "listens on" not in line and "loading" not in line
        ]
        assert len(lines) == 1 and "UnknownMethod" in lines[0], server.stderr


def test_a_taken_port_is_an_error_of_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*in use"):
            listen("127.0.0.1", port)


def test_a_traceback_is_seen(tmp_path: Path) -> None:
    """The twin of `check_clean`: a server whose end fails, and one that has complained."""
    with started(tmp_path, SCRIPTED_STEP="no number") as server:
        server.process.wait(60)
        with pytest.raises(AssertionError, match="ValueError"):
            check_clean(server, server.process.returncode)
