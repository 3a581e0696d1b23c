"""Another GGUF file as draft model: it drafts token by token, in a context and streams of its own.

Its streams hold tokens of the target. Where its tokenizer is another one, `Translation` maps both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from speculon.checkpoints.gguf.header import read_split
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, UnsupportedModel
from speculon.core.memory import free_bytes
from speculon.core.types import Draft, Limits, Verdict
from speculon.decoding.sequence import Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.llama.memory import plan_memory
from speculon.runtimes.llama.model import LlamaModel, Rows
from speculon.runtimes.llama.streams import common
from speculon.runtimes.llama.vocabulary import Vocabulary
from speculon.speculation.proposers.base import Proposer
from speculon.speculation.proposers.chain import draft_chain
from speculon.speculation.proposers.translation import Translation, tokenizer_overlap

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.llama.runtime import LlamaRuntime

NAME = "draft_model"


@dataclass(slots=True, eq=False)
class DraftStream:
    """What the draft model has read of a sequence, in tokens of the target."""

    id: int
    tokens: list[int] = field(default_factory=list)
    owner: int | None = None
    used: int = 0


class LlamaDraftModel(Proposer):
    """As `Proposer` says. It reads what was committed with the next draft, and forgets rejected ones then."""

    def __init__(
        self,
        model: LlamaModel,
        vocab_size: int,
        streams: int,
        min_confidence: float,
        translation: Translation | None = None,
    ):
        """`vocab_size` is the target's; without `translation` the ids of both are the same."""
        self.model, self._vocab_size, self._min_confidence = model, vocab_size, min_confidence
        self.translation = translation
        self.limits = Limits(max_context=model.length, branches=False)
        self._streams = [DraftStream(number) for number in range(streams)]
        self._of: dict[int, DraftStream] = {}
        self._calls = 0

    @classmethod
    def load(
        cls,
        path: Path,
        config: EngineConfig,
        runtime: LlamaRuntime,
        tokenizer: Tokenizer | None,
        repack: bool,
    ) -> Self:
        """`tokenizer` is the target's, where it is loaded. All layers are on this machine: each draft token
        would cost a round trip to a server.

        Raises `WrongPair` for a model with too few of the target's tokens, `UnsupportedModel` for a
        recurrent one.
        """
        own = Tokenizer(Vocabulary(path, config))
        theirs = tokenizer or Tokenizer(Vocabulary(runtime.model.path, config))
        overlap = tokenizer_overlap(own, theirs, str(path))  # refused before the weights are read
        length = min(runtime.model.length, context_of(path))
        shares = () if config.rpc else config.tensor_split  # with servers, the first are theirs
        own_memory = {"max_context": length, "kv_memory_gb": None}
        settings = config.model_copy(update={**own_memory, "rpc": (), "tensor_split": shares})
        plan = plan_memory(read_split(path), settings, free_bytes())
        if plan.streams < (streams := runtime.plan.streams):
            why = f"the memory has room for {plan.streams} contexts of draft {path}"
            raise ConfigError(f"max_num_seqs = {config.max_num_seqs}: {why}, and the target has {streams}")
        rows = config.max_batch_tokens + runtime.draft_rows
        model = LlamaModel(
            path,
            settings,
            repack=repack,
            streams=streams,
            length=plan.length,
            rows=rows,
            outputs=streams,
            rollback=0,
        )
        if model.recurrent:
            model.close()
            raise UnsupportedModel(f"draft {path}: a recurrent state cannot go back to what was accepted")
        size, translation = runtime.model.vocab_size, None
        if overlap is not None:
            translation = Translation(overlap, size, model.vocab_size, runtime.device)
        return cls(model, size, streams, config.speculation.draft_min_confidence, translation)

    def admit(self, seq: Sequence) -> None:
        """Its stream is found with its first draft."""

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict]) -> None:
        """What was rejected is forgotten with the next draft."""

    def release(self, seq: Sequence) -> None:
        if (stream := self._of.pop(seq.id, None)) is not None:
            stream.owner = None

    def unread(self, seq: Sequence) -> int:
        """As `ReadsTokens` says."""
        stream = self._of.get(seq.id)
        read = 0 if stream is None else common(stream.tokens, seq.tokens)
        return max(0, len(seq.tokens) - 1 - read)

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        self._calls += 1
        streams = [self._stream(seq) for seq in seqs]
        for seq, stream in zip(seqs, streams, strict=True):
            self._catch_up(seq, stream)

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            return self._next([(streams[i], [*seqs[i].tokens, *drafts[i]]) for i in which])

        return draft_chain(NAME, seqs, ks, forward, self._min_confidence)

    def _stream(self, seq: Sequence) -> DraftStream:
        """The sequence's own stream, else the one that was unused for longest."""
        stream = self._of.get(seq.id)
        if stream is None:
            stream = min(self._streams, key=lambda one: (one.owner is not None, one.used, one.id))
            if stream.owner is not None:
                del self._of[stream.owner]
            stream.owner, self._of[seq.id] = seq.id, stream
        stream.used = self._calls
        return stream

    def _catch_up(self, seq: Sequence, stream: DraftStream) -> None:
        """Goes back to what both have in common, and reads on until one call can take the rest of all."""
        read = min(common(stream.tokens, seq.tokens), len(seq.tokens) - 1)
        self.model.cut(stream.id, read)
        del stream.tokens[read:]
        room = self.model.batch.size // len(self._streams)
        while len(seq.tokens) - read > room:
            rows = seq.tokens[read : min(read + self.model.batch.size, len(seq.tokens) - 1)]
            self._run([Rows(stream.id, read, rows, len(rows))])
            stream.tokens += rows
            read += len(rows)

    def _next(self, texts: list[tuple[DraftStream, list[int]]]) -> Tensor:
        """Logits [B, V] after each text, of which the streams read what they lack."""
        order = sorted(range(len(texts)), key=lambda i: texts[i][0].id)
        parts = []
        for stream, tokens in (texts[i] for i in order):
            start = len(stream.tokens)
            parts.append(Rows(stream.id, start, tokens[start:], len(tokens) - start - 1))
        logits = self._run(parts)
        for i, part in zip(order, parts, strict=True):
            texts[i][0].tokens += part.tokens
        places = torch.empty(len(order), dtype=torch.long)
        places[order] = torch.arange(len(order))
        return logits[places]

    def _run(self, parts: list[Rows]) -> Tensor:
        """Logits [R, V] over the target's vocabulary, whose tokens the parts are."""
        if self.translation is None:
            return self.model.run(parts)[0][:, : self._vocab_size]
        translated = [part._replace(tokens=self.translation.read(list(part.tokens))) for part in parts]
        return self.translation.logits(self.model.run(translated)[0])


def context_of(path: Path) -> int:
    return read_split(path).number("context_length") or 2
