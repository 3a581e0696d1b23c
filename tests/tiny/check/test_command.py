"""`speculon check`: what it writes and shows, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.cli import check as command
from speculon.decoding import verify as verifying
from tests.pure.screens import ELLIPSIS
from tests.tiny.check.plans import PROMPTS, credulous


def speculon(folder: Path, *arguments: str) -> Any:
    sizes = [
        "--prompt",
        PROMPTS[0],
        "--prompt",
        PROMPTS[1],
        "--max-tokens",
        "16",
        "--runs",
        "64",
        "--positions",
        "4",
    ]
    sizes += ["--sampler", '{"temperature": 1.0}', "--quick", "--cases", "1"]
    return CliRunner().invoke(
        app, ["check", "--model", str(folder), *sizes, *arguments], catch_exceptions=False
    )


def drafting(draft: Path) -> Iterator[str]:
    yield from ("--method", "draft_model", "--draft", str(draft))


FIXED = {"method": "suffix", "policy": "fixed"}


def test_the_command_passes_and_writes(folder: Path, draft: Path, tmp_path: Path) -> None:
    done = speculon(folder, *drafting(draft), "--json", "--out", str(tmp_path / "new"))
    report = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, report["outcome"]) == (0, "", "passed"), (
        report["problems"],
        report["gaps"],
    )
    assert json.loads((tmp_path / "new" / "check.json").read_text()) == report
    assert (tmp_path / "new" / "check.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "new" / "report.md").read_text()
    assert (
        text.startswith("**passed: ")
        and "| same seed, planted errors |" in text
        and "| rejection, planted errors |" in text
        and "| block, planted errors |" in text
    )
    assert report["model"]["speculation"] == {
        "method": "draft_model",
        "policy": "fixed",
        "num_speculative_tokens": 4,
    }
    assert report["plan"]["samplers"] == [{"temperature": 1.0}] and report["plan"]["runs"] == 64
    assert all(len(one["p"]) == 5 for one in report["sampled"])


def test_the_command_checks_fixed_drafts_unless_another_policy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"block_size": 8, "speculation": {"method": "suffix"}}
    assert command.with_drafts(settings) == {"block_size": 8, "speculation": FIXED}
    assert command.with_drafts({}) == {"speculation": {"policy": "fixed"}}
    adaptive = {"speculation": {"policy": "adaptive"}}
    assert command.with_drafts(adaptive) == adaptive
    (tmp_path / "speculon.toml").write_text('[speculation]\npolicy = "solo"\n')
    assert command.with_drafts(settings) == settings
    (tmp_path / "speculon.toml").unlink()
    monkeypatch.setenv("SPECULON_SPECULATION__POLICY", "goodput")
    assert command.with_drafts(settings) == settings


def test_the_command_fails_and_says_why(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(verifying, "match", credulous)
    done = speculon(folder, *drafting(draft), "--runs", "16")
    words = " ".join(done.stdout.split())
    assert (
        done.exit_code == 1
        and "texts differ from the target's own by more than a tie; the first is text " in words
    )
    assert ELLIPSIS not in done.stdout
    assert "failed: texts differ from plain decoding by more than rounding or chance" in words


def test_the_command_does_not_pass_without_having_speculated(folder: Path) -> None:
    lookups = ["--method", "ngram", "--prompt-lookup-min", "32", "--prompt-lookup-max", "32"]
    done = speculon(folder, *lookups, "--runs", "16")
    assert done.exit_code == 1 and "no round had drafts" in done.stdout and "inconclusive: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        pytest.param(
            ["--method", "off"],
            "InvalidParameter",
            "method = 'off': speculation is off, so there is nothing to check",
            id="off",
        ),
        pytest.param(
            ["--num-speculative-tokens", "0"],
            "InvalidParameter",
            "num_speculative_tokens = 0",
            id="no drafts",
        ),
        pytest.param(["--runs", "3"], "InvalidParameter", "runs = 3: must be at least 16", id="runs"),
        pytest.param(
            ["--sampler", '{"temperature": 0}'],
            "InvalidParameter",
            "must be above 0: greedy texts are checked in any case",
            id="greedy",
        ),
        pytest.param(["--max-tokens", "1020"], "TooLong", "max_tokens 1020", id="too long"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, arguments: list[str], error: str, words: str
) -> None:
    done = speculon(folder, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{error}: ") and words in done.stderr and done.stderr.count("\n") == 1
    machine = speculon(folder, *arguments, "--json")
    assert (machine.exit_code, json.loads(machine.stdout)["error"]["type"]) == (2, error)
