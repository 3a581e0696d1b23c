"""The overview: numbers of all models, and live charts of the latest intervals."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from speculon.server.admin.figures import INTERVAL, Figures, Point
from speculon.server.admin.schemas import Engine
from speculon.server.admin.ui.colours import PALETTE, SYMBOLS, colour_of, options, symbol_of
from speculon.server.admin.ui.shell import View
from speculon.server.admin.ui.words import Words

NUMBERS = ("requests", "running", "rate", "tokens", "acceptance", "per_call", "saved", "memory")
MB = 1e6


async def build(view: View) -> None:
    words, figures = view.words, view.figures
    figures.refresh()
    with ui.element("div").classes("sp-numbers"):
        labels = {name: number(words(f"overview.{name}")) for name in NUMBERS}
    with ui.element("div").classes("sp-grid"):
        charts = {
            "rate": chart(words("overview.chart_rate"), options("time", [])),
            "acceptance": chart(words("overview.chart_acceptance"), options("time", [], min=0, max=100)),
            "per_call": chart(words("overview.chart_per_call"), options("time", [])),
            "drafts": chart(words("overview.chart_drafts"), options("time", [])),
            "positions": chart(words("overview.chart_positions"), options("category", [], min=0, max=100)),
            "reasons": chart(words("overview.chart_reasons"), options("category", [])),
            "memory": chart(words("overview.chart_memory"), options("category", [])),
            "costs": chart(words("overview.chart_costs"), options("value", [], min=0)),
        }
    ui.label(words("overview.note")).classes("text-sm opacity-80")

    def update() -> None:
        figures.refresh()
        for name, text in numbers(figures, words).items():
            labels[name].set_text(text)
        engines = {one.name: one.engine for one in view.context.admin.overview().models if one.engine}
        for name, (series, categories) in (series_of(figures, words) | series_of_engines(engines)).items():
            show(charts[name], series, categories)

    update()
    ui.timer(INTERVAL, update, immediate=False)


def number(title: str) -> ui.label:
    with ui.card().classes("sp-card gap-0").props("flat bordered"):
        ui.label(title).classes("text-sm opacity-80")
        return ui.label().classes("text-xl")


def chart(title: str, content: dict[str, Any]) -> ui.echart:
    with ui.card().classes("sp-card").props("flat bordered"):
        ui.label(title).props("role=heading aria-level=2")
        shown = ui.echart(content).classes("w-full h-56").props("role=img")
    shown.props["aria-label"] = title
    return shown


def numbers(figures: Figures, words: Words) -> dict[str, str]:
    totals, now = figures.totals, figures.now
    rate = figures.points[-1].tokens_per_s if figures.points else 0.0
    return {
        "requests": f"{now.open_requests:,}",
        "running": f"{now.running:,} / {now.waiting:,}",
        "rate": f"{rate:,.1f}",
        "tokens": f"{totals.tokens:,}",
        "acceptance": ratio(totals.accepted * 100, totals.drafted, " %", 1),
        "per_call": ratio(totals.tokens, totals.target_calls, "", 2),
        "saved": words("overview.seconds", seconds=f"{totals.saved_ms / 1e3:,.1f}"),
        "memory": megabytes(sum(now.memory.values()), words),
    }


def megabytes(held: int, words: Words) -> str:
    """A model alone has no share that the server knows."""
    return words("overview.megabytes", megabytes=f"{held / MB:,.0f}") if held else "–"


def ratio(part: float, whole: float, unit: str, digits: int) -> str:
    """Without a whole there is no ratio."""
    return f"{part / whole:.{digits}f}{unit}" if whole else "–"


def series_of(figures: Figures, words: Words) -> dict[str, tuple[list[dict[str, Any]], list[str] | None]]:
    """Chart -> its series, and the categories of its axis where it has some."""
    points, totals = list(figures.points), figures.totals
    at = sorted(totals.drafted_at)
    shares = [round(100 * totals.accepted_at.get(i, 0) / totals.drafted_at[i], 1) for i in at]
    reasons = sorted(totals.reasons.items(), key=lambda item: -item[1])
    single = PALETTE[0]
    return {
        "rate": ([line(words("overview.rate"), points, lambda p: p.tokens_per_s, single)], None),
        "acceptance": (
            [
                line(method, points, lambda p, m=method: percent(p, m), colour_of(method), symbol_of(method))
                for method in sorted(totals.drafted_from)
            ],
            None,
        ),
        "per_call": ([line(words("overview.per_call"), points, lambda p: p.per_call, single)], None),
        "drafts": ([line(words("overview.chart_drafts"), points, lambda p: p.drafts, single)], None),
        "positions": ([bars(words("overview.acceptance"), shares)], [str(i + 1) for i in at]),
        "reasons": (
            [bars(words("overview.rounds"), [count for _, count in reasons])],
            [words(f"overview.reason_{reason}") for reason, _ in reasons],
        ),
    }


def series_of_engines(
    engines: dict[str, Engine],
) -> dict[str, tuple[list[dict[str, Any]], list[str] | None]]:
    """Memory by part in MB, models side by side; and ms of a plain step by sequences."""
    parts = list(dict.fromkeys(part for engine in engines.values() for part in engine.memory_bytes))
    memory = [
        {
            "type": "bar",
            "stack": "memory",
            "name": part,
            "data": [round(engine.memory_bytes.get(part, 0) / MB, 1) for engine in engines.values()],
            "color": PALETTE[place % len(PALETTE)],
            "barMaxWidth": 48,
        }
        for place, part in enumerate(parts)
    ]
    costs = [
        {
            "type": "line",
            "name": name,
            "data": [[sequences, round(ms, 2)] for sequences, ms in sorted(engine.cost_curve.items())],
            "symbol": SYMBOLS[place % len(SYMBOLS)],
            "symbolSize": 6,
            "color": PALETTE[place % len(PALETTE)],
        }
        for place, (name, engine) in enumerate(engines.items())
        if engine.cost_curve
    ]
    return {"memory": (memory, list(engines)), "costs": (costs, None)}


def percent(point: Point, method: str) -> float | None:
    share = point.acceptance.get(method)
    return None if share is None else round(100 * share, 1)


def line(name: str, points: list[Point], read: Any, colour: str, symbol: str = "none") -> dict[str, Any]:
    """Intervals without a value are left out; the line goes on to the next one."""
    values = [(point.time * 1e3, read(point)) for point in points]
    return {
        "type": "line",
        "name": name,
        "data": [[at, round(value, 2)] for at, value in values if value is not None],
        "symbol": symbol,
        "symbolSize": 6,
        "color": colour,
    }


def bars(name: str, values: list[Any]) -> dict[str, Any]:
    return {"type": "bar", "name": name, "data": values, "color": PALETTE[0], "barMaxWidth": 32}


def show(chart: ui.echart, series: list[dict[str, Any]], categories: list[str] | None) -> None:
    """Sends the chart only where it has changed."""
    if chart.options["series"] == series:
        return
    chart.options["series"] = series
    if categories is not None:
        chart.options["xAxis"]["axisLabel"] |= {"interval": 0, "rotate": 30 if len(categories) < 12 else 0}
        chart.options["xAxis"]["data"] = categories
    chart.update()
