"""The rows of EAGLE-3 heads of every format are those of the formula, whatever happens to their pages."""

from __future__ import annotations

import random
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM
from speculon.core.config import SamplingParams
from speculon.core.types import Draft, Reason
from speculon.runtimes.torch.drafters import layers as drafter_layers
from speculon.runtimes.torch.drafters.eagle3 import network as eagle3
from speculon.runtimes.torch.drafters.eagle3.network import Eagle3Network, FirstLayer
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from tests.tiny.eagle_reference import reference_path
from tests.tiny.heads import (
    CONTEXT,
    FORMATS,
    LLAMA3,
    TAPLESS,
    Texts,
    Watch,
    deep_model,
    deep_target,
    folder_of,
    head_of,
    true_taps,
    watch_heads,
    write_eagle3,
    wrong_rows,
)
from tests.tiny.requests import GREEDY, MODES, OFF, accepted_lengths
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, proposer_of, texts_of

KS = (1, 3, 7)
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "reduced vocabulary": {"draft_vocab": 40},
    "norm before residual": {"norm_before_residual": True, "norm_before_fc": True},
    "newest": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "draft_vocab": 64},
    "two layers": {"layers": 2, "windows": (None, 6)},
    "two layers, old names": {"layers": 2, "later_norm": "hidden_norm"},
    "window": {"windows": 5},
    "another width": {"hidden": 48, "heads": 6, "kv_heads": 3},
    "shared": {"lm_head": False},
    "own embedding": {"own_embed": True},
    "biases": {"attention_bias": True, "fc_bias": True},
    "normed heads": {"qk_norm": True},
    "scaled": {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "logit_scale": 0.5},
    "other taps": {"taps": (-1, 2, 5, 6)[:3]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "prompts in chunks": {"max_batch_tokens": 7},
    "a page each token": {"block_size": 1},
    "few pages": {"num_blocks": 40, "max_num_seqs": 8},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3},
    "stock layers": {"fuse": False},
}
CHOSEN = list(zip(SETTINGS, cycle(KS), strict=False))
CHOSEN_FORMATS = list(zip(FORMATS, cycle(KS), strict=False))


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    chance = random.Random(7)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 31, 1, 17, 8, 24)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=33 - 2 * i, seed=50 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, OFF, f"q{i}"))
    return tuple(requests)


def write(
    requests: tuple[Request, ...],
    speculation: dict[str, Any],
    request_speculation: dict[str, Any],
    device: str = "cpu",
    **settings: Any,
) -> dict[Key, Result]:
    engine = make_engine(deep_target(device), speculation=speculation, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, request_speculation, request.id)
    return drain(engine)


@cache
def plain(mode: str, shared: int = 0) -> Texts:
    """What is written for each of the requests without speculation."""
    return texts_of(write(requests_of(mode, shared), {}, OFF))


def whole(mode: str, shared: int = 0) -> Texts:
    """Prompt and text of each."""
    return {(r.id, 0): [*r.prompt, *plain(mode, shared)[r.id, 0]] for r in requests_of(mode, shared)}


def ask(k: int) -> dict[str, Any]:
    return {"method": "eagle3", "num_speculative_tokens": k}


@pytest.mark.parametrize(("format", "k"), CHOSEN_FORMATS)
def test_every_format_gives_the_rows_of_the_formula(format: str, k: int, tmp_path: Path) -> None:
    taps = None if format in TAPLESS else (1, 3, 4)
    head = write_eagle3(tmp_path, deep_model().config, format, taps=taps)
    watch = watch_heads(plain("greedy"))
    results = write(requests_of("greedy"), folder_of(head), ask(k))
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_rows(watch, head_of(taps=taps), whole("greedy"))
    assert len(watch.rows) > 20


