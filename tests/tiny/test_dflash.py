"""The blocks of DFlash and DSpark drafters of every format are those of the formula, whatever happens to
their pages.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon.core.config import SamplingParams
from speculon.runtimes.torch.drafters.dflash import network as dflash
from speculon.runtimes.torch.drafters.dflash.network import RecurrentMarkovHead
from speculon.runtimes.torch.loading.load import wrap_model
from tests.builders import spread
from tests.formats.writer import make_checkpoint
from tests.tiny.blocks import (
    FORMATS,
    Watch,
    ask,
    drafter_of,
    folder_of,
    watch_blocks,
    write_dflash,
    wrong_blocks,
)
from tests.tiny.conftest import build
from tests.tiny.heads import DEPTH, deep_model, deep_target
from tests.tiny.requests import GREEDY, MODES, OFF, accepted_lengths
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, proposer_of, texts_of
from tests.tiny.test_eagle3 import SETTINGS, plain, requests_of, shifted, whole, write

KS, FEW = (1, 3, 7), 4  # of the requests
MARKOV = (None, "vanilla", "gated", "rnn")
CHOSEN = spread([False, True], MARKOV, KS[1:])
SPARK: dict[str, Any] = {"format": "speculators", "from_anchor": True, "windows": (9, None), "markov": "rnn"}
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer, one tap": {"layers": 1, "taps": (3,)},
    "taps in another order": {"taps": (4, -1, 2)},
    "another width": {"hidden": 48, "heads": 6, "kv_heads": 3},
    "own head": {"own_head": True},
    "biases, heads without norms": {"bias": True, "qk_norm": False, "rope_theta": 1e6},
    "window": {"windows": (5, None)},
    "window without causality": {"windows": (11, None), "causal": False},
    "window shorter than the block": {"windows": (3, 3), "causal": False},
    "causal": {"causal": True},
    "speculators, window": {"format": "speculators", "windows": (5, 5)},
    "speculators, window without causality": {"format": "speculators", "windows": (3, 3), "causal": False},
    "reduced vocabulary": {"format": "speculators", "draft_vocab": 40, "markov": "gated"},
    "confidence": {"format": "deepspec", "confidence": "h"},
    "confidence with Markov": {"format": "specforge", "markov": "vanilla", "confidence": "h and e"},
    "convolutions and a selector": {"format": "dflash2"},
}


def drafted_with(
    folder: Path, k: int, mode: str = "greedy", shared: int = 0, settings: Any = (), **variant: Any
) -> tuple[dict[Key, Result], Watch]:
    """What the requests of a mode give with such a drafter, and the blocks that it computed."""
    path = write_dflash(folder, deep_model().config, **variant)
    watch = watch_blocks(plain(mode, shared))
    return write(requests_of(mode, shared), folder_of(path), ask(k), **dict(settings)), watch


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_changes_no_token(format: str, tmp_path: Path) -> None:
    results, watch = drafted_with(tmp_path, 7, format=format)
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(8))
    assert not wrong_blocks(watch, drafter_of(format), whole("greedy"))
    assert len(watch.rounds) > 20


@pytest.mark.parametrize(("from_anchor", "markov", "k"), CHOSEN)
def test_both_layouts_draft_with_every_head(
    from_anchor: bool, markov: str | None, k: int, tmp_path: Path
) -> None:
    variant: dict[str, Any] = {"format": "speculators", "from_anchor": from_anchor, "markov": markov}
    results, watch = drafted_with(tmp_path, k, **variant)
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_blocks(watch, drafter_of(**variant), whole("greedy"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, **VARIANTS[variant])
    watch = watch_blocks(plain("greedy"))
    results = write(requests_of("greedy")[:FEW], folder_of(path), ask(4))
    assert texts_of(results) == {key: plain("greedy")[key] for key in results}
    assert not wrong_blocks(watch, drafter_of(**VARIANTS[variant]), whole("greedy"))


@pytest.mark.parametrize(("setting", "mode"), list(zip(SETTINGS, cycle(MODES), strict=False)))
def test_no_setting_changes_a_block(setting: str, mode: str, tmp_path: Path) -> None:
    results, watch = drafted_with(tmp_path, 5, mode, 9, SETTINGS[setting], **SPARK)
    assert texts_of(results) == plain(mode, 9)
    if setting == "few pages":
        assert any(result.stats.preemptions for result in results.values())
    assert not wrong_blocks(watch, drafter_of(**SPARK), whole(mode, 9), greedy=mode == "greedy")


@pytest.mark.parametrize(
    ("markov", "number", "acceptance"),
    [
        pytest.param("rnn", 1, "rejection", id="with a Markov head"),
        pytest.param(None, 1, "block", id="penalties"),
        pytest.param(None, 4, "rejection", id="all rows at once"),
        pytest.param("rnn", 1, "matching", id="without q"),
    ],
)
def test_drafts_are_drawn_with_the_noise_of_the_target(
    markov: str | None, number: int, acceptance: str, tmp_path: Path
) -> None:
    """Each draft is what the target's noise picks of the formula's logits; q is what it was picked from."""
    variant = {"format": "speculators", "draft_vocab": 40, "markov": markov, "from_anchor": True}
    path = write_dflash(tmp_path, deep_model().config, **variant)
    watch = watch_blocks()
    request = replace(requests_of("sampled")[number], speculation={**ask(6), "acceptance": acceptance})
    engine = make_engine(deep_target(), speculation=folder_of(path))
    seqs = engine.admission.admit(request.id, request.prompt, request.params, request.speculation)
    engine.add_request(request.prompt, request.params, request.speculation, request.id)
    text, prompt_len = [*request.prompt, *drain(engine)[request.id, 0].tokens], len(request.prompt)
    if acceptance == "matching":
        assert texts_of(write((requests_of("sampled")[number],), {}, OFF))[request.id, 0] == text[prompt_len:]
        assert {made.draft.probs for made in watch.rounds} == {None}
    assert not wrong_blocks(watch, drafter_of(**variant), {(request.id, 0): text}, seq=seqs[0])
    assert len(watch.rounds) > 5


def test_switched_off_and_on_it_continues_where_it_was(tmp_path: Path) -> None:
    """Under `solo` the long sequence has drafts while it is alone, none in a batch, and drafts again."""
    path = write_dflash(tmp_path, deep_model().config, **SPARK)
    prompt = requests_of("greedy")[1].prompt
    long = Request(prompt, SamplingParams(max_tokens=60, ignore_eos=True, **GREEDY), OFF, "long")
    alone = texts_of(write((long,), {}, OFF))
    watch = watch_blocks(alone)
    engine = make_engine(deep_target(), speculation=folder_of(path))
    engine.add_request(prompt, long.params, {**ask(3), "policy": "solo"}, "long")
    tokens: list[int] = []
    for step in range(200):
        if step == 4:
            short = SamplingParams(max_tokens=9, ignore_eos=True, **GREEDY)
            engine.add_request([5, 6, 7], short, OFF, "other")
        tokens += [t for event in engine.step() if event.request_id == "long" for t in event.tokens]
        if not engine.has_work:
            break
    assert tokens == alone["long", 0]
    assert not wrong_blocks(watch, drafter_of(**SPARK), {("long", 0): [*prompt, *tokens]})
    lengths = [made.length for made in watch.rounds]
    assert max(b - a for a, b in zip(lengths, lengths[1:], strict=False)) > 5, "drafting never paused"


def test_a_prefix_hit_loses_no_draft_and_no_row(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, **SPARK)
    chance = random.Random(3)
    prefix = [chance.randrange(3, 96) for _ in range(128)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY)
    drafts, reads = [], []
    for cache_it in (True, False):
        watch = watch_blocks()
        engine = make_engine(deep_target(), speculation=folder_of(path), block_size=16, prefix_cache=cache_it)
        for name, tail in (("first", [7, 8, 9]), ("second", [11, 12])):
            watch.read = 0
            engine.add_request([*prefix, *tail], params, ask(5), name)
            results = drain(engine)
        assert results["second", 0].stats.cached_tokens == (128 if cache_it else 0)
        drafts.append([made.draft.tokens for made in watch.rounds if made.key[0] == "second"])
        reads.append(watch.read)
    assert drafts[0] == drafts[1]
    assert reads[0] == reads[1] - 128


def test_a_prefix_whose_writer_did_not_draft_is_read_from_its_states(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, **SPARK)
    watch = watch_blocks()
    engine = make_engine(deep_target(), speculation=folder_of(path))
    first, params = list(range(3, 60)), SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY)
    engine.add_request(first, params, OFF, "plain")
    drain(engine)
    engine.add_request(first, params, ask(3), "drafted")
    results = drain(engine)
    assert results["drafted", 0].stats.cached_tokens == 56
    text = [*first, *results["drafted", 0].tokens]
    assert not wrong_blocks(watch, drafter_of(**SPARK), {("drafted", 0): text})


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
def test_pages_before_all_windows_are_released(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a target whose layers all have windows; no row of a block looks for what is gone."""
    model = build("mistral", num_hidden_layers=DEPTH, sliding_window=5, max_position_embeddings=512)
    shown = copy.deepcopy(model)
    monkeypatch.setattr("tests.tiny.blocks.deep_model", lambda: model)
    monkeypatch.setattr("tests.tiny.heads.observed", lambda: shown)
    target = wrap_model(model, name="windows", share=False)
    variant: dict[str, Any] = {"format": format, "windows": (6, 6), "markov": "vanilla"}
    path = write_dflash(tmp_path, model.config, **variant)
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=160, ignore_eos=True, **GREEDY)
    few, texts = {"num_blocks": 30, "max_batch_tokens": 8, "max_num_seqs": 2}, list[list[int]]()
    for speculation in (OFF, ask(5)):
        watch = watch_blocks({("r", 0): texts[0]} if texts else None)
        engine = make_engine(target, speculation=folder_of(path), **few)
        engine.add_request(prompt, params, speculation, "r")
        texts.append(drain(engine)["r", 0].tokens)
    assert texts[0] == texts[1]
    assert max(made.length for made in watch.rounds) > 30 * 4, "more than all pages hold"
    drafter = make_checkpoint(f"dflash/{variant.pop('format')}", model.config, **variant)
    assert not wrong_blocks(watch, drafter, {("r", 0): [*prompt, *texts[0]]})


