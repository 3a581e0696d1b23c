"""A small model of the same vocabulary guesses token by token (Leviathan 2023; Chen 2023).

Its keys and values lie in layers of its own in the target's pages, so prefix hits, rollback and preemption need no code here:
`seq.drafted` says how far they reach, and whatever is missing is computed in one call when a draft is next wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from speculon.batch import Batch
from speculon.config import ModelObject, SpeculationConfig
from speculon.core import Draft, Needs, Sequence, Verdict
from speculon.errors import ConfigError, ModelError
from speculon.models.load import load_target, load_tokenizer, wrap_model
from speculon.models.target import Target
from speculon.proposers.base import TargetFacts
from speculon.sampling import Row, pick, weigh
from speculon.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import DraftLease

NAME = "draft_model"


class DraftModel:
    """One forward per draft position for all sequences of the round."""

    def __init__(self, model: Target, vocab_size: int, min_confidence: float = 0.0):
        self.needs = Needs(layers=model.layers, max_context=model.max_context, bytes_fixed=model.num_bytes)
        self.model, self.vocab_size, self.min_confidence = model, vocab_size, min_confidence

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> DraftModel:
        source = config.drafts.get(NAME)
        if source is None:
            raise ConfigError("draft_model needs draft = a checkpoint")
        model = load_draft(source, target) if isinstance(source, str) else wrap_draft(source, target)
        return cls(model, target.vocab_size, config.draft_min_confidence)

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt is computed with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        drafts: list[list[int]] = [[] for _ in seqs]
        sure: list[list[float]] = [[] for _ in seqs]
        probs: list[list[Tensor]] = [[] for _ in seqs]
        active = list(range(len(seqs)))
        while active:
            logits = self._forward([(seqs[i], drafts[i]) for i in active], lease)  # [len(active), V]
            rows = [Row(seqs[i], seqs[i].rules, tuple(drafts[i])) for i in active]
            weights = weigh(logits, rows)
            tokens = pick(weights, rows)  # with the target's noise, so that the two agree often
            confidence = logits.softmax(-1).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
            for row, (i, token, share) in enumerate(zip(active, tokens, confidence, strict=True)):
                drafts[i].append(token)
                sure[i].append(share)
                if seqs[i].rejection:
                    probs[i].append(weights[row].softmax(-1))
            active = [i for i in active if len(drafts[i]) < budgets[i] and sure[i][-1] >= self.min_confidence]
        return [
            Draft(tuple(d), (NAME,) * len(d), torch.stack(q) if q else None, tuple(c))
            for d, q, c in zip(drafts, probs, sure, strict=True)
        ]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: Tensor | None) -> None:
        """Nothing to learn: the commit has set `seq.drafted` back to what was accepted."""

    def release(self, seq: Sequence) -> None:
        """Its pages go with the target's."""

    def _forward(self, texts: list[tuple[Sequence, list[int]]], lease: DraftLease) -> Tensor:
        """Logits [B, V] after each text, computing what its layers have not seen."""
        pieces: list[tuple[Sequence, int, int]] = []
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for seq, draft in texts:
            start, end = seq.drafted.get(NAME, 0), len(seq.tokens) + len(draft)
            ids += [*seq.tokens[start:], *draft][-(end - start) :]
            positions += range(start, end)
            last.append(len(ids) - 1)
            pieces.append((seq, start, end))
        device = self.model.device
        batch = Batch(
            [], torch.tensor([ids], device=device), torch.tensor([positions], device=device), torch.tensor(last, device=device)
        )
        logits = self.model.forward(batch, lease.view(pieces)).logits[:, : self.vocab_size]
        for seq, _, end in pieces:
            seq.drafted[NAME] = end
        return logits


def load_draft(path: str, target: TargetFacts) -> Target:
    """The checkpoint as a checked Target on the target's device, in its dtype."""
    if target.tokenizer is not None:
        check_same_ids(path, Tokenizer(load_tokenizer(path)), target.tokenizer)
        return load_target(path, dtype=target.dtype, device=target.device)
    return check_size(load_target(path, dtype=target.dtype, device=target.device), target)


def wrap_draft(model: ModelObject, target: TargetFacts) -> Target:
    """A checked Target over a model in memory, which stays as and where it is. Does not modify `model`."""
    if str(model.device) != target.device:
        raise ModelError(f"draft {type(model).__name__} is on {model.device}, the target on {target.device}")
    return check_size(wrap_model(model), target)


def check_size(draft: Target, target: TargetFacts) -> Target:
    """Raises `ModelError` for a draft with fewer ids than the target: all that can be compared without two tokenizers."""
    if draft.vocab_size < target.vocab_size:
        raise ModelError(f"draft {draft.name}: its vocabulary has {draft.vocab_size} ids, the target's {target.vocab_size}")
    return draft


def check_same_ids(path: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raises `ModelError` where the same id stands for another token; a padded vocabulary is no difference."""
    mine, theirs = draft.inner.get_vocab(), target.inner.get_vocab()
    wrong = next((token for token, i in theirs.items() if mine.get(token, i) != i), None)
    missing = theirs.keys() - mine.keys()
    if wrong is not None:
        raise ModelError(f"{path}: draft and target disagree on {wrong!r}: id {mine[wrong]} and {theirs[wrong]}")
    if missing:
        raise ModelError(f"{path}: the draft lacks {len(missing)} of the target's tokens, among them {sorted(missing)[0]!r}")
