"""The control of a model's drafters: a list of what there is, and whether each fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from speculon.core.config.speculation import AUTO
from speculon.operations.admin.schemas import DrafterFit, FieldView
from speculon.operations.admin.ui.controls import Control
from speculon.operations.admin.ui.shell import PageView


@dataclass
class DrafterRow:
    drafter: DrafterFit
    box: ui.checkbox


class DrafterBoxes(Control):
    """A box for each drafter, at most one of a method; or `auto`, which searches for them at each load."""

    def __init__(self, field: FieldView, drafters: list[DrafterFit], model: str, view: PageView):
        self._model, self._view, self._rows = model, view, list[DrafterRow]()
        ui.label(field.name)
        with ui.column().classes("gap-0 w-full").props("role=group") as self._list:
            self._list.props["aria-label"] = field.name
        super().__init__(self._list)
        for drafter in with_set(drafters, field.value):
            self._add(drafter)
        with ui.row().classes("items-center w-full no-wrap"):
            self._path = ui.input(view.words("models.other_drafter")).props("outlined dense").classes("grow")
            self._path.on("keydown.enter", self._examine)
            self._button = ui.button(view.words("models.add"), on_click=self._examine).props("flat")
        self.write(field.value)

    def read(self) -> Any:
        """In the form that it had, where it is the same; else one by its path, and several by method."""
        chosen = self._chosen()
        if chosen == self._begun:
            return self._value
        return next(iter(chosen.values())) if len(chosen) == 1 else chosen

    def write(self, value: Any) -> None:
        for row in self._rows:
            row.box.value = row.drafter.checkpoint in paths_of(value)
            if row.box.value:  # one that does not fit can be taken away
                row.box.enable()
        self._value, self._begun = value, self._chosen()

    def lock(self) -> None:
        for shown in (*(row.box for row in self._rows), self._path, self._button):
            shown.disable()

    def _add(self, drafter: DrafterFit) -> None:
        words = self._view.words
        with self._list:
            with ui.row().classes("items-center gap-2"):
                box = ui.checkbox(drafter.name)
                if drafter.method:
                    ui.badge(drafter.method, outline=True)
                if drafter.loaded:
                    ui.badge(words("models.state_loaded"))
            why = words("models.misfit", why=drafter.refusal) if drafter.refusal else ""
            place = words("models.search") if drafter.checkpoint == AUTO else drafter.checkpoint
            about = ui.label(". ".join(filter(None, (place, why, *drafter.warnings))))
        about.classes("text-xs opacity-80 pl-10").style("overflow-wrap: anywhere")
        box.props["aria-describedby"] = about.html_id
        if drafter.refusal:
            box.disable()
        row = DrafterRow(drafter, box)
        self._rows.append(row)
        box.on_value_change(lambda: self._exclude(row))

    def _exclude(self, chosen: DrafterRow) -> None:
        """Unchecks what cannot be together with one that was checked."""
        if not chosen.box.value:
            return
        for row in self._rows:
            methods = {row.drafter.method, chosen.drafter.method}
            if row is not chosen and (len(methods) == 1 or AUTO in methods):
                row.box.value = False

    async def _examine(self) -> None:
        """Adds the checkpoint that was typed, with whether it fits."""
        path = (self._path.value or "").strip()
        known = [row for row in self._rows if row.drafter.checkpoint == path]
        if known or not path:
            for row in known:
                row.box.value = row.box.enabled
            return
        drafters = await self._view.admin.drafters_for(self._model, path)
        self._path.value = ""
        for drafter in drafters:
            self._add(drafter)
            self._rows[-1].box.value = drafter.refusal is None

    def _chosen(self) -> dict[str, str]:
        return {row.drafter.method: row.drafter.checkpoint for row in self._rows if row.box.value}


def with_set(drafters: list[DrafterFit], value: Any) -> list[DrafterFit]:
    """`auto`, and what is set, each under the method that it is set for; then the others."""
    of_path = {path: method for method, path in value.items()} if isinstance(value, Mapping) else {}
    known = {drafter.checkpoint for drafter in drafters}
    unknown = [drafter for drafter in dict.fromkeys([AUTO, *paths_of(value)]) if drafter not in known]
    added = [
        DrafterFit(name=drafter, method="", checkpoint=drafter, loaded=False, refusal=None, warnings=[])
        for drafter in unknown
    ]
    return [
        drafter.model_copy(
            update={
                "method": AUTO
                if is_search(drafter.checkpoint)
                else of_path.get(drafter.checkpoint, drafter.method)
            }
        )
        for drafter in [*added, *drafters]
    ]


def is_search(checkpoint: str) -> bool:
    return checkpoint.partition(":")[0] == AUTO


def paths_of(draft: Any) -> list[str]:
    values = draft.values() if isinstance(draft, Mapping) else [draft]
    return [value for value in values if isinstance(value, str)]
