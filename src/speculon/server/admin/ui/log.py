"""The log: its latest lines, and new ones as they come."""

from __future__ import annotations

from nicegui import ui

from speculon.server.admin.log_ring import LINES
from speculon.server.admin.ui.shell import View

SECONDS = 1.0


async def build(view: View) -> None:
    ui.label(view.words("log.note", lines=LINES)).classes("text-sm opacity-80")
    shown = ui.log(max_lines=LINES).classes("w-full h-[70vh] text-xs").props("tabindex=0 role=log")
    last = 0

    def update() -> None:
        nonlocal last
        lines = view.log.since(last)
        if lines:
            shown.push("\n".join(text for _, text in lines))
            last = lines[-1][0]

    update()
    ui.timer(SECONDS, update, immediate=False)
