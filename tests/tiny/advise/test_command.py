"""`speculon advise`: what it writes is used by the next command, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculon.advise import report as advise_report
from speculon.advise import run as advise_module
from speculon.cli import app
from speculon.config import EngineConfig
from tests.pure.screens import ELLIPSIS
from tests.tiny.advise.plans import SMALL, cli, prompts
from tests.tiny.folders import CONTEXT


def test_it_answers_writes_and_what_it_writes_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text("block_size = 8\n")
    code, out, err = cli(
        folder,
        *prompts(),
        *SMALL,
        "--temperature",
        "0",
        "--draft",
        str(folder),
        "--write",
        str(toml),
        "--out",
        "new",
        "--json",
    )
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert json.loads((tmp_path / "new" / "advise.json").read_text()) == record
    assert (tmp_path / "new" / "advise.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "new" / "advise.md").read_text()
    assert record["answer"][0] in text and "| 2 | draft_model |" in text and record["toml"] in text
    assert "| draft_model | 100% | 100% | 100% | 100% |" in text and "| target | 2 | " in text
    assert (tmp_path / "new" / "speculon.toml").read_text() == record["toml"] and record["next"].endswith(
        "/mine.toml speculon serve"
    )
    assert {one["method"] for one in record["estimates"]} == {"suffix", "ngram", "draft_model", "auto"}
    assert all(one["low"] <= one["high"] for one in record["estimates"])
    own = next(one for one in record["estimates"] if one["method"] == "draft_model")
    assert own["acceptance"] == 1 and len(record["texts"]) == 2 and record["trials"][0]["held_out"] is True
    assert {"auto"} == {one["method"] for one in record["trials"][0]["results"] if one["policy"] == "goodput"}

    monkeypatch.setenv("SPECULON_CONFIG", str(toml))
    config = EngineConfig()
    assert config.block_size == 8 and config.model == str(folder)
    assert {name: getattr(config.speculation, name) for name in record["settings"]} == record["settings"]
    flags = shlex.split(record["flags"])
    done = CliRunner().invoke(
        app, ["generate", "--model", str(folder), "--prompt", "x", "--max-tokens", "2", *flags]
    )
    assert done.exit_code == 0


def test_for_a_person_it_is_a_verdict_tables_and_settings(
    folder: Path, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise_report, "find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "80")
    few = ["--workloads", "code", "--max-tokens", "40", "--concurrency", "1", "--repeats", "1"]
    code, out, err = cli(folder, *few, "--num-speculative-tokens", "2")
    assert code == 0 and out.startswith(("Yes: use", "No: leave speculation off")) and ELLIPSIS not in out
    parts = ("speed over plain decoding", "drafts at concurrency 1", "auto+goodput", "speculon.toml:")
    for part in (*parts, "[speculation]", "or: --model"):
        assert part in out
    assert "next: SPECULON_CONFIG=speculon-advise/speculon.toml speculon serve" in out
    assert "no chart: matplotlib is missing" in err and "wrote speculon-advise/advise.md" in err
    assert not Path("speculon-advise/advise.png").exists()
    monkeypatch.setenv("SPECULON_CONFIG", "speculon-advise/speculon.toml")
    assert EngineConfig().model == str(folder)


def test_files_of_prompts_and_chats(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "two"}]}\n{"category": "qa", "turns": ["three", "more"]}\n'
    )
    (tmp_path / "b.txt").write_text("four")
    sizes = ["--max-tokens", "8", "--concurrency", "1", "--num-speculative-tokens", "1", "--repeats", "0"]
    code, out, _ = cli(folder, "--data", "a.jsonl", "--prompt-file", "b.txt", *sizes, "--json")
    record = json.loads(out)
    assert code == 0 and set(record["groups"]) == {"data:a", "data:qa", "b.txt"}
    assert [text["name"] for text in record["texts"]] == ["b.txt 1", "data:a line 1", "data:qa line 2"]
    assert record["trials"] == []


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        pytest.param([], "InvalidParameter", "prompt = None: give some by --prompt", id="no prompt"),
        pytest.param(["-p", ""], "InvalidParameter", "prompt = '': is empty", id="an empty one"),
        pytest.param(["-p", "x", "--workloads", "code"], "InvalidParameter", "workloads = 'code'", id="both"),
        pytest.param(
            ["--workloads", "poems"], "InvalidParameter", "workloads = 'poems'", id="no such workload"
        ),
        pytest.param(
            ["--workloads", "code", "--temperature", "1"],
            "InvalidParameter",
            "temperature = 1.0",
            id="two temperatures",
        ),
        pytest.param(["--prompt-file", "none.txt"], "InvalidParameter", "prompt-file", id="no file"),
        pytest.param(["--data", "none.jsonl"], "DataError", "none.jsonl: No such file", id="no data"),
        pytest.param(["-p", "x " * CONTEXT], "TooLong", "prompt 2", id="beyond the context"),
        pytest.param(
            ["-p", "x", "--max-tokens", "2000"], "TooLong", "> context 1024", id="an answer beyond it"
        ),
        pytest.param(
            ["-p", "x y", "--max-tokens", "1"], "InvalidParameter", "second token", id="no draft to make"
        ),
        pytest.param(
            ["-p", "x", "--concurrency", "64"],
            "InvalidParameter",
            "max_num_seqs is 32",
            id="too large a batch",
        ),
        pytest.param(
            ["-p", "x", "--at-once", "3"],
            "InvalidParameter",
            "at_once = 3",
            id="a batch size that is not measured",
        ),
        pytest.param(["-p", "x", "--method", "magic"], "UnknownMethod", "magic", id="no such method"),
        pytest.param(
            ["-p", "x", "--num-speculative-tokens", "0"],
            "InvalidParameter",
            "num_speculative_tokens",
            id="no draft",
        ),
        pytest.param(
            ["-p", "x", "--write", "no/such/x.toml"],
            "InvalidParameter",
            "no such folder",
            id="nowhere to write",
        ),
        pytest.param(
            ["-p", "x", "--draft", "other"],
            "WrongPair",
            "different tokenizers",
            id="another vocabulary",
        ),
    ],
)
def test_what_cannot_be_advised_on_is_refused(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "other" in arguments:
        from tests.tiny.checkpoint import write_stranger

        write_stranger(tmp_path / "other")
    monkeypatch.setattr(advise_module, "time_rounds", lambda *_: pytest.fail("measured"))
    code, out, _ = cli(folder, *arguments, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, expected) and message in error["message"]
