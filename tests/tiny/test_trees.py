"""Drafts that are trees change no token: any shape, any method, alone or batched, preempted, in windows."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, product

import pytest

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.errors import InvalidParameter
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv import store as store_module
from speculon.runtimes.torch.kv.store import PageStore
from speculon.speculation.proposers.registry import register
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.recurrent import recurrent_target
from tests.tiny.requests import MODES, SETTINGS, Texts, assert_same, plain, requests_of
from tests.tiny.scripted import Key, Request, Result, Scripted, drain, make_engine, run

NAME, K = "branching", 7
# attention of all kinds: grouped heads, windows, sinks, compressed keys, chunks of positions
TARGETS = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4")


class ScriptedTrees(Scripted):
    """A tree whose nodes follow each other at random; the true path is in it, as far as there is room."""

    def propose_trees(self, seqs: list[Sequence], budgets: list[int], depths: list[int]) -> list[Draft]:
        return [self.tree(seq, k, depth) for seq, k, depth in zip(seqs, budgets, depths, strict=True)]

    def tree(self, seq: Sequence, k: int, depth: int) -> Draft:
        at, truth = seq.num_output, self.truth[seq.request.id, seq.sample]
        chance = random.Random(f"{seq.request.id} {seq.sample} {at}")
        tokens: list[int] = []
        parents: list[int] = []
        depths = {-1: -1}
        true_node, until = -1, chance.randrange(depth + 1)
        for node in range(k):
            after_truth = chance.random() < 0.6
            open_nodes = [n for n, its in depths.items() if its < depth - 1]
            parent = true_node if after_truth and true_node in open_nodes else chance.choice(open_nodes)
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            depths[node], position = depths[parent] + 1, at + depths[parent] + 1
            true = truth[position] if position < len(truth) else 3
            on_path = parent == true_node and depths[node] < until and chance.random() < 0.5
            free = [t for t in range(3, self.vocab_size) if t not in taken and t != true]
            tokens.append(true if on_path else chance.choice(free))
            parents.append(parent)
            true_node = node if on_path else true_node
        draft = Draft(tuple(tokens), (NAME,) * k, parents=tuple(parents))
        return (
            draft.truncated(k) if draft.parents != tuple(range(-1, k - 1)) else replace(draft, parents=None)
        )


def use_trees(truth: Texts, tree: Draft | None = None) -> None:
    """Makes a drafter of random trees, or of this one, known by its name."""
    proposer = ScriptedTrees(truth)
    if tree is not None:
        proposer.tree = lambda seq, k, depth: tree.truncated(k)  # type: ignore[method-assign]
    register(NAME, lambda config, target: proposer)


def with_trees(requests: tuple[Request, ...], k: int = K, depth: int = 4) -> tuple[Request, ...]:
    speculation = {"method": NAME, "num_speculative_tokens": k, "draft_depth": depth}
    return tuple(replace(request, speculation=speculation) for request in requests)


def moved(results: dict[Key, Result]) -> int:
    return sum(result.stats.accepted for result in results.values())


@pytest.mark.parametrize(
    ("mode", "setting", "depth"),
    [(*place, depth) for place, depth in zip(product(MODES, SETTINGS), cycle((1, 2, 4)), strict=False)],
)
def test_trees_give_the_plain_output(mode: str, setting: str, depth: int) -> None:
    truth = plain(mode)
    use_trees(truth)
    requests = with_trees(requests_of(mode), depth=depth)
    results = run(tiny_target("llama"), [*requests], **SETTINGS[setting])
    assert_same(requests, results, truth)
    assert moved(results) > 20
    assert (sum(r.stats.preemptions for r in results.values()) > 0) == (setting == "few pages")


def check_target(name: str, mode: str = "greedy") -> dict[Key, Result]:
    target = tiny_target(name)
    truth = {key: r.tokens for key, r in run(target, [*requests_of(mode)]).items()}
    use_trees(truth)
    requests = with_trees(requests_of(mode))
    results = run(target, [*requests])
    for key, result in results.items():
        assert result.tokens == truth[key], key
    return results


@pytest.mark.parametrize("name", TARGETS)
def test_attention_of_every_kind(name: str) -> None:
    assert moved(check_target(name)) > 20


def test_prefixes_are_found_again() -> None:
    truth = plain("greedy", shared=14)
    use_trees(truth)
    engine = make_engine(tiny_target("llama"))
    requests = with_trees(requests_of("greedy", shared=14))
    for _ in range(2):
        for request in requests:
            engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results = drain(engine)
        assert_same(requests, results, truth)
    assert engine.counters.totals.cached_tokens > 0


def test_logprobs_are_those_of_the_path() -> None:
    requests = tuple(
        replace(r, params=SamplingParams(**{**r.params.model_dump(), "logprobs": 2}))
        for r in requests_of("greedy")[:3]
    )
    truth = run(tiny_target("llama"), [*requests])
    use_trees({key: result.tokens for key, result in truth.items()})
    results = run(tiny_target("llama"), [*with_trees(requests)])
    for key, result in results.items():
        ours, plainly = result.logprobs, truth[key].logprobs
        assert [one.token for one in ours] == [one.token for one in plainly]
        pairs = zip(ours, plainly, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4


# planted errors


def test_a_sibling_that_sees_its_sibling_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "branches", lambda parents: [([], 0, len(parents))])
    with pytest.raises(AssertionError):
        check_target("llama")


def test_keys_of_the_wrong_branch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStore, "move", lambda self, slots, to: None)
    with pytest.raises(AssertionError):
        check_target("llama")


# where there are no trees


def test_recurrent_targets_have_chains() -> None:
    target = recurrent_target("qwen3_5")
    truth = {key: r.tokens for key, r in run(target, [*requests_of("greedy")]).items()}
    use_trees(truth)
    engine = make_engine(target)
    for request in with_trees(requests_of("greedy")[:2]):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    assert all(not seq.branching for seq in engine.scheduler.waiting)
    results = drain(engine)
    assert {key: r.tokens for key, r in results.items()} == {key: truth[key] for key in results}


def test_rules_with_q_have_chains() -> None:
    use_trees({})
    engine = make_engine(tiny_target("llama"))
    sampled = SamplingParams(temperature=1.0, max_tokens=4)
    engine.add_request([3, 4], sampled, {"method": NAME}, "block")
    engine.add_request([3, 4], sampled, {"method": NAME, "acceptance": "matching"}, "matching")
    branching = {seq.request.id: seq.branching for seq in engine.scheduler.waiting}
    assert branching == {"block": frozenset(), "matching": frozenset({NAME})}


@pytest.mark.parametrize(
    ("draft", "limit"),
    [
        (Draft((5, 6, 7), (NAME,) * 3, parents=(-1, 0, 0)), ""),
        (Draft((5, 6, 7), (NAME,) * 3, parents=(-1, 0, 3)), "each node must come after its parent"),
        (Draft((5, 6, 7, 8), (NAME,) * 4, parents=(-1, 0, 1, 0)), "but was asked for at most 2"),
    ],
)
def test_a_tree_that_is_none_costs_its_sequence_the_drafts(
    draft: Draft, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    truth = plain("greedy")
    use_trees(truth, draft)
    engine = make_engine(tiny_target("llama"))
    requests = with_trees(requests_of("greedy")[:1], depth=2)
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    assert_same(requests, drain(engine), {key: truth[key] for key in truth if key[0] == requests[0].id})
    assert (limit in caplog.text) if limit else not caplog.records


def test_given_drafts_are_chains() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), method="off")
    tree = Draft((5, 6), (NAME,) * 2, parents=(-1, -1))
    with pytest.raises(InvalidParameter, match="drafts that a caller gives are chains"):
        decoder.verify([3, 4, 5], tree)


def fates_of(seq_requests: tuple[Request, ...]) -> list[str]:
    engine = make_engine(tiny_target("llama"))
    for request in seq_requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    fates: list[str] = []
    while engine.has_work:
        fates += [fate for event in engine.step() if event.drafted for fate in event.fates[-1:]]
    return fates


def test_a_path_that_is_accepted_whole_ends_in_a_bonus() -> None:
    truth = plain("greedy")
    (key, text), request = next(iter(truth.items())), requests_of("greedy")[0]
    assert key[0] == request.id
    register(NAME, lambda config, target: Whole(truth))
    fates = fates_of(with_trees((request,), k=3, depth=2))
    assert len(text) > 20 and fates.count("bonus") > 10 and "correction" not in fates


class Whole(ScriptedTrees):
    """The true tokens, and beside the first of them a wrong one."""

    def tree(self, seq: Sequence, k: int, depth: int) -> Draft:
        at, truth = seq.num_output, self.truth[seq.request.id, seq.sample]
        right = truth[at : at + 2]
        tokens = (*right[:1], (right[0] + 1) % self.vocab_size, *right[1:])
        return Draft(tokens, (NAME,) * len(tokens), parents=(-1, -1, 0)[: len(tokens)]).truncated(k)
