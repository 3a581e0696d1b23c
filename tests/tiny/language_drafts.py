"""Language models that draft, as folders: PARD models, and models whose tokenizer is not the target's."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from speculon.core.config import EngineConfig
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.runtimes.torch.drafters.draft_model.pard import NAME, Pard
from speculon.runtimes.torch.drafters.table import register
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.model.target import Target
from tests.engines import engine_on
from tests.tiny.conftest import VOCAB, build, tiny_target
from tests.tiny.requests import OFF, Texts, plain, requests_of
from tests.tiny.scripted import Key, Request, Result, drain, texts_of

SPECIALS = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(32 + i) for i in range(VOCAB - len(SPECIALS))]  # target id 3 + i
MASK = VOCAB  # one more id, which no target has


def byte_level(pieces: Seq[str]) -> PreTrainedTokenizerFast:
    """Token i is piece i, a character, as GPT-2 writes it."""
    vocab = {piece.replace(" ", "\u0120"): i for i, piece in enumerate(pieces)}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return finished(backend)


def sentencepiece(pieces: Seq[str]) -> PreTrainedTokenizerFast:
    """The same as SentencePiece writes it: digits are bytes."""
    spelt = {c: f"<0x{ord(c):02X}>" if c.isdigit() else c.replace(" ", "\u2581") for c in pieces}
    backend = Backend(BPE(vocab={spelt[c]: i for i, c in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return finished(backend)


def finished(backend: Backend) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([token for token in SPECIALS if backend.token_to_id(token) is not None])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def characters() -> Tokenizer:
    """The target's tokenizer, of as many ids as the tiny models have logits."""
    return Tokenizer(byte_level([*SPECIALS, *CHARACTERS]))


def shuffled(lacking: int = 0, more: int = 0) -> list[str]:
    """The target's pieces in another order, without some characters, and with others."""
    chance = random.Random(3)
    pieces = [*SPECIALS, *chance.sample(CHARACTERS, len(CHARACTERS) - lacking)]
    pieces += [chr(0xC0 + i) for i in range(more)]
    chance.shuffle(pieces)
    return pieces


def write_draft(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **config: Any) -> Path:
    """A random language model."""
    build("llama", seed, vocab_size=len(tokenizer) + 1, **config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_same(folder: Path, pieces: Seq[str], tokenizer: PreTrainedTokenizerFast, **config: Any) -> Path:
    """The target's own weights, with its rows of the vocabulary where another tokenizer has them."""
    source, model = build("llama"), build("llama", 9, vocab_size=len(pieces), **config)
    order = {piece: i for i, piece in enumerate([*SPECIALS, *CHARACTERS])}
    state = source.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = model.state_dict()[name].clone()
        for i, piece in enumerate(pieces):
            if piece in order:
                rows[i] = state[name][order[piece]]
        state[name] = rows
    model.load_state_dict(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_pard(folder: Path, seed: int = 1, **config: Any) -> Path:
    """A PARD model with the target's tokenizer."""
    return write_draft(folder, characters().inner, seed, **{"pard_token": MASK, **config})


def engine_of(drafts: dict[str, Any], target: Target | None = None, **settings: Any) -> Engine:
    speculation = {"policy": "fixed", "draft": drafts, **settings.pop("speculation", {})}
    config = EngineConfig(**{"block_size": 4, **settings}, speculation=speculation)
    return engine_on(target or tiny_target("llama"), characters(), config)


def write(engine: Engine, requests: Seq[Request]) -> dict[Key, Result]:
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


def asking(mode: str, k: int, *methods: str, shared: int = 0) -> list[Request]:
    """The requests, with these methods in turn."""
    return [
        Request(r.prompt, r.params, {"method": methods[i % len(methods)], "num_speculative_tokens": k}, r.id)
        for i, r in enumerate(requests_of(mode, shared))
    ]


def off(requests: Seq[Request]) -> Texts:
    """What is written for these requests without speculation."""
    return texts_of(write(engine_of({}), [Request(r.prompt, r.params, OFF, r.id) for r in requests]))


def some(mode: str, results: dict[Key, Result]) -> Texts:
    """What should have been written."""
    return {key: plain(mode)[key] for key in results}


def drafted(results: dict[Key, Result]) -> tuple[int, int]:
    """Drafts that were verified, and of these the accepted ones."""
    found = [result.stats.speculation() for result in results.values()]
    return sum(done.drafted for done in found), sum(done.accepted for done in found)


@dataclass
class Watch:
    """Each block of a PARD model: the tokens before it, and the logits of its drafts [K, V]."""

    blocks: list[tuple[list[int], Tensor]] = field(default_factory=list)


class Watched(Pard):
    """Records every block, and drafts the known output with some errors, so that all lengths are accepted."""

    watch: Watch
    truth: Texts

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        return [self._true_draft(s, d) for s, d in zip(seqs, drafts, strict=True)] if self.truth else drafts

    def _block(self, rest: list[TokenRange], budgets: list[int]) -> Tensor:
        logits = super()._block(rest, budgets)
        for (seq, _, _), rows in zip(rest, logits.split(budgets), strict=True):
            self.watch.blocks.append((list(seq.tokens), rows.cpu()))
        return logits

    def _true_draft(self, seq: Sequence, draft: Draft) -> Draft:
        rest = self.truth[seq.request.id, seq.sample][seq.num_output :]
        chance = random.Random(f"{seq.request.id} {len(seq.tokens)}")
        tokens = [t if chance.random() > 0.3 else (t + 1) % VOCAB for t in rest[: len(draft.tokens)]]
        return Draft(tuple(tokens), (NAME,) * len(tokens))


def watch_pard(truth: Texts | None = None) -> Watch:
    """Makes `pard` the name of a drafter that is watched, and that says `truth` where there is any."""
    watch = Watch()

    def made(config: Any, host: Any) -> Watched:
        drafter = Watched.build(config, host)
        drafter.watch, drafter.truth = watch, truth or {}
        return drafter

    register(NAME, made)
    return watch


def wrong_blocks(watch: Watch, seed: int = 1, atol: float = 1e-4) -> list[str]:
    """Blocks that are not the formula's: logits of the stock model after the last token, and after masks."""
    model, wrong = build("llama", seed, vocab_size=VOCAB + 1), []
    for tokens, rows in watch.blocks:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens + [MASK] * (len(rows) - 1)])).logits[0]
        off = (rows - logits[len(tokens) - 1 :, :VOCAB]).abs().max().item()
        if not off < atol:
            wrong.append(f"after {len(tokens)} tokens: {len(rows)} rows are off by {off:.1e}")
    return wrong
