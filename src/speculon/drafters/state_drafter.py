"""What drafters over the target's own hidden states have in common.

The states of every position lie in pages, as their own keys and values do, so a sequence may be preempted,
start behind a cached prefix, or be computed again: nothing that they need is ever lost. `seq.drafted` says
how far they have read; what is missing is computed with the next draft.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from speculon.core.config import SpeculationConfig
from speculon.core.errors import ConfigError
from speculon.core.types import Draft, Needs, Stop, Verdict, no_draft
from speculon.decoding.sequence import Sequence
from speculon.drafters.config import DrafterConfig, TargetShape, check_pair
from speculon.loading.locate import locate
from speculon.speculation.proposers.base import States, TargetFacts
from speculon.target.target import Runner, Target

if TYPE_CHECKING:
    from speculon.decoding.kv.lease import DraftLease

NOT_READY = no_draft(Stop.NOT_READY)
TAPS = "taps"  # the option

AnyConfig = TypeVar("AnyConfig", bound=DrafterConfig)

log = logging.getLogger("speculon")


class StateDrafter:
    """A proposer that reads the target's states; how it drafts is up to `_propose` of each method."""

    method: ClassVar[str]
    needs: Needs
    runner: Runner

    def __init__(self, target: TargetFacts, min_confidence: float):
        assert target.model is not None
        self.target, self.min_confidence = target.model, min_confidence
        self.vocab_size, self.max_rows = target.vocab_size, target.rows or sys.maxsize
        self.compile = target.compile

    def admit(self, seq: Sequence) -> None:
        """Nothing yet: the prompt is read with the first draft."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        """Nothing after a single token: there are no states before it."""
        able = [len(seq.tokens) > 1 for seq in seqs]
        if not any(able):
            return [NOT_READY] * len(seqs)
        drafts = iter(self._propose(list(compress(seqs, able)), list(compress(budgets, able)), lease))
        return [next(drafts) if yes else NOT_READY for yes in able]

    @abstractmethod
    def _propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]: ...

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """Nothing to learn: the states of accepted drafts are in the pages, and rows of drafts are computed
        again from them.
        """

    def release(self, seq: Sequence) -> None:
        """Its pages go with the target's."""


def states_of(method: str, target: TargetFacts) -> Target:
    """The target whose states a drafter reads. Raises `ConfigError` where there is none."""
    if target.model is None:
        raise ConfigError(f"{method} reads the target's states, and there is no target")
    return target.model


def checked_config(
    method: str,
    config: SpeculationConfig,
    target: TargetFacts,
    read: Callable[[Any], AnyConfig],
    overridden: Callable[[AnyConfig, Mapping[str, Any]], AnyConfig],
) -> AnyConfig:
    """The config of the method's checkpoint with the options that override it, checked against the target.

    Raises `ConfigError` without a folder or for wrong options, `ModelError` where the two do not fit.
    """
    source = config.drafts.get(method)
    if not isinstance(source, str):
        raise ConfigError(f"{method} needs draft = a checkpoint's folder")
    model = states_of(method, target)
    found = overridden(read(locate(source)), config.options)
    layers, architecture = len(model.layers), type(model.model).__name__
    odd = check_pair(found, TargetShape(model.hidden_size, model.vocab_size, layers, architecture))
    log.info("%s: %s", method, found.summary(layers))
    for note in (*found.notes, *odd):
        log.warning("%s: %s", method, note)
    return found
