"""The overview: numbers of all models, and live charts of the latest intervals."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from speculon.operations.admin.figures import INTERVAL, Figures, Point
from speculon.operations.admin.schemas import EngineStatus, MethodCounts, Overview, RoundCounts
from speculon.operations.admin.ui.colours import GREY, PALETTE, SYMBOLS, colour_of, options, symbol_of
from speculon.operations.admin.ui.shell import PageView
from speculon.operations.admin.ui.words import UiWords

NUMBERS = ("requests", "running", "rate", "tokens", "acceptance", "per_call", "saved", "memory")
COLUMNS = ("method", "rounds", "drafted", "accepted", "acceptance", "per_call")
MB = 1e6
NOT_KNOWN = "–"


async def build(view: PageView) -> None:
    words, figures = view.words, view.admin.figures
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
    columns = [
        {"name": name, "label": words(f"overview.{name}"), "field": name, "align": "left"} for name in COLUMNS
    ]
    table = ui.table(columns=columns, rows=[], row_key="method").classes("w-full").props("dense")
    table.props["aria-label"] = words("overview.method")
    table.props["no-data-label"] = words("overview.no_method")

    def update() -> None:
        now = figures.refresh()
        for name, text in numbers(now, figures, words).items():
            labels[name].set_text(text)
        rows = [row_of(counts) for counts in now.totals.methods]
        if rows != table.rows:
            table.rows = rows
        points, engines = (
            list(figures.points),
            {model.name: model.engine for model in now.models if model.engine},
        )
        shown = series_of(points, now.totals, words) | series_of_engines(engines)
        for name, (series, categories) in shown.items():
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
        shown = ui.echart(content, renderer="svg").classes("w-full h-56").props("role=img")
    shown.props["aria-label"] = title
    return shown


def numbers(now: Overview, figures: Figures, words: UiWords) -> dict[str, str]:
    totals, engines = now.totals, [model.engine for model in now.models if model.engine is not None]
    running = sum(engine.sequences_running for engine in engines)
    waiting = sum(engine.sequences_waiting for engine in engines)
    saved = totals.saved_seconds
    return {
        "requests": f"{sum(model.requests_open for model in now.models):,}",
        "running": f"{running:,} / {waiting:,}",
        "rate": f"{figures.points[-1].tokens_per_s if figures.points else 0.0:,.1f}",
        "tokens": f"{sum(model.tokens for model in now.models):,}",
        "acceptance": share_text(totals.acceptance_rate),
        "per_call": decimal(totals.tokens_per_target_call),
        "saved": NOT_KNOWN if saved is None else words("overview.seconds", seconds=f"{saved:,.1f}"),
        "memory": megabytes(sum(model.held_bytes for model in now.models), words),
    }


def row_of(counts: MethodCounts) -> dict[str, str]:
    return {
        "method": counts.method,
        "rounds": f"{counts.rounds:,}",
        "drafted": f"{counts.drafted:,}",
        "accepted": f"{counts.accepted:,}",
        "acceptance": share_text(counts.acceptance_rate),
        "per_call": decimal(counts.tokens_per_target_call),
    }


def megabytes(held: int, words: UiWords) -> str:
    """A model alone has no share that the server knows."""
    return words("overview.megabytes", megabytes=f"{held / MB:,.0f}") if held else NOT_KNOWN


def share_text(share: float | None) -> str:
    return NOT_KNOWN if share is None else f"{100 * share:.1f} %"


def decimal(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.2f}"


def series_of(
    points: list[Point], totals: RoundCounts, words: UiWords
) -> dict[str, tuple[list[dict[str, Any]], list[str] | None]]:
    """Chart -> its series, and the categories of its axis where it has some."""
    shares = [round(100 * share, 1) for share in totals.per_position]
    reasons = sorted(totals.plain_rounds.items(), key=lambda item: -item[1])
    single, methods = PALETTE[0], [counts.method for counts in totals.methods]
    acceptance = [of_method(method, points, lambda p, m=method: percent(p, m)) for method in methods]
    per_call = [of_method(method, points, lambda p, m=method: p.per_call_of.get(m)) for method in methods]
    every = line(words("overview.all"), points, lambda p: p.per_call, GREY)
    return {
        "rate": ([line(words("overview.rate"), points, lambda p: p.tokens_per_s, single)], None),
        "acceptance": (acceptance, None),
        "per_call": ([every, *per_call], None),
        "drafts": ([line(words("overview.chart_drafts"), points, lambda p: p.drafts, single)], None),
        "positions": (
            [bars(words("overview.acceptance"), shares)],
            [str(i + 1) for i in range(len(shares))],
        ),
        "reasons": (
            [bars(words("overview.rounds"), [count for _, count in reasons])],
            [words(f"overview.reason_{reason}") for reason, _ in reasons],
        ),
    }


def of_method(method: str, points: list[Point], read: Any) -> dict[str, Any]:
    return line(method, points, read, colour_of(method), symbol_of(method))


def series_of_engines(
    engines: dict[str, EngineStatus],
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
