"""What drafters have in common that are whole language models: how one is loaded, and its forward.

Its keys and values lie in layers of its own in the target's pages, and its recurrent states, if any, in slots
of its own. So prefix hits, rollback and preemption need no code here: `Pages.drafted` says how far they
reach, and whatever is missing is computed in one call when a draft is next requested. It reads and drafts
tokens of the target; where its tokenizer is another one, `Translation` maps both ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import torch.nn.functional as F

from speculon.checkpoints.reading import load_tokenizer
from speculon.checkpoints.spelling import Overlap
from speculon.core.config import ModelObject, SpeculationConfig
from speculon.core.config.speculation import Quantization
from speculon.core.errors import ConfigError, ModelError
from speculon.decoding.sampling import NEVER
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.torch.batch import Batch, RowRanges, joined
from speculon.runtimes.torch.drafters.base import WeightedProposer
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.kv.draft_slots import PER_SEQUENCE, spare_slots
from speculon.runtimes.torch.kv.states import KEPT_BYTES, slot_bytes
from speculon.runtimes.torch.loading.load import load_target, wrap_model
from speculon.runtimes.torch.loading.memory import model_needs
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import Needs
from speculon.speculation.proposers.translation import Translation, tokenizer_overlap

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.torch.kv.store import View


class ModelDrafter(WeightedProposer):
    """A language model over the target's pages; how it drafts is up to `propose` of each method.

    It reads the prompt with the first draft, and its pages and slots are released with the target's.
    """

    method: ClassVar[str]

    def __init__(
        self,
        load: Callable[[], Target],
        needs: Needs,
        host: DrafterHost,
        min_confidence: float = 0.0,
        drafts: int = 0,
        overlap: Callable[[], Overlap | None] = lambda: None,
    ):
        """`drafts` are the most of a round, after each of which a recurrent state may be kept; `overlap` says
        which of the target's tokens it has, where its tokenizer is another one.
        """
        self._sequences, self._drafts = host.sequences, drafts
        self.needs, self._load, self._overlap = self.with_slots(needs), load, overlap
        self.vocab_size, self.min_confidence = host.model.vocab_size, min_confidence
        self.max_rows = host.rows or sys.maxsize  # of a call: as estimated for its scratch memory
        self.translation: Translation | None = None  # None: ids are the target's
        self.model: Target

    @classmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Self:
        source = config.drafts.get(cls.method)
        if source is None:
            raise ConfigError(f"{cls.method} needs draft = a checkpoint")
        if isinstance(source, str):
            step = host.model.dtype, host.model.device, host.rows, host.scored
            needs = model_needs(source, *step, host.fuse, host.compile, config.draft_quantization)
            load = partial(load_draft, source, host, config.draft_quantization)
            overlap = partial(find_overlap, source, host)
            return cls(load, needs, host, config.draft_min_confidence, config.most(), overlap)
        model = wrap_draft(source, host)
        # in memory already: nothing to load or to estimate
        needs = replace(model.needs(host.rows, host.scored), bytes_fixed=0)
        drafter = cls(lambda: model, needs, host, config.draft_min_confidence, config.most())
        drafter.take(model)
        return drafter

    def load(self) -> None:
        overlap = self._overlap()  # refused before the weights are read
        self.take(self._load())
        if overlap is not None:
            size, device = self.model.vocab_size, self.model.device
            self.translation = Translation(overlap, self.vocab_size, size, device)
        needs = replace(
            self.needs,
            layers=self.model.layers,
            max_context=self.model.max_context,
            bytes_fixed=self.model.num_bytes,
            states=self.model.state_specs,
        )
        self.needs = self.with_slots(needs)

    def take(self, model: Target) -> None:
        """Drafts with this model from now on. Raises `ModelError` for one that the method cannot use."""
        self.model, self.runner = model, model.runner

    def with_slots(self, needs: Needs) -> Needs:
        """The same with slots for its recurrent states: for each sequence, and spare ones within a step."""
        each = slot_bytes(needs.states)
        if not each:
            return needs
        spare = spare_slots(self._sequences, self._drafts, each, KEPT_BYTES)
        count = PER_SEQUENCE * self._sequences + spare
        return replace(needs, spare_states=spare, bytes_states=count * each)

    def _read(self, ranges: list[TokenRange]) -> None:
        self._forward(ranges, [seq.tokens[start:end] for seq, start, end in ranges], [])

    def _forward(self, ranges: list[TokenRange], ids: list[list[int]], scored: list[int]) -> Tensor:
        """Reads `ids`, tokens of the target, as one flat row; logits [R, V] after the `scored` rows."""
        logits = self._run(ranges, [self._as_read(tokens) for tokens in ids], scored)
        self.pages.done(ranges, ids)
        self.pages.mark(ranges)
        return logits

    def _as_read(self, tokens: list[int]) -> list[int]:
        """Tokens of the target as ids of the model."""
        return tokens if self.translation is None else self.translation.read(tokens)

    def _run(self, ranges: list[TokenRange], ids: list[list[int]], scored: list[int]) -> Tensor:
        """One forward over ids of the model; logits [R, V] over the target's vocabulary."""
        positions = [position for _, start, end in ranges for position in range(start, end)]
        tokens = [token for its in ids for token in its]
        batch = Batch.of([], tokens, positions, scored, self.model.device, prompt_rows(ranges))
        return self._logits(batch, self.pages.view(ranges))

    def _logits(self, batch: Batch, view: View) -> Tensor:
        logits = self.model.forward(batch, view).logits
        if self.translation is not None:
            return self.translation.logits(logits)
        logits = logits[:, : self.vocab_size]
        # one of the two may be padded
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=NEVER)


def prompt_rows(ranges: list[TokenRange]) -> RowRanges:
    """The rows of ranges, end to end, that belong to prompts."""
    runs, row = [], 0
    for seq, start, end in ranges:
        if start < seq.request.prompt_len:
            runs.append((row, row + min(end, seq.request.prompt_len) - start))
        row += end - start
    return joined(runs)


def load_draft(path: str, host: DrafterHost, quantization: Quantization) -> Target:
    """The checkpoint as a checked Target on the target's device, in its dtype."""
    target = host.model
    draft = load_target(
        path,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        fused=host.fuse,
        compile=host.compile,
        batch_invariant=None if target.batch_invariant else False,
        quantization=quantization,
    )
    return draft if host.tokenizer is not None else check_size(draft, target)


def find_overlap(path: str, host: DrafterHost) -> Overlap | None:
    if host.tokenizer is None:
        return None
    return tokenizer_overlap(Tokenizer(load_tokenizer(path)), host.tokenizer, path)


def wrap_draft(model: ModelObject, host: DrafterHost) -> Target:
    """A checked Target over a model in memory, which stays as and where it is. Does not modify `model`."""
    target = host.model
    if str(model.device) != str(target.device):
        raise ModelError(f"draft {type(model).__name__} is on {model.device}, the target on {target.device}")
    invariant = None if target.batch_invariant else False
    draft = wrap_model(model, fused=host.fuse, compile=host.compile, batch_invariant=invariant)
    return check_size(draft, target)


def check_size(draft: Target, target: Target) -> Target:
    """Raises `ModelError` for a draft with fewer ids than the target: all that can be compared without two
    tokenizers.
    """
    if draft.vocab_size < target.vocab_size:
        raise ModelError(
            f"draft {draft.name}: its vocabulary has {draft.vocab_size} ids, the target's {target.vocab_size}"
        )
    return draft
