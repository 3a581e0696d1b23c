"""What `speculon serve` prints on a terminal: lines end between words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from speculon.cli.serve import open_to_others, warn_of_open_server
from speculon.core.config.serve import ServeConfig
from tests.server.outside import LISTENS, LOCAL_HTTP, PATIENCE, ROOT, SCRIPTED

fcntl = pytest.importorskip("fcntl", reason="needs a pseudo-terminal")
pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
termios = pytest.importorskip("termios", reason="needs a pseudo-terminal")

WIDTH = 80
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """`speculon serve` with its stderr on a pseudo-terminal of `WIDTH` columns."""

    def __init__(self, folder: Path, *arguments: str):
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, WIDTH))
        env = {name: value for name, value in os.environ.items() if not name.startswith("SPECULON_")}
        env |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "SCRIPTED_STEP": "0.01"}
        env |= {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(WIDTH)}
        command = [sys.executable, *SCRIPTED, "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=theirs
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._output = b""

    @property
    def lines(self) -> list[str]:
        try:
            while part := os.read(self._ours, 65536):
                self._output += part
        except (BlockingIOError, OSError):  # nothing more yet, or the other end is closed
            pass
        return STYLE.sub("", self._output.decode()).splitlines()

    @property
    def text(self) -> str:
        """The messages, with the line breaks of the terminal taken out."""
        return " ".join(line.strip() for line in self.lines)

    def wait_for(self, part: str) -> None:
        until = time.monotonic() + PATIENCE
        while part not in self.text:
            assert time.monotonic() < until and self.process.poll() is None, self.text
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.168.0.7", (), True),
        ("fe80::1%eth0", (), True),
        ("127.0.0.1", (), False),
        ("127.0.0.2", (), False),
        ("::1", (), False),
        ("0.0.0.0", ("secret",), False),
    ],
)
def test_which_server_is_open_to_others(host: str, keys: tuple[str, ...], is_open: bool) -> None:
    assert open_to_others(host, ServeConfig(api_key=keys)) == is_open


def test_an_open_server_warns_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_open_server("0.0.0.0", as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("WARNING: ") for line in lines)
    warn_of_open_server("0.0.0.0", as_json=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["level"] == "WARNING"


def test_lines_end_between_words(tmp_path: Path) -> None:
    """From the warning of an open server to the end by Ctrl-C."""
    folder = tmp_path / "captured"
    terminal = Terminal(tmp_path, "--host", "0.0.0.0", "--capture", str(folder), "--capture-gb", "0.5")
    try:
        terminal.wait_for("ready in")
        found = LISTENS.search(terminal.text)
        assert found
        url = found[1].replace("0.0.0.0", "127.0.0.1")
        body = {"prompt": "say:one two", "speculation": {"pool": "a"}}
        response = httpx.post(url + "/v1/completions", json=body, **LOCAL_HTTP)
        refused = httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": -1}, **LOCAL_HTTP)
        assert (response.status_code, refused.status_code) == (200, 400)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.process.kill()
    long = [line for line in terminal.lines if len(line) > WIDTH]
    assert all(" " not in line.strip() for line in long), f"only a word longer than a line may be: {long}"
    assert "WARNING: 0.0.0.0 is open to others without an API key" in terminal.text
    frame = [line for line in terminal.lines if line[:1] in tuple("╭│╰")]
    assert len(frame) >= 4, frame
    # a folder longer than a line is folded: compared without spaces
    capturing = f"capturing requests and answers of every API key in {folder}, at most 0.5 GB"
    assert capturing.replace(" ", "") in terminal.text.replace(" ", "")
    assert f"{response.headers['x-request-id']} 7 tok " in terminal.text
    assert (
        f"{refused.headers['x-request-id']} 400 /v1/completions max_tokens = -1: Input should"
        in terminal.text
    )
    assert any(line.startswith("  ") for line in terminal.lines), "no message was longer than a line"
    assert terminal.lines[-1] == "stopped" and "finishing" not in terminal.text
