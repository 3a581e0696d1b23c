"""Small advices, and planted costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.advise import run as advise_module
from speculon.advise.maths import TimedRound
from speculon.advise.prompts import Split
from speculon.bench.workloads import Case
from speculon.cli import app
from tests.pure.test_advise import rounds_of

K = 4
SMALL = ["--max-tokens", "24", "--concurrency", "1,2", "--num-speculative-tokens", str(K), "--repeats", "1"]
PROMPTS = ["def add(left, right):\n", "class Stack:\n", "for value in values:\n", "raise ValueError(name)\n"]


def plant(monkeypatch: pytest.MonkeyPatch, also: tuple[str, ...] = ("ngram",), **costs: float) -> None:
    timed: list[TimedRound] = rounds_of(**costs, also=also)
    monkeypatch.setattr(advise_module, "time_rounds", lambda *_: timed)


def cases(llm: LLM, temperature: float = 0.0, max_tokens: int = 40) -> list[Case]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(PROMPTS))
    ]
    return [Case(text, llm.tokenizer.encode(text), p) for text, p in zip(PROMPTS, params, strict=True)]


def split(llm: LLM, **more: Any) -> Split:
    some = cases(llm, **more)
    return Split.of({"prompts": some})


def cli(folder: Path, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(
        app, ["advise", "--model", str(folder), *arguments], input=stdin, catch_exceptions=False
    )
    return done.exit_code, done.stdout, done.stderr


def prompts() -> list[str]:
    return [part for prompt in PROMPTS for part in ("--prompt", prompt)]
