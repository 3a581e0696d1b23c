"""Prompts of a file as workloads: what is read, what is refused, and that no mode learns from another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM
from speculon.core.config import SamplingParams
from speculon.core.errors import BenchError, DataError, InvalidParameter
from speculon.measure.bench.data import answered, read_prompts
from speculon.measure.bench.plan import BenchPlan, make_plan
from speculon.measure.bench.run import run
from speculon.measure.bench.workloads import build
from tests.tiny.bench.plans import bench
from tests.tiny.folders import CONTEXT

USER = {"role": "user", "content": "def first(items):"}
ANSWER = {"role": "assistant", "content": "return items[0]"}
SPEC_BENCH = [
    {"question_id": n, "category": ("qa", "math reasoning")[n % 2], "turns": [f"def f{n}(x):"]}
    for n in range(6)
]
HUMAN_EVAL = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "test": ""} for n in range(3)]
MIXED = [*SPEC_BENCH, *HUMAN_EVAL, {"messages": [USER, ANSWER]}, {"prompt": "class A:"}]


def write(file: Path, *records: Any) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def plan_of(file: Path, **options: Any) -> BenchPlan:
    return make_plan({"data": file, "modes": ("ngram:4",), **options}, False)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_every_category_is_a_workload(tmp_path: Path, name: str) -> None:
    found = read_prompts(write(tmp_path / name, *MIXED))
    assert {workload: len(some) for workload, some in found.prompts.items()} == {
        "data:qa": 3,
        "data:math-reasoning": 3,
        "data:HumanEval": 3,
        "data:mine": 2,
    }
    assert [one.name for one in found.prompts["data:qa"]] == ["0", "2", "4"]
    assert [one.name for one in found.prompts["data:mine"]] == ["line 10", "line 11"]


def test_chats_go_through_the_template_and_prompts_do_not(llm: LLM, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", *MIXED, {"messages": [USER, ANSWER, USER]})
    plan = plan_of(file, max_tokens=8)

    def prompts(name: str) -> list[list[int]]:
        return [case.prompt for case in build(name, llm.tokenizer, plan.size(CONTEXT, name), plan.more)]

    apply = llm.tokenizer.apply_chat
    assert prompts("data:qa") == [apply([{"role": "user", "content": f"def f{n}(x):"}]) for n in (0, 2, 4)]
    assert prompts("data:HumanEval") == [llm.tokenizer.encode(f"def f{n}(x):\n") for n in range(3)]
    assert prompts("data:mine") == [
        apply([USER]),
        llm.tokenizer.encode("class A:"),
        apply([USER, ANSWER, USER]),
    ]


def test_later_turns_follow_the_targets_own_answers(llm: LLM, tmp_path: Path) -> None:
    turns = [["def a(x):", "And b.", "And c."], ["def d(x):"], ["def e(x):", "And f."]]
    file = write(
        tmp_path / "chats.jsonl", *({"question_id": n, "turns": some} for n, some in enumerate(turns))
    )
    found = read_prompts(file).prompts
    assert [one.name for one in found["data:chats"]] == ["0", "0 turn 2", "0 turn 3", "1", "2", "2 turn 2"]
    prompts = [one.content for one in answered(found, llm, max_tokens=8)["data:chats"]]
    chats = [one for one in prompts if isinstance(one, list)]
    for number, texts in ((2, turns[0]), (3, turns[1]), (5, turns[2])):
        assert [turn["content"] for turn in chats[number][::2]] == texts
        for end in range(1, len(chats[number]), 2):
            prompt = llm.tokenizer.apply_chat(chats[number][:end])
            (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
            assert chats[number][end] == {"role": "assistant", "content": output.text}


def test_turns_after_one_without_room_are_left_out(llm: LLM, tmp_path: Path) -> None:
    turns = [["x y " * CONTEXT, "And b."], ["def d(x):", "x y " * CONTEXT, "And e."], ["def f(x):", "And g."]]
    file = write(
        tmp_path / "chats.jsonl", *({"question_id": n, "turns": some} for n, some in enumerate(turns))
    )
    found = answered(read_prompts(file).prompts, llm, max_tokens=8)["data:chats"]
    assert [one.name for one in found] == ["0", "1", "1 turn 2", "2", "2 turn 2"]
    plan = plan_of(file, max_tokens=8, prompts=2, modes=("off",), concurrency=(1,))
    cells = run(llm, plan)[0]
    assert {cell.texts for cell in cells} == {2}


@pytest.mark.parametrize(
    ("named", "workloads"),
    [
        (None, ["data:qa", "data:math-reasoning"]),
        (("code",), ["code", "data:qa", "data:math-reasoning"]),
        (("data@0.7",), ["data:qa@0.7", "data:math-reasoning@0.7"]),
        (("data:qa", "code"), ["data:qa", "code"]),
    ],
)
def test_workloads_name_parts_of_the_file(
    tmp_path: Path, named: tuple[str, ...] | None, workloads: list[str]
) -> None:
    options = {} if named is None else {"workloads": named}
    plan = plan_of(write(tmp_path / "x.jsonl", *SPEC_BENCH), **options)
    assert list(plan.workloads) == workloads
    assert plan.concurrency == (1,)  # 4 and 8 are more than the 3 prompts of a category
    assert plan.cases(workloads[0]) == (32 if workloads[0] == "code" else 3)


def test_without_a_file_its_workloads_are_unknown(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="must be one of code"):
        BenchPlan(workloads=("data:qa",))
    with pytest.raises(InvalidParameter, match="must be at most 3, the prompts of data:qa in .*x.jsonl"):
        plan_of(write(tmp_path / "x.jsonl", *SPEC_BENCH), concurrency=(4,))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ('{"text": "a"}', r"this line has none of the keys turns .*, messages .*, or prompt"),
        ('{"turns": []}', "turns must be a list of strings"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "at least one message of a user"),
        ('{"prompt": 3}', "prompt must be a string"),
        ('{"prompt": "a", "category": 3}', "category must be a string"),
        ('{"prompt": "\udcff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_refused_before_the_model_is_loaded(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DataError, match=rf"x\.jsonl:3: .*{reason}"):
        plan_of(file)
    code, out, err = bench(tmp_path / "no model", "--data", str(file))
    assert (code, out) == (2, "") and err.startswith("DataError: ") and "x.jsonl:3:" in err.replace("\n", "")


def test_a_bad_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "cut.jsonl.gz").write_bytes(write(tmp_path / "x.jsonl.gz", *MIXED).read_bytes()[:-9])
    for name, reason in (
        ("none", "No such file"),
        ("empty.jsonl", "no prompts"),
        ("bad.jsonl.gz", "gzip"),
        ("cut.jsonl.gz", "end"),
        ("", "directory"),
    ):
        with pytest.raises(DataError, match=f"{name}: .*{reason}"):
            plan_of(tmp_path / name)


def test_chats_are_refused_where_the_model_has_no_template(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer.inner, "chat_template", None)
    chats = plan_of(write(tmp_path / "x.jsonl", *SPEC_BENCH), max_tokens=8)
    with pytest.raises(InvalidParameter, match="the model has no chat template: use another model"):
        run(llm, chats)
    plain = plan_of(write(tmp_path / "y.jsonl", *HUMAN_EVAL), max_tokens=8)
    assert len(build("data:HumanEval", llm.tokenizer, plain.size(CONTEXT, "data:HumanEval"), plain.more)) == 3


def test_prompts_that_do_not_fit_are_passed_over_and_too_few_are_an_error(llm: LLM, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"prompt": "x y " * CONTEXT}, {"prompt": "def f(x):"})
    for prompts in (1, 2):
        plan = plan_of(file, max_tokens=8, prompts=prompts)
        cases = build("data:x", llm.tokenizer, plan.size(CONTEXT, "data:x"), plan.more)
        assert [case.name for case in cases] == ["data:x line 2"]
    with pytest.raises(BenchError, match=r"1 of 2 prompts in .*x\.jsonl leave room .*, and concurrency is 2"):
        run(llm, plan_of(file, max_tokens=8, concurrency=(2,)))


def test_the_command_measures_a_file_and_counts_the_prompts_that_fit(folder: Path, tmp_path: Path) -> None:
    long = {"prompt": "x y " * CONTEXT, "category": "HumanEval"}
    file = write(tmp_path / "mine.jsonl", *SPEC_BENCH, *HUMAN_EVAL, long)
    few = ["--max-tokens", "48", "--repeats", "1", "--concurrency", "1", "--modes", "ngram:4"]
    code, out, err = bench(folder, "--data", str(file), *few, "--json", "--out", str(tmp_path / "new"))
    assert (code, err) == (0, "")
    report = json.loads(out)
    names = ["data:qa", "data:math-reasoning", "data:HumanEval"]
    assert list(dict.fromkeys(cell["workload"] for cell in report["cells"])) == names
    assert all(cell["texts"] == 3 and cell["different"] == 0 for cell in report["cells"])
    assert {workload["cases"] for workload in report["workloads"].values()} == {3}
    assert report["plan"]["data"]["file"] == "mine.jsonl"
    assert report["plan"]["data"]["prompts"] == {**dict.fromkeys(names, 3), "data:HumanEval": 4}
    assert "| data:qa | 1 | ngram:4 |" in (tmp_path / "new" / "bench.md").read_text()