def test_no_row_of_a_block_enters_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of drafted positions keep what they had."""
    path = write_dflash(tmp_path, deep_model().config)
    watch_blocks(plain("greedy"))
    request = requests_of("greedy")[1]
    engine = make_engine(deep_target(), speculation=folder_of(path))
    drafter: Any = proposer_of(engine, "dflash")
    blocks, changed = drafter._blocks, []

    def compare(seqs: Any, ks: Any) -> Any:
        pools = [*drafter.pages.store.k, *drafter.pages.store.v]
        before = [pool.clone() for pool in pools]
        states = blocks(seqs, ks)
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, pools, strict=True)))
        return states

    monkeypatch.setattr(drafter, "_blocks", compare)
    engine.add_request(request.prompt, request.params, ask(5), request.id)
    drain(engine)
    assert len(changed) > 5 and not any(changed)


def test_the_limit_of_the_block_is_that_of_the_request(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, block_size=5)
    watch = watch_blocks()
    engine = make_engine(deep_target(), speculation=folder_of(path))
    request = requests_of("greedy")[1]
    [seq] = engine.admission.admit("r", request.prompt, request.params, ask(16))
    assert seq.request.max_drafts == {"dflash": 4}
    engine.add_request(request.prompt, request.params, ask(16), request.id)
    assert drain(engine)[request.id, 0].tokens == plain("greedy")[request.id, 0]
    assert max(len(made.draft.tokens) for made in watch.rounds) == 4


def test_beyond_its_context_there_is_no_draft(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, config={"max_position_embeddings": 50})
    watch = watch_blocks(plain("greedy"))
    request = requests_of("greedy")[1]
    results = write((request,), folder_of(path), ask(5))
    assert texts_of(results) == {(request.id, 0): plain("greedy")[request.id, 0]}
    assert max(made.length - 1 + len(made.states) for made in watch.rounds) == 49
    assert results[request.id, 0].stats.reasons["context_limit"] > 5


@pytest.mark.parametrize(("markov", "reads"), [("vanilla", "h and e"), ("rnn", "h"), (None, "h")])
def test_a_draft_ends_below_the_confidence_that_is_asked_for(
    markov: str | None, reads: str, tmp_path: Path
) -> None:
    variant = {"format": "specforge", "markov": markov, "confidence": reads}
    path = write_dflash(tmp_path, deep_model().config, **variant)
    watch = watch_blocks()
    speculation = {**folder_of(path), "draft_min_confidence": 0.5}
    assert texts_of(write(requests_of("greedy"), speculation, ask(6))) == plain("greedy")
    assert not wrong_blocks(watch, drafter_of(**variant), whole("greedy"))
    chances = [made.draft.confidence or () for made in watch.rounds]
    assert all(chance >= 0.5 for each in chances for chance in each[:-1])
    assert {each[-1] < 0.5 for each in chances} == {True, False}


# planted errors: each must show in the blocks or in the drafts


def layout_a_as_b(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("speculon.runtimes.torch.drafters.dflash.config.samples_from_anchor", lambda source: True)


def causal_block(patch: pytest.MonkeyPatch) -> None:
    layer_sight = dflash.layer_sight
    patch.setattr(dflash, "layer_sight", lambda *args: replace(layer_sight(*args), causal=True))


def window_by_row(patch: pytest.MonkeyPatch) -> None:
    layer_sight = dflash.layer_sight
    patch.setattr(dflash, "layer_sight", lambda *args: replace(layer_sight(*args), anchored=False))


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    config = "speculon.runtimes.torch.drafters.dflash.config.DFlashConfig"
    patch.setattr(f"{config}.tap_layouts", lambda self, layers: ((2, 4, 5),))


def pushed_aside(patch: pytest.MonkeyPatch) -> None:
    """Position j has the states of j - 1."""
    patch.setattr("speculon.runtimes.torch.kv.draft_pages.DraftPages.taps", shifted(patch))


def masks_at_the_anchor(patch: pytest.MonkeyPatch) -> None:
    """Each block is a position late."""
    network = dflash.DFlashNetwork
    forward = network.forward
    patch.setattr(network, "forward", lambda self, ids, at, *more: forward(self, ids, at + 1, *more))


def unnormed_context(patch: pytest.MonkeyPatch) -> None:
    load = dflash.load_dflash

    def without(*args: Any) -> Any:
        model = load(*args)
        model.hidden_norm = lambda x: x
        return model

    patch.setattr("speculon.runtimes.torch.drafters.dflash.proposer.load_dflash", without)


def forgotten_state(patch: pytest.MonkeyPatch) -> None:
    step = RecurrentMarkovHead.step
    patch.setattr(RecurrentMarkovHead, "step", lambda self, e, h, state: step(self, e, h, 0 * state))


def anchor_forever(patch: pytest.MonkeyPatch) -> None:
    """Each row of the Markov head reads the first row's token."""
    logits = dflash.Drawing.logits

    def stuck(self: Any, which: list[int], row: int, previous: list[int]) -> Any:
        self.first = getattr(self, "first", None) or dict(zip(which, previous, strict=True))
        return logits(self, which, row, [self.first[i] for i in which])

    patch.setattr(dflash, "Drawing", type("Drawing", (dflash.Drawing,), {"logits": stuck}))
    patch.setattr("speculon.runtimes.torch.drafters.dflash.proposer.Drawing", dflash.Drawing)


PLANTED = [
    layout_a_as_b,
    causal_block,
    window_by_row,
    off_by_one,
    pushed_aside,
    masks_at_the_anchor,
    unnormed_context,
    forgotten_state,
    anchor_forever,
]


@pytest.mark.parametrize("plant", [None, *PLANTED])
def test_planted_errors_show(
    plant: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = {**SPARK, "from_anchor": False, "causal": False}
    if plant is not None:
        plant(monkeypatch)
    path = write_dflash(tmp_path, deep_model().config, **variant)
    watch = watch_blocks(plain("greedy"))
    results = write(requests_of("greedy")[:FEW], folder_of(path), ask(4))
    truth = {key: plain("greedy")[key] for key in results}
    assert texts_of(results) == truth, "the text is the target's, however wrong the drafter"
    assert bool(wrong_blocks(watch, drafter_of(**variant), whole("greedy"))) == (plant is not None)