def test_beyond_its_context_rounds_are_plain(tmp_path: Path) -> None:
    """The context is that of the head's config, or of `options`."""
    head = write_eagle3(tmp_path, deep_model().config, "safeailab", config={"max_position_embeddings": 30})
    requests = requests_of("greedy")[:3]
    for options, limit in (({}, 30), ({"max_context": 44}, 44), ({"max_context": 1000}, None)):
        watch = watch_heads(plain("greedy"))
        results = write(requests, {**folder_of(head), "options": options}, ask(7))
        assert texts_of(results) == {key: plain("greedy")[key] for key in results}
        assert any(r.stats.reasons[Reason.CONTEXT_LIMIT] for r in results.values()) == (limit is not None)
        assert limit is None or max(one.length + len(one.drafts) for one in watch.rounds) == limit


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config, **VARIANTS[variant])
    watch = watch_heads(plain("greedy"))
    results = write(requests_of("greedy")[:4], folder_of(head), ask(4))
    assert texts_of(results) == {key: plain("greedy")[key] for key in results}
    assert not wrong_rows(watch, head_of(**VARIANTS[variant]), whole("greedy"))


@pytest.mark.parametrize(("setting", "k"), CHOSEN)
def test_no_setting_changes_a_row(setting: str, k: int, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config, draft_vocab=64)
    watch = watch_heads(plain("greedy", 9))
    results = write(requests_of("greedy", 9), folder_of(head), ask(k), **SETTINGS[setting])
    assert texts_of(results) == plain("greedy", 9)
    if setting == "few pages":
        assert any(result.stats.preemptions for result in results.values())
    assert not wrong_rows(watch, head_of(draft_vocab=64), whole("greedy", 9))


@pytest.mark.parametrize("policy", ["solo", "shadow"])
def test_switched_off_and_on_it_continues_where_it_was(policy: str, tmp_path: Path) -> None:
    """Under `solo` the long sequence has drafts while it is alone, none in a batch, and drafts again."""
    head = write_eagle3(tmp_path, deep_model().config)
    long = Request(
        requests_of("greedy")[1].prompt,
        SamplingParams(max_tokens=70, ignore_eos=True, **GREEDY),
        OFF,
        "long",
    )
    alone = texts_of(write((long,), {}, OFF))
    watch = watch_heads({**plain("greedy"), **alone})
    engine = make_engine(deep_target(), speculation=folder_of(head))
    speculation = {**ask(3), "policy": policy}
    engine.add_request(long.prompt, long.params, speculation, long.id)
    events = []
    for step in range(400):
        if step in (4, 24):
            for request in requests_of("greedy")[:2]:
                engine.add_request(request.prompt, request.params, speculation, f"{request.id}{step}")
                watch_key = (f"{request.id}{step}", 0)
                proposer_of(engine, "eagle3").truth[watch_key] = plain("greedy")[request.id, 0]
        events += engine.step()
        if not engine.has_work:
            break
    tokens = [token for event in events if event.request_id == "long" for token in event.tokens]
    assert tokens == alone["long", 0]
    assert not wrong_rows(watch, head_of(), {("long", 0): [*long.prompt, *tokens]})
    if policy == "solo":
        starts = [rows.start for rows in watch.rows if rows.key == ("long", 0)]
        sizes = [len(rows.states) for rows in watch.rows if rows.key == ("long", 0)]
        assert max(sizes[1:]) > 8, f"drafting never paused: {sizes}"
        assert starts == sorted(starts)


@pytest.mark.parametrize("sampling", ["matching", "rejection"])
def test_drafts_of_a_reduced_vocabulary_carry_a_whole_distribution(sampling: str, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config, draft_vocab=40)
    engine = make_engine(deep_target(), speculation=folder_of(head))
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=1)
    seen = []
    drafter: Any = proposer_of(engine, "eagle3")
    propose = drafter.propose

    def note(*args: Any) -> Any:
        drafts = propose(*args)
        seen.extend(draft.probs for draft in drafts)
        return drafts

    drafter.propose = note
    engine.add_request([5, 6, 7], params, {**ask(4), "acceptance": sampling}, "r")
    drain(engine)
    tensors = head_of(draft_vocab=40).tensors
    inside = torch.arange(40) + tensors["d2t"]
    if sampling == "matching":
        assert set(seen) == {None}
    for probs in seen if sampling != "matching" else ():
        torch.testing.assert_close(probs[:, inside].sum(-1), torch.ones(len(probs)))
        assert probs.shape[1] == 96


