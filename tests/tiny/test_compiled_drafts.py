"""A compiled target gives the states that drafters read, and language models that draft are compiled, too.

The layers run in the compiler's terms, as they are. The compiler itself runs in tests/soak.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.config import EngineConfig
from speculon.core.types import Draft
from speculon.drafters.draft_model.proposer import DraftModel
from speculon.engine.engine import Engine
from speculon.loading.load import wrap_model
from speculon.target import compiled as compiling
from speculon.target import compiled_layers, linear, programs
from speculon.target.compare import close
from speculon.target.linear import Layout, Linear, packed
from speculon.target.taps import Taps
from speculon.target.target import Target
from speculon.target.trial import Trial
from tests.tiny.blocks import ask as ask_for_blocks
from tests.tiny.blocks import drafter_of, watch_blocks, wrong_blocks
from tests.tiny.blocks import folder_of as folder_of_blocks
from tests.tiny.checkpoint_formats import write_eagle3
from tests.tiny.conftest import build, tiny_model, tiny_target
from tests.tiny.dflash_checkpoints import write_dflash
from tests.tiny.heads import DEPTH, Texts, deep_model, folder_of, head_of, watch_heads, wrong_rows
from tests.tiny.scripted import Key, Result, drain, make_engine, proposer_of, texts_of
from tests.tiny.test_eagle3 import ask, plain, requests_of, whole

LAYOUTS = [Linear, packed]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "program", lambda layers, *_: layers)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The programs that are used."""
    used, arguments = set[str](), compiling.Compiled.arguments

    def recorded(self: compiling.Compiled, *step: Any) -> Any:
        found = arguments(self, *step)
        used.add(found[0])
        return found

    monkeypatch.setattr(compiling.Compiled, "arguments", recorded)
    return used


def compiled_target(model: Any = None) -> Target:
    target = wrap_model(model or deep_model(), share=False, compile=True)
    assert isinstance(target.runner.run, compiling.Compiled), str(target.runner)
    return target


def write(target: Target, speculation: dict[str, Any], requests: Any, asked: Any) -> dict[Key, Result]:
    engine = make_engine(target, speculation=speculation)
    for request in requests:
        engine.add_request(request.prompt, request.params, asked, request.id)
    return drain(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taps_are_those_of_the_loop(
    layout: Layout, variants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    target = compiled_target()
    run, chosen = target.runner.run, (-1, 0, 3, DEPTH - 1)
    assert isinstance(run, compiling.Compiled)
    trial, long = Trial.of(target, (8, 3)), Trial.of(target, (33, 5))
    steps = [trial.last(1), trial.last(5), trial.last(2, 3), (long.batch, long.view)]
    variants.clear()
    for batch, view in steps:
        found = []
        for way in (run, run.loop):
            taps = Taps(chosen)
            with torch.inference_mode():
                way(batch, view, taps)
            found.append(taps.take())
        assert found[0].keys() == found[1].keys() == set(chosen)
        assert all(close(found[0][layer], found[1][layer]) for layer in chosen)
        assert not close(found[0][0], found[1][3]), "the states of another layer would be the same"
    assert variants == run.programs.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 4])
