"""The boundary: what the engine asks of whatever runs the target.

Tokens, positions, drafts with their parents, names of adapters, images and logits cross it. How a runtime
keeps what it has computed, in pages or otherwise, stays behind it.

To write one, begin with a copy of `tests/scripted_runtime.py`, for which `tests/tiny/test_boundary.py` is a
test of all that follows. One thread at a time calls it. It reads of a `Sequence` its `id`, `tokens`,
`committed`, `pending`, `contents` and `wants_prompt_logprobs`, of its `request` `prefix_cache`, `adapter`,
`images`, `prompt_len` and `max_len`, and it changes none of them. `reserve`, `forward` and `commit` may raise
anything: the step is left, every sequence is as it was, and the server tries once more before it ends the
running requests. No member of `Space` raises, but for `check_integrity`.

A round in one line: `between_rounds`, plan (by `Space`), `prepare_images` of each span, `reserve`,
`__enter__`, `forward`, `commit`, the sequences advance, `__exit__`, `close` of those that have ended.

Optional, which means present with an empty result, are the prefix cache (`cached` and `open` give 0,
`shares` False), trees, drafters and refusals, images (`prepare_images` gives None), adapters,
`capabilities`, `memory`, `between_rounds` (which gives False) and `loading_ended`.
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
    capacity: int  # tokens of all sequences together, a multiple of `Space.block_size`
    takes_trees: bool = False  # whether drafts may branch
    prefix_cache: bool = False
    batch_invariant: bool = False  # whether a row's logits are bitwise equal in every batch
    parameters: int = 0  # of the target
    layers: int = 0  # the same
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> digest of its weights
    # how it runs, as far as costs depend on it, as JSON knows it: `device`, `dtype`, `threads` always
    form: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one forward."""

    # [R, V] float32 on `Runtime.device`, with V = `vocab_size`: a tensor of its own, which may be read after
    # the step and is never written to
    logits: Tensor
    scored: Seq[range]  # of each span, in the order given: its rows among the R; together all of them
    ms: float = 0.0  # of the model alone; 0: not measured, and booked as preparation


class Space(Protocol):
    """Who holds how much of the memory for tokens. All numbers are tokens; `room`, `most` and `needed` are
    multiples of a block.

    While a sequence waits, the engine asks cached, shares and needed. Its start is open, needed, chunk, and
    then a step; or close at once where there is too little room, which every plan may repeat, so open is
    cheap. While it runs it is chunk, needed up to the end of that, and a step, each time; at its end close,
    which also comes for one that was never opened. `SpeculativeDecoder`, with one sequence, leaves out chunk
    and needed.
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

        Without `end`: the most that it has yet to take at any time until all of its tokens are computed;
        with sliding windows, whose old tokens it gives back on the way, that is less than all. What it might
        find cached while it waits is not subtracted.
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
        """Whether `other`, which runs or is the oldest that waits, is about to compute tokens that `seq`
        would then find cached: `seq` lets it go first. False is always allowed.
        """
        ...

    def open(self, seq: Sequence) -> int:
        """Gives a sequence that has nothing its cached beginning, as `cached` says; returns how many tokens
        that is, which the caller makes its `committed`. What nobody held before is no room any more.
        """
        ...

    def chunk(self, seq: Sequence, rows: int) -> int:
        """Rows of its next span, at most `rows` and what is `pending`; 0 where nothing can be computed with
        so few, but never where they are all the rows of a step.
        """
        ...

    def close(self, seq: Sequence) -> None:
        """Takes everything from a sequence; it may be opened again."""
        ...

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError unless all is accounted for. It is called between steps, when the engine is
        idle, and may do nothing.
        """
        ...


