"""A page whose code blocks run: below each block the reader sees what it printed.

    python -m recipes.site.blocks docs/tutorial.md build/tutorial.md

mkdocs does this to the tutorial (`recipes/site/hooks.py`). Blocks of `python` share one namespace, each block
of `bash` is a shell of its own; both run in one folder, in the order of the page. What a shell leaves in the
background runs to the end of the page. Blocks of other languages, `sh` among them, are only shown.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
COLUMNS = 100
SECONDS = 180  # for one block
# colours and line breaks as on a terminal, without its progress bars
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
# a terminal's, black to white, which can be read on a light and on a dark page
EIGHT = ["7d8590", "cf222e", "2da44e", "bf8700", "2f81c7", "a371f7", "1b989d", "7d8590"]
SHADES = [(int(shade[:2], 16), int(shade[2:4], 16), int(shade[4:], 16)) for shade in EIGHT]
COLOURS = TerminalTheme((255, 255, 255), (0, 0, 0), SHADES, SHADES)
# in an output, fences and links are text: the page's own rules would find them even there
NOT_MARKDOWN = {ord(mark): f"&#{ord(mark)};" for mark in "`~["}


class BlockFailed(Exception):
    """A block ended with an error; the message has the block and what it printed."""


def fill(markdown: str, folder: Path) -> str:
    """The page with the output of each block below it. The blocks run in `folder`."""
    with inside(folder) as run_shell:
        names: dict[str, object] = {"__name__": "__main__"}
        runs: dict[str, Callable[[str], str]] = {"python": lambda source: run_python(source, names)}
        runs["bash"] = run_shell

        def with_output(match: re.Match[str]) -> str:
            printed = without_places(runs[match[1]](match[2]), folder)
            return f"{match[0]}\n{as_html(printed)}\n" if printed.strip() else match[0]

        return BLOCK.sub(with_output, markdown)


@contextmanager
def inside(folder: Path) -> Iterator[Callable[[str], str]]:
    """Changes into `folder`; yields the function that runs a shell; ends what the shells left running."""
    shells: list[subprocess.Popen[bytes]] = []
    before, folder = Path.cwd(), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        yield lambda source: run_bash(source, shells)
    finally:
        os.chdir(before)
        for shell in shells:
            with suppress(ProcessLookupError):  # nothing of its group is left
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait()


def run_python(source: str, names: dict[str, object]) -> str:
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(compile(source, "block", "exec"), names)
    except BaseException as error:
        raise BlockFailed(f"{source}\n{printed.getvalue()}\n{traceback.format_exc()}") from error
    return printed.getvalue()


def run_bash(source: str, shells: list[subprocess.Popen[bytes]]) -> str:
    """What the shell printed on either stream, into a file: a pipe would wait for background processes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with TemporaryFile() as printed:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", source],
            env={**os.environ, **TERMINAL, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        shells.append(shell)
        try:
            code = shell.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if code != 0:
        why = f"ended with {code}" if code else f"it did not end within {SECONDS} s"
        raise BlockFailed(f"{source}\n{text}\n{why}")
    return text


def without_places(text: str, folder: Path) -> str:
    """Folders of the machine that builds are a reader's home, environment and checkout."""
    text = text.replace(str(folder.resolve()), "~").replace(sys.prefix, "~/.venv")
    return text.replace(str(ROOT), "~/speculon")


def as_html(printed: str) -> str:
    """Text with terminal colours, as the site shows it."""
    screen = Console(record=True, width=10_000, file=io.StringIO(), soft_wrap=True)
    lines = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    screen.print(Text.from_ansi(lines), soft_wrap=True)
    code = screen.export_html(inline_styles=True, code_format="{code}", theme=COLOURS).rstrip()
    code = code.translate(NOT_MARKDOWN)
    return f'<pre class="output"><code>{code}</code></pre>'


def main() -> None:
    page, filled, folder = Path(sys.argv[1]), Path(sys.argv[2]), ROOT / "build" / "blocks"
    markdown = page.read_text(encoding="utf-8")
    os.environ.pop("SPECULON_CACHE", None)
    os.environ["XDG_CACHE_HOME"] = str(folder / ".cache")
    try:
        filled.write_text(fill(markdown, folder.resolve()), encoding="utf-8")
    except BlockFailed as error:
        raise SystemExit(f"{page}: a block failed\n{error}") from None


if __name__ == "__main__":
    main()
