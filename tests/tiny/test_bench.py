"""`speculon bench` on a random model: what it writes, and that it refuses to report a mode that did nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.bench import workloads
from speculon.bench.measure import measure, recording
from speculon.bench.run import AGAIN, STOCK, Plan, run, tie_gap
from speculon.bench.workloads import Case, Size, build, fingerprint
from speculon.cli import app
from speculon.config import SpeculationConfig
from speculon.core import NO_DRAFT, Draft, Needs, Sequence
from speculon.demo import corpus
from speculon.errors import BenchError, InvalidParameter
from speculon.proposers import registry
from speculon.proposers.base import TargetFacts
from tests.tiny.folders import CONTEXT, make_folder, make_library

PROMPTS, TOKENS = 2, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), prefix_cache=False)


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
    code, out, err = bench(folder, *sizes, "--modes", "ngram:4", "--with-transformers", "--out", str(tmp_path / "new"), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == report
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| code | 1 | ngram:4 |" in (tmp_path / "new" / "bench.md").read_text()

    cells = {(cell["workload"], cell["concurrency"], cell["mode"]): cell for cell in report["cells"]}
    greedy = [(name, 1, mode) for name in ("code", "edit") for mode in ("off", "ngram:4", STOCK, AGAIN)]
    crowds = [(name, 2, mode) for name in ("code", "edit") for mode in ("off", "ngram:4", AGAIN)]
    prose = [("prose", count, mode) for count in (1, 2) for mode in ("off", "ngram:4", AGAIN)]
    assert set(cells) == {*greedy, *crowds, *prose}
    assert all(cell["different"] == 0 for cell in cells.values())  # fp32: the same text everywhere
    assert all(cell["ratio"] == 1 for (_, _, mode), cell in cells.items() if mode == "off")
    assert all(0.9 < cell["tokens_per_target_call"] <= 1 for (_, _, mode), cell in cells.items() if mode in ("off", AGAIN))
    ngram = cells["code", 1, "ngram:4"]
    assert ngram["tokens_per_target_call"] > 1 and len(ngram["per_position"]) == 4 and "5" in ngram["ms_by_rows"]
    assert 0 < ngram["overhead"] < 1 and cells["edit", 1, "off"]["exact"] == 0

    assert report["command"].startswith("speculon ")
    assert {"torch", "transformers", "python"} <= set(report["versions"])
    assert {"cpu", "cores", "platform", "memory_gib"} <= set(report["machine"])
    assert report["model"]["prefix_cache"] is False and report["model"]["name"] == "model"


def test_it_shows_tables(folder: Path) -> None:
    sizes = ["--workloads", "code", "--prompts", "1", "--max-tokens", "32", "--repeats", "1", "--concurrency", "1"]
    code, out, _ = bench(folder, *sizes, "--modes", "ngram:2")
    assert code == 0
    assert {path.name for path in Path("speculon-bench").iterdir()} == {"bench.json", "bench.md", "bench.png"}
    assert "code, one at a time" in out and "off again" in out and "medians of 1 alternated repeats" in out


def test_a_mode_that_ran_no_round_is_an_error(folder: Path) -> None:
    sizes = ["--workloads", "code", "--prompts", "1", "--repeats", "1", "--concurrency", "1"]
    code, out, _ = bench(folder, *sizes, "--max-tokens", "2", "--json")  # the second token needs no guess
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, "BenchError")
    assert "ngram:4 ran no speculative round in code" in error["message"] and "max_tokens" in error["message"]


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
    plan = Plan(workloads=("code",), modes=("mute:4",), concurrency=(1,), prompts=1, max_tokens=16, repeats=1)
    with pytest.raises(BenchError, match=r"mute:4 ran no speculative round .*'no_match': 14"):
        run(llm, plan)


@pytest.mark.parametrize(
    "arguments", [["--modes", "zzz:3"], ["--modes", "ngram:0"], ["--concurrency", "x"], ["--workloads", ","]]
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
    assert all(0 < len(case.prompt) <= CONTEXT - TOKENS and case.params.max_tokens == TOKENS for case in cases)
    assert [case.params.greedy for case in cases] == [name != "prose"] * 3
    assert [case.reference is not None for case in cases] == [name == "edit"] * 3


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
    case = Case("x", llm.tokenizer.encode("class Stack:"), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    one = measure(llm, [case, case], {"method": "off"})
    assert [step.decoding for step in one.steps] == [False] + [True] * 9
    assert [step.rows for step in one.steps] == [2 * len(case.prompt)] + [2] * 9
    assert sum(step.tokens for step in one.steps) == one.tokens == 20
    assert all(0 < step.forward_ms < step.step_ms for step in one.steps)
    with pytest.raises(ZeroDivisionError), recording(llm.engine):
        raise ZeroDivisionError
    assert "step" not in vars(llm.engine)


def test_the_gap_where_two_texts_part(llm: LLM) -> None:
    case = Case("x", llm.tokenizer.encode("class Stack:"), SamplingParams(temperature=0, max_tokens=6))
    output = llm.generate([case.prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0]
    assert output.logprobs is not None
    (_, best), (second, less) = output.logprobs[3].top
    other = [*output.token_ids[:3], second, 9, 9]
    assert tie_gap(llm, case, other, output.token_ids) == pytest.approx(best - less, abs=1e-5)
    assert tie_gap(llm, case, output.token_ids[:4], output.token_ids) is None
