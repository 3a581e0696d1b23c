"""Whether llama.cpp's rearranged weights run on this chip: tried once in a process of its own, and kept.

On some chips with AMX the library ends with an illegal instruction, which no process survives.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from speculon.checkpoints.gguf.header import read_split
from speculon.core.config import EngineConfig
from speculon.core.config.file import cache_folder
from speculon.core.kept_files import chip_name, key_of, read_json, write_json

SECONDS = 600.0  # a file of hundreds of gigabytes may take minutes to read

log = logging.getLogger("speculon")


def may_repack(path: Path, config: EngineConfig, tell: Callable[[str], None]) -> bool:
    """Whether a load with rearranged weights, and a row computed with them, have ended well here."""
    if config.repack is not None:
        return config.repack
    folder, key = cache_folder(), situation(path)
    known = None if folder is None else folder / f"llama-{key}.json"
    if known is not None and isinstance(repack := read_json(known, key), bool):
        return repack
    tell("trying llama.cpp's faster kernels in a process of its own")
    command = [sys.executable, "-P", "-m", "speculon.runtimes.llama.trial", str(path)]
    try:
        ended = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=SECONDS,
            check=False,
        ).returncode
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
        write_json(known, key, not fails)
    return not fails


def situation(path: Path) -> str:
    """Names what decides: the chip, the package, and the types of the weights."""
    return key_of((chip_name(), version("llama-cpp-python"), sorted(read_split(path).types)))


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
