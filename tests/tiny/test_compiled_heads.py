"""Compiled heads and block drafters compute what the networks do, or are refused with a reason.

The layers run in the compiler's terms, as they are. The compiler itself runs in tests/soak.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.decoding.kv.store import SpanView
from speculon.drafters import runner as draft_runs
from speculon.drafters.dflash.attention import Sight, hidden_keys, visible
from speculon.drafters.runner import CompiledBlocks, CompiledHead, HeadLayers, RowsLayers
from speculon.engine.engine import Engine
from speculon.target import compiled_layers, footprint, linear, programs
from speculon.target.linear import Layout, Linear, packed
from tests.tiny.blocks import ask as ask_for_blocks
from tests.tiny.blocks import drafter_of, watch_blocks, wrong_blocks
from tests.tiny.checkpoint_formats import write_eagle3
from tests.tiny.dflash_checkpoints import write_dflash
from tests.tiny.heads import deep_model, deep_target, head_of, watch_heads, wrong_rows
from tests.tiny.scripted import Result, drain, make_engine, texts_of
from tests.tiny.test_captured_drafts import BLOCKS, HEADS
from tests.tiny.test_eagle3 import SETTINGS, VARIANTS, ask, plain, requests_of, whole

METHODS = ("eagle3", "dflash")
WRONG = "not compiled: it computes something else"
ASK = {"eagle3": ask, "dflash": ask_for_blocks}
COMPILED = {"eagle3": CompiledHead, "dflash": CompiledBlocks}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "program", lambda layers, *_: layers)


def engine_with(
    method: str, folder: Path, compile: bool = True, settings: Any = None, **variant: Any
) -> Engine:
    """A target that runs its loop, and such a drafter."""
    write = write_eagle3 if method == "eagle3" else write_dflash
    path = write(folder, deep_model().config, **variant)
    draft: Any = {"draft": {method: str(path)}}
    return make_engine(deep_target(), speculation=draft, compile=compile, **(settings or {}))


def counted(engine: Engine, method: str) -> dict[str, int]:
    """How often each program runs from now on."""
    drafter: Any = engine.proposers.find(method)
    assert isinstance(drafter.runner.run, COMPILED[method]), str(drafter.runner)
    assert engine.capabilities()[f"compiled.{method}"].status == "on"
    calls = dict.fromkeys(drafter.runner.run.programs, 0)

    def count(name: str, program: Any, *given: Any) -> Any:
        calls[name] += 1
        return program(*given)

    for name, program in list(drafter.runner.run.programs.items()):
        drafter.runner.run.programs[name] = lambda *given, n=name, p=program: count(n, p, *given)
    return calls


def drained(engine: Engine, asked: dict[str, Any], requests: Any = None) -> dict[Any, Result]:
    for request in requests_of("greedy") if requests is None else requests:
        engine.add_request(request.prompt, request.params, asked, request.id)
    return drain(engine)


@pytest.mark.parametrize(("variant", "layout"), [*((v, packed) for v in HEADS[1:]), ("window", Linear)])
def test_rows_of_a_compiled_head_are_those_of_the_formula(
    variant: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    watch = watch_heads(plain("greedy"))
    engine = engine_with("eagle3", tmp_path, **VARIANTS[variant])
    calls = counted(engine, "eagle3")
    alone = texts_of(drained(engine, ask(4), requests_of("greedy")[1:2]))  # first: in consecutive pages
    assert alone.items() <= plain("greedy").items()
    assert texts_of(drained(engine, ask(4))) == plain("greedy")
    assert not wrong_rows(watch, head_of(**VARIANTS[variant]), whole("greedy"))
    assert set(calls) == {"one", "few", "joint", "many"} and all(calls.values()), calls


@pytest.mark.parametrize(("variant", "layout"), [*((v, packed) for v in BLOCKS), ("causal", Linear)])
def test_compiled_blocks_are_those_of_the_formula(
    variant: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    watch, sizes = watch_blocks(plain("greedy")), BLOCKS.get(variant, {"windows": (4, None), "causal": True})
    engine = engine_with("dflash", tmp_path, **sizes)
    calls = counted(engine, "dflash")
    for request in requests_of("greedy"):
        key = request.id, 0
        found = texts_of(drained(engine, ask_for_blocks(4), [request]))
        assert found == {key: plain("greedy")[key]}
    assert texts_of(drained(engine, ask_for_blocks(4))) == plain("greedy")
    assert not wrong_blocks(watch, drafter_of(**sizes), whole("greedy"))
    assert calls["few"] > 20, calls


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", ["few pages", "a page each token", "prompts in chunks"])
def test_no_setting_changes_a_token(setting: str, method: str, tmp_path: Path) -> None:
    engine = engine_with(method, tmp_path, settings=SETTINGS[setting])
    calls = counted(engine, method)
    asked, requests, texts = ASK[method](4), requests_of("sampled", 9), plain("sampled", 9)
    results = drained(engine, asked, requests)
    assert texts_of(results) == texts
    assert setting != "few pages" or any(result.stats.preemptions for result in results.values())
    assert texts_of(drained(engine, asked, requests[:1])).items() <= texts.items()
    assert any(calls.values())


@pytest.mark.parametrize("method", METHODS)
def test_with_other_threads_nothing_compiled_runs(method: str, tmp_path: Path) -> None:
    engine = engine_with(method, tmp_path)
    calls, drafter = counted(engine, method), engine.proposers.find(method)
    drafter.runner.run.threads += 1  # type: ignore[union-attr]
    drained(engine, ASK[method](4), requests_of("greedy")[:1])
    assert not any(calls.values())


def why_not(engine: Engine, method: str) -> str:
    """The reason in the table; the network runs as it is."""
    drafter: Any = engine.proposers.find(method)
    assert not isinstance(drafter.runner.run, tuple(COMPILED.values()))
    row = engine.capabilities()[f"compiled.{method}"]
    assert row.status == "off" and row.reason == str(drafter.runner)
    return row.reason


def rotated_from_zero(layers: Any) -> Any:
    """A program in which all rows are at position 0; positions are the last input of each row."""
    count = 2 if isinstance(layers, HeadLayers) else 1
    return lambda *given: layers(*given[:count], torch.zeros_like(given[count]), *given[count + 1 :])


def unmasked(*_: Any) -> None:
    return None


PLANTED: dict[str, tuple[str, dict[str, Any], Any, str, Any]] = {
    "head: positions": ("eagle3", {}, programs, "program", lambda layers, *_: rotated_from_zero(layers)),
    "head: the wrong residual": ("eagle3", {}, None, "norm_before_residual", True),
    "blocks: positions": ("dflash", {}, programs, "program", lambda layers, *_: rotated_from_zero(layers)),
    "blocks: causal rows unmasked": ("dflash", {"windows": (4, None)}, draft_runs, "block_mask", unmasked),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_error_is_found(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, variant, place, name, wrong = PLANTED[plant]
    if place is not None:
        monkeypatch.setattr(place, name, wrong)
    else:
        monkeypatch.setattr(programs, "program", lambda layers, *_: changed(layers, name, wrong))
    assert WRONG in why_not(engine_with(method, tmp_path, **variant), method)


def changed(layers: Any, name: str, value: Any) -> Any:
    setattr(layers.layers[0], name, value)
    return layers


@pytest.mark.parametrize("which", ["one", "few", "joint", "many"])
def test_a_program_that_writes_no_pages_is_not_used(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(layers: Any, variant: str, *how: Any) -> compiled_layers.Program:
        return (lambda *args: layers(*args[:4], *copy.deepcopy(args[4:]))) if variant == which else layers

    monkeypatch.setattr(programs, "program", forgetful)
    assert WRONG in why_not(engine_with("eagle3", tmp_path), "eagle3")


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_compiled_runs_as_it_is(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin a long text")

    monkeypatch.setattr(programs, "program", failing)
    engine = engine_with(method, tmp_path)
    assert "not compiled: No working C++ compiler found" in why_not(engine, method)
    drafter: Any = engine_with(method, tmp_path, compile=False).proposers.find(method)
    assert str(drafter.runner).endswith("layers, one loop")


def test_programs_of_other_windows_are_not_used(tmp_path: Path) -> None:
    keys = set()
    for i, windows in enumerate([None, (4, None), (5, None)]):
        drafter: Any = engine_with(
            "dflash", tmp_path / f"{i}", compile=False, windows=windows
        ).proposers.find("dflash")
        keys.add(programs.program_key(RowsLayers(drafter.network)))
    assert len(keys) == 3


@pytest.mark.parametrize(("method", "layout"), [("eagle3", packed), ("eagle3", Linear), ("dflash", packed)])
def test_programs_are_counted(
    method: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "fastest_layout", lambda dtype, device: layout)
    plain, compiled = (
        engine_with(method, tmp_path, compile).proposers.find(method) for compile in (False, True)
    )
    assert plain is not None and compiled is not None
    weights = plain.needs.bytes_fixed
    copies = 0 if layout is Linear else footprint.COPIES
    assert compiled.needs.bytes_fixed == weights + copies * weights + footprint.JOINT_BYTES


@pytest.mark.parametrize(
    "sight",
    [Sight(), Sight(causal=True), Sight(reach=3), Sight(True, 2), Sight(reach=3, anchored=True)],
    ids=str,
)
def test_the_mask_of_one_block_is_that_of_a_call(sight: Sight) -> None:
    span = visible(SpanView(0, 5, slice(0, 9), 9), sight)
    hidden = hidden_keys([span], sight, span.rows, span.context, torch.device("cpu"))[0]
    mask = draft_runs.block_mask(sight, span.rows, span.context, torch.zeros(1))
    assert torch.equal(hidden, torch.zeros(hidden.shape).bool() if mask is None else mask.isinf())