def test_nodes_of_trees_are_those_of_the_formula(tmp_path: Path) -> None:
    """The share that the head gives each node is its probability after the drafts on its path."""
    certain = {"logit_scale": 4.0}  # of a head in doubt all nodes would follow the same token
    head, model = head_of(**certain), deep_model()
    folder = folder_of(write_eagle3(tmp_path, model.config, **certain))
    engine = make_engine(deep_target(), speculation=folder)
    drafter: Any = proposer_of(engine, "eagle3")
    propose, trees = drafter.propose_trees, dict[tuple[int, ...], Draft]()

    def note(seqs: Any, *args: Any) -> Any:
        drafts = propose(seqs, *args)
        trees.update(zip((tuple(seq.tokens) for seq in seqs), drafts, strict=True))
        return drafts

    drafter.propose_trees = note
    params = SamplingParams(max_tokens=6, ignore_eos=True, **GREEDY)
    for request in requests_of("greedy")[:2]:
        engine.add_request(request.prompt, params, {**ask(6), "draft_depth": 3}, request.id)
    drain(engine)
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    depths = set()
    for tokens, draft in trees.items():
        ids = [*tokens]
        taps = true_taps(ids, head.taps)[:-1]
        for (*path, token), share in zip(draft.prefixes[1:], draft.confidence or (), strict=True):
            with torch.inference_mode():
                logits = reference_path(head.tensors, head, ids, taps, tuple(path), *shared)
            assert share == pytest.approx(float(logits.softmax(-1)[token]), rel=1e-3), (ids, path, token)
            depths.add(len(path))
    assert depths == {0, 1, 2}


def test_a_prefix_hit_loses_no_block_and_no_draft(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config)
    chance = random.Random(3)
    prefix = [chance.randrange(3, 96) for _ in range(128)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY)
    texts, drafts, reads = [], [], []
    for cache_it in (True, False):
        watch = watch_heads()
        engine = make_engine(deep_target(), speculation=folder_of(head), block_size=16, prefix_cache=cache_it)
        for name, tail in (("first", [7, 8, 9]), ("second", [11, 12])):
            engine.add_request([*prefix, *tail], params, ask(5), name)
            results = drain(engine)
        texts.append(results["second", 0].tokens)
        assert results["second", 0].stats.cached_tokens == (128 if cache_it else 0)
        drafts.append([made.drafts for made in watch.rounds if made.key[0] == "second"])
        reads.append(sum(len(rows.states) for rows in watch.rows if rows.key[0] == "second"))
    assert texts[0] == texts[1]
    assert drafts[0] == drafts[1]
    assert reads[0] == reads[1] - 127


def test_a_prefix_whose_writer_did_not_draft_is_read_from_its_states(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config)
    watch = watch_heads()
    engine = make_engine(deep_target(), speculation=folder_of(head))
    first, params = list(range(3, 60)), SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY)
    engine.add_request(first, params, OFF, "plain")
    drain(engine)
    engine.add_request(first, params, ask(3), "drafted")
    results = drain(engine)
    assert results["drafted", 0].stats.cached_tokens == 56
    assert not wrong_rows(watch, head_of(), {("drafted", 0): [*first, *results["drafted", 0].tokens]})


