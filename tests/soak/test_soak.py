"""Many different requests in a pool too small for them all: each is answered or refused by name, and no page
is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.errors import InvalidRequest
from speculon.decoding.sequence import Event
from speculon.engine.engine import Engine
from speculon.speculation.control.policies import POLICIES
from speculon.target.target import Output
from tests.tiny.account import check_account, unknown_to
from tests.tiny.conftest import CONTEXT, tiny_target
from tests.tiny.drafting import DRAFT, NoisyModel, use_draft
from tests.tiny.requests import TIE, gap
from tests.tiny.scripted import (
    Key,
    Request,
    Result,
    assert_nothing_held,
    drain,
    make_engine,
    run,
    script,
    spell,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

REQUESTS = 300
REFUSED = 0.1  # of all requests
ABORTED = 0.15
FAULTS = 0.05  # of all steps
PAGES = 48  # of 4 tokens: two requests of the longest kind


def random_request(number: int, chance: random.Random, prompts: list[list[int]]) -> Request:
    """Prompts partly begin alike; every parameter is set in some requests."""
    shared = chance.choice(prompts)[: chance.randrange(1, 30)]
    prompt = shared + [chance.randrange(3, 96) for _ in range(chance.randrange(30))]
    params: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "max_tokens": chance.choice([0, 1, 2, 5, 20, 50]),
        "seed": chance.randrange(10),
        "n": chance.choice([1, 1, 1, 1, 2, 4]),
        "ignore_eos": chance.random() < 0.7,
    }
    some = {
        "top_k": lambda: chance.randrange(1, 50),
        "top_p": lambda: chance.uniform(0.3, 1),
        "min_p": lambda: chance.uniform(0, 0.3),
        "repetition_penalty": lambda: chance.uniform(0.7, 2),
        "presence_penalty": lambda: chance.uniform(-1, 2),
        "frequency_penalty": lambda: chance.uniform(-0.5, 2),
        "logit_bias": lambda: {chance.randrange(96): chance.uniform(-5, 5) for _ in range(3)},
        "bad_words": lambda: tuple(
            spell([chance.randrange(96) for _ in range(chance.choice([1, 2]))]) for _ in range(2)
        ),
        "stop": lambda: tuple(
            spell([chance.randrange(96) for _ in range(chance.choice([1, 1, 2]))]) for _ in range(3)
        ),
        "stop_token_ids": lambda: tuple(chance.randrange(96) for _ in range(4)),
        "min_tokens": lambda: chance.randrange(params["max_tokens"] + 1),
        "logprobs": lambda: chance.randrange(4),
        "prompt_logprobs": lambda: chance.randrange(3),
    }
    params |= {name: make() for name, make in some.items() if chance.random() < 0.15}
    method = chance.choice(
        ["scripted", "scripted", "ngram", "synthetic", "off", "auto", "draft_model", "draft_model"]
    )
    policy = random.Random(number).choice(["fixed"] * len(POLICIES) + list(POLICIES))
    speculation = {
        "method": method,
        "num_speculative_tokens": chance.choice([0, 1, 2, 4, 8, 16]),
        "policy": policy,
    }
    return Request(prompt, SamplingParams(**params), speculation, f"q{number}")


def spoiled(request: Request, chance: random.Random) -> Request:
    """The same request with something that must be refused."""
    return replace(
        request,
        **chance.choice(
            [
                {"prompt": []},
                {"prompt": [*request.prompt, 96]},
                {"prompt": request.prompt * CONTEXT},
                {"speculation": {"method": "nonsense"}},
                {"speculation": {"num_speculative_tokens": 1000}},
                {"params": request.params.model_copy(update={"max_tokens": CONTEXT})},
                {"params": request.params.model_copy(update={"logit_bias": {500: 1.0}})},
                {"params": request.params.model_copy(update={"n": 1, "stop_token_ids": (-7,)})},
            ]
        ),
    )


class Traffic:
    """Feeds an engine at random moments, aborts at random moments, and keeps what it says."""

    def __init__(self, engine: Engine, requests: list[Request], chance: random.Random):
        self.engine, self.waiting, self.chance = engine, list(reversed(requests)), chance
        self.results: dict[Key, Result] = {}
        self.refused: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.spoiled: set[str] = set()

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.results.setdefault((event.request_id, event.sample), Result()).take(event)

    def feed(self) -> None:
        request = self.waiting.pop()
        if self.chance.random() < REFUSED:
            request = spoiled(request, self.chance)
            self.spoiled.add(request.id)
        try:
            self.engine.add_request(request.prompt, request.params, request.speculation, request.id)
        except InvalidRequest as error:
            self.refused[request.id] = type(error).__name__
            return
        if self.chance.random() < ABORTED / 3:
            self.abort(request.id)  # before its first step

    def abort(self, name: str) -> None:
        events = self.engine.abort(name)
        self.take(events)
        if events:
            self.aborted.add(name)
        self.engine.check_integrity()

    def run(self) -> int:
        steps = 0
        while self.waiting or self.engine.has_work:
            while self.waiting and self.chance.random() < 0.5:
                self.feed()
            if self.chance.random() < FAULTS:
                self.fail()
            self.take(self.engine.step())
            steps += 1
            if steps % 5 == 0:
                self.engine.check_integrity()
            alive = [
                seq.request.id for seq in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
            ]
            if alive and self.chance.random() < 0.03:
                self.abort(self.chance.choice(alive))
            assert steps < 20_000
        return steps

    def fail(self) -> None:
        """A step whose forward raises after it has run: what it wrote must not be seen."""
        forward = self.engine.target.forward

        def fail(*args: Any, **kwargs: Any) -> Output:
            forward(*args, **kwargs)
            raise MemoryError("planted")

        self.engine.target.forward = fail  # type: ignore[method-assign]
        try:
            if self.engine.has_work:
                with pytest.raises(MemoryError):
                    self.engine.step()
        finally:
            del self.engine.target.forward


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"max_batch_tokens": 6, "max_num_seqs": 30}),
    ("gemma3", {"block_size": 3, "num_blocks": 60}),
    ("deepseek_v3", {"max_num_seqs": 4}),
]


@pytest.mark.parametrize(("seed", "name", "settings"), [(i, *x) for i, x in enumerate(SETTINGS)], ids=str)
def test_every_request_is_answered_or_refused_and_the_pool_is_whole(
    seed: int, name: str, settings: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, 96) for _ in range(30)] for _ in range(5)]
    requests = [random_request(i, chance, prompts) for i in range(REQUESTS)]
    target = tiny_target(name)
    truth: dict[Key, Result] = {}
    for request in requests:
        truth |= run(target, [replace(request, speculation={"method": "off"})])
    script({key: result.tokens for key, result in truth.items()})

    draft = NoisyModel(target, error_rate=0.4)
    use_draft(draft)

    engine = make_engine(
        target,
        **{"speculation": DRAFT, "num_blocks": PAGES, "max_num_seqs": 12, "max_batch_tokens": 40} | settings,
    )
    traffic = Traffic(engine, requests, chance)
    traffic.run()
    drain(engine)  # nothing left, the pool whole

    assert set(traffic.refused) == traffic.spoiled
    assert {name for name, _ in traffic.results} | set(traffic.refused) == {
        request.id for request in requests
    }
    ties = 0
    for request in requests:
        if request.id in traffic.refused:
            assert request.id not in {name for name, _ in traffic.results}
            continue
        for sample in range(request.params.n):
            result, plain = traffic.results[request.id, sample], truth[request.id, sample]
            assert result.finish is not None
            check_account(result)
            if result.finish.reason == "abort":
                assert request.id in traffic.aborted and result.tokens == plain.tokens[: len(result.tokens)]
                continue
            if result.tokens != plain.tokens or result.finish != plain.finish:
                at = next(
                    i for i, (a, b) in enumerate(zip(result.tokens, plain.tokens, strict=False)) if a != b
                )
                assert gap(request, plain.tokens[:at], sample, name) < TIE, (request, at)
                ties += 1
                continue
            assert [lp.token for lp in result.logprobs] == (
                plain.tokens if request.params.logprobs is not None else []
            )
            assert [lp.token for lp in result.prompt_logprobs] == [lp.token for lp in plain.prompt_logprobs]
    assert ties <= 2

    total = engine.counters
    ended = Counter(result.finish.reason for result in traffic.results.values() if result.finish)
    assert total.finished == ended and min(ended[reason] for reason in ("stop", "length", "abort")) > 10
    assert total.totals.accepted > 200 and (total.totals.cached_tokens > 200) == engine.pool.prefix_cache
    assert total.totals.accepted_from["draft_model"] > 100 and max(draft.calls) > 30
    assert total.totals.preemptions > 5 or engine.scheduler.max_num_seqs == 4
    assert total.totals.reasons["no_pages"] > 0 and len(set(traffic.refused.values())) >= 4
    assert total.totals.watched.total() > 5 and unknown_to(engine)
    assert_nothing_held(engine)
    print(f"\n{dict(ended)}, refused {dict(Counter(traffic.refused.values()))}, {ties} ties, {total}")
