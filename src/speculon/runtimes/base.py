"""The boundary: what the engine asks of whatever runs the target.

Tokens, positions, drafts with their parents, names of adapters, images and logits cross it. How a runtime
keeps what it has computed, in pages or otherwise, stays behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from speculon.core.config import EngineConfig
from speculon.core.errors import SpeculonError
from speculon.core.images import ImageInput, PromptImages
from speculon.core.types import Capability
from speculon.decoding.rounds import Drafted, Grant, Judged, Span
from speculon.decoding.sequence import Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.speculation.proposers.base import Proposer
from speculon.speculation.proposers.compose import Refusal

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change of a runtime that is loaded."""

    name: str  # of the target, for messages
    vocab_size: int  # ids for which there is a logit
    max_context: int  # tokens of one sequence
    eos_ids: frozenset[int]
    capacity: int  # tokens of all sequences together
    takes_trees: bool = False  # whether drafts may branch
    prefix_cache: bool = False
    batch_invariant: bool = False  # whether a row's logits are bitwise equal in every batch
    parameters: int = 0  # of the target
    layers: int = 0  # the same
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> digest
    # how it runs, as far as costs depend on it: device, dtype, ..
    form: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one forward."""

    logits: Tensor  # [R, V] float32
    scored: Seq[range]  # of each span, in the order given: its rows among the R
    ms: float = 0.0  # of the model alone


class Space(Protocol):
    """Who holds how much of the memory for tokens. All numbers are tokens; those of room are multiples of a
    block.

    For one sequence the engine calls cached, shares and needed while it waits, then open, (chunk, needed, a
    step)*, close; close may also come for one that was never opened.
    """

    block_size: int  # tokens that a sequence takes at once

    @property
    def room(self) -> int:
        """Tokens that can be taken now; what is only cached makes room."""
        ...

    def most(self, length: int) -> int:
        """The most that a sequence holds at once while it grows to this length."""
        ...

    def needed(self, seq: Sequence, end: int | None = None) -> int:
        """What a sequence has yet to take before its positions below `end` can be computed.

        Without `end`: before all of its tokens can, where it gives back what is no longer read on the way.
        """
        ...

    def cached(self, seq: Sequence) -> int:
        """Tokens that a waiting sequence would find computed. Changes nothing.

        What is found agrees with it in tokens and images (`Sequence.contents`) and in the adapter, and leaves
        at least its last token to compute, because its logits are needed. It is 0 where the request has no
        `prefix_cache`, where `seq.wants_prompt_logprobs`, and always in a runtime without a prefix cache.
        """
        ...

    def shares(self, seq: Sequence, other: Sequence) -> bool:
        """Whether another sequence, which runs or is the first to start, is about to compute what a waiting
        one could then find.
        """
        ...

    def open(self, seq: Sequence) -> int:
        """Gives a sequence that has nothing its cached beginning, as `cached` says; returns how many tokens
        that is.
        """
        ...

    def chunk(self, seq: Sequence, rows: int) -> int:
        """Rows of its next span, at most `rows`: any number; 0 where nothing can be computed with so few."""
        ...

    def close(self, seq: Sequence) -> None:
        """Takes everything from a sequence; it may be opened again."""
        ...

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError unless all is accounted for."""
        ...


class Step(AbstractContextManager["Step"], Protocol):
    """The claim of room of one round. Leaving it cuts what is computed of each sequence to `seq.committed`,
    which the caller has advanced if it committed. So leaving drops the rejected drafts, or the whole step.
    """

    grants: Seq[Grant]  # of each span: room for the drafts that may follow it

    def forward(self, drafted: list[Drafted]) -> Output:
        """One call of the model for all spans with their drafts. Commits nothing.

        Scored are all rows of a span that `scores_prompt`; of any other one that `samples`, the row of its
        last token and one row per draft, K + 1 in the order of the draft; of the rest none. The row of a
        node in a tree follows its parent's.
        """
        ...

    def commit(self, judged: list[Judged]) -> float:
        """Keeps each span and its accepted drafts, `Judged.end` tokens in all; returns the ms that it took to
        undo rejected drafts, if more than forgetting rows was needed.

        The caller then advances the sequences, before it leaves the step.
        """
        ...


class Runtime(Protocol):
    """A loaded target, with what it has computed of the open sequences."""

    facts: Facts
    space: Space
    # methods with weights that it has loaded, in that order, and those that it has not, with the reasons;
    # their names are known to `speculation.proposers.registry`
    drafters: Mapping[str, Proposer]
    refusals: Mapping[str, Refusal]

    @property
    def device(self) -> device:
        """Where its logits are."""
        ...

    def read_images(self, prompt: list[int], images: Seq[ImageInput]) -> PromptImages:
        """The images of a prompt, which has some. Raises `InvalidParameter` for what it cannot read, or if it
        takes none.
        """
        ...

    def prepare_images(self, span: Span) -> SpeculonError | None:
        """Makes what the rows of a span need beside their tokens: features of images. Returns why it
        cannot.
        """
        ...

    def reserve(self, spans: list[Span]) -> Step:
        """Takes the room of all spans, which the caller has counted, then grants that of drafts as far as it
        goes. A draft never takes room from a sequence.
        """
        ...

    def capabilities(self, config: EngineConfig) -> Iterator[tuple[str, Capability]]:
        """Rows of the capability table: what the model and this runtime can do, and what limits them."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by part, as estimated before they were taken."""
        ...

    def describe(self) -> dict[str, Any]:
        """The loaded target for `speculon inspect`, as JSON knows it."""
        ...

    def loading_ended(self) -> None:
        """All is loaded and warm: notes and logs what memory is held now."""
        ...


class Backend(Protocol):
    """The module of a runtime, by which it is found, sized and loaded."""

    def prepare(self, config: EngineConfig) -> EngineConfig:
        """The settings with what this runtime finds beside the model: drafters. Loads nothing.

        Raises `ModelError` for a model, and `ConfigError` for a setting, that it cannot use.
        """
        ...

    def load(
        self, config: EngineConfig, tokenizer: Tokenizer | None, progress: Callable[[str], None] | None = None
    ) -> Runtime:
        """A runtime that is ready; `progress` is told each stage. Raises as `prepare` does."""
        ...

    # for `SpeculativeDecoder`

    def wrap(self, model: Any, tokenizer: Tokenizer | None, config: EngineConfig) -> Runtime:
        """A runtime of a model in memory, which is not modified."""
        ...

    def drafts_of(self, draft: str) -> str | dict[str, Any]:
        """The drafter at a path, under its method. Raises `ConfigError` for a search."""
        ...

    # for the server's pool of models, before an engine is started

    def fits(self, config: EngineConfig, drafts: Iterable[str]) -> list[Any]:
        """What fits around a model, then each of `drafts`: drafters, with warnings or why they do not fit."""
        ...

    def device_name(self, config: EngineConfig) -> str:
        """Whose memory an engine of these settings takes. Raises `ConfigError` for a missing device."""
        ...

    def free_bytes(self, config: EngineConfig) -> int:
        """Free bytes of the device of these settings."""
        ...

    def memory_needed(self, settings: dict[str, Any], total: int) -> tuple[EngineConfig, Any, int]:
        """The settings with their drafters, what the process of their engine takes of `total` bytes, and how
        much of that is for tokens. Raises what loading would.
        """
        ...

    # for `speculon inspect`

    def describe_alone(self, model: str, form: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """A target without an engine, where one cannot be made of it."""
        ...
