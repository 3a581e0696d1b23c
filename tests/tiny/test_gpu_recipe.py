"""recipes/gpu, as far as no device is needed: its figures, its clock, and a whole run with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.gpu import one_run
from recipes.gpu.forwards import CALLS, PROFILED, WARM, covered, forward_cost, weights_read
from recipes.gpu.one_run import FORMS, TINY, Part, Sizes, page, read_rows, read_tests, run_all

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model import captured as capturing
from tests.documents import ROOT
from tests.tiny.conftest import build, tiny_target


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([(0, 2), (3, 4)], 3, id="a gap"),
        pytest.param([(3, 4), (0, 2)], 3, id="any order"),
        pytest.param([(0, 5), (1, 2), (4, 7)], 7, id="side by side"),
        pytest.param([(0, 2), (2, 3)], 3, id="end to end"),
    ],
)
def test_work_side_by_side_counts_once(intervals: list[tuple[float, float]], length: float) -> None:
    assert covered(intervals) == length


def test_a_forward_is_timed_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_target("qwen3"), list[tuple[int, int]]()
    forward = target.forward

    def watched(batch: Any, view: Any) -> Any:
        seen.append((batch.input_ids.shape[1], view.spans[-1].context))
        return forward(batch, view)

    monkeypatch.setattr(target, "forward", watched)
    assert forward_cost(target, sequences=3, rows=5, context=20).ms > 0
    assert seen == [(15, 20)] * (WARM + CALLS + PROFILED)


@pytest.mark.parametrize("tied", [False, True])
def test_of_an_embedding_that_is_no_head_only_rows_are_read(tied: bool) -> None:
    model = build("qwen3", tie_word_embeddings=tied)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    embedding = model.get_input_embeddings().weight.nbytes
    assert weights_read(wrap_model(model)) == sum(weights.values()) - (0 if tied else embedding)


@pytest.mark.timeout(500)
def test_a_tiny_run_has_every_figure_of_both_forms(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.gpu.one_run", "--tiny", "--no-tests", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "one_run.json").read_text())
    assert report["parts"].keys() == {"tiny"} and report["parts"]["tiny"].endswith(" s")
    found = [(r["figure"], r["form"], r.get("sequences"), r.get("rows")) for r in report["rows"]]
    each = [
        (figure, form, sequences, rows)
        for form in FORMS
        for sequences in TINY.sequences
        for figure, of in (("step", [None]), ("head", [None]), ("verify", TINY.rows))
        for rows in of
    ]
    assert found == sorted([("load", form, None, None) for form in FORMS] + each, key=found.index)
    assert all(row["ms"] > 0 for row in report["rows"] if row["figure"] != "load")
    loads = {row["form"]: row for row in report["rows"] if row["figure"] == "load"}
    assert all(loads["captured"][name].endswith(", captured") for name in ("runner", "head"))
    text = (tmp_path / "one_run.md").read_text()
    assert "### decoding steps" in text and "| captured | 2 | 4 |" in text and "### calls of the head" in text


def test_of_a_form_that_fails_there_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(model: Any, compile: bool, **settings: Any) -> Any:
        if not compile:
            raise UnsupportedModel("planted")
        return wrap_model(model, compile=False, **settings)

    monkeypatch.setattr("speculon.runtimes.torch.loading.load.wrap_model", refusing)
    monkeypatch.setattr(capturing, "RECORDERS", dict(capturing.RECORDERS))
    first, *others = one_run.measure_model("tiny", Sizes((1,), (1,), 24, 12, 1 << 16, 128))
    assert first == {"figure": "failed", "form": "as it comes", "reason": "UnsupportedModel: planted"}
    assert [row["figure"] for row in others] == ["load", "step", "head", "verify"]
    text = page({"versions": {"torch": "2"}, "commit": "c", "parts": {}, "rows": [{"part": "tiny", **first}]})
    assert "as it comes: UnsupportedModel: planted" in text


def part(name: str, seconds: float, source: str) -> Part:
    return Part(name, seconds, [sys.executable, "-c", source], read_rows)


LOAD = {"figure": "load", "form": "a", "weights": 1, "bandwidth": 1, "seconds": 1, "runner": "r", "head": "r"}
FIGURE = f"print({json.dumps(LOAD)!r}, flush=True)"


def test_a_part_that_hangs_is_ended_and_its_figures_stay(tmp_path: Path) -> None:
    parts = [
        part("hangs", 3.0, f"import time\nprint('loading')\n{FIGURE}\ntime.sleep(600)"),
        part("fails", 60.0, f"{FIGURE}\nraise SystemExit(3)"),
    ]
    report = run_all(parts, tmp_path)
    assert report["parts"]["hangs"] == "ended after its 3 s"
    assert report["parts"]["fails"].endswith("exit status 3")
    kept = json.loads((tmp_path / "one_run.json").read_text())
    assert [row["part"] for row in kept["rows"]] == ["hangs", "fails"]
    assert "- hangs: ended after its 3 s" in (tmp_path / "one_run.md").read_text()


def test_what_a_part_leaves_is_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(one_run, "run_part", lambda part, seconds, take: given.append(seconds) or "0 s")
    run_all([part("a", 100, ""), part("b", 50, ""), part("c", 300, "")], tmp_path, total=400)
    assert given == pytest.approx([100, 150, 390], abs=2)  # and never more than all has left
    short = run_all([part("a", 100, "")], tmp_path, total=one_run.RESERVE + one_run.LEAST - 1)
    assert len(given) == 3 and short["parts"] == {"a": "not begun: no time was left"}


def test_outcomes_of_tests_are_counted_as_they_come() -> None:
    lines = [
        "[gw0] [ 10%] PASSED tests/gpu/test_cuda.py::test_a \n",
        "tests/gpu/test_cuda.py::test_b SKIPPED (needs a CUDA device) [ 20%]\n",
        "collected 3 items\n",
        "[gw1] [ 30%] FAILED tests/gpu/test_cuda.py::test_c[x] \n",
    ]
    *_, last = read_tests(lines)
    assert last["counts"] == {"passed": 1, "skipped": 1, "failed": 1}
    assert last["failed"] == ["[gw1] [ 30%] FAILED tests/gpu/test_cuda.py::test_c[x]"]
    row = {"part": "tests/gpu", **last}
    text = page({"versions": {"torch": "2"}, "commit": "c", "parts": {}, "rows": [row]})
    assert "1 passed, 1 skipped, 1 failed\n- [gw1]" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["one_run"])
    with pytest.raises(SystemExit, match="torch sees none here"):
        one_run.main()