@pytest.mark.parametrize("better", [0, 1], ids=["outputs", "inputs"])
def test_taps_that_can_be_read_in_two_ways_are_tried_in_both(
    better: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tap_layouts = (0, 2, 3), (-1, 1, 2)
    head = write_eagle3(tmp_path, deep_model().config, "specforge", taps=tap_layouts[0])
    agreement = eagle3.agreement

    def favour(*args: Any) -> float:
        assert 0 <= agreement(*args) <= 1
        return float(args[3] == tap_layouts[better])

    monkeypatch.setattr("speculon.runtimes.torch.drafters.eagle3.proposer.agreement", favour)
    with caplog.at_level("INFO", "speculon"):
        watch = watch_heads(plain("greedy"))
        results = write(requests_of("greedy"), folder_of(head), ask(3))
    assert texts_of(results) == plain("greedy")
    assert f"used: {list(tap_layouts[better])}" in caplog.text
    assert bool(wrong_rows(watch, head_of(taps=tap_layouts[0]), whole("greedy"))) == bool(better)


def test_a_wrong_config_can_be_set_right(tmp_path: Path) -> None:
    true, wrong = (
        {"taps": (0, 2, 3), "norm_before_residual": True},
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    )
    head = write_eagle3(
        tmp_path, deep_model().config, config={**wrong, "norm_before_residual": False}, **true
    )
    for options, right in (({}, False), ({"taps": [0, 2, 3], "norm_before_residual": True}, True)):
        watch = watch_heads(plain("greedy"))
        results = write(requests_of("greedy"), {**folder_of(head), "options": options}, ask(3))
        assert texts_of(results) == plain("greedy")
        assert bool(wrong_rows(watch, head_of(**true), whole("greedy"))) != right


# planted errors: each must show in the rows or in the drafts


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "speculon.runtimes.torch.drafters.eagle3.config.Eagle3Config.tap_layouts",
        lambda self, num_layers: ((2, 3, 4),),
    )


def swapped(patch: pytest.MonkeyPatch) -> None:
    cat = torch.cat

    def begin(self: FirstLayer, x: Tensor, tables: Any) -> Any:
        embedded, state = x.chunk(2, -1)
        return self.rotated(cat([self.hidden_norm(state), self.input_layernorm(embedded)], -1), tables)

    patch.setattr(FirstLayer, "begin", begin)


def fed_back_normed(patch: pytest.MonkeyPatch) -> None:
    forward = Eagle3Network.forward
    patch.setattr(Eagle3Network, "forward", lambda self, *args: self.norm(forward(self, *args)))


def inherited_theta(patch: pytest.MonkeyPatch) -> None:
    rope_config = drafter_layers.rope_config

    def inherit(config: Any) -> Any:
        made = rope_config(config)
        made.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
        return made

    patch.setattr(drafter_layers, "rope_config", inherit)


def absolute_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafter_layers, "target_ids", lambda path, vocab, offsets, device: offsets)


def pushed_aside(patch: pytest.MonkeyPatch) -> None:
    """Row i pairs g_i with x_i."""
    patch.setattr("speculon.runtimes.torch.kv.draft_pages.DraftPages.taps", shifted(patch))


def shifted(patch: pytest.MonkeyPatch) -> Any:
    taps = DraftPages.taps
    return lambda self, ranges: taps(
        self, [(seq, max(0, start - 1), max(0, start - 1) + end - start) for seq, start, end in ranges]
    )


PLANTED = [off_by_one, swapped, fed_back_normed, inherited_theta, absolute_ids, pushed_aside]


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_errors_show(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = write_eagle3(tmp_path, deep_model().config, draft_vocab=40)
    plant(monkeypatch)
    watch: Watch = watch_heads(plain("greedy"))
    results = write(requests_of("greedy"), folder_of(head), ask(3))
    assert texts_of(results) == plain("greedy"), "the text is the target's, however wrong the head"
    assert wrong_rows(watch, head_of(draft_vocab=40), whole("greedy"))


def test_the_context_of_the_test_is_long_enough() -> None:
    assert deep_target().max_context == CONTEXT


def test_a_prompt_of_one_token_beside_trees_is_not_ready() -> None:
    """There is no state before it; the others of its call have their trees."""
    llm = LLM("demo", speculation={"draft": "demo-eagle3"}, warmup=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5], llm.tokenizer.encode("def mean(values):")]
    tree = {"policy": "fixed", "num_speculative_tokens": 5, "draft_depth": 2}
    plain = llm.generate(prompts, params, speculation={"method": "off"})
    outs = llm.generate(prompts, params, speculation={"method": "eagle3", **tree})
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert outs[0].reasons.get("not_ready") == 1 and not any("error" in out.reasons for out in outs)
