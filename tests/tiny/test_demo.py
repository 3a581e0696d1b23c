"""The demo: what it runs, what it prints, and that it fails where a text differs that must not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculon import LLM
from speculon.cli import app, demo
from speculon.measure.bench import measure as measuring
from speculon.measure.bench.measure import Measurement
from speculon.measure.bench.workloads import Case
from tests.tiny.folders import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no speculon.toml of whoever runs the tests
    monkeypatch.setattr(demo, "PROMPTS", [prompt._replace(max_tokens=40) for prompt in demo.PROMPTS])


def run_demo(folder: Path, *arguments: str, **environment: str) -> Result:
    flags = ["demo", "--model", str(folder), "--rounds", "1", "--no-warmup", *arguments]
    return CliRunner(env=environment).invoke(app, flags, catch_exceptions=False)


@pytest.mark.parametrize(
    ("k", "mode", "setting"),
    [
        pytest.param([], "auto", {"method": "auto", "pool": ""}, id="the engine's policy"),
        pytest.param(
            ["--num-speculative-tokens", "6"],
            "auto:6",
            {"method": "auto", "num_speculative_tokens": 6, "policy": "fixed", "pool": ""},
            id="K",
        ),
    ],
)
def test_the_demo_measures_plain_decoding_beside_the_default(
    folder: Path, k: list[str], mode: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, Any]] = []
    measure = measuring.measure

    def watched(llm: LLM, cases: list[Case], speculation: Mapping[str, Any]) -> Measurement:
        seen.append(speculation)
        return measure(llm, cases, speculation)

    monkeypatch.setattr(measuring, "measure", watched)
    done = run_demo(folder, *k, "--json")
    tasks = json.loads(done.stdout)["tasks"]
    assert (done.exit_code, done.stderr, [task["mode"] for task in tasks]) == (0, "", [mode] * 3)
    assert seen == [{"method": "off", "policy": "fixed"}, setting] * 3
    for task in tasks:
        assert task["same_text"] and task["plain"]["tokens_per_call"] <= 1
        assert task["speculative"]["target_calls"] <= task["plain"]["target_calls"]


def test_the_demo_shows_texts_with_their_accepted_drafts_and_the_figures(folder: Path) -> None:
    k = ("--num-speculative-tokens", "4")
    done, coloured = run_demo(folder, *k), run_demo(folder, *k, FORCE_COLOR="1", TERM="xterm")
    assert done.exit_code == 0 and "Write the same class with the name Wallet." in done.stdout
    assert done.stdout.count("Same text: yes, token for token.") == len(demo.PROMPTS)
    assert done.stdout.count("target calls instead of") == len(demo.PROMPTS)
    assert done.stdout.endswith("Plain and speculative texts are equal for 3 of 3 prompts.\n")
    assert coloured.stdout.count("\x1b[1;32m") > 1, "the word Green, and accepted drafts"


def test_the_demo_without_its_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculon.checkpoints.locate.packaged", lambda package: None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code != 0 and "run `speculon pull smollm2`" in " ".join(done.stderr.split())


@pytest.mark.parametrize("invariant", [True, False])
def test_another_text_is_an_error_where_the_model_is_batch_invariant(
    folder: Path, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, runs = measuring.measure, 0

    def planted(llm: LLM, cases: list[Case], speculation: Mapping[str, Any]) -> Measurement:
        nonlocal runs
        runs, one = runs + 1, measure(llm, cases, speculation)
        runtime = llm.engine.runtime
        monkeypatch.setattr(runtime, "facts", replace(runtime.facts, batch_invariant=invariant))
        if runs == 1:
            one.token_ids[0][0] += 1
        return one

    monkeypatch.setattr(measuring, "measure", planted)
    done = run_demo(folder)
    assert done.exit_code == int(invariant) and demo.DIFFERENT[invariant] in done.stdout
    assert done.stdout.endswith("Plain and speculative texts are equal for 2 of 3 prompts.\n")


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.2, 1.4], "1.3 times as fast"),
        ([1.4, 0.98], "No faster"),
        ([0.8, 0.9], "Slower, 0.85 times as fast"),
    ],
)
def test_the_demo_is_faster_where_all_rounds_are(ratios: list[float], expected: str) -> None:
    assert demo.faster(ratios) == expected
