"""Whether llama.cpp's rearranged weights run on this chip: tried once in a process of its own, and kept.

On some chips with AMX the library ends with an illegal instruction, which no process survives.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from speculon.checkpoints.gguf.header import read_split
from speculon.core.config import EngineConfig
from speculon.core.config.file import cache_folder

SECONDS = 600.0  # a file of hundreds of gigabytes may take minutes to read

log = logging.getLogger("speculon")


def may_repack(path: Path, config: EngineConfig, tell: Callable[[str], None]) -> bool:
    """Whether a load with rearranged weights, and a row computed with them, have ended well here."""
    if config.repack is not None:
        return config.repack
    known = None if (folder := cache_folder()) is None else folder / f"llama-{situation(path)}.json"
    with suppress(OSError, ValueError, KeyError):
        if known is not None:
            return bool(json.loads(known.read_text(encoding="utf-8"))["repack"])
    tell("trying llama.cpp's faster kernels in a process of its own")
    command = [sys.executable, "-m", "speculon.runtimes.llama.trial", str(path)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return True
    fails = ended == -signal.SIGILL  # whatever else is wrong is met again, and told, by the load itself
    if fails:
        log.warning(
            "%s: llama.cpp ends with an illegal instruction on this chip when it rearranges weights: it runs "
            "without that (repack = false)",
            path.name,
        )
    if known is not None and (fails or ended == 0):
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps({"repack": not fails}), encoding="utf-8")
    return not fails


def situation(path: Path) -> str:
    """Names what decides: the chip, the package, and the types of the weights."""
    chip = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        chip += next((line for line in lines if line.startswith("flags")), "")
    types = sorted(read_split(path).types)
    return hashlib.sha256(f"{chip} {version('llama-cpp-python')} {types}".encode()).hexdigest()[:12]


def main(path: str) -> None:
    """Loads a file with rearranged weights and computes a few rows."""
    from speculon.runtimes.llama.model import LlamaModel, Rows

    config = EngineConfig(model=path, runtime="llama", gpu_layers=0)
    model = LlamaModel(Path(path), config, repack=True, streams=1, length=256, rows=64, outputs=1, rollback=0)
    for rows in (32, 1):  # prompts and single tokens have kernels of their own
        model.run([Rows(0, 0, [0] * rows, rows - 1)])
        model.cut(0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
