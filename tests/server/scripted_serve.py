"""`speculon serve` over a scripted engine in a process of its own.

`SCRIPTED_STEP=0.01 python scripted_serve.py serve --port 0`. The command, the engine's process, its worker
and their pipe are the real ones; only model and tokenizer are not.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def run_worker(pipe: Connection, settings: dict[str, Any]) -> None:
    from speculon.core.errors import ModelNotFound
    from speculon.engine.worker import main
    from tests.server.scripted import ScriptedEngine

    def build(config: Any, progress: Any) -> Any:
        progress("reading the script")
        time.sleep(float(os.environ.get("SCRIPTED_LOAD", "0")))
        while Path("slow").exists():
            time.sleep(0.05)
        if Path("broken").exists():
            raise ModelNotFound("planted")
        return ScriptedEngine(config, step_seconds=float(os.environ["SCRIPTED_STEP"]))

    main(pipe, settings, build)


def main() -> None:
    from speculon import cli
    from speculon.decoding.text.tokenizer import Tokenizer
    from speculon.engine import async_engine
    from speculon.server.pool.loader import GB, ModelLoader, Share
    from tests.server.scripted import Bytes

    if descriptors := os.environ.get("SCRIPTED_DESCRIPTORS"):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    async_engine.run_worker = run_worker
    ModelLoader.device = lambda loader, config: "cpu"  # type: ignore[method-assign]
    ModelLoader.free_memory = lambda loader, config: 100 * GB  # type: ignore[method-assign]
    ModelLoader.share = lambda loader, settings, total: Share(GB, settings)  # type: ignore[method-assign]
    ModelLoader.tokenizer = lambda loader, config: Tokenizer(Bytes())  # type: ignore[method-assign]
    ModelLoader.sampling = lambda loader, config: {}  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
