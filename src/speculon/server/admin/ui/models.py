"""The models: their states, and a dialog with the settings of each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from nicegui import ui

from speculon.errors import SpeculonError
from speculon.server.admin.schemas import FieldView, ModelView
from speculon.server.admin.ui.shell import View
from speculon.server.errors import param_of

SECONDS = 2.0
DRAFT = "draft"  # the field of the drafter


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

            def opened() -> None:
                with dialogs:
                    Settings(model, view, refresh).open()

            ui.button(words("models.load"), on_click=load)
            ui.button(words("models.unload"), on_click=unload)
            ui.button(words("models.settings"), on_click=opened)


class Settings:
    """The dialog of one model. Only fields that were changed are sent."""

    def __init__(self, model: ModelView, view: View, refresh: Any):
        self._model, self._view, self._refresh = model, view, refresh
        self._inputs: dict[str, Any] = {}
        self._fields = {field.name: field for field in model.settings}
        with ui.dialog().props("maximized") as self._dialog, ui.card().classes("w-full"):
            self._content()

    def open(self) -> None:
        self._dialog.open()

    def _content(self) -> None:
        words = self._view.words
        ui.label(words("models.settings_of", model=self._model.name)).props("role=heading aria-level=2")
        with ui.column().classes("w-full"):
            for field in self._model.settings:
                self._field(field)
        self._status = ui.label("").props("role=status")
        with ui.row().classes("sticky bottom-0"):
            ui.button(words("models.save"), on_click=self._save)
            ui.button(words("models.close"), on_click=self._dialog.close).props("flat")

    def _field(self, field: FieldView) -> None:
        words = self._view.words
        why = self._model.locked or field.locked
        shown = self._control(field)
        from_where = words("models.origin", origin=field.origin)
        hint = f"{from_where}. {words('models.locked', why=why)}" if why else from_where
        if field.new_worker:
            hint += f". {words('models.new_worker')}"
        # the hint is part of the control: a screen reader says it with the name
        shown.props["hint"] = hint
        shown.props["aria-description"] = hint
        shown.props("outlined dense persistent-hint bottom-slots").classes("w-full")
        if why:
            shown.props("readonly").tooltip(why)
        else:
            self._inputs[field.name] = shown

    def _control(self, field: FieldView) -> Any:
        if field.name == DRAFT:
            found = self._view.context.admin.drafters_for(self._model.name)
            now = as_text(field.value)
            names = {now: now or "-"} | {one.checkpoint: f"{one.name} ({one.method})" for one in found}
            return ui.select(names, value=now, label=field.name)
        return ui.input(field.name, value=as_text(field.value))

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for name, shown in self._inputs.items():
            before = self._fields[name].value
            if shown.value != as_text(before):
                changes[name] = value_of(shown.value)
        return changes

    async def _save(self) -> None:
        words, changes = self._view.words, self._changes()
        for shown in self._inputs.values():
            shown.error = None
        if not changes:
            self._status.text = words("models.unchanged")
            return
        anew = [name for name in changes if self._fields[name].new_worker]
        self._status.text = words("models.saving_anew", names=", ".join(anew)) if anew else ""
        try:
            # a change that has begun is not cut off by a page that is closed
            await asyncio.shield(self._view.context.admin.change(self._model.name, changes))
        except SpeculonError as error:
            field = self._inputs.get(param_of(error) or "")
            if field is not None:
                field.error = str(error)
            self._status.text = str(error)
            return
        self._status.text = words("models.saved")


def as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def value_of(text: str | None) -> Any:
    """What was typed: JSON where it is that, else a text; empty takes the field out of the file."""
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
