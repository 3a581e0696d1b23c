"""The dialog with the settings of one model."""

from __future__ import annotations

import asyncio

from nicegui import ui

from speculon.core.errors import SpeculonError
from speculon.operations.admin.schemas import DrafterFit, FieldView, ModelView
from speculon.operations.admin.ui.controls import Control, control_of
from speculon.operations.admin.ui.drafters import DrafterBoxes
from speculon.operations.admin.ui.shell import PageView
from speculon.server.errors import param_of

DRAFT = "draft"  # the field of the drafter
GROUPS = ("speculation", "sampling", "engine", "pool")


class SettingsDialog:
    """Only fields that were changed are sent."""

    def __init__(self, model: ModelView, drafters: list[DrafterFit], view: PageView):
        self._model, self._drafters, self._view = model, drafters, view
        self._fields: dict[str, Field] = {}

    @classmethod
    async def of(cls, name: str, view: PageView) -> SettingsDialog:
        """With the settings as they are now. Raises `ConfigError` where their file has a fault."""
        admin = view.admin
        return cls(await admin.model(name), await admin.drafters_for(name), view)

    def open(self) -> None:
        """Shows it within the current element."""
        words, title = self._view.words, self._view.words("models.settings_of", model=self._model.name)
        with ui.dialog(value=True).props("maximized") as dialog, ui.card().classes("w-full"):
            dialog.props["aria-label"] = title
            dialog.on("hide", dialog.delete)
            # first and always visible: no one has to pass all fields to save
            with ui.column().classes("sp-bar w-full gap-1"):
                ui.label(title).props("role=heading aria-level=2").classes("text-lg")
                with ui.row():
                    ui.button(words("models.save"), on_click=self._save)
                    ui.button(words("models.close"), on_click=dialog.close).props("flat")
                self._status = ui.label("").props("role=status")
            for group in GROUPS:
                ui.label(words(f"models.group_{group}")).props("role=heading aria-level=3")
                with ui.element("div").classes("sp-grid"):
                    for field in self._model.settings:
                        if field.group == group:
                            self._fields[field.name] = self._field(field)

    def _field(self, field: FieldView) -> Field:
        with ui.column().classes("sp-card gap-0").props(f"data-field={field.name}"):
            if field.name == DRAFT:
                control: Control = DrafterBoxes(field, self._drafters, self._model.name, self._view)
            else:
                control = control_of(field, self._view.words)
            if control.one_line:
                control.shown.on("keydown.enter", self._save)
            return Field(field, control, self._model.locked, self._view)

    async def _save(self) -> None:
        words, changes = self._view.words, {}
        for name, field in self._fields.items():
            field.refuse("")
            if field.changed:
                changes[name] = field.control.read()
        if not changes:
            self._status.text = words("models.unchanged")
            return
        anew = [name for name in changes if self._fields[name].view.new_worker]
        self._status.text = words("models.saving_anew", names=", ".join(anew)) if anew else ""
        try:
            # a change that has begun is not cut off by a page that is closed
            view = await asyncio.shield(self._view.admin.change(self._model.name, changes))
        except SpeculonError as error:
            refused = self._fields.get((param_of(error) or "").partition(".")[0])
            if refused is not None:
                refused.refuse(str(error))
            self._status.text = str(error)
            return
        for setting in view.settings:
            self._fields[setting.name].update(setting)
        self._status.text = words("models.saved")


class Field:
    """One setting: its control, where its value comes from, and why it is locked or was refused."""

    def __init__(self, view: FieldView, control: Control, locked: str | None, page: PageView):
        self.control, self._words, self._locked = control, page.words, locked
        self._hint = ui.label().classes("text-xs opacity-80")
        self._fault = ui.label().props("role=alert").classes("text-sm text-negative")
        # a screen reader says both with the control's name
        control.shown.props["aria-describedby"] = f"{self._hint.html_id} {self._fault.html_id}"
        self.update(view)

    def update(self, view: FieldView) -> None:
        """Shows the value that is in force."""
        self.control.write(view.value)
        self.view, self._was = view, self.control.read()
        why = self._locked or view.locked
        parts = [view.description] if view.description else []
        parts.append(self._words("models.origin", origin=view.origin))
        if why:
            parts.append(self._words("models.locked", why=why))
            self.control.lock()
        elif view.new_worker:
            parts.append(self._words("models.new_worker"))
        self._hint.text = ". ".join(parts)

    @property
    def changed(self) -> bool:
        return bool(self.control.read() != self._was)

    def refuse(self, why: str) -> None:
        self._fault.text = why
        self.control.shown.props["aria-invalid"] = "true" if why else "false"
