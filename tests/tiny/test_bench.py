"""`speculon bench` on a random model: what it writes, and that it refuses to report a mode that did nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.bench import workloads
from speculon.bench.baseline import TransformersBaseline
from speculon.bench.cell import tie_gap
from speculon.bench.measure import Measurement, measure, recording
from speculon.bench.plan import AGAIN, TRANSFORMERS, BenchPlan, parse_mode
from speculon.bench.run import run
from speculon.bench.widen import gated_mlps, widen_target
from speculon.bench.workloads import Case, Size, build, fingerprint
from speculon.cli import app
from speculon.config import SpeculationConfig
from speculon.control.goodput import Goodput
from speculon.core import NO_DRAFT, Decision, Draft, Needs, Reason, Sequence
from speculon.demo import corpus
from speculon.errors import BenchError, InvalidParameter
from speculon.proposers import registry
from speculon.proposers.base import TargetFacts
from speculon.proposers.pools import key_of
from speculon.proposers.suffix import Suffix
from tests.tiny.folders import CONTEXT, make_folder, make_library

PROMPTS, TOKENS = 2, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed"})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("bench") / "library")


@pytest.fixture(autouse=True)
def held_out(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "stdlib_root", lambda: library)


def bench(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "--model", str(folder), *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_it_measures_writes_and_draws(folder: Path, tmp_path: Path) -> None:
    sizes = ["--prompts", str(PROMPTS), "--max-tokens", str(TOKENS), "--repeats", "1", "--concurrency", "1,2"]
    sizes += ["--workloads", "code,edit,prose,mixed"]
    code, out, err = bench(
        folder, *sizes, "--modes", "ngram:4", "--with-transformers", "--out", str(tmp_path / "new"), "--json"
    )
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["against_best_fixed"] == [] and all(cell["policy"] == "fixed" for cell in report["cells"])
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == report
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| code | 1 | ngram:4 |" in (tmp_path / "new" / "bench.md").read_text()

    cells = {(cell["workload"], cell["concurrency"], cell["mode"]): cell for cell in report["cells"]}
    greedy = [
        (name, 1, mode) for name in ("code", "edit") for mode in ("off", "ngram:4", TRANSFORMERS, AGAIN)
    ]
    crowds = [(name, 2, mode) for name in ("code", "edit") for mode in ("off", "ngram:4", AGAIN)]
    prose = [
        (name, count, mode)
        for name in ("prose", "mixed")
        for count in (1, 2)
        for mode in ("off", "ngram:4", AGAIN)
    ]
    assert set(cells) == {*greedy, *crowds, *prose}
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

    assert ngram["sources"] == {"ngram": 1} and 0 < ngram["reached"] <= 1
    split = ngram["rounds"]
    assert split["draft"] + split["target"] + split["rest"] == pytest.approx(1) and min(split.values()) > 0
    assert split["tokens_per_target_call"] >= ngram["tokens_per_target_call"]  # which counts plain calls, too
    assert [need["speed"] for need in ngram["needed"]] == [1, 1.5, 2]
    assert cells["code", 1, "off"]["rounds"] is None and cells["code", 2, "ngram:4"]["needed"] == []
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
    sizes = [
        "--workloads",
        "code",
        "--prompts",
        "2",
        "--max-tokens",
        "48",
        "--repeats",
        "1",
        "--concurrency",
        "1",
    ]
    out = tmp_path / "new"
    code, said, _ = bench(
        folder,
        *sizes,
        "--modes",
        "ngram:4,suffix:8,suffix,auto/solo",
        "--policy",
        "goodput",
        "--out",
        str(out),
    )
    assert code == 0 and "policies against the best fixed mode" in said
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


def test_without_options_the_modes_are_those_that_something_drafts_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[BenchPlan] = []

    def stop(llm: LLM, plan: BenchPlan, advance: object) -> None:
        plans.append(plan)
        raise BenchError("seen")

    monkeypatch.setattr("speculon.commands.bench.compare", stop)
    assert bench(folder)[0] == 2 and bench(folder, "--draft", str(folder))[0] == 2
    assert [sum("draft_model" in mode for mode in plan.modes) for plan in plans] == [0, 2]
    assert plans[1].modes == tuple(mode for mode in BenchPlan().modes if "eagle3" not in mode)


def test_it_shows_tables(folder: Path) -> None:
    sizes = [
        "--workloads",
        "code",
        "--prompts",
        "1",
        "--max-tokens",
        "32",
        "--repeats",
        "1",
        "--concurrency",
        "1",
    ]
    code, out, _ = bench(folder, *sizes, "--modes", "ngram:2")
    assert code == 0
    assert {path.name for path in Path("speculon-bench").iterdir()} == {"bench.json", "bench.md", "bench.png"}
    assert "code, one at a time" in out and "off again" in out and "medians of 1 alternated repeats" in out


def test_a_mode_that_ran_no_round_is_an_error(folder: Path) -> None:
    sizes = ["--workloads", "code", "--prompts", "1", "--repeats", "1", "--concurrency", "1"]
    # the second token needs no guess
    code, out, _ = bench(folder, *sizes, "--max-tokens", "2", "--modes", "ngram:4", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, "BenchError")
    assert "ngram:4 ran no speculative round in code" in error["message"] and "max_tokens" in error["message"]


@pytest.fixture(scope="module")
def drafting(folder: Path) -> LLM:
    """The target is its own draft: what it guesses greedily always stands."""
    return LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "draft": str(folder)})


def small(**fields: Any) -> BenchPlan:
    usual: dict[str, Any] = {
        "workloads": ("code",),
        "concurrency": (1,),
        "prompts": 1,
        "max_tokens": 16,
        "repeats": 1,
    }
    return BenchPlan(**(usual | fields))


# mode and time; tokens that its users' pools held before, and after; pools in all
Pooled = list[tuple[str, int, int, int]]


def watch_pools(
    llm: LLM, plan: BenchPlan, monkeypatch: pytest.MonkeyPatch, pool: Callable[[str], str] = str
) -> Pooled:
    """Every measurement of a run."""
    seen: Pooled = []
    found = llm.engine.proposers.find("suffix")
    assert isinstance(found, Suffix)

    def held(cases: list[Case], time: str) -> int:
        return sum(
            found.pools.sizes.get(str(key_of(f"{case.user}, {time}", case.prompt)), 0) for case in cases
        )

    def watched(llm: LLM, cases: list[Case], speculation: dict[str, Any], time: str = "") -> Measurement:
        before = held(cases, pool(time))
        done = measure(llm, cases, speculation, pool(time))
        seen.append((time, before, held(cases, pool(time)), len(found.pools.sizes)))
        return done

    monkeypatch.setattr("speculon.bench.run.measure", watched)
    run(llm, plan)
    return seen


def not_cold(seen: Pooled, edits: int) -> list[str]:
    """Times in which a user's first edit found something, or a later one nothing."""
    times: dict[str, list[int]] = {}
    for time, before, _, _ in seen:
        times.setdefault(time, []).append(before)
    return [
        time for time, held in times.items() if any((n > 0) != (i % edits > 0) for i, n in enumerate(held))
    ]


