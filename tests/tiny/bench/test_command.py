"""`speculon bench` on a random model: what it writes, shows and refuses."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from speculon import LLM
from speculon.measure.bench.plan import AGAIN
from speculon.measure.bench.run import run
from tests.pure.screens import ELLIPSIS
from tests.tiny.bench.plans import bench, sizes, small

PROMPTS, TOKENS = 2, 48


def test_it_measures_writes_and_draws(folder: Path, tmp_path: Path) -> None:
    # the last ones count
    few = [*sizes(PROMPTS, TOKENS), "--concurrency", "1,2", "--workloads", "code,edit,prose,mixed"]
    code, out, err = bench(folder, *few, "--modes", "ngram:4", "--out", str(tmp_path / "new"), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["against_best_fixed"] == [] and all(cell["policy"] == "fixed" for cell in report["cells"])
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == report
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| code | 1 | ngram:4 |" in (tmp_path / "new" / "bench.md").read_text()

    cells = {(cell["workload"], cell["concurrency"], cell["mode"]): cell for cell in report["cells"]}
    names, modes = ("code", "edit", "prose", "mixed"), ("off", "ngram:4", AGAIN)
    assert set(cells) == set(product(names, (1, 2), modes))
    assert all(cell["different"] == 0 for cell in cells.values())  # fp32: the same text everywhere
    assert all(cell["ratio"] == 1 for (_, _, mode), cell in cells.items() if mode == "off")
    assert all(
        0.9 < cell["tokens_per_target_call"] <= 1
        for (_, _, mode), cell in cells.items()
        if mode in ("off", AGAIN)
    )
    ngram = cells["code", 1, "ngram:4"]
    assert (
        ngram["tokens_per_target_call"] > 1 and len(ngram["per_position"]) == 4 and "5" in ngram["ms_by_rows"]
    )
    assert 0 < ngram["overhead"] < 1 and ngram["diagnosis"] and cells["code", 1, "off"]["diagnosis"] is None
    assert [cells[name, 1, "off"]["exact"] for name in ("code", "edit", "prose", "mixed")] == [
        None,
        0,
        None,
        0,
    ]
    assert [len(cells["code", count, "off"]["speeds"][0]) for count in (1, 2)] == [2, 1]

    assert ngram["sources"] == {"ngram": 1}
    for (name, count, mode), cell in cells.items():  # greedy texts of this model loop, sampled ones do not
        free = round(cell["texts"] * (1 - cell["looping"])) if count == 1 else 0
        assert cell["texts_without_loops"] == free and (cell["ratio_without_loops"] is None) == (free == 0), (
            name,
            mode,
        )

    assert report["command"].split()[0] == "speculon"
    assert {"torch", "transformers", "python"} <= set(report["versions"])
    assert {"cpu", "cores", "platform", "memory_gib"} <= set(report["machine"])
    assert report["model"]["prefix_cache"] is False and report["model"]["name"] == "model"


def test_a_policy_is_compared_with_the_best_fixed_mode(folder: Path, tmp_path: Path) -> None:
    few = sizes(prompts=2, max_tokens=24)
    out = tmp_path / "new"
    code, text, _ = bench(
        folder,
        *few,
        "--modes",
        "ngram:4,suffix:8,suffix,auto/solo",
        "--policy",
        "goodput",
        "--out",
        str(out),
    )
    assert code == 0 and "policies against the best fixed mode" in text
    report = json.loads((out / "bench.json").read_text())
    fixed = dict.fromkeys(("off", "ngram:4", "suffix:8", AGAIN), "fixed")
    assert {cell["mode"]: cell["policy"] for cell in report["cells"]} == {
        **fixed,
        "suffix": "goodput",
        "auto/solo": "solo",
    }
    assert [row["mode"] for row in report["against_best_fixed"]] == ["suffix", "auto/solo"] * 2
    one = report["against_best_fixed"][0]
    assert set(one["picked"]) <= {"off", "ngram:4", "suffix:8"}
    assert one["over_best"]["low"] <= one["over_best"]["ratio"] <= one["over_best"]["high"]
    assert "## policies against the best fixed mode" in (out / "bench.md").read_text()


def test_it_shows_a_verdict_and_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    few = sizes(prompts=1, max_tokens=32)
    code, out, _ = bench(folder, *few, "--modes", "ngram:2")
    assert code == 0
    assert {path.name for path in Path("speculon-bench").iterdir()} == {"bench.json", "bench.md", "bench.png"}
    assert "code, concurrency 1" in out and "off again" in out and "medians of 1 alternated repeats" in out
    assert out.startswith(("Fastest mode: ngram:2", "No mode was faster")) and ELLIPSIS not in out


def test_a_mode_that_ran_no_round_is_an_error(folder: Path) -> None:
    # no draft for the second token, which is the last
    code, out, _ = bench(folder, *sizes(max_tokens=2), "--modes", "ngram:4", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, "BenchError")
    assert "ngram:4 had no round with drafts in code" in error["message"] and "max_tokens" in error["message"]


def test_a_mode_without_its_drafter_fails_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculon.measure.bench.run.measure", lambda *_: pytest.fail("measured"))
    code, out, _ = bench(folder, "--modes", "ngram:4,draft_model:4/rejection", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, "InvalidParameter")
    assert (
        "modes = 'draft_model:4/rejection': no_drafter: no drafter is loaded for this method; give a "
        "checkpoint" in error["message"]
    )


def test_a_plain_measurement_does_hit_the_planted_failure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: with a drafter at hand the same trap springs."""
    monkeypatch.setattr(
        "speculon.measure.bench.run.measure", lambda *_: (_ for _ in ()).throw(ZeroDivisionError)
    )
    with pytest.raises(ZeroDivisionError):
        run(llm, small(modes=("ngram:4",)))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--modes", "zzz:3"],
        ["--concurrency", "x"],
        ["--workloads", ","],
    ],
)
def test_a_plan_that_cannot_be_is_told_before_anything_is_loaded(folder: Path, arguments: list[str]) -> None:
    code, out, err = bench(folder / "none", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(("InvalidParameter: ", "UnknownMethod: "))
