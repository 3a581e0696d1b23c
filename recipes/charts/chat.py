"""The picture of docs/chat.md: a conversation with SmolLM2 in a pseudo-terminal.

python -m recipes.charts.chat
"""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "chat.svg"
WIDTH = 100
PROMPT = "\n> "
NOT_COLOUR = re.compile(r"\x1b\[[?\d;]*[a-ln-zA-Z]")  # what moves the cursor or sets a mode
COMMAND = ["-m", "speculon.cli", "chat", "--show-drafts", "--temperature", "0", "--max-tokens", "160"]
TURNS = (
    "Write a Python class named Stack with push and pop.",
    "Add a method named peek.",
    "/stats",
)
PATIENCE = 120.0  # seconds for the model to load


def main() -> None:
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(WIDTH), "INPUTRC": os.devnull}
    with subprocess.Popen(
        [sys.executable, *COMMAND], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as chat:
        os.close(theirs)
        shown = read_until_prompt(ours)
        for turn in TURNS:
            os.write(ours, f"{turn}\n".encode())
            shown += read_until_prompt(ours)
        os.write(ours, b"/quit\n")
    if chat.returncode:
        raise SystemExit(f"speculon chat ended with {chat.returncode}: {shown}")
    draw(shown)


def read_until_prompt(terminal: int) -> str:
    """What is written up to the next prompt, without it."""
    seen, end = b"", time.monotonic() + PATIENCE
    while not plain(seen).endswith(PROMPT):
        if time.monotonic() > end:
            raise SystemExit(f"no prompt within {PATIENCE:g} s: {seen!r}")
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096)
    return plain(seen)


def plain(output: bytes) -> str:
    """Text and colours alone."""
    return NOT_COLOUR.sub("", output.decode(errors="ignore")).replace("\r", "")


def draw(shown: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    loading = shown.index("smollm2:")
    console.print(Text.from_ansi(f"$ speculon chat --show-drafts\n{shown[loading:].removesuffix(PROMPT)}"))
    console.save_svg(str(PICTURE), title="speculon chat")


if __name__ == "__main__":
    main()
