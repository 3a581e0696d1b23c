"""The process that compiles programs while an engine runs: `python -m` this module, with a file of jobs.

It has the lowest priority, and ends with the engine: its input ends then. It pauses before it imports torch,
so that an engine of a few seconds costs nothing more. Then it waits for its turn, so that of all engines of a
folder one has a process with torch in memory, and the next process finds the programs of the first.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

TURN = 1.0  # s between two looks at the lock


def yield_to_others() -> None:
    """Time that nobody else asks for, and the first to go where memory runs out. Compilers inherit both."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # of Linux alone
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write("19")  # a session of its own is a group, which shares time with others as an equal
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def end_with_input() -> None:
    """Ends this process and its compilers as soon as nobody holds the other end of its input."""
    while os.read(0, 1):  # a lock of `sys.stdin`, held when the interpreter ends, would abort the process
        pass
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    yield_to_others()
    threading.Thread(target=end_with_input, daemon=True).start()
    with open(int(sys.argv[1]), "rb") as given:
        pause, folder, jobs = pickle.load(given)  # `jobs` are bytes, which take torch to read
    time.sleep(pause)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with FileLock(Path(folder) / "lock").acquire(poll_interval=TURN):
        from speculon.runtimes.torch.model.background import compile_jobs

        compile_jobs(Path(folder), pickle.loads(jobs))


if __name__ == "__main__":
    main()
