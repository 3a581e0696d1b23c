"""The models: their states, and a button for the settings of each."""

from __future__ import annotations

import json
from typing import Any

from nicegui import ui

from speculon.errors import SpeculonError
from speculon.server.admin.schemas import ModelView
from speculon.server.admin.ui.settings import Settings
from speculon.server.admin.ui.shell import View

SECONDS = 2.0


async def build(view: View) -> None:
    dialogs = ui.element()  # a new list of models must not delete an open dialog

    @ui.refreshable
    async def listed() -> None:
        try:
            found = await view.context.admin.models()
        except SpeculonError as error:
            ui.label(str(error)).props("role=alert")
            return
        for model in found:
            card(model, view, listed.refresh, dialogs)

    await listed()
    states = [str([(one.name, one.state) for one in view.context.admin.overview().models])]

    async def update() -> None:
        now = str([(one.name, one.state) for one in view.context.admin.overview().models])
        if now != states[0]:
            states[0] = now
            await listed.refresh()

    ui.timer(SECONDS, update)


def card(model: ModelView, view: View, refresh: Any, dialogs: ui.element) -> None:
    words, admin = view.words, view.context.admin
    with ui.card().classes("sp-card").props(f"data-model={json.dumps(model.name)}"):
        with ui.row().classes("items-center"):
            ui.label(model.name).classes("text-lg").props("role=heading aria-level=2")
            ui.badge(model.state, outline=True)
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
                    async for stage in admin.load(model.name):
                        status.text = ", ".join(f"{key} {value}" for key, value in stage.items())
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
                    dialog = await Settings.of(model.name, view)
                except SpeculonError as error:
                    status.text = str(error)
                    return
                with dialogs:
                    dialog.open()

            ui.button(words("models.load"), on_click=load)
            ui.button(words("models.unload"), on_click=unload)
            ui.button(words("models.settings"), on_click=opened)
