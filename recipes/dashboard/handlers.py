"""How much of its time the server spends for a page that is open, while 16 requests run.

    pip install py-spy
    python -m recipes.dashboard.handlers

Windows with the overview open in Chromium and windows without it take turns. py-spy samples the thread of the
event loop; a sample counts where code of the dashboard, or of the libraries it alone uses, is on the stack.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack, closing
from datetime import date
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright
from recipes.dashboard.shots import FLAGS, PROMPTS, ROOT, ask, served

from speculon.measure.bench.provenance import cpu_name

OUT = ROOT / "docs/benchmarks/dashboard"
STREAMS, TURNS, SECONDS, PER_SECOND = 16, 5, 12, 200
OF_DASHBOARD = re.compile(r"server/admin/|nicegui|socketio|engineio|websockets")
EVENT_LOOP = "speculon/cli/serve.py"


class Load:
    """Streams that are asked for again and again; counts their answers."""

    def __init__(self, url: str):
        self.answers, self._url, self._ends = 0, url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._ends.is_set():
            ask(self._url, PROMPTS[number % len(PROMPTS)], 96)
            self.answers += 1

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def share(pid: int) -> float:
    """Of the samples of the event loop's thread, those within the dashboard."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stacks"
        command = ["py-spy", "record", "--pid", str(pid), "--idle", "--format", "raw", "--output", str(file)]
        command += ["--rate", str(PER_SECOND), "--duration", str(SECONDS)]
        subprocess.run(command, check=True, capture_output=True)
        counts = [line.rpartition(" ") for line in file.read_text().splitlines()]
    loop = [(stack, int(count)) for stack, _, count in counts if EVENT_LOOP in stack]
    total = sum(count for _, count in loop)
    if not total:
        raise SystemExit("the thread of the event loop was not found")
    return sum(count for stack, count in loop if OF_DASHBOARD.search(stack)) / total


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("py-spy") is None:
        raise SystemExit("Chromium and py-spy are needed")
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, pid = stack.enter_context(served(folder))
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=chromium, args=FLAGS)
        load = stack.enter_context(closing(Load(url)))
        for turn in range(2 * TURNS):
            is_open = bool(turn % 2)
            page = browser.new_page()
            if is_open:
                page.goto(url + "/admin/")
                page.wait_for_timeout(3000)
            before = load.answers
            of_dashboard = share(pid)
            found[is_open].append((of_dashboard, (load.answers - before) * 96 / SECONDS))
            page.close()
    rows = {
        name: {
            "share": round(median(share for share, _ in found[is_open]), 4),
            "highest_share": round(max(share for share, _ in found[is_open]), 4),
            "tokens_per_second": round(median(speed for _, speed in found[is_open])),
        }
        for name, is_open in (("no page", False), ("overview open", True))
    }
    command = "python -m recipes.dashboard.handlers"
    record = {"date": str(date.today()), "chip": cpu_name(), "command": command, "rows": rows}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "handlers.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (OUT / "README.md").write_text(table(record, rows), encoding="utf-8")


def table(record: dict[str, object], rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "# What an open page of the dashboard costs",
        "",
        f"`{record['command']}`, {record['chip']}, {record['date']}: the demo model,",
        f"{STREAMS} requests at once. Medians of {TURNS} windows of {SECONDS} s each way, in turns.",
        "",
        "| | time of the event loop within the dashboard | highest | tokens/s |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['share']:.2%} | {row['highest_share']:.2%} | {row['tokens_per_second']} |"
            for name, row in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
