"""Small benchmarks, by the command and by the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from speculon.cli import app
from speculon.measure.bench.plan import BenchPlan


def bench(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "--model", str(folder), *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def small(**fields: Any) -> BenchPlan:
    usual: dict[str, Any] = {
        "workloads": ("code",),
        "concurrency": (1,),
        "prompts": 1,
        "max_tokens": 16,
        "repeats": 1,
    }
    return BenchPlan(**(usual | fields))


def sizes(prompts: int = 1, max_tokens: int = 24) -> list[str]:
    """Options for one repeat of the workload `code` at concurrency 1."""
    numbers = {"--prompts": prompts, "--max-tokens": max_tokens, "--repeats": 1, "--concurrency": 1}
    return ["--workloads", "code", *(str(part) for option in numbers.items() for part in option)]
