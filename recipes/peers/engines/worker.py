"""The loop that every worker runs: a JSON line asks, a JSON line answers.

Standard library only, for any engine's environment.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter, process_time
from typing import Any, Protocol

LONG = 240  # characters of a refusal


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    method: str  # off, ngram, draft_model, or an engine's own word
    k: int | None  # drafts per round; None: the engine's own choice
    target: str  # in the engine's own format
    draft: str | None
    threads: int
    context: int  # tokens of a text, prompt included
    texts: int  # the highest concurrency
    eos: tuple[int, ...]
    server: str | None = None  # a program to be started, where the engine is one
    dtype: str = "float32"  # or bfloat16: of weights, arithmetic and cache


@dataclass(frozen=True)
class Ask:
    """Texts to be written in one batch; no seed, so that every engine samples by its usual rule."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float  # 0: greedy


@dataclass
class Answer:
    """Texts, with or without their stop token. None: the engine does not tell."""

    tokens: list[list[int]]
    drafted: int | None = None
    accepted: int | None = None
    calls: int | None = None  # of the target, each for all texts in it


class Engine(Protocol):
    packages: tuple[str, ...]  # whose versions belong to the figures

    def write(self, ask: Ask) -> Answer: ...

    def close(self) -> None: ...


def serve(start: Callable[[Settings], Engine]) -> None:
    """Answers until standard input ends. What an engine raises is its refusal."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the lines

    def tell(**line: Any) -> None:
        lines.write(json.dumps(line) + "\n")

    try:
        engine = start(Settings(**json.loads(sys.argv[1])))
    except Exception as error:
        tell(refused=words(error))
        return
    tell(versions={name: version(name) for name in engine.packages})
    try:
        for line in sys.stdin:
            ask = Ask(**json.loads(line))
            began, worked = perf_counter(), process_time()
            try:
                answer = engine.write(ask)
            except Exception as error:
                tell(refused=words(error))
            else:
                seconds, cpu_seconds = perf_counter() - began, process_time() - worked
                tell(seconds=seconds, cpu_seconds=cpu_seconds, **vars(answer))
    finally:
        engine.close()


def words(error: Exception) -> str:
    """Short; the log has all of it."""
    traceback.print_exception(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONG]