WARM: dict[str, Any] = {
    "workloads": ("warm",),
    "prompts": 4,
    "max_tokens": 96,
    "repeats": 2,
    "concurrency": (1, 2),
}


def test_a_loop_is_cold_at_its_first_edit_in_every_mode_and_repeat_and_warm_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    plan = small(modes=("suffix:4", "ngram:4", "suffix:8"), **WARM)
    seen = watch_pools(llm, plan, monkeypatch)
    assert len(seen) == plan.measurements
    assert not_cold([each for each in seen if each[0].startswith("suffix")], edits=2) == []
    assert all((after > before) == time.startswith("suffix") for time, before, after, _ in seen)


def test_a_planted_pool_that_is_the_same_every_time_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    seen = watch_pools(llm, small(modes=("suffix:4",), **WARM), monkeypatch, pool=lambda time: "always")
    assert "suffix:4, repeat 0 of warm, 1" in not_cold(
        [each for each in seen if each[0].startswith("suffix")], edits=2
    )


def test_other_workloads_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "method": "suffix"})
    plan = small(workloads=("code", "edit", "prose", "mixed"), modes=("suffix:4",), prompts=3, max_tokens=96)
    assert {pools for *_, pools in watch_pools(llm, plan, monkeypatch)} == {0}


def test_users_that_would_be_forgotten_are_refused(folder: Path) -> None:
    llm = LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "suffix_pools": 3})
    plan = small(
        workloads=("warm",), modes=("suffix:4", "suffix:8"), concurrency=(2,), prompts=4, max_tokens=96
    )
    with pytest.raises(InvalidParameter, match="suffix_pools = 3: 2 users in 2 modes take 4"):
        run(llm, plan)


