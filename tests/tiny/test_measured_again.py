"""Who measures the same prompt again must not find the answer of last time, which would flatter."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from recipes.serving import latency
from rich.console import Console

from speculon import LLM, SamplingParams
from speculon.cli.demo import DemoPrompt, perform
from speculon.measure.bench.workloads import Case
from speculon.speculation.proposers.suffix import Suffix
from tests.tiny.folders import make_folder

ENGINES = Path(__file__).parents[2] / "recipes" / "peers" / "engines"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        str(make_folder(tmp_path_factory.mktemp("remembered") / "model")), prefix_cache=False, warmup=False
    )


def remembered(llm: LLM) -> int:
    found = llm.engine.proposers.find("suffix")
    assert isinstance(found, Suffix)
    return len(found.pools.sizes)


def test_the_demo_remembers_no_round(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("x", llm.tokenizer.encode("class Stack:"), SamplingParams(temperature=0, max_tokens=24))
    perform(llm, DemoPrompt("x", "class Stack:", 24), "auto:4", 2, Console(quiet=True))
    assert remembered(llm) == 0
    # the planted error: no pool named
    llm.generate([case.prompt], case.params, speculation={"method": "auto"})
    assert remembered(llm) == 1


def test_the_engine_beside_others_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENGINES))
    ours, worker = import_module("ours"), import_module("worker")
    monkeypatch.setattr(ours, "LLM", lambda model, **settings: settings)
    for method in ("ngram", "auto"):
        settings = worker.Settings(method, 4, "target", "draft", 1, 1024, 8, ())
        assert ours.Speculon(settings).llm["speculation"]["suffix_pools"] == 0
    for name in ("ours", "worker"):
        sys.modules.pop(name)


def test_servers_under_load_remember_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, ...]] = []

    def refuse(*flags: str, log: Path) -> Any:
        started.append(flags)
        raise KeyboardInterrupt

    monkeypatch.setattr(latency, "Server", refuse)
    monkeypatch.setattr(latency, "write_prompts", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        latency.measure(
            argparse.Namespace(methods="auto", concurrency="1", prompts=1, tokens=1, threads=1, out=tmp_path)
        )
    (flags,) = started
    assert flags[flags.index("--suffix-pools") + 1] == "0" and "--no-prefix-cache" in flags
