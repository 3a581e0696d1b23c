"""`speculon bench` in the browser: its options, its progress, its figures."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from pydantic import ValidationError

from speculon.errors import SpeculonError
from speculon.server.admin.schemas import BenchOptions, BenchView
from speculon.server.admin.ui.colours import PALETTE, options
from speculon.server.admin.ui.shell import View
from speculon.server.admin.ui.words import Words

SECONDS = 1.0
WORKLOADS = ("code", "edit", "prose", "mixed", "warm")
NUMBERS = ("prompts", "max_tokens", "repeats")
COLUMNS = ("workload", "concurrency", "mode", "speed", "ratio", "per_call", "acceptance", "differ")


async def build(view: View) -> None:
    words, admin = view.words, view.context.admin
    with ui.card().classes("sp-card").props("flat bordered"):
        ui.label(words("bench.about")).classes("text-sm")
        form = Form(view)
        with ui.row().classes("items-center"):
            begin = ui.button(words("bench.start"))
            cancel = ui.button(words("bench.cancel"), on_click=admin.cancel_bench).props("outline")
        status = ui.label().props("role=status")
        fault = ui.label().props("role=alert").classes("text-negative")
    lines = ui.label().props("role=log").classes("w-full text-xs font-mono").style("white-space: pre-wrap")
    results = ui.column().classes("w-full gap-4")
    shown: list[float | None] = [None]  # the start of the benchmark whose figures are on the page

    def update() -> None:
        now = admin.bench()
        running = now.state == "running"
        begin.set_enabled(not running)
        cancel.set_enabled(running)
        state = words(f"bench.state_{now.state}")
        text = words("bench.status", state=state, seconds=f"{now.seconds:.0f}")
        status.set_text(f"{text}: {now.error}" if now.error else text)
        status.set_visibility(now.state != "none")
        lines.set_text("\n".join(now.lines[-20:]))
        if running and shown[0] is not None:
            shown[0] = None
            results.clear()
        elif now.result is not None and shown[0] != now.started:
            shown[0] = now.started
            results.clear()
            with results:
                figures(now, words)

    async def asked() -> None:
        fault.set_text("")
        try:
            chosen = form.options()
        except ValidationError as error:
            fault.set_text(reason_of(error))
            return
        if await confirmed(words):
            try:
                admin.start_bench(chosen)
            except SpeculonError as error:
                fault.set_text(str(error))
            update()

    begin.on_click(asked)
    update()
    ui.timer(SECONDS, update, immediate=False)


class Form:
    """The options, with the defaults of the command. Lists are typed with commas."""

    def __init__(self, view: View):
        words, plain = view.words, BenchOptions()
        models = [one.name for one in view.context.admin.overview().models]
        with ui.element("div").classes("sp-grid"):
            self._model = ui.select(models, value=models[0], label=words("bench.model"))
            self._workloads = ui.select(
                list(WORKLOADS), value=list(plain.workloads), multiple=True, label=words("bench.workloads")
            )
            self._modes = ui.input(words("bench.modes"))
            self._concurrency = ui.input(
                words("bench.concurrency"), value=",".join(map(str, plain.concurrency))
            )
            self._numbers = {
                name: ui.number(words(f"bench.{name}"), value=getattr(plain, name), precision=0)
                for name in NUMBERS
            }
        self._modes.props["hint"] = words("bench.modes_hint")
        for shown in (self._model, self._workloads, self._modes, self._concurrency, *self._numbers.values()):
            shown.props("outlined dense").classes("w-full")

    def options(self) -> BenchOptions:
        """Raises `ValidationError`."""
        return BenchOptions.model_validate(
            {
                "model": self._model.value,
                "workloads": self._workloads.value,
                "modes": parts(self._modes.value),
                "concurrency": parts(self._concurrency.value),
                **{name: shown.value for name, shown in self._numbers.items()},
            }
        )


def parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def reason_of(error: ValidationError) -> str:
    """Each refused field, its value and its limit."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc']))} = {one['input']!r}: {one['msg']}" for one in error.errors()
    )


async def confirmed(words: Words) -> bool:
    with ui.dialog() as dialog, ui.card():
        ui.label(words("bench.confirm"))
        with ui.row():
            ui.button(words("bench.go"), on_click=lambda: dialog.submit(True))
            ui.button(words("bench.back"), on_click=lambda: dialog.submit(False)).props("flat")
    answer = bool(await dialog)
    dialog.delete()
    return answer


def figures(now: BenchView, words: Words) -> None:
    """A chart of the speed over plain decoding, and a table of every cell."""
    cells = (now.result or {})["cells"]
    with ui.card().classes("sp-card").props("flat bordered"):
        ui.label(words("bench.chart")).props("role=heading aria-level=2")
        chart = ui.echart(chart_of(cells, words), renderer="svg").classes("w-full h-64").props("role=img")
        chart.props["aria-label"] = words("bench.chart")
        ui.label(words("bench.noise")).classes("text-sm opacity-80")
    columns = [
        {"name": name, "label": words(f"bench.{name}"), "field": name, "align": "left"} for name in COLUMNS
    ]
    rows = [{"id": number, **row_of(cell)} for number, cell in enumerate(cells)]
    ui.table(columns=columns, rows=rows, row_key="id").classes("w-full")


def chart_of(cells: list[dict[str, Any]], words: Words) -> dict[str, Any]:
    """A group of bars per mode: one bar per workload and concurrency."""
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    groups = list(dict.fromkeys((cell["workload"], cell["concurrency"]) for cell in cells))
    ratios = {(cell["workload"], cell["concurrency"], cell["mode"]): cell["ratio"] for cell in cells}
    series = [
        {
            "type": "bar",
            "name": words("bench.group", workload=workload, concurrency=concurrency),
            "data": [rounded(ratios.get((workload, concurrency, mode))) for mode in modes],
            "color": PALETTE[place % len(PALETTE)],
            "barMaxWidth": 32,
        }
        for place, (workload, concurrency) in enumerate(groups)
    ]
    content = options("category", series)
    content["xAxis"] |= {"data": modes}
    return content


def row_of(cell: dict[str, Any]) -> dict[str, Any]:
    accepted = cell["acceptance_rate"]
    return {
        "workload": cell["workload"],
        "concurrency": cell["concurrency"],
        "mode": cell["mode"],
        "speed": f"{cell['tokens_per_second']:.0f}",
        "ratio": "–" if cell["ratio"] is None else f"{cell['ratio']:.2f}",
        "per_call": f"{cell['tokens_per_target_call']:.2f}",
        "acceptance": "–" if accepted is None else f"{100 * accepted:.0f} %",
        "differ": f"{cell['different']} / {cell['texts']}",
    }


def rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)
