"""The models: their states, how far a load is, and a button for the settings of each."""

from __future__ import annotations

import json
from typing import Any

from nicegui import ui

from speculon.core.errors import SpeculonError
from speculon.operations.admin.schemas import ModelView
from speculon.operations.admin.ui.settings import SettingsDialog
from speculon.operations.admin.ui.shell import PageView

SECONDS = 1.0


async def build(view: PageView) -> None:
    dialogs = ui.element()  # a new list of models must not delete an open dialog
    lines: dict[str, ui.label] = {}  # by model: the stage of its load, or why a button did nothing

    @ui.refreshable
    async def listed() -> None:
        lines.clear()
        try:
            models = await view.admin.models()
        except SpeculonError as error:
            ui.label(str(error)).props("role=alert")
            return
        for model in models:
            lines[model.name] = card(model, view, listed.refresh, dialogs)

    def states() -> dict[str, tuple[str, str]]:
        return {
            name: (model.shown_state, model.stage) for name, model in view.admin.state.pool.models.items()
        }

    shown = states()
    await listed()

    async def update() -> None:
        nonlocal shown
        before, shown = shown, states()
        if [state for state, _ in before.values()] != [state for state, _ in shown.values()]:
            await listed.refresh()
        for name, (state, stage) in shown.items():
            if name in lines and state == "loading":
                lines[name].text = stage

    ui.timer(SECONDS, update)


def card(model: ModelView, view: PageView, refresh: Any, dialogs: ui.element) -> ui.label:
    """Returns its line of text."""
    words, admin, pool = view.words, view.admin, view.admin.state.pool
    with ui.card().classes("sp-card").props(f"data-model={json.dumps(model.name)}"):
        with ui.row().classes("items-center"):
            ui.label(model.name).classes("text-lg").props("role=heading aria-level=2")
            ui.badge(words(f"models.state_{model.state}"), outline=True)
            for shown in ("default", "pinned"):
                if getattr(model, shown):
                    ui.badge(words(f"models.{shown}"))
            for method in model.drafters:
                ui.badge(f"{words('models.drafter')}: {method}")
        if model.error:
            ui.label(model.error).props("role=alert").classes("text-negative")
        status = ui.label("").props("role=status")
        with ui.row():

            async def load() -> None:
                try:
                    await pool.load(pool.find(model.name))  # `update` shows the stages
                except SpeculonError as error:
                    status.text = str(error)
                    return
                await refresh()

            async def unload() -> None:
                try:
                    await admin.unload(model.name)
                except SpeculonError as error:
                    status.text = str(error)
                    return
                await refresh()

            async def opened() -> None:
                try:
                    dialog = await SettingsDialog.of(model.name, view)
                except SpeculonError as error:
                    status.text = str(error)
                    return
                with dialogs:
                    dialog.open()

            begin = ui.button(words("models.load"), on_click=load)
            begin.set_enabled(model.state in ("unloaded", "failed"))
            ui.button(words("models.unload"), on_click=unload).set_enabled(model.state == "loaded")
            ui.button(words("models.settings"), on_click=opened)
    return status
