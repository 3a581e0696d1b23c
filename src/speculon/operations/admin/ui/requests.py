"""Requests that run, and the latest that have ended, with the account of their rounds."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote

from nicegui import ui

from speculon.operations.admin.schemas import RequestView
from speculon.operations.admin.ui.shell import PageView
from speculon.operations.admin.ui.words import UiWords

SECONDS = 1.0
COLUMNS = ("model", "state", "started", "seconds", "tokens", "account")


def account(view: RequestView, words: UiWords) -> str:
    """Its main figures, so far while it runs; those of rounds only where there were some."""
    figures = view.speculation
    text = str(figures["method"])
    if figures.get("rounds"):
        per_call = f"{figures['tokens_per_target_call']:.2f}"
        counts = {name: figures[name] for name in ("rounds", "drafted", "accepted")}
        text = words("requests.account_rounds", method=text, per_call=per_call, **counts)
    if figures.get("saved_ms") is not None:
        text = words("requests.account_saved", account=text, ms=f"{figures['saved_ms']:,.0f}")
    return text


def row_of(request: RequestView, view: PageView) -> dict[str, Any]:
    return {
        "id": request.id,
        "link": "/admin/tokens?id=" + quote(request.id, safe="") if request.explained else "",
        "model": request.model,
        "state": view.words(f"requests.{request.state}"),
        "started": datetime.fromtimestamp(request.started).strftime("%H:%M:%S"),
        "seconds": f"{request.seconds:.2f}",
        "tokens": request.tokens,
        "account": account(request, view.words),
    }


async def build(view: PageView) -> None:
    words, admin = view.words, view.admin
    search = ui.input(words("requests.filter")).props("clearable outlined dense").classes("w-full")
    columns = [
        {"name": name, "label": words(f"requests.{name}"), "field": name, "align": "left"}
        for name in ("id", *COLUMNS)
    ]
    columns[-1]["style"] = "white-space: normal; min-width: 20rem"
    table = ui.table(columns=columns, rows=[], row_key="id", pagination=25).classes("w-full")
    table.props["no-data-label"] = words("requests.none")
    table.props["no-results-label"] = words("requests.no_match")
    table.props["rows-per-page-label"] = words("requests.per_page")
    table.props[":pagination-label"] = "(first, last, all) => `${first}–${last} / ${all}`"
    table.add_slot(
        "body-cell-id",
        '<q-td :props="props"><a v-if="props.row.link" :href="props.row.link" class="underline">'
        "{{ props.value }}</a><span v-else>{{ props.value }}</span></q-td>",
    )
    table.props("dense")
    table.bind_filter_from(search, "value")

    def update() -> None:
        rows = [row_of(request, view) for request in admin.requests.views()]
        if rows != table.rows:
            table.rows = rows

    update()
    ui.timer(SECONDS, update, immediate=False)
