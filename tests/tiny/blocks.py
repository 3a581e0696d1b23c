"""Runs DFlash drafters in tests, with a record of each block they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculon.core.types import Draft
from speculon.decoding.sampling import ScoredRow, pick, round_stream, weigh
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.dflash.proposer import NAME, DFlashDrafter
from tests.formats.writer import Checkpoint, make_checkpoint, record, write_checkpoint
from tests.tiny.dflash_reference import reference_drafts, reference_states
from tests.tiny.heads import Texts, deep_model, register_watched, true_draft, true_taps
from tests.tiny.scripted import Key

FORMATS = tuple(record("dflash")["forms"])
MASK = record("dflash")["sizes"]["mask"]


@dataclass
class Round:
    """What a block drafted by itself after some tokens of a sequence, from which states."""

    key: Key
    length: int
    draft: Draft
    states: Tensor  # [K, H]


@dataclass
class Watch:
    rounds: list[Round] = field(default_factory=list)
    read: int = 0  # positions whose keys and values were written


class Watched(DFlashDrafter):
    """Records every block, and drafts the known output with some errors, so that all lengths are accepted."""

    watch: Watch
    truth: Texts

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        drafts = super()._propose(seqs, budgets)
        for seq, draft, states in zip(seqs, drafts, self.states, strict=True):
            key = seq.request.id, seq.sample
            self.watch.rounds.append(Round(key, len(seq.tokens), draft, states.cpu()))
        if not self.truth:
            return drafts
        return [true_draft(NAME, self.truth, seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]

    def _blocks(self, seqs: list[Sequence], ks: list[int]) -> list[Tensor]:
        self.states = super()._blocks(seqs, ks)
        return self.states

    def _read(self, ranges: Any) -> None:
        super()._read(ranges)
        self.watch.read += sum(end - start for _, start, end in ranges)


def watch_blocks(truth: Texts | None = None) -> Watch:
    """Makes `dflash` the name of a drafter that is watched, and that says `truth` where there is any."""
    watch = Watch()

    register_watched(NAME, Watched, watch, truth)
    return watch


def write_dflash(folder: Path, target: Any, format: str = "z-lab", seed: int = 0, **changes: Any) -> Path:
    """A drafter for a target with this config, as `write_checkpoint` writes it."""
    return write_checkpoint(folder, f"dflash/{format}", target, seed, **changes)


def drafter_of(format: str = "z-lab", **variant: Any) -> Checkpoint:
    """The drafter that `write_dflash` writes for the deep model."""
    return make_checkpoint(f"dflash/{format}", deep_model().config, **variant)


def wrong_blocks(
    watch: Watch,
    drafter: Checkpoint,
    texts: Mapping[Key, list[int]],
    greedy: bool = True,
    seq: Sequence | None = None,
    atol: float = 1e-4,
) -> list[str]:
    """Blocks whose states, drafts, chances or q are not the formula's; `texts` are prompts with output.

    Drafts are compared where they are greedy, or drawn as `seq` says, which is at the end of its prompt.
    """
    model, wrong = deep_model(), []
    embed, lm_head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    skipped = not drafter.anchor_drafts
    for key, ids in texts.items():
        taps = true_taps(ids, drafter.taps)
        for made in (made for made in watch.rounds if made.key == key):
            n, rows = made.length - 1, len(made.states) + skipped
            states = reference_states(drafter, ids[n], taps[:n], rows, embed)
            off = (made.states - states[skipped:]).abs().max().item()
            if not off < atol:
                wrong.append(f"{key}: the block after {n} positions is off by {off:.1e}")
            if greedy:
                drawing = Choice(None if seq is None else replace(seq, tokens=ids[: n + 1]))
                found = reference_drafts(drafter, ids[n], states, lm_head, drawing)
                wrong += [
                    f"{key}: after {n} positions {why}" for why in differences(made.draft, *found, drawing)
                ]
    return wrong


@dataclass
class Choice:
    """Chooses drafts greedily, or as a sequence's parameters and noise do; records q of each row."""

    seq: Sequence | None
    q: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, before: list[int]) -> int:
        if self.seq is None:
            return int(logits.argmax())
        rows = [ScoredRow(self.seq, self.seq.request.rules, tuple(before), round_stream(self.seq))]
        weights = weigh(logits[None], rows)
        self.q.append(weights[0].softmax(-1))
        return pick(weights, rows)[0]


def differences(
    draft: Draft, tokens: list[int], logits: list[Tensor], chances: list[float], drawing: Choice
) -> Iterator[str]:
    k = len(draft.tokens)
    if draft.tokens != tuple(tokens[:k]):
        yield f"{draft.tokens}, not {tokens[:k]}"
    elif not torch.allclose(torch.tensor(draft.confidence), torch.tensor(chances[:k]), atol=1e-4):
        yield f"chances {draft.confidence}, not {chances[:k]}"
    elif draft.probs is not None and not torch.allclose(draft.probs, torch.stack(drawing.q[:k]), atol=1e-4):
        yield "another q"


def folder_of(path: Path) -> dict[str, Any]:
    return {"draft": {NAME: str(path)}}


def ask(k: int) -> dict[str, Any]:
    return {"method": NAME, "num_speculative_tokens": k}
