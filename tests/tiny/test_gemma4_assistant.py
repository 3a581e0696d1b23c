"""Gemma 4's assistants change no token, and their rows are those of transformers, whatever happens to their
pages.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from functools import cache
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.generation import candidate_generator

from speculon.core.config import SamplingParams
from speculon.core.types import Draft
from speculon.runtimes.torch.drafters.families import read_assistant_config
from speculon.runtimes.torch.drafters.gemma4_assistant.network import load_assistant, make_sources
from speculon.runtimes.torch.drafters.gemma4_assistant.proposer import NAME, layers_read
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from speculon.runtimes.torch.kv.store import PageStore, as_index
from tests.builders import make_sequence
from tests.rounding import rounding
from tests.tiny.assistant_forms import (
    FORMS,
    FULL,
    SLIDING,
    Step,
    Texts,
    assistant,
    distance,
    folder_of,
    reference_steps,
    seen,
    stock,
    target_of,
    watch_assistants,
    wrong_rows,
)
from tests.tiny.conftest import VOCAB
from tests.tiny.requests import GREEDY, MODES, OFF, accepted_lengths
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, proposer_of, texts_of

KS = (1, 3, 7)
SETTINGS: dict[str, dict[str, Any]] = {
    "prompts in chunks": {"max_batch_tokens": 7},
    "a page each token": {"block_size": 1},
    "few pages": {"num_blocks": 40, "max_num_seqs": 8},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3},
    "stock layers": {"fuse": False},
}
CHOSEN = list(zip(SETTINGS, cycle(MODES), cycle(KS), strict=False))


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    chance = random.Random(7)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 31, 1, 17, 8, 24)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=30 - 2 * i, seed=50 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, None, f"q{i}"))
    return tuple(requests)


def ask(form: str, k: int = 3) -> dict[str, Any]:
    return {"draft": {NAME: str(folder_of(form))}, "method": NAME, "num_speculative_tokens": k}


def write(
    form: str, requests: tuple[Request, ...], speculation: dict[str, Any], **settings: Any
) -> dict[Key, Result]:
    engine = make_engine(target_of(form), speculation=speculation, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


@cache
def plain(form: str, mode: str, shared: int = 0) -> Texts:
    """What is written for each of the requests without speculation."""
    return texts_of(write(form, requests_of(mode, shared), {"method": "off"}))


def whole(form: str, mode: str, shared: int = 0) -> Texts:
    """Prompt and text of each."""
    texts = plain(form, mode, shared)
    return {(r.id, 0): [*r.prompt, *texts[r.id, 0]] for r in requests_of(mode, shared)}


PROMPTS = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (2, 5, 7, 23, 40)]
DRAFTS = (7, 50, 9, 31)


def own_rows(form: str, moving: int = 0, layers: Mapping[str, int] | None = None) -> list[list[Step]]:
    """What the network computes by itself of each prompt, over pages with the stock model's keys and values;
    pages of a sequence are not consecutive.

    Planted errors: positions that move by so many per draft, and other `layers` of the target.
    """
    target, size = target_of(form), 4
    network = load_assistant(read_assistant_config(folder_of(form)), target)
    store = PageStore(target.layers, 16 * len(PROMPTS), size, "cpu")
    drafts = DraftPages(BlockPool(store.num_blocks, size), store, NAME, len(target.layers))
    seqs, states = [make_sequence(ids) for ids in PROMPTS], []
    for i, (seq, ids) in enumerate(zip(seqs, PROMPTS, strict=True)):
        drafts.of(seq).table = [*range(i, store.num_blocks, len(PROMPTS))]
        reference = seen(form, tuple(ids))
        slots = as_index(store.where_of(drafts.of(seq), len(ids)), store.device)
        for layer, (k, v) in reference.layers.items():
            store.k[layer][slots], store.v[layer][slots] = k[0].transpose(0, 1), v[0].transpose(0, 1)
            store.k[layer][slots[-1]] = torch.nan  # of the last token, which the target has not read
        states.append(reference.states[0, len(ids) - 2])
    ends = [(seq, len(seq.tokens) - 1) for seq in seqs]
    found = layers_read(network.config, target)
    read = {kind: ((layers or {}).get(kind, layer), window) for kind, (layer, window) in found.items()}
    sources = make_sources(read, drafts, ends)
    positions, last = torch.tensor([n for _, n in ends]), torch.stack(states)
    rows: list[list[Step]] = [[] for _ in seqs]
    for before in (None, *DRAFTS[:-1]):
        tokens = torch.tensor([ids[-1] if before is None else before for ids in PROMPTS])
        after = network(stock(form).get_input_embeddings()(tokens), last, positions, sources)
        last, positions = network.post_projection(after), positions + moving
        for row, *step in zip(rows, network.logits(after, VOCAB), last, strict=True):
            row.append(Step(*step))
    return rows


def largest_distance(form: str, rows: list[list[Step]]) -> float:
    """Of all rows to those of transformers."""
    pairs = [
        pair
        for ids, own in zip(PROMPTS, rows, strict=True)
        for pair in zip(own, reference_steps(form, ids, len(ids), DRAFTS), strict=True)
    ]
    return max(max(distance(a.logits, b.logits), distance(a.state, b.state)) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(form: str) -> None:
    """From equal keys and values, in a batch, within the window and beyond it; each draft reads the state of
    the one before.
    """
    layers = len(DRAFTS) * read_assistant_config(folder_of(form)).layers
    assert largest_distance(form, own_rows(form)) < rounding(layers)


PLANTED: dict[str, dict[str, Any]] = {
    "a position that moves": {"moving": 1},
    "another sliding layer": {"layers": {SLIDING: 2}},
    "another full layer": {"layers": {FULL: 3}},
}


@pytest.mark.parametrize("form", ["large", "unified"])
@pytest.mark.parametrize("error", PLANTED)
@torch.inference_mode()
def test_a_planted_error_is_found(error: str, form: str) -> None:
    assert largest_distance(form, own_rows(form, **PLANTED[error])) > 1e-3


@pytest.mark.parametrize(("form", "k"), [("small", 1), ("unified", 3), ("experts", 7)])
def test_drafts_change_no_token(form: str, k: int) -> None:
    watch = watch_assistants(plain(form, "greedy"))
    results = write(form, requests_of("greedy"), ask(form, k))
    assert texts_of(results) == plain(form, "greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_rows(form, watch, whole(form, "greedy"))
    assert max(one.length for one in watch) > 40 and len(watch) > 20


def check_setting(setting: str, form: str, mode: str, k: int) -> None:
    watch = watch_assistants(plain(form, mode, 9))
    results = write(form, requests_of(mode, 9), ask(form, k), **SETTINGS[setting])
    assert texts_of(results) == plain(form, mode, 9)
    if setting == "few pages":
        assert any(result.stats.preemptions for result in results.values())
    assert not wrong_rows(form, watch, whole(form, mode, 9))


@pytest.mark.parametrize(("setting", "mode", "k"), CHOSEN)
def test_no_setting_changes_a_token_or_a_row(setting: str, mode: str, k: int) -> None:
    check_setting(setting, "small", mode, k)


def test_a_prefix_hit_loses_no_row() -> None:
    """Pages of a request that did not draft hold the states that a later one reads."""
    first, params = list(range(3, 60)), SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY)
    watch = watch_assistants()
    engine = make_engine(target_of("small"), speculation=ask("small"))
    for name, speculation in (("first", OFF), ("second", None)):
        engine.add_request([*first, 7], params, speculation, name)
        results = drain(engine)
    assert results["second", 0].stats.cached_tokens == 56
    assert watch[0].key == ("second", 0) and watch[0].length == 59
    assert not wrong_rows("small", watch, {("second", 0): [*first, 7, *results["second", 0].tokens]})


def test_it_reads_no_prompt() -> None:
    """The first call of a sequence has one row for each draft, however long the prompt is."""
    watch = watch_assistants()
    request = Request(PROMPTS[-1], SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY))
    write("large", (request,), ask("large"))
    assert watch[0].length == len(PROMPTS[-1]) + 1 and len(watch[0].steps) == 3


@pytest.mark.parametrize("acceptance", ["matching", "block"])
def test_drafts_carry_their_distribution_where_it_is_used(acceptance: str) -> None:
    watch = watch_assistants()
    params, all_drafts = (
        SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1),
        list[Draft](),
    )
    engine = make_engine(target_of("small"), speculation=ask("small") | {"acceptance": acceptance})
    propose = proposer_of(engine, NAME).propose

    def recorded(*arguments: Any) -> list[Draft]:
        drafts = propose(*arguments)
        all_drafts.extend(drafts)
        return drafts

    proposer_of(engine, NAME).propose = recorded
    engine.add_request([5, 6, 7], params)
    drain(engine)
    drafts = [draft for draft in all_drafts if draft.tokens]
    assert all((draft.probs is not None) == (acceptance != "matching") for draft in drafts) and drafts
    for one, draft in zip(watch, drafts, strict=False):
        if draft.probs is not None:
            logits = torch.stack([step.logits for step in one.steps])
            assert torch.allclose(draft.probs, logits.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("form", ["small", "multimodal"])
def test_drafts_are_those_of_transformers_assisted_generation(form: str) -> None:
    """Its first round after each prompt, as `generate` itself makes it: later ones may read a rejected
    draft's keys. A target without shared layers gives its assistant none in transformers 5.23.
    """
    watch, theirs = watch_assistants(), []
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    candidates = generator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            theirs.append((input_ids[0].tolist(), ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    helper = copy.deepcopy(assistant(form))
    helper.generation_config.num_assistant_tokens = 5
    for i, prompt in enumerate(PROMPTS[1::2]):
        request = Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True, **GREEDY), id=f"q{i}")
        ours = texts_of(write(form, (request,), ask(form, 5)))[request.id, 0]
        with patch.object(generator, "get_candidates", recorded):
            rest = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
            ids = stock(form).generate(torch.tensor([prompt]), assistant_model=helper, **rest)
        assert ids[0, len(prompt) :].tolist() == ours
        before, drafts = next(pair for pair in theirs if pair[0][: len(prompt)] == prompt)
        assert before == [*prompt, ours[0]]
        assert next(one.drafts for one in watch if one.key == (request.id, 0)) == tuple(drafts)
