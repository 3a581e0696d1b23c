"""Runs pytest in children of a process that has imported what all tests need, which is most of a short run.

Its arguments are the modules, beside the plugins of pytest; never the package itself, which a child is to
import with its error. Each line of its input is JSON: the arguments of pytest, and the file for its output.
It answers with the child's process id, and at the end with its exit status.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points


def main() -> None:
    for name in (*sys.argv[1:], *(plugin.module for plugin in entry_points(group="pytest11"))):
        with suppress(ImportError):
            import_module(name)
    assert "speculon" not in sys.modules
    for line in sys.stdin:
        order = json.loads(line)
        if not (child := os.fork()):
            run(**order)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(arguments: list[str], output: str) -> None:
    """In a session of its own, with the servers that tests start; never returns."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 3  # pytest's own for an internal error
    try:
        status = int(import_module("pytest").main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
