"""Costs that an earlier start has measured spare the next one its warm-up, and never do harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.types import Reason
from speculon.engine import build, kept_costs
from speculon.engine.engine import Engine
from speculon.engine.warm_up import warm_up
from speculon.runtimes.torch import runtime
from tests.tiny.folders import make_folder

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [1, 2, 3, 1, 2, 3]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that warmed up."""
    engines: list[Engine] = []

    def noted(engine: Engine) -> None:
        engines.append(engine)
        warm_up(engine)

    monkeypatch.setattr(build, "warm_up", noted)
    return engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), num_blocks=64, **settings)


def the_costs(cache: Path) -> Path:
    (path,) = cache.glob("costs-*.json")
    return path


def parts(llm: LLM) -> Any:
    return {name: cost.parts for name, cost in llm.engine.policy.costs.state().items()}


def test_the_second_start_measures_nothing(folder: Path, cache: Path, measured: list[Engine]) -> None:
    with start(folder) as first:
        known = parts(first)
    assert measured == [first.engine] and known
    with start(folder) as second:
        assert measured == [first.engine] and parts(second) == known
        output = second.generate([PROMPT], PARAMS)[0].outputs[0]
        assert Reason.COLD not in output.reasons
        later = parts(second)
    assert later != known, "costs follow what is measured"
    assert parts(start(folder)) == later, "and so does the file"


def test_a_start_without_a_warm_up_takes_what_there_is_and_keeps_what_it_sees(
    folder: Path, cache: Path, measured: list[Engine]
) -> None:
    with start(folder, warmup=False) as first:
        assert not first.engine.policy.costs.known
        reasons = first.generate([PROMPT], PARAMS)[0].outputs[0].reasons
        assert reasons[Reason.COLD] > 0
    with start(folder, warmup=False) as second:
        assert Reason.COLD not in second.generate([PROMPT], PARAMS)[0].outputs[0].reasons
    with start(folder) as third:
        assert measured == [third.engine], "a few rounds of one sequence are no warm-up"
    start(folder)
    assert measured == [third.engine]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "weights": lambda folder, patch: flip(folder / "model.safetensors"),
    "chip": lambda folder, patch: patch.setattr(runtime, "chip", lambda: "another"),
    "versions": lambda folder, patch: patch.setattr(kept_costs, "versions", lambda: {"torch": "another"}),
    "threads": lambda folder, patch: patch.setattr(runtime.torch, "get_num_threads", lambda: 99),
    "dtype": lambda folder, patch: {"dtype": "bfloat16"},
    "drafter": lambda folder, patch: {"speculation": {"draft": str(folder)}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_those_of_another_model_chip_or_setting_are_not_used(
    what: str, folder: Path, cache: Path, measured: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dtype": "float32"}
    start(folder, **settings)
    mine = the_costs(cache).read_bytes()
    settings |= CHANGES[what](folder, monkeypatch) or {}
    other = start(folder, **settings)
    assert measured[1:] == [other.engine]
    (path,) = {*cache.glob("costs-*.json")} - {path for path in cache.iterdir() if path.read_bytes() == mine}
    path.write_bytes(mine)  # under the other's name they are not used, either
    again = start(folder, **settings)
    assert measured[2:] == [again.engine]


def with_costs(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        stored = json.loads(path.read_text())
        stored["content"] = change(stored["content"])
        path.write_text(json.dumps(stored))

    return damage


def scaled(factor: float) -> Callable[[Any], Any]:
    def change(content: Any) -> Any:
        costs = content["costs"].items()
        changed = {name: ([factor * part for part in parts], *rest) for name, (parts, *rest) in costs}
        return {"warm": True, "costs": changed}

    return change


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte": lambda path: path.write_bytes(path.read_bytes().replace(b'"warm": t', b'"warm"\x00 t')),
    "empty": lambda path: path.write_bytes(b""),
    "older": with_costs(lambda content: {name: cost[0] for name, cost in content["costs"].items()}),
    "no costs": with_costs(lambda content: {"warm": True}),
    "a list": with_costs(lambda content: [content]),
    "infinite": with_costs(scaled(float("inf"))),
    "not a number": with_costs(scaled(float("nan"))),
    "beyond bounds": with_costs(scaled(1e30)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_costs_a_warm_up_and_is_written_anew(
    what: str, folder: Path, cache: Path, measured: list[Engine]
) -> None:
    start(folder)
    DAMAGES[what](the_costs(cache))
    second = start(folder)
    assert measured[1:] == [second.engine]
    start(folder)
    assert measured[1:] == [second.engine], "the new file is whole"


@pytest.mark.parametrize("factor", [0.0, 1e-7, 1e6, -1.0])
def test_absurd_costs_change_no_text_and_are_forgotten(
    factor: float, folder: Path, cache: Path, measured: list[Engine]
) -> None:
    with start(folder) as first:
        expected = first.generate([PROMPT] * 2, PARAMS)
        before = first.engine.policy.costs.step(1)
    with_costs(scaled(factor))(the_costs(cache))
    second = start(folder)
    costs = second.engine.policy.costs
    assert measured == [first.engine] and not before / 100 < costs.step(1) < 100 * before
    texts = second.generate([PROMPT] * 2, PARAMS)
    assert [one.outputs[0].token_ids for one in texts] == [one.outputs[0].token_ids for one in expected]
    for _ in range(4):
        second.generate([PROMPT], PARAMS)
    assert before / 20 < costs.step(1) < 20 * before


@pytest.mark.parametrize("place", ["", "file/cache"])
def test_without_a_folder_every_start_measures(
    place: str, folder: Path, measured: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPECULON_CACHE", place and str(tmp_path / place))
    with start(folder) as first, start(folder) as second:
        assert measured == [first.engine, second.engine]


def test_what_a_state_has_told_is_kept_for_starts_without_one(
    folder: Path, cache: Path, measured: list[Engine], tmp_path: Path
) -> None:
    with start(folder, state=tmp_path / "state"):
        the_costs(cache).unlink()
    with start(folder, state=tmp_path / "state") as second:
        assert len(measured) == 1
        known = parts(second)
    assert parts(start(folder)) == known and len(measured) == 1
