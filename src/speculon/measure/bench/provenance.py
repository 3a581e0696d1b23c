"""Where figures come from: the commit, the versions, the machine and the model."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculon.engine.llm import LLM


def model_facts(llm: LLM) -> dict[str, Any]:
    facts, config = llm.engine.runtime.facts, llm.config
    return {
        "name": Path(config.model).name,  # not the folders above it
        "parameters": facts.parameters,
        "layers": facts.layers,
        "vocab_size": facts.vocab_size,
        "dtype": facts.form["dtype"],
        "quantization": config.quantization,
        "device": facts.form["device"],
        "threads": facts.form["threads"],
        "drafts": {
            method: Path(draft).name if isinstance(draft, str) else type(draft).__name__
            for method, draft in config.speculation.drafts.items()
        },
        "block_size": config.block_size,
        "max_batch_tokens": config.max_batch_tokens,
        "prefix_cache": config.prefix_cache,
    }


def commit() -> str | None:
    """Of the checkout this package runs from, with `+` when it has changes; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.check_output(command, stderr=subprocess.PIPE, text=True, timeout=10).strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "..")
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changes)
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for name in ("speculon", "torch", "transformers", "tokenizers"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = "not installed"
    return known


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


def write_files(
    folder: Path, data_name: str, data: Mapping[str, Any], page_name: str, page: str
) -> list[Path]:
    """A report as JSON and as Markdown, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / data_name, folder / page_name]
    files[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(page, encoding="utf-8")
    return files
