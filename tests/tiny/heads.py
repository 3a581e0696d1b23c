"""EAGLE-3 heads for tests: a target deep enough for taps, a head, and a record of each row it computes."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.eagle3.proposer import NAME, Eagle3Drafter
from speculon.runtimes.torch.drafters.table import register
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from tests.formats.writer import Checkpoint, make_checkpoint, record, write_checkpoint
from tests.tiny.conftest import VOCAB, build
from tests.tiny.eagle_reference import reference_chain, reference_rows
from tests.tiny.scripted import Key

DEPTH, CONTEXT = 7, 1024
FORMATS = tuple(record("eagle3")["forms"])
TAPLESS = ("safeailab", "nebius")  # their configs name no taps: always the usual three
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Texts = Mapping[Key, list[int]]


@cache
def deep_model() -> PreTrainedModel:
    """The stock model; treat it as read-only."""
    return build("llama", num_hidden_layers=DEPTH, max_position_embeddings=CONTEXT)


@cache
def observed() -> PreTrainedModel:
    """A copy: the library leaves hooks on a model whose states were asked for."""
    return copy.deepcopy(deep_model())


@cache
def deep_target(device: str = "cpu") -> Target:
    return wrap_model(copy.deepcopy(deep_model()).to(device), name="deep", share=False)


@dataclass
class Round:
    """What the head drafted by itself after some tokens of a sequence."""

    key: Key
    length: int
    drafts: tuple[int, ...]


@dataclass
class Rows:
    """Rows of the target's states: the head's states after them, for a text's slots from `start` on."""

    key: Key
    start: int
    states: Tensor  # [n, H]


@dataclass
class Watch:
    rounds: list[Round] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)


def true_draft(name: str, truth: Texts, seq: Sequence, draft: Draft) -> Draft:
    """As many drafts of the known output, some of them wrong."""
    rest = truth[seq.request.id, seq.sample][seq.num_output :]
    chance = random.Random(f"{seq.request.id} {len(seq.tokens)}")
    tokens = [true if chance.random() > 0.3 else (true + 1) % VOCAB for true in rest[: len(draft.tokens)]]
    return Draft(tuple(tokens), (name,) * len(tokens))


def register_watched(name: str, watched: type, watch: Any, truth: Texts | None) -> None:
    """Makes a drafter that is watched known by its name; it says `truth` where there is any."""

    def made(config: Any, host: Any) -> Any:
        drafter: Any = watched.build(config, host)  # type: ignore[attr-defined]
        assert isinstance(drafter, watched)
        drafter.watch, drafter.truth = watch, truth or {}
        return drafter

    register(name, made)


class Watched(Eagle3Drafter):
    """Records every row, and drafts the known output with some errors, so that all lengths are accepted."""

    watch: Watch
    truth: Texts

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        for seq, draft in zip(seqs, drafts, strict=True):
            self.watch.rounds.append(Round((seq.request.id, seq.sample), len(seq.tokens), draft.tokens))
        return (
            [true_draft(NAME, self.truth, seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]
            if self.truth
            else drafts
        )

    def _read(self, ranges: list[TokenRange]) -> Tensor:
        after = super()._read(ranges)
        row = 0
        for seq, start, end in ranges:
            states = self.last[row : row + end - start].cpu().clone()
            self.watch.rows.append(Rows((seq.request.id, seq.sample), start, states))
            row += end - start
        return after

    def _forward(self, ranges: list[TokenRange], ids: list[int], states: Tensor) -> Tensor:
        self.last = super()._forward(ranges, ids, states)
        return self.last


def watch_heads(truth: Texts | None = None) -> Watch:
    """Makes `eagle3` the name of a head that is watched, and that says `truth` where there is any."""
    watch = Watch()

    register_watched(NAME, Watched, watch, truth)
    return watch


@cache
def hidden_states(model: PreTrainedModel, ids: tuple[int, ...]) -> tuple[Tensor, ...]:  # [1, n, H] each
    with torch.inference_mode():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states


def true_taps(ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """What the stock model's layers leave of each id [n, k * Ht]."""
    states = hidden_states(observed(), tuple(ids))
    return torch.cat([states[layer + 1][0] for layer in layers], -1)


def write_eagle3(
    folder: Path, target: Any, format: str = "speculators", seed: int = 0, **changes: Any
) -> Path:
    """A head for a target with this config, as `write_checkpoint` writes it."""
    return write_checkpoint(folder, f"eagle3/{format}", target, seed, **changes)


def head_of(**variant: Any) -> Checkpoint:
    """The head that `write_eagle3` writes for the deep model."""
    return make_checkpoint("eagle3/speculators", deep_model().config, **variant)


def wrong_rows(
    watch: Watch, head: Checkpoint, texts: Mapping[Key, list[int]], atol: float = 1e-4
) -> list[str]:
    """Rows that are not the formula's; `texts` are prompts with what was written."""
    model, wrong = deep_model(), []
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for key, ids in texts.items():
        taps = true_taps(ids, head.taps)
        with torch.inference_mode():
            expected, _ = reference_rows(head.tensors, head, ids, taps[:-1], *shared)
        for rows in (rows for rows in watch.rows if rows.key == key):
            truth = expected[rows.start - 1 : rows.start - 1 + len(rows.states)]
            off = (rows.states - truth).abs().max().item()
            if not off < atol:
                wrong.append(f"{key}: slots from {rows.start} on are off by {off:.1e}")
        for made in (made for made in watch.rounds if made.key == key and made.drafts):
            n = made.length
            with torch.inference_mode():
                drafts, _ = reference_chain(
                    head.tensors, head, ids[:n], taps[: n - 1], len(made.drafts), *shared
                )
            if tuple(drafts) != made.drafts:
                wrong.append(f"{key}: after {n} tokens {made.drafts}, not {tuple(drafts)}")
    return wrong


def folder_of(path: Path) -> dict[str, Any]:
    return {"draft": {NAME: str(path)}}
