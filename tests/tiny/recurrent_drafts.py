"""Recurrent draft models for tests: what they draft is noted, and compared with the stock model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.draft_model.proposer import NAME, DraftModel
from speculon.runtimes.torch.drafters.table import register
from speculon.runtimes.torch.loading.memory import model_needs
from speculon.runtimes.torch.model.target import Target
from tests.tiny.conftest import tiny_target
from tests.tiny.recurrent import TIE, recurrent_model, recurrent_target, requests
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, texts_of

Force = Callable[[Key, int], int | None]  # (text, position in it) -> the token to draft there; None: its own
Ids = dict[Key, list[int]]  # prompt and output
POOL: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 3, "max_batch_tokens": 16}  # it preempts
TOKENS = 14  # of each text


def key_of(seq: Sequence) -> Key:
    return seq.request.id, seq.sample


class NotedDrafts(DraftModel):
    """A draft model that drafts other tokens than its own where `force` says so."""

    force: Force
    noted: list[tuple[Key, int, tuple[int, ...]]]  # text, its length, the draft

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        for seq, draft in zip(seqs, drafts, strict=True):
            self.noted.append((key_of(seq), len(seq.tokens), draft.tokens))
        return drafts

    def _next(self, ranges: Any, ids: list[list[int]]) -> Tensor:
        logits = super()._next(ranges, ids)
        for row, (seq, _, end) in enumerate(ranges):
            if (token := self.force(key_of(seq), end)) is not None:
                logits[row] = logits[row] - 1e4
                logits[row, token] = 1e4
        return logits


@dataclass
class Drafts:
    """The drafter of each engine that is built from now on."""

    name: str
    force: Force
    made: list[NotedDrafts] = field(default_factory=list)

    @property
    def last(self) -> NotedDrafts:
        return self.made[-1]

    def wrong(self, texts: Ids) -> list[tuple[Key, int]]:
        """Every draft that is not the stock model's next token, while the text goes on as it was drafted."""
        logits = {key: stock_logits(self.name, ids) for key, ids in texts.items()}
        return [
            (key, length + i)
            for key, length, draft in self.last.noted
            for i in range(len(draft))
            if [*draft[:i]] == texts[key][length : length + i]
            and self.force(key, length + i) is None
            and not near_best(logits[key][length + i - 1], draft[i])
        ]


def near_best(logits: Tensor, token: int) -> bool:
    """Whether a token has the largest logit, up to numeric ties."""
    return bool(logits.max() - logits[token] < TIE)


@torch.inference_mode()
def stock_logits(name: str, ids: list[int]) -> Tensor:  # [T, V]
    return recurrent_model(name)(torch.tensor([ids]), use_cache=False).logits[0]


def use_drafts(name: str, force: Force = lambda key, position: None, model: Target | None = None) -> Drafts:
    """Makes a recurrent model draft, in engines built from now on."""
    drafts, draft = Drafts(name, force), model or recurrent_target(name)

    def build(config: Any, host: Any) -> NotedDrafts:
        made = NotedDrafts(lambda: draft, draft.needs(1, 1), host, config.draft_min_confidence, config.most())
        made.force, made.noted = force, []
        drafts.made.append(made)
        return made

    register(NAME, build)
    return drafts


def wrong_now_and_then(texts: Ids, share: float = 0.3) -> Force:
    """Another token than the text's, at random places."""

    def force(key: Key, position: int) -> int | None:
        chance = random.Random(f"{key} {position}")
        text = texts.get(key, [])
        return (text[position] + 1) % 96 if position < len(text) and chance.random() < share else None

    return force


def right_now_and_then(texts: Ids, share: float = 0.7) -> Force:
    """The text's own token, at random places."""

    def force(key: Key, position: int) -> int | None:
        chance, text = random.Random(f"{key} {position}"), texts.get(key, [])
        return text[position] if position < len(text) and chance.random() < share else None

    return force


def drafted_requests(**params: Any) -> list[Request]:
    """The requests with K = 1..6, and two that begin as the one before does."""
    found = [
        replace(r, speculation={"method": NAME, "num_speculative_tokens": 1 + i})
        for i, r in enumerate(requests())
    ]
    for i in (3, 1):
        found.insert(i + 1, replace(found[i], id=f"again{i}"))
    return [replace(r, params=r.params.model_copy(update={"max_tokens": TOKENS, **params})) for r in found]


def serve(target: Target, made: list[Request], **settings: Any) -> dict[Key, Result]:
    """All of them at once, drafted for by the drafter in use; the states are checked in each step."""
    speculation = {
        "draft": "a model in memory",
        "num_speculative_tokens": 6,
        **settings.pop("speculation", {}),
    }
    engine = make_engine(target, speculation=speculation, **{**POOL, **settings})
    for request in made:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


def ids_of(made: list[Request], results: dict[Key, Result]) -> Ids:
    prompts = {request.id: request.prompt for request in made}
    return {key: [*prompts[key[0]], *result.tokens] for key, result in results.items()}


@cache
def truth_of(name: str) -> dict[Key, Result]:
    """Of the usual requests."""
    return plain(name, drafted_requests())


def plain(name: str, made: list[Request]) -> dict[Key, Result]:
    target = tiny_target("llama") if name == "llama" else recurrent_target(name)
    return run(target, [replace(request, speculation={"method": "off"}) for request in made])


def rejected(results: dict[Key, Result]) -> int:
    return sum(result.stats.speculation().rejected for result in results.values())


def check_states(name: str, kept: bool) -> None:
    """Wrong drafts are planted; all others are the stock model's next tokens."""
    made = drafted_requests()
    truth = truth_of(name)
    drafts = use_drafts(name, wrong_now_and_then(ids_of(made, truth)))
    results = serve(recurrent_target(name), made)
    assert texts_of(results) == texts_of(truth) and rejected(results) > 9
    assert drafts.wrong(ids_of(made, truth)) == []
    assert bool(drafts.last.needs.spare_states) == kept


def check_estimate(name: str, folder: Path) -> None:
    recurrent_model(name).save_pretrained(folder)
    needs = model_needs(folder, torch.float32, torch.device("cpu"), 8, 8)
    loaded = recurrent_target(name)
    assert needs.states == loaded.state_specs
    sizes = [sum(layer.bytes_per_token for layer in layers) for layers in (needs.layers, loaded.layers)]
    assert sizes[0] == sizes[1]
