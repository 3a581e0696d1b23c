"""The recorded findings as a page.

    python -m recipes.mutants.table

Run it again after findings were recorded: it writes docs/benchmarks/mutants/findings.md from the files beside
it, one run in each, the oldest first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "mutants"
TEXT = """# Planted errors: findings

The first test that turned red, and the seconds until then: of the tests that the mutant names, without the
import of libraries.

`python -m recipes.mutants.table` writes this page from the files beside it.
"""

Record = dict[str, Any]


def main() -> None:
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}
    ordered = dict(sorted(runs.items(), key=lambda run: (run[1]["date"], run[0] != "before")))
    (FOLDER / "findings.md").write_text(page(ordered), encoding="utf-8")


def page(runs: dict[str, Record]) -> str:
    lines = [TEXT, "| run | date | commit | machine | red | survived |", "|---|---|---|---|---|---|"]
    for name, run in runs.items():
        machine, survived = f"{run['machine']['cpu']}, {run['machine']['cores']} cores", len(run["survived"])
        lines.append(f"| {name} | {run['date']} | {run['commit']} | {machine} | {run['red']} | {survived} |")
    lines += ["", "| mutant | " + " | ".join(f"{name} | s" for name in runs) + " |"]
    lines.append("|---|" + "---|---|" * len(runs))
    findings = {name: {row["name"]: row for row in run["mutants"]} for name, run in runs.items()}
    for mutant in dict.fromkeys(row for rows in findings.values() for row in rows):
        cells = [cell(rows.get(mutant)) for rows in findings.values()]
        lines.append(f"| {mutant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(found: Record | None) -> str:
    """The test, and the seconds."""
    if found is None:
        return "not planted | "
    hung = " (hangs)" * found["hung"]
    return f"`{found['test']}`{hung} | {found['seconds']:.0f}" if found["test"] else "**survived** | "


if __name__ == "__main__":
    main()
