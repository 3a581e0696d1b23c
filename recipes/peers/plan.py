"""Which engines in which modes, and where setup.sh put them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFF, OURS, STOCK = "off", "speculon", "transformers"
COMPILED = "speculon --compile"
MODES = {
    STOCK: (OFF, "ngram:8", "draft_model:4", "draft_model"),
    "openvino": (OFF, "ngram:8", "draft_model:4", "draft_model:6"),
    "llama.cpp": (OFF, "ngram:8", "draft_model:4", "draft_model:6"),
    "vllm": (OFF, "ngram:8", "draft_model:4", "draft_model:6", "speculon:16", "nothing:16"),
    OURS: (OFF, "ngram:8", "draft_model:4", "draft_model:6", "auto:6"),
    COMPILED: (OFF, "ngram:8", "draft_model:5", "auto:5"),
}
MORE = ("auto", "suffix:8", "eagle3:3")  # of ours, if named
SCRIPTS = {
    STOCK: "hf.py",
    "openvino": "ov.py",
    "llama.cpp": "llama.py",
    "vllm": "vllm_cpu.py",
    OURS: "ours.py",
}
SCRIPTS[COMPILED] = "ours_compiled.py"


@dataclass(frozen=True, slots=True)
class Mode:
    """One engine with one way of drafting: one worker."""

    engine: str
    name: str  # off, METHOD or METHOD:K

    @property
    def method(self) -> str:
        return self.name.partition(":")[0]

    @property
    def k(self) -> int | None:
        return int(self.name.partition(":")[2] or 0) or None

    def __str__(self) -> str:
        return f"{self.engine} {self.name}"


def modes_of(engines: list[str], names: list[str] | None = None) -> list[Mode]:
    """All modes of these engines, or those of these names; each engine has its plain decoding."""
    return [
        Mode(engine, name)
        for engine in engines
        for name in (*MODES[engine], *(MORE if engine == OURS and names else ()))
        if names is None or name in (OFF, *names)
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine lives."""

    python: Path
    script: Path
    target: Path
    draft: Path | None
    server: Path | None = None


def place(engine: str, envs: Path, target: Path, draft: Path | None) -> Place:
    """The others' formats are where setup.sh made them, of a draft model only for the demo."""
    python = Path(sys.executable) if engine in (OURS, COMPILED) else envs / engine / "bin/python"
    server = None
    if engine == "openvino":
        target = envs / "checkpoints/openvino/target"
        draft = envs / "checkpoints/openvino/draft"
    elif engine == "llama.cpp":
        if target.suffix != ".gguf":
            target = envs / "checkpoints/gguf/target.gguf"
        draft = envs / "checkpoints/gguf/draft.gguf"
        server = envs / "llama.cpp/build/bin/llama-server"
    found = Place(python, HERE / "engines" / SCRIPTS[engine], target, draft, server)
    for path in (found.python, found.target, found.server):
        if path and not path.exists():
            raise SystemExit(f"{engine}: {path} is missing; recipes/peers/setup.sh {envs} makes it")
    return found
