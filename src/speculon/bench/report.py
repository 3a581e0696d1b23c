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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.bench.against import Against, against_best_fixed
from speculon.bench.cell import Cell
from speculon.bench.plan import Plan
from speculon.bench.tables import (
    AGAINST,
    AGAINST_LEGEND,
    LEGEND,
    PROFILE_LEGEND,
    ROUNDS_LEGEND,
    against_markdown,
    markdown,
    profile_markdown,
    rounds_markdown,
)
from speculon.bench.workloads import Case, fingerprint

if TYPE_CHECKING:
    from speculon.llm import LLM

MEASURED = (
    "tokens_per_second: tokens written / wall time from submission to the last token, prompt processing and all Python included, "
    "prefix cache off; decode_*: the same over steps without prompt tokens. ratio: median over (group of prompts, repeat) of a "
    "mode's speed / the speed of `off` on the same group in the same repeat; `off again` repeats `off` and shows the noise; "
    "ratio_without_loops: over the pairs of single texts of which neither ends repeating itself. rounds: decoding calls that "
    "verified drafts. needed: tokens per target call for a speed s: s * (ms of such a one) / (ms of a plain one); acceptance "
    "a, equal at every position, with sum_{i=0..K} a^i of that; null: impossible. profile: mean ms of a decoding "
    "step, part by part. policy: of the mode's requests; each mode has policies of its own, which begin with the costs that the "
    "engine measured at start, and observe rounds of this mode alone. speeds: tokens_per_second by repeat and group of prompts, "
    "in the order of the cases. "
    "against_best_fixed: over_best: geometric mean over groups of a mode's speed / that of the fixed mode (`off` among them) "
    "that was fastest on the other half of the groups; picked: by the first half, and by the second; over_plain, again: the "
    "mode's speed, and that of `off again`, / that of `off`; low, high: 90 % interval, by drawing the groups of each cell again."
)


WIDENED = "the same function at the call cost of a larger model"


@dataclass(slots=True)
class Report:
    """Everything a stranger needs to repeat the run, and the figures."""

    command: str
    plan: dict[str, Any]
    model: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    cells: list[Cell]
    against_best_fixed: list[Against] = field(default_factory=list)
    measured: str = MEASURED
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    commit: str | None = field(default_factory=lambda: commit())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    @classmethod
    def of(
        cls, argv: list[str], plan: Plan, llm: LLM, cells: list[Cell], cases: dict[str, list[Case]]
    ) -> Report:
        model = {**model_facts(llm), "widened_to": plan.widen and plan.widen * 1_000_000}
        return cls(
            shlex.join(["speculon", *argv]),
            asdict(plan),
            model,
            workload_facts(cases),
            cells,
            against_best_fixed(cells),
        )

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
        "drafts": {
            method: Path(draft).name if isinstance(draft, str) else type(draft).__name__
            for method, draft in config.speculation.drafts.items()
        },
        "block_size": config.block_size,
        "max_batch_tokens": config.max_batch_tokens,
        "prefix_cache": config.prefix_cache,
    }


def workload_facts(cases: dict[str, list[Case]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "cases": len(some),
            "prompt_tokens": [len(case.prompt) for case in some],
            "fingerprint": fingerprint(some),
        }
        for name, some in cases.items()
    }


def commit() -> str | None:
    """Of the checkout this package runs from, with `+` when it has changes; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head, changes = (
            subprocess.run(
                [*git, *arguments], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", ".."),
            )
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
    made = ((markdown, LEGEND), (rounds_markdown, ROUNDS_LEGEND), (profile_markdown, PROFILE_LEGEND))
    parts = [
        heading(report),
        *(part for table, legend in made for part in (table(report.cells), f"{legend}.")),
    ]
    if report.against_best_fixed:
        parts[1:1] = [
            f"## {AGAINST}",
            against_markdown(report.against_best_fixed),
            f"{AGAINST_LEGEND}.",
            "## All modes",
        ]
    files[1].write_text("\n\n".join(parts) + "\n", encoding="utf-8")
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
    wide = (
        f" widened to {model['widened_to'] // 10**6} M parameters: {WIDENED}" if model["widened_to"] else ""
    )
    drafts = "".join(f", {method} {name}" for method, name in model["drafts"].items())
    return (
        f"{model['name']}{wide}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, {model['dtype']}{drafts}"
        f"; {machine.get('gpu', machine['cpu'])}, {model['threads']} thread{'s' * (model['threads'] > 1)}"
    )
