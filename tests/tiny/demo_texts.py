"""The shipped model continuing real code: prompts, what transformers writes, and where two texts differ."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from speculon.core.config import EngineConfig, SamplingParams
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.loading.load import load_target
from speculon.loading.reading import load_tokenizer
from speculon.target.target import Target

DEMO = Path(__file__).parents[1] / "models" / "demo"
MISSING = not (DEMO / "model.safetensors").exists()
TOKENS, CONCURRENCY = 64, 8
DRAFTS = (1, 4, 16)
TIE = 1e-4  # nat
Speculation = dict[str, object]


@dataclass(frozen=True)
class Difference:
    """Prompt `prompt` continues differently from its output token `at` on, where the target's two best are
    `gap` nat apart.
    """

    prompt: int
    at: int
    gap: float


class Demo:
    """The demo target, its stock twin, and `count` pieces of the standard library of different lengths."""

    def __init__(self, count: int):
        self.count = count

    @cached_property
    def target(self) -> Target:
        return load_target(DEMO, dtype="float32", device="cpu")

    @cached_property
    def stock(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None  # generate takes it from here when a call says None
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(load_tokenizer(DEMO))

    @cached_property
    def prompts(self) -> list[list[int]]:
        chance, found = random.Random(0), []
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        while len(found) < self.count:
            lines = (
                chance.choice(files).read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            )
            at = chance.randrange(max(1, len(lines) - 40))
            ids = self.tokenizer.encode("".join(lines[at : at + 40]))[: chance.randrange(4, 300)]
            if ids:
                found.append(ids)
        return found

    def by_generate(self, count: int | None = None) -> list[list[int]]:
        greedy = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
        texts = []
        with torch.inference_mode():
            for prompt in self.prompts[:count]:
                ids = torch.tensor([prompt])
                out = self.stock.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
                texts.append(out[0, len(prompt) :].tolist())
        return texts

    def by_forward(self, texts: list[list[int]]) -> list[list[int]]:
        """The stock model's best token at each place of the first prompts' texts, in one
        forward each: where a text is all of these, it is that of `generate`.
        """
        best = []
        with torch.inference_mode():
            for prompt, text in zip(self.prompts, texts, strict=False):
                logits = self.stock(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
                best.append(logits.argmax(-1).tolist())
        return best

    def write(
        self, concurrency: int, speculation: list[Speculation], count: int | None = None
    ) -> tuple[list[list[int]], int]:
        """The texts of our engine, `concurrency` at a time, the n-th asking for `speculation[n % len]`; and
        accepted drafts.
        """
        texts: list[list[int]] = [[] for _ in self.prompts[:count]]
        engine = Engine(
            self.target,
            self.tokenizer,
            EngineConfig(max_num_seqs=concurrency, speculation={"policy": "fixed", "draft": "demo-draft"}),
        )
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        for i in range(len(texts)):
            engine.add_request(self.prompts[i], params, speculation[i % len(speculation)], str(i))
        while engine.has_work:
            for event in engine.step():
                texts[int(event.request_id)] += event.tokens
        engine.check_integrity()
        return texts, engine.counters.totals.accepted

    def differences(self, ours: list[list[int]], truth: list[list[int]]) -> list[Difference]:
        return [
            Difference(i, at, self.gap(self.prompts[i] + b[:at]))
            for i, (a, b) in enumerate(zip(ours, truth, strict=False))
            if (at := first_difference(a, b)) is not None
        ]

    def gap(self, tokens: list[int]) -> float:
        """How far the stock model's best next token is ahead of the second, nat."""
        with torch.inference_mode():
            best = self.stock(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(2).values
        return float(best[0] - best[1])


def first_difference(a: list[int], b: list[int]) -> int | None:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), None if len(a) == len(b) else shorter)


def report(name: str, found: list[Difference], count: int) -> str:
    gaps = "".join(f"; prompt {d.prompt} at token {d.at}: {d.gap:.1e} nat" for d in found)
    return f"{name}: {len(found)} of {count} texts differ{gaps}"


GOODPUT: list[Speculation] = [{"policy": "goodput"}]  # the engine's default, which decides by the clock


def speculation_modes() -> Iterator[tuple[str, list[Speculation]]]:
    """The modes: every K by itself, and a different K for each sequence of the batch."""
    ngram: list[Speculation] = [{"method": "ngram", "num_speculative_tokens": k} for k in DRAFTS]
    for k, one in zip(DRAFTS, ngram, strict=True):
        yield f"ngram, K = {k}", [one]
    yield "ngram, every K and off", [*ngram, {"method": "off"}]
    draft: list[Speculation] = [{"method": "draft_model", "num_speculative_tokens": k} for k in DRAFTS]
    yield "draft_model, K = 4", [draft[1]]
    cascade: Speculation = {"method": "auto", "num_speculative_tokens": 6}
    yield (
        "draft_model of every K, cascade, ngram and off",
        [*draft, cascade, ngram[1], cascade, {"method": "off"}],
    )
