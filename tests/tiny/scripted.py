"""A proposer that knows the text beforehand and is wrong where asked, a letter tokenizer, and a way to run
requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speculon import LLM
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.core.types import NO_LIMITS, Draft, Finish, TokenLogprobs, Verdict
from speculon.decoding.sequence import Event, Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.runtimes.torch.kv.states import StateStore
from speculon.runtimes.torch.kv.store import PageStore
from speculon.runtimes.torch.model.target import Target
from speculon.speculation.proposers.registry import register
from tests.engines import engine_on, torch_runtime

Key = tuple[str, int]  # request id, sample


class Scripted:
    """Drafts the known text; where `lies(position in the output)`, another token.

    Without `lies` a draft is true with probability 0.6 per position, and in every other round up to a
    position that goes through 0 and K..1, so that long accepted runs occur as well.
    """

    def __init__(
        self, truth: Mapping[Key, list[int]], lies: Callable[[int], bool] | None = None, vocab_size: int = 96
    ):
        self.limits = NO_LIMITS
        self.truth, self.lies, self.vocab_size = truth, lies, vocab_size
        self.known: set[int] = set()
        self._rounds: Counter[int] = Counter()  # by K

    def admit(self, seq: Sequence) -> None:
        assert seq.id not in self.known
        self.known.add(seq.id)

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        return [self.draft_of(seq, k) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict]) -> None:
        assert all(seq.id in self.known for seq in seqs)

    def release(self, seq: Sequence) -> None:
        self.known.remove(seq.id)

    def draft_of(self, seq: Sequence, k: int) -> Draft:
        at, truth = seq.num_output, self.truth.get((seq.request.id, seq.sample), [])
        chance = random.Random(f"{seq.request.id} {seq.sample} {at}")
        self._rounds[k] += 1
        true_until = -(self._rounds[k] // 2) % (k + 1) if self._rounds[k] % 2 else None
        tokens = []
        for i, position in enumerate(range(at, at + k)):
            token = truth[position] if position < len(truth) else chance.randrange(self.vocab_size)
            if self.lies is not None:
                lie = self.lies(position)
            else:
                lie = i == true_until if true_until is not None else chance.random() > 0.6
            tokens.append(
                (token + 1 + chance.randrange(self.vocab_size - 1)) % self.vocab_size if lie else token
            )
        return Draft(tuple(tokens), ("scripted",) * k)


def script(truth: Mapping[Key, list[int]], lies: Callable[[int], bool] | None = None) -> Scripted:
    """Makes `scripted` the name of a proposer that knows `truth`."""
    proposer = Scripted(truth, lies)
    register("scripted", lambda config, target: proposer)
    return proposer


class Letters:
    """Token i is the character 32 + i."""

    eos_token_id = None
    chat_template = None

    def __len__(self) -> int:
        return 96

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 32 for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(32 + i) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(32 + token)


def spell(ids: list[int]) -> str:
    return Letters().decode(ids)


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    speculation: dict[str, Any] | None = None
    id: str = "r"


@dataclass
class Result:
    """All that one sample's events said."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: Event) -> None:
        assert self.finish is None, "an event after the last one"
        self.tokens += event.tokens
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs += event.prompt_logprobs or ()
        self.finish = event.finish
        self.stats = event.stats or self.stats


def texts_of(results: Mapping[Key, Result]) -> dict[Key, list[int]]:
    return {key: result.tokens for key, result in results.items()}


def make_engine(target: Target, **settings: Any) -> Engine:
    """Under policy `fixed` unless `speculation` names another: drafts must not depend on the clock."""
    speculation = {"policy": "fixed", **settings.pop("speculation", {})}
    return engine_on(
        target, Tokenizer(Letters()), EngineConfig(**{"block_size": 4, **settings}, speculation=speculation)
    )


def drain(engine: Engine, results: dict[Key, Result] | None = None, steps: int = 2000) -> dict[Key, Result]:
    """Steps until nothing is left to do; the pool is checked on the way and must be whole and unused at the
    end.
    """
    results = {} if results is None else results
    for step in range(steps):
        if not engine.has_work:
            break
        for event in engine.step():
            results.setdefault((event.request_id, event.sample), Result()).take(event)
        if step % 8 == 0:
            engine.check_integrity()
    assert not engine.has_work, f"still busy after {steps} steps"
    engine.check_integrity()
    assert engine.runtime.space.room == engine.runtime.facts.capacity
    return results


def assert_nothing_held(engine: Engine) -> None:
    """Nothing runs, every page is free or cached, and no part remembers a request or a sequence."""
    engine.check_integrity()
    assert not engine.has_work and engine.runtime.space.room == engine.runtime.facts.capacity
    assert not engine._requests and not engine.proposers._admitted and not engine.scheduler._siblings


def assert_idle(llm: LLM) -> None:
    """No call runs, and nothing of one remains."""
    assert_nothing_held(llm.engine)
    assert not len(llm._stepper._requests)


def proposer_of(engine: Engine, method: str) -> Any:
    """The proposer of a method, which is built."""
    proposer = engine.proposers.find(method)
    assert proposer is not None, method
    return proposer


def store_of(engine: Engine) -> PageStore:
    """K and V of all pages."""
    return torch_runtime(engine).store


def states_of(engine: Engine, drafter: str | None = None) -> StateStore:
    """The recurrent states of the target, or of a drafter, which has some."""
    runtime = torch_runtime(engine)
    if drafter is None:
        states = runtime.states
    else:
        pages = runtime.drafters[drafter].pages
        states = pages.states and pages.states.store
    assert states is not None
    return states


def run(target: Target, requests: list[Request], **settings: Any) -> dict[Key, Result]:
    """All requests at once in an engine of their own."""
    engine = make_engine(target, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)
