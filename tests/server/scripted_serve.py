"""`speculon serve` over a scripted engine in a process of its own: `SCRIPTED_STEP=0.01 python
scripted_serve.py serve --port 0`.

The command, the engine's process, its worker and their pipe are the real ones; only model and tokenizer are
not.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def run_worker(pipe: Connection, settings: dict[str, Any]) -> None:
    from speculon.config import EngineConfig
    from tests.server.scripted import ScriptedEngine

    class Scripted:
        """In the place of `LLM`, which would load torch."""

        def __init__(self, progress: Any, **given: Any):
            progress("reading the script")
            self.engine = ScriptedEngine(
                EngineConfig(**given), step_seconds=float(os.environ["SCRIPTED_STEP"])
            )

    sys.modules["speculon.llm"] = llm = ModuleType("speculon.llm")
    llm.LLM = Scripted  # type: ignore[attr-defined]
    from speculon.engine.worker import main

    main(pipe, settings)


def main() -> None:
    from speculon import cli
    from speculon.engine import async_engine
    from speculon.server.app_state import Server
    from speculon.text import Tokenizer
    from tests.server.scripted import Bytes

    async_engine.run_worker = run_worker
    Server._load_tokenizer = lambda server: Tokenizer(Bytes())  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
