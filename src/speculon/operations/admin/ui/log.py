"""The log: its latest lines, and new ones as they come."""

from __future__ import annotations

from datetime import datetime

from nicegui import ui

from speculon.operations.admin.schemas import LogLine
from speculon.operations.admin.service import MOST_LINES
from speculon.operations.admin.ui.shell import PageView

SECONDS = 1.0


async def build(view: PageView) -> None:
    ui.label(view.words("log.note", lines=MOST_LINES)).classes("text-sm opacity-80")
    shown = ui.log(max_lines=MOST_LINES).classes("w-full h-[70vh] text-xs").props("tabindex=0 role=log")
    last = 0

    def update() -> None:
        nonlocal last
        lines = view.admin.ring.since(last)
        if lines:
            shown.push("\n".join(map(text_of, lines)))
            last = lines[-1].number

    update()
    ui.timer(SECONDS, update, immediate=False)


def text_of(line: LogLine) -> str:
    return f"{datetime.fromtimestamp(line.time):%H:%M:%S} {line.level} {line.text}"
