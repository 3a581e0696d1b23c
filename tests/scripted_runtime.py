"""A runtime in plain Python: what follows a text is a rule, and what it keeps of a sequence is a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from speculon.core.config import EngineConfig
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.images import PromptImages
from speculon.core.types import Capability, Reason, shared_length
from speculon.decoding.rounds import Drafted, Grant, Judged, Span
from speculon.decoding.sequence import Sequence
from speculon.runtimes.base import Facts, Output

VOCAB, EOS = 24, 23


def rule(tokens: list[int]) -> int:
    """The next token: the text counts up, jumps at every seventh position, and ends at one of them."""
    n = len(tokens)
    return EOS if n == 56 else (tokens[-1] + 1 + 3 * (n % 7 == 0)) % 22


class ScriptedRuntime:
    """Its own `Space`, in blocks of one token. `held` has the tokens that it has computed of each open
    sequence, `kept` those of closed ones, which later sequences may begin with.
    """

    def __init__(self, capacity: int = 400, max_context: int = 100, rule: Callable[[list[int]], int] = rule):
        form = {"device": "cpu", "dtype": "float32", "threads": 1}
        ends = frozenset({EOS})
        self.facts = Facts("scripted", VOCAB, max_context, ends, capacity, prefix_cache=True, form=form)
        self.space, self.rule, self.device = self, rule, torch.device("cpu")
        self.block_size = 1
        self.drafters: dict[str, Any] = {}
        self.refusals: dict[str, Any] = {}
        self.held: dict[int, list[int]] = {}
        self.kept: list[list[int]] = []
        self.taken: dict[int, int] = {}  # tokens by sequence, those of the running step included
        self.calls = 0
        self.fails_at = -1  # which call raises

    # Space

    @property
    def room(self) -> int:
        return self.facts.capacity - sum(self.taken.values())

    def most(self, length: int) -> int:
        return length

    def needed(self, seq: Sequence, end: int | None = None) -> int:
        return max(0, (len(seq.tokens) if end is None else end) - self.taken.get(seq.id, 0))

    def cached(self, seq: Sequence) -> int:
        if not seq.request.prefix_cache or seq.wants_prompt_logprobs:
            return 0
        return max((shared_length(seq.tokens[:-1], kept) for kept in self.kept), default=0)

    def shares(self, seq: Sequence, other: Sequence) -> bool:
        return False

    def open(self, seq: Sequence) -> int:
        self.held[seq.id] = seq.tokens[: self.cached(seq)]
        self.taken[seq.id] = len(self.held[seq.id])
        return self.taken[seq.id]

    def chunk(self, seq: Sequence, rows: int) -> int:
        return min(rows, seq.pending)

    def close(self, seq: Sequence) -> None:
        if seq.id in self.held:
            held = self.held.pop(seq.id)
            self.kept += [held] if seq.request.prefix_cache else []
            del self.taken[seq.id]

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        assert self.held == {seq.id: seq.tokens[: seq.committed] for seq in running}
        assert self.taken == {seq.id: seq.committed for seq in running}

    # Runtime

    def read_images(self, prompt: list[int], images: Any) -> PromptImages:
        raise InvalidParameter("images", len(images), "a text model")

    def prepare_images(self, span: Span) -> SpeculonError | None:
        return None

    def reserve(self, spans: list[Span]) -> ScriptedStep:
        return ScriptedStep(self, spans)

    def capabilities(self, config: EngineConfig) -> Iterator[tuple[str, Capability]]:
        return iter(())

    def memory(self) -> dict[str, int]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {}

    def between_rounds(self) -> bool:
        return False

    def loading_ended(self) -> None:
        pass

    def end(self) -> None:
        pass


class ScriptedStep:
    def __init__(self, runtime: ScriptedRuntime, spans: list[Span]):
        self.runtime, self.spans, self.grants = runtime, spans, list[Grant]()
        room = runtime.room - sum(span.end - runtime.taken[span.seq.id] for span in spans)
        assert room >= 0, "more is reserved than there is"
        runtime.taken |= {span.seq.id: span.end for span in spans}
        for span in spans:
            drafts = min(room, span.most_drafts)
            self.grants.append(Grant(drafts, Reason.NO_PAGES if span.most_drafts and not drafts else None))
            room -= drafts

    def forward(self, drafted: list[Drafted]) -> Output:
        """Computes all rows, and holds them: what is rejected goes when the step is left."""
        runtime, follow, scored = self.runtime, list[int](), list[range]()
        runtime.calls += 1
        if runtime.calls == runtime.fails_at:
            raise RuntimeError("the device is gone")
        for one in drafted:
            held, span = runtime.held[one.seq.id], one.span
            assert len(held) == span.start, "it has other tokens than the engine believes"
            held += [*one.seq.tokens[span.start : span.end], *one.draft.tokens]
            first = 0 if span.scores_prompt else span.length - 1 if span.samples else one.rows
            scored.append(range(len(follow), len(follow) + one.rows - first))
            follow += [runtime.rule(held[: end + 1]) for end in range(span.start + first, one.end)]
        rows = [[4.0 * (token == best) for token in range(VOCAB)] for best in follow]
        return Output(torch.tensor(rows).reshape(len(rows), VOCAB), scored)

    def commit(self, judged: list[Judged]) -> float:
        return 0.0  # forgetting rows is all that rejected drafts cost

    def __enter__(self) -> ScriptedStep:
        return self

    def __exit__(self, *_: object) -> None:
        for seq in (span.seq for span in self.spans):
            del self.runtime.held[seq.id][seq.committed :]
            self.runtime.taken[seq.id] = seq.committed