class Step(AbstractContextManager["Step"], Protocol):
    """The claim of room of one round. Leaving it cuts what is computed of each sequence to `seq.committed`,
    which the caller has advanced if it committed. So leaving drops the rejected drafts, or the whole step.

    `reserve` takes the room; `__enter__` returns the step itself. One step is open at a time. `forward` and
    then `commit` come at most once each; it may be left before either of them, and by an exception.
    """

    # of each span, in their order: as many of its `most_drafts` as have room (`rounds.grants` shares rows
    # out); where it could use some and gets none the reason is `no_pages` or `load`
    grants: Seq[Grant]

    def forward(self, drafted: list[Drafted]) -> Output:
        """One call of the model for all spans with their drafts. Commits nothing.

        `drafted` has one entry for each reserved span, in their order, with at most the drafts of its grant.
        Its rows are `seq.tokens[span.start:span.end]`, then `draft.tokens`, at `Drafted.positions`. A tree
        comes with each node after its parent; a node attends to the sequence, its ancestors and itself.

        Scored are all rows of a span that `scores_prompt`; of any other one that `samples`, the row of its
        last token and one row per draft, K + 1 in the order of the draft; of the rest none.
        """
        ...

    def commit(self, judged: list[Judged]) -> float:
        """Keeps each span and its accepted drafts, so that `Judged.end` tokens of each sequence are computed.

        The accepted drafts are the first `verdict.accepted`; of a tree those of `verdict.path`, which become
        the first. Returns the ms that it took to undo the others; 0 where forgetting rows is enough. The
        caller then advances the sequences, before it leaves the step.
        """
        ...


class Runtime(Protocol):
    """A loaded target, with what it has computed of the open sequences."""

    facts: Facts
    space: Space
    # methods with weights that it has loaded and feeds itself, in the order of the settings, and those that
    # it could not load, with the reasons; their names are known to `speculation.proposers.registry`
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
        """Makes what the rows of a span need beside their tokens: features of images. Returns why it cannot.
        It is called for every planned span, also of texts, and again where a step is repeated.
        """
        ...

    def reserve(self, spans: list[Span]) -> Step:
        """Takes the room of all spans, which the caller has counted by `needed`, or raises and takes none;
        then grants that of drafts as far as it goes. A draft never takes room from a sequence.
        """
        ...

    def capabilities(self, config: EngineConfig) -> Iterator[tuple[str, Capability]]:
        """Rows of the capability table: what the model and this runtime can do, and what limits them."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by part, as estimated before they were taken."""
        ...

    def describe(self) -> dict[str, Any]:
        """The loaded target for `speculon inspect`, which alone reads it, as JSON knows it: with `memory` and
        the keys of `runtimes.torch.inspection.target_facts`.
        """
        ...

    def end(self) -> None:
        """Frees what it holds. Nothing else is called after that."""
        ...

    def between_rounds(self) -> bool:
        """Between any two rounds: a moment, some tens of ms, to make itself faster. Returns whether rounds
        take another time from here on; what they compute is bitwise the same.
        """
        ...

    def loading_ended(self) -> None:
        """All is loaded and warm: notes and logs what memory is held now."""
        ...


@dataclass(frozen=True, slots=True)
class Fit:
    """A drafter and one target: warnings about the pair, or why it cannot draft for it."""

    path: str
    method: str  # empty: not known
    warnings: tuple[str, ...] = ()
    refusal: str | None = None


class Needed(Protocol):
    """Bytes that the process of an engine takes."""

    @property
    def total(self) -> int: ...

    @property
    def snapshots(self) -> int:
        """Of recurrent states, for later prompts."""
        ...


class Backend(Protocol):
    """The module of a runtime, by which it is found, sized and loaded. A row of `TABLE` in `registry.py`
    names it, and so does the setting `runtime`. `LLM` needs `refusal`, `tokenizer`, `prepare` and `load`; the
    others may raise `ConfigError`.
    """

    def refusal(self, config: EngineConfig) -> str | None:
        """Which setting it cannot follow, or why it cannot run such a model; None where it can, as far as
        that is known without loading it.
        """
        ...

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        """What reads and writes texts of the model. Raises `ModelError` where there is none."""
        ...

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

    def fits(self, config: EngineConfig, drafts: Iterable[str]) -> list[Fit]:
        """What fits around a model, then each of `drafts`: drafters, with warnings or why they do not fit."""
        ...

    def device_name(self, config: EngineConfig) -> str:
        """Whose memory an engine of these settings takes. Raises `ConfigError` for a missing device."""
        ...

    def free_bytes(self, config: EngineConfig) -> int:
        """Free bytes of the device of these settings."""
        ...

    def memory_needed(self, settings: dict[str, Any], total: int) -> tuple[EngineConfig, Needed, int]:
        """The settings with their drafters, what the process of their engine takes of `total` bytes, and how
        much of that is for tokens. Raises what loading would.
        """
        ...

    # for `speculon inspect`

    def describe_alone(self, model: str, form: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """A target without an engine, where one cannot be made of it."""
        ...
