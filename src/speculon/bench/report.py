"""What a benchmark says: a file with its circumstances, tables, and a chart."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from speculon.bench.run import AGAIN, Cell, Plan
from speculon.bench.workloads import Case, fingerprint
from speculon.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.llm import LLM

MEASURED = (
    "tokens_per_second: tokens written / wall time from submission to the last token, prompt processing and all Python included, "
    "prefix cache off; decode_*: the same over steps without prompt tokens. ratio: median over (group of prompts, repeat) of a "
    "mode's speed / the speed of `off` on the same group in the same repeat; `off again` repeats `off` and shows the noise."
)


@dataclass(slots=True)
class Report:
    """Everything a stranger needs to repeat the run, and the figures."""

    command: str
    plan: dict[str, Any]
    model: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    cells: list[Cell]
    measured: str = MEASURED
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    commit: str | None = field(default_factory=lambda: commit())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    @classmethod
    def of(cls, argv: list[str], plan: Plan, llm: LLM, cells: list[Cell], cases: dict[str, list[Case]]) -> Report:
        return cls(shlex.join(["speculon", *argv]), asdict(plan), model_facts(llm), workload_facts(cases), cells)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def model_facts(llm: LLM) -> dict[str, Any]:
    import torch

    target, config = llm.engine.target, llm.config
    return {
        "name": Path(config.model).name,  # not the folders above it
        "parameters": target.num_parameters,
        "layers": len(target.layers),
        "vocab_size": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "block_size": config.block_size,
        "max_batch_tokens": config.max_batch_tokens,
        "prefix_cache": config.prefix_cache,
    }


def workload_facts(cases: dict[str, list[Case]]) -> dict[str, dict[str, Any]]:
    return {
        name: {"cases": len(some), "prompt_tokens": [len(case.prompt) for case in some], "fingerprint": fingerprint(some)}
        for name, some in cases.items()
    }


def commit() -> str | None:
    """Of the checkout this package runs from, with `+` when it has changes; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head, changes = (
            subprocess.run([*git, *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no", ".."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(changes)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("speculon", "torch", "transformers", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.processor() or platform.machine()


def write(report: Report, folder: Path) -> list[Path]:
    """`bench.json`, `bench.md` and, where matplotlib is installed, `bench.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.json", folder / "bench.md"]
    files[0].write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(f"{heading(report)}\n\n{markdown(report.cells)}\n\n{LEGEND}.\n", encoding="utf-8")
    if find_spec("matplotlib"):
        from speculon.bench.chart import draw

        files.append(draw(report.cells, model_line(report), folder / "bench.png"))
    return files


def heading(report: Report) -> str:
    plan = report.plan
    return (
        f"`{report.command}` at {report.commit or 'an installed package'}, {report.date[:10]}: {model_line(report)}, "
        f"torch {report.versions['torch']}; medians of {plan['repeats']} alternated repeats of {plan['prompts']} prompts, "
        f"up to {plan['max_tokens']} tokens each"
    )


def model_line(report: Report) -> str:
    model, machine = report.model, report.machine
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, {model['dtype']}; "
        f"{machine.get('gpu', machine['cpu'])}, {model['threads']} thread{'s' * (model['threads'] > 1)}"
    )


SPEED = ("tok/s", "x off", "tok/call", "ms (rows)", "engine", "same", "exact", "loops")
LEGEND = (
    "tok/s: prompts included; x off: median of pairs; ms (rows): a decoding call of the model, its two usual sizes; "
    "engine: share of a step outside the model; same: texts equal to those of `off`; "
    "loops: texts that end repeating themselves and are not right"
)


def figures(cell: Cell) -> tuple[str, ...]:
    """In the order of `SPEED`."""
    texts = cell.texts * len(cell.per_repeat)
    return (
        f"{cell.tokens_per_second:.0f}",
        "1" if cell.mode == OFF else f"{cell.ratio:.2f}",
        number(cell.tokens_per_target_call, ".2f"),
        " ".join(f"{ms:.1f} ({rows})" for rows, ms in usual_calls(cell)) or "-",
        number(cell.overhead, ".1%"),
        "-" if cell.mode == OFF else f"{texts - cell.different}/{texts}" if cell.different else "all",
        number(cell.exact, ".0%"),
        f"{cell.looping:.0%}",
    )


def usual_calls(cell: Cell) -> list[tuple[int, float]]:
    """The two most frequent sizes of a decoding call, small ones first."""
    often = sorted(cell.ms_by_rows, key=lambda rows: -cell.ms_by_rows[rows][1])[:2]
    return [(rows, cell.ms_by_rows[rows][0]) for rows in sorted(often)]


def notes(cell: Cell) -> list[str]:
    """What does not fit into a column."""
    found = []
    if cell.per_position:
        found.append(f"{cell.mode}: {accepted(cell)} of the drafts at positions 1 to {len(cell.per_position)} accepted")
    if cell.different:
        gaps = f"; where greedy ones part, the candidates are at most {max(cell.tie_nats):.0e} nat apart" if cell.tie_nats else ""
        found.append(
            f"{cell.mode}: {cell.different} of {cell.texts * len(cell.per_repeat)} texts differ from those of {OFF}{gaps}"
        )
    return found


def accepted(cell: Cell) -> str:
    return " ".join(f"{share:.0%}".rstrip("%") for share in cell.per_position) + " %" if cell.per_position else "-"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def by_cell(cells: list[Cell]) -> list[list[Cell]]:
    """The modes of each workload and concurrency."""
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency))]


def table(cells: list[Cell]) -> Table:
    """For the terminal: the modes of one workload at one concurrency."""
    first = cells[0]
    title = f"{first.workload}, {'one at a time' if first.concurrency == 1 else f'{first.concurrency} at once'}"
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    made.add_column("mode", no_wrap=True)
    for name in SPEED:
        made.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        made.add_row(cell.mode, *figures(cell), style="dim" if cell.mode in (OFF, AGAIN) else "green" if cell.ratio > 1 else "")
    return made


def markdown(cells: list[Cell]) -> str:
    """The same for a README, in one table."""
    head = ("workload", "at once", "mode", *SPEED, "drafts accepted, by position")
    rows = [(cell.workload, str(cell.concurrency), cell.mode, *figures(cell), accepted(cell)) for cell in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