def test_a_policy_that_holds_everything_back_is_no_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Goodput, "decide", lambda self, seqs, load: [Decision(None, 0, Reason.COST)] * len(seqs)
    )
    cells, _ = run(llm, small(modes=("ngram:4/goodput",)))
    found = {cell.mode: cell.diagnosis for cell in cells}
    # pays: by noise, which one text cannot exclude
    assert found["ngram:4/goodput"] in ("gated: cost", "pays")


def test_a_draft_model_is_measured_like_any_method(folder: Path, tmp_path: Path) -> None:
    sizes = [
        "--workloads",
        "code",
        "--prompts",
        "1",
        "--max-tokens",
        "24",
        "--repeats",
        "1",
        "--concurrency",
        "1",
    ]
    modes = ["--modes", "draft_model:3,auto:3", "--draft", str(folder), "--out", str(tmp_path / "new")]
    code, out, err = bench(folder, *sizes, *modes, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    cells = {cell["mode"]: cell for cell in report["cells"]}
    own, both = cells["draft_model:3"], cells["auto:3"]
    assert own["per_position"] == [1, 1, 1] and own["reached"] == 1 and own["different"] == 0
    # three calls of the same model
    assert own["sources"] == {"draft_model": 1} and own["rounds"]["draft"] > 0.3
    assert sum(both["sources"].values()) == pytest.approx(1) and set(both["sources"]) <= {
        "suffix",
        "draft_model",
    }
    assert report["model"]["drafts"] == {"draft_model": "model"} and report["model"]["widened_to"] is None
    said = (tmp_path / "new" / "bench.md").read_text()
    assert "draft_model model;" in said and "| draft_model 100% |" in said


def test_the_modes_say_the_method_and_other_options_of_speculation_are_there(folder: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--help"], terminal_width=200)
    assert (
        done.exit_code == 0
        and "--draft " in done.stdout
        and "--acceptance" in done.stdout
        and "--method" not in done.stdout
    )


@pytest.mark.parametrize("modes", ["draft_model:4", "ngram:4,draft_model:4/rejection"])
def test_a_mode_without_its_drafter_fails_before_anything_is_measured(
    folder: Path, modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculon.bench.run.measure", lambda *_: pytest.fail("measured"))
    code, out, _ = bench(folder, "--modes", modes, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, "InvalidParameter")
    assert (
        f"modes = {modes.rpartition(',')[2]!r}: no_drafter: draft_model needs a checkpoint, given with "
        "--draft"
        in error["message"]
    )


def test_a_plain_measurement_does_hit_the_planted_failure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: with a drafter at hand the same trap springs."""
    monkeypatch.setattr("speculon.bench.run.measure", lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run(llm, small(modes=("ngram:4",)))


def test_rules_of_acceptance_are_modes(drafting: LLM) -> None:
    """A draft that agrees with the target exactly is accepted under both; by matching the text is the plain
    one.
    """
    modes = ("draft_model:3/matching", "draft_model:3/rejection")
    cells, _ = run(drafting, small(workloads=("prose@0.7",), modes=modes, prompts=2, max_tokens=24))
    by_mode = {cell.mode: cell for cell in cells}
    matching, rejection = (by_mode[mode] for mode in modes)
    assert (matching.different, matching.rejection) == (0, False)
    assert rejection.rejection and matching.reached == rejection.reached == 1


def test_the_same_cases_at_another_temperature(llm: LLM) -> None:
    size = Size(3, TOKENS, CONTEXT)
    warm, usual = build("prose@0.7", llm.tokenizer, size), build("prose", llm.tokenizer, size)
    assert [(case.prompt, case.params.seed) for case in warm] == [
        (case.prompt, case.params.seed) for case in usual
    ]
    assert {case.params.temperature for case in warm} == {0.7} and {
        case.params.temperature for case in usual
    } == {1}
    sampled = build("code@1", llm.tokenizer, size)
    # a text without a seed would be another in every mode
    assert [case.params.seed for case in sampled] == [0, 1, 2]
    assert [case.params.seed for case in build("code", llm.tokenizer, size)] == [None] * 3
    assert [case.prompt for case in sampled] == [case.prompt for case in build("code", llm.tokenizer, size)]


def test_a_widened_bench_says_so_everywhere_and_writes_the_same(folder: Path, tmp_path: Path) -> None:
    sizes = [
        "--workloads",
        "code",
        "--prompts",
        "1",
        "--max-tokens",
        "24",
        "--repeats",
        "1",
        "--concurrency",
        "1",
    ]
    modes = ["--modes", "draft_model:3", "--draft", str(folder), "--with-transformers"]
    reports = []
    for name, more in (("as it is", []), ("wide", ["--widen", "3"])):
        code, out, err = bench(folder, *sizes, *modes, *more, "--out", str(tmp_path / name), "--json")
        assert (code, err) == (0, "")
        reports.append(json.loads(out))
    plain, wide = reports
    assert wide["model"]["widened_to"] == 3_000_000 and abs(wide["model"]["parameters"] - 3e6) < 2e4
    assert plain["model"]["widened_to"] is None and plain["model"]["parameters"] < 1e5
    assert all(cell["different"] == 0 for cell in wide["cells"])  # transformers' own among them
    assert [cell["tokens_per_target_call"] for cell in wide["cells"]] == [
        cell["tokens_per_target_call"] for cell in plain["cells"]
    ]
    forward = [
        next(c["ms_by_rows"]["1"][0] for c in report["cells"] if c["mode"] == "off") for report in reports
    ]
    assert forward[1] > forward[0]
    said = "model widened to 3 M parameters: the same function at the call cost of a larger model, 3.0 M"
    assert (
        said in (tmp_path / "wide" / "bench.md").read_text()
        and "widened" not in (tmp_path / "as it is" / "bench.md").read_text()
    )


def test_transformers_gets_the_same_columns(folder: Path) -> None:
    llm = LLM(str(folder), prefix_cache=False, fuse=False, rehearse=False)
    assert TransformersBaseline(llm).model.num_parameters() == llm.engine.target.num_parameters
    widen_target(llm.engine.target, 1)
    stock = TransformersBaseline(llm, 1).model
    assert stock.num_parameters() == llm.engine.target.num_parameters > 900_000
    assert torch.equal(
        next(gated_mlps(stock)).up_proj.weight, next(gated_mlps(llm.engine.target.model)).up_proj.weight
    )


def test_the_chart_says_that_the_target_is_widened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    titles = []
    monkeypatch.setattr("speculon.bench.chart.draw", lambda cells, title, path: titles.append(title) or path)
    sizes = [
        "--workloads",
        "code",
        "--prompts",
        "1",
        "--max-tokens",
        "8",
        "--repeats",
        "1",
        "--concurrency",
        "1",
    ]
    modes = ["--modes", "draft_model:2", "--draft", str(folder)]
    assert bench(folder, *sizes, *modes, "--widen", "1", "--out", str(tmp_path), "--json")[0] == 0
    assert len(titles) == 1 and "widened to 1 M parameters: the same function at the call cost" in titles[0]


class Mute:
    """Never guesses."""

    needs = Needs()

    def __init__(self, config: SpeculationConfig, target: TargetFacts):
        pass

    def admit(self, seq: Sequence) -> None: ...

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: object) -> list[Draft]:
        return [NO_DRAFT] * len(seqs)

    def observe(self, seqs: object, verdicts: object, taps: object) -> None: ...

    def release(self, seq: Sequence) -> None: ...


def test_the_same_for_a_planted_drafter_that_never_guesses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {"mute": Mute})
    with pytest.raises(BenchError, match=r"mute:4 ran no speculative round .*'no_match': 14"):
        run(llm, small(modes=("mute:4",)))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--modes", "zzz:3"],
        ["--modes", "ngram:0"],
        ["--modes", "auto+auto"],
        ["--concurrency", "x"],
        ["--workloads", ","],
    ],
)
def test_a_plan_that_cannot_be_is_told_before_anything_is_loaded(folder: Path, arguments: list[str]) -> None:
    code, out, err = bench(folder / "none", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(("InvalidParameter: ", "UnknownMethod: "))


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_cases_are_the_same_every_time_and_fit(llm: LLM, name: str) -> None:
    size = Size(3, TOKENS, CONTEXT)
    cases = build(name, llm.tokenizer, size)
    assert fingerprint(cases) == fingerprint(build(name, llm.tokenizer, size))
    assert len({case.name for case in cases}) == 3
    assert all(
        0 < len(case.prompt) <= CONTEXT - TOKENS and case.params.max_tokens == TOKENS for case in cases
    )
    sampled, asked = (
        {"prose": {0, 1, 2}, "mixed": {2}}.get(name, set()),
        {"mixed": {1}, "code": set(), "prose": set()},
    )
    assert [case.params.greedy for case in cases] == [i not in sampled for i in range(3)]
    assert [case.reference is not None for case in cases] == [
        i in asked.get(name, {0, 1, 2}) for i in range(3)
    ]


def test_mixed_cases_are_the_first_of_each_workload_in_turn(llm: LLM) -> None:
    mixed = build("mixed", llm.tokenizer, Size(6, TOKENS, CONTEXT))
    parts = [build(name, llm.tokenizer, Size(2, TOKENS, CONTEXT)) for name in ("code", "edit", "prose")]
    assert [case.prompt for case in mixed] == [part[i].prompt for i in range(2) for part in parts]
    assert [case.params.temperature for case in mixed] == [0, 0, 1] * 2
    assert [
        case.params.temperature for case in build("mixed@0.5", llm.tokenizer, Size(3, TOKENS, CONTEXT))
    ] == [0.5] * 3


def test_in_a_loop_the_right_answer_is_the_next_prompts_source(llm: LLM) -> None:
    cases = build("warm", llm.tokenizer, Size(8, TOKENS, CONTEXT, crowd=2))
    assert [case.user for case in cases] == ["user 1"] * 4 + ["user 2"] * 4
    for first, second in pairwise(cases):
        follows = bool(first.reference) and str(first.reference) in llm.tokenizer.decode(second.prompt)
        assert follows == (first.user == second.user)


def test_an_edit_asks_for_its_reference(llm: LLM) -> None:
    case = build("edit", llm.tokenizer, Size(1, TOKENS, CONTEXT))[0]
    old, new = case.name.rpartition(", ")[2].split(" -> ")
    asked = llm.tokenizer.decode(case.prompt)
    assert f"Repeat this function with `{old}` renamed to `{new}`." in asked
    assert case.reference and case.reference.startswith("```python\n") and new in case.reference


def test_too_few_cases_are_an_error(llm: LLM) -> None:
    with pytest.raises(BenchError, match="of 100000 cases"):
        build("code", llm.tokenizer, Size(100_000, TOKENS, CONTEXT))
    with pytest.raises(InvalidParameter, match="context is 64"):
        build("code", llm.tokenizer, Size(1, 64, 64))


def test_a_recording_sees_every_step_and_leaves_the_engine_as_it_was(llm: LLM) -> None:
    case = Case(
        "x",
        llm.tokenizer.encode("class Stack:"),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
    )
    one = measure(llm, [case, case], {"method": "off"})
    assert [step.decoding for step in one.steps] == [False] + [True] * 9
    assert [step.rows for step in one.steps] == [2 * len(case.prompt)] + [2] * 9
    assert sum(step.tokens for step in one.steps) == one.tokens == 20
    assert all(0 < step.forward_ms < step.step_ms for step in one.steps)
    assert [step.spans for step in one.steps] == [2] * 10 and not any(step.drafted for step in one.steps)
    with pytest.raises(ZeroDivisionError), recording(llm.engine):
        raise ZeroDivisionError
    assert "step" not in vars(llm.engine)


def test_a_recording_sees_what_was_drafted_and_how_long_it_took(drafting: LLM) -> None:
    case = Case(
        "x",
        drafting.tokenizer.encode("class Stack:"),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    )
    before = drafting.engine.counters.profile["propose"]
    one = measure(drafting, [case, case], parse_mode("draft_model:3").speculation)
    assert [(step.drafted, step.spans, step.tokens) for step in one.steps] == [
        (0, 2, 2),
        (6, 2, 8),
        (6, 2, 8),
    ]
    assert all(0 < step.draft_ms < step.step_ms - step.forward_ms for step in one.steps[1:])
    assert sum(step.draft_ms for step in one.steps) == pytest.approx(
        drafting.engine.counters.profile["propose"] - before
    )
    plain = measure(drafting, [case], {"method": "off"})
    # of one step a busy machine says little
    usual = [median(step.draft_ms for step in some.steps[1:]) for some in (plain, one)]
    assert usual[0] < usual[1]


def test_the_gap_where_two_texts_part(llm: LLM) -> None:
    case = Case("x", llm.tokenizer.encode("class Stack:"), SamplingParams(temperature=0, max_tokens=6))
    output = llm.generate([case.prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0]
    assert output.logprobs is not None
    (_, best), (second, less) = output.logprobs[3].top
    other = [*output.token_ids[:3], second, 9, 9]
    assert tie_gap(llm, case, other, output.token_ids) == pytest.approx(best - less, abs=1e-5)
    assert tie_gap(llm, case, output.token_ids[:4], output.token_ids) is None
