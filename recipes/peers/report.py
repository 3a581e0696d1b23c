"""What a run leaves: every measurement in JSON, a table, a chart."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from figures import Record, Row
from matplotlib.figure import Figure

from speculon.measure.bench.charts import COLOURS, name_panel, new_figure
from speculon.measure.bench.tables import markdown_table

HEAD = (
    "engine",
    "mode",
    "tokens/s",
    "x transformers",
    "x own plain",
    "x speculon off",
    "x own ngram:8",
    "drafts accepted",
    "tokens per target call",
    "texts unlike speculon's",
    "texts unlike its own plain",
    "nats per token",
)
MEASURED = (
    "tokens/s: tokens written / wall time from submission to the last token, prompt included, taken in the "
    "worker itself; all "
    "repeats together. x transformers, x own plain, x speculon off: median over the pairs (group of prompts, "
    "repeat) with the "
    "plain decoding of that engine; x own ngram:8: with its prompt lookup. drafts accepted: by the engine's "
    "own counters; `?`: it does not tell. "
    "tokens per target "
    "call: of all texts of a call together. texts unlike speculon's: greedy texts that are not, token for "
    "token, those of "
    "`speculon off`, or of the engine's own plain decoding. nats per token: how much texts sampled at "
    "temperature 1 surprise the target; engines "
    "that sample from the "
    "same distribution have the same, up to chance"
)


def write(folder: Path, facts: dict[str, Any], rows: list[Row], records: list[Record]) -> list[Path]:
    """`peers.json`, `peers.md`, `peers.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"peers.{kind}" for kind in ("json", "md", "png")]
    everything = {
        **facts,
        "measured": MEASURED,
        "rows": list(map(asdict, rows)),
        "records": list(map(asdict, records)),
    }
    files[0].write_text(json.dumps(everything) + "\n", encoding="utf-8")
    files[1].write_text(markdown(facts, rows), encoding="utf-8")
    draw(rows, title(facts)).savefig(files[2], dpi=150)
    return files


def title(facts: dict[str, Any]) -> str:
    plan, machine = facts["plan"], facts["machine"]
    clock = ", CPU seconds in the place of seconds" if plan["clock"] == "cpu" else ""
    return (
        f"{facts['model']}, {plan.get('dtype', 'float32')}; {machine['cpu']}, {plan['threads']} "
        f"threads{clock}; medians of {plan['repeats']} alternated "
        f"repeats of {plan['prompts']} prompts, up to {plan['max_tokens']} tokens each"
    )


def markdown(facts: dict[str, Any], rows: list[Row]) -> str:
    parts = [f"`{facts['command']}` at {facts['commit']}, {facts['date'][:10]}: {title(facts)}."]
    for (workload, count), cell in by_cell(rows):
        parts.append(f"## {workload}, {'one at a time' if count == 1 else f'{count} at once'}")
        parts.append(markdown_table(HEAD, map(line, cell)))
        parts.extend(f"- {row.engine} {row.mode} refused: {row.refused}" for row in cell if row.refused)
    versions = ", ".join(f"{name} {number}" for name, number in sorted(facts["versions"].items()))
    return "\n\n".join([*parts, f"{MEASURED}.", f"Versions: {versions}.\n"])


def by_cell(rows: list[Row]) -> list[tuple[tuple[str, int], list[Row]]]:
    return [
        (cell, list(some)) for cell, some in groupby(rows, key=lambda row: (row.workload, row.concurrency))
    ]


def line(row: Row) -> tuple[str, ...]:
    if row.refused:
        return (row.engine, row.mode, "refused", *("",) * (len(HEAD) - 3))
    return (
        row.engine,
        row.mode,
        f"{row.tokens_per_second:.0f}",
        number(row.to_stock),
        number(row.to_own),
        number(row.to_ours),
        number(row.to_lookup),
        drafts(row),
        number(row.tokens_per_call),
        *("" if n is None else f"{n} of {row.texts}" for n in (row.different, row.unlike_own)),
        number(row.nats_per_token),
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def drafts(row: Row) -> str:
    if row.mode == "off":
        return ""
    if row.silent:
        return "**none, or none accepted**"
    return f"{row.accepted / row.drafted:.0%}" if row.drafted and row.accepted is not None else "?"


def draw(rows: list[Row], heading: str) -> Figure:
    """A panel per cell; a bar per mode, coloured by engine, plain decoding pale."""
    cells, engines = by_cell(rows), list(dict.fromkeys(row.engine for row in rows))
    tallest = max(len(cell) for _, cell in cells)
    columns = min(2, len(cells))
    lines = -(-len(cells) // columns)
    figure = new_figure(6.2 * columns, (0.9 + 0.21 * tallest) * lines + 0.2, heading)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, ((workload, count), cell) in zip(panels, cells, strict=False):
        speeds = [row.tokens_per_second or 0 for row in cell]
        bars = panel.barh(
            range(len(cell)),
            speeds,
            color=[COLOURS[engines.index(row.engine) % len(COLOURS)] for row in cell],
        )
        for bar, row in zip(bars, cell, strict=True):
            bar.set_alpha(0.5 if row.mode == "off" else 1)
        labels = ["refused" if row.refused else f"{row.tokens_per_second:.0f}" for row in cell]
        panel.bar_label(bars, labels, padding=3, fontsize=7)
        panel.set_yticks(range(len(cell)), [f"{row.engine} {row.mode}" for row in cell], fontsize=7)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        name_panel(panel, f"{workload}, {'one at a time' if count == 1 else f'{count} at once'}")
        panel.set_xlabel("tokens per second", fontsize=8)
    for panel in panels[len(cells) :]:
        panel.set_visible(False)
    return figure