def test_a_head_reads_what_programs_return(
    k: int, layout: Layout, variants: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    target, path = compiled_target(), write_eagle3(tmp_path, deep_model().config)
    watch = watch_heads(plain("greedy"))
    variants.clear()
    for requests in (requests_of("greedy"), requests_of("greedy")[:1]):
        found = texts_of(write(target, folder_of(path), requests, ask(k)))
        assert found == {key: text for key, text in plain("greedy").items() if key in found}
    assert not wrong_rows(watch, head_of(), whole("greedy"))
    assert (
        target.taps is not None
        and variants == compiling.plan_for(target.dtype, target.device).settings.keys()
    )


def test_a_block_drafter_reads_what_programs_return(variants: set[str], tmp_path: Path) -> None:
    target, path = compiled_target(), write_dflash(tmp_path, deep_model().config)
    watch = watch_blocks(plain("greedy"))
    variants.clear()
    found = texts_of(write(target, folder_of_blocks(path), requests_of("greedy"), ask_for_blocks(4)))
    assert found == plain("greedy") and len(variants) > 1
    assert not wrong_blocks(watch, drafter_of(), whole("greedy"))


def next_layer(logits: Any, *states: Any) -> list[Any]:
    return [logits, *states[1:], states[0]]


def exchanged_rows(logits: Any, *states: Any) -> list[Any]:
    return [logits, *(x.flip(0) for x in states)]


def one_short(logits: Any, *states: Any) -> list[Any]:
    return [logits, *states[:-1]]


@pytest.mark.parametrize("wrong", [next_layer, exchanged_rows, one_short])
def test_a_program_with_wrong_taps_is_not_used(
    wrong: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compiled_layers.Layers.forward

    def planted(self: compiled_layers.Layers, *given: Any) -> list[Any]:
        return wrong(*right(self, *given))

    monkeypatch.setattr(compiled_layers.Layers, "forward", planted)
    target = wrap_model(tiny_model("qwen3"), share=False, compile=True)
    assert target.runner.form != "compiled"
    assert "not compiled: it computes something else" in str(target.runner)


def test_states_are_counted_for_each_row() -> None:
    target, stays = compiled_target(tiny_model("qwen3")), tiny_target("qwen3")
    config = target.model.config
    row = (config.num_hidden_layers + 1) * config.hidden_size * 4
    for rows in (1, 40):
        assert target.needs(rows, 1).bytes_scratch - stays.needs(rows, 1).bytes_scratch == rows * row


def with_draft(path: Path, compile: bool) -> tuple[Engine, DraftModel]:
    """An engine whose draft model comes from a folder."""
    speculation: Any = {"draft": {"draft_model": str(path)}, "policy": "fixed"}
    config = EngineConfig(block_size=4, compile=compile, speculation=speculation)
    engine = Engine(wrap_model(tiny_model("llama"), share=False, compile=compile), None, config)
    drafter = proposer_of(engine, "draft_model")
    assert isinstance(drafter, DraftModel)
    return engine, drafter


def drafts_of(engine: Engine, drafter: DraftModel, requests: Any) -> tuple[Texts, list[tuple[int, ...]]]:
    """What is written, and all drafts on the way."""
    found: list[tuple[int, ...]] = []
    propose = drafter.propose

    def recorded(*given: Any) -> list[Draft]:
        drafts = propose(*given)
        found.extend(draft.tokens for draft in drafts)
        return drafts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafter, "propose", recorded)
        for request in requests:
            speculation = {"method": "draft_model", "num_speculative_tokens": 3}
            engine.add_request(request.prompt, request.params, speculation, request.id)
        return texts_of(drain(engine)), found


@pytest.mark.parametrize("seed", [0, 1])
def test_a_compiled_draft_model_drafts_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of seed 0 it is the target itself, and all drafts are accepted; of seed 1 most are rejected."""
    tiny_model("llama", seed).save_pretrained(tmp_path)
    outputs, used = {}, set[str]()
    for compile in (False, True):
        engine, drafter = with_draft(tmp_path, compile)
        run = drafter.model.runner.run
        assert isinstance(run, compiling.Compiled) == compile
        if isinstance(run, compiling.Compiled):
            for name, program in list(run.programs.items()):
                run.programs[name] = lambda *given, name=name, program=program: (
                    used.add(name),
                    program(*given),
                )[1]
        sets = (requests_of("greedy"), requests_of("greedy")[:1])
        outputs[compile] = [drafts_of(engine, drafter, requests) for requests in sets]
    assert outputs[True] == outputs[False]
    assert all(drafts for _, drafts in outputs[True]) and len(used) > 2, used


def test_the_table_says_which_models_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    table = with_draft(tmp_path, True)[0].capabilities()
    assert table["compiled"].status == table["compiled.draft_model"].status == "on"
    assert table["captured.draft_model"].reason == "only on cuda, and this is cpu"
    table = with_draft(tmp_path, False)[0].capabilities()
    assert table["compiled.draft_model"].reason == "setting compile is off"

    def failing(layers: compiled_layers.Layers, *_: Any) -> Any:
        if len(layers.layers) == 3:
            raise RuntimeError("no room for the draft model")
        return layers

    monkeypatch.setattr(programs, "program", failing)
    table = with_draft(tmp_path, True)[0].capabilities()
    assert table["compiled"].status == "on" and table["compiled.draft_model"].status == "off"
    assert "not compiled: no room for the draft model" in table["compiled.draft_model"].reason
