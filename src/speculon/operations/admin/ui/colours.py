"""One colour per method everywhere: those of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

from typing import Any

# in this order: the first ones are often together in one chart
METHODS = (
    "suffix",
    "draft_model",
    "ngram",
    "eagle3",
    "dflash",
    "mtp",
    "gemma4_assistant",
    "pard",
    "prediction",
    "grammar",
    "synthetic",
)
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a8a", "#b8a800")
SYMBOLS = ("circle", "rect", "triangle", "diamond", "pin", "arrow", "roundRect")
GREY = "#808080"  # lines: enough contrast on white and on dark
TEXT = "currentColor"  # the page's own, in either theme; only SVG has it


def colour_of(method: str) -> str:
    return PALETTE[place_of(method) % len(PALETTE)]


def symbol_of(method: str) -> str:
    """A second sign beside the colour."""
    return SYMBOLS[place_of(method) % len(SYMBOLS)]


def place_of(method: str) -> int:
    """Plug-ins share the place after the last."""
    return METHODS.index(method) if method in METHODS else len(METHODS)


def axes(kind: str) -> dict[str, Any]:
    return {
        "type": kind,
        "axisLabel": {"color": TEXT, "hideOverlap": True},
        "nameTextStyle": {"color": TEXT},
        "splitLine": {"lineStyle": {"color": "rgba(128,128,128,.25)"}},
    }


def options(x: str, series: list[dict[str, Any]], **y: Any) -> dict[str, Any]:
    return {
        "animation": False,
        "color": list(PALETTE),
        "grid": {"left": 48, "right": 16, "top": 36, "bottom": 28},
        "legend": {"top": 0, "type": "scroll", "textStyle": {"color": TEXT}},
        "tooltip": {"trigger": "axis"},
        "xAxis": axes(x),
        "yAxis": axes("value") | y,
        "series": series,
    }
