"""Prediction layers in a target's checkpoint change no token, and their rows are those of the formula."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from speculon.config import SamplingParams
from speculon.proposers import registry
from tests.tiny.mtp_forms import FORMS, Texts, target_of, watch_mtp, written, wrong_rows
from tests.tiny.scripted import Key, Request, Result, drain, make_engine
from tests.tiny.test_parity import MODES, OFF, accepted_lengths

KS = (1, 3, 7)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The table of methods as it was."""
    yield
    registry._registered.pop("mtp", None)


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    chance = random.Random(7)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 21, 1, 9)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=24 - 3 * i, seed=50 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, OFF, f"q{i}"))
    return tuple(requests)


def write(
    form: str, requests: tuple[Request, ...], speculation: dict[str, Any], **settings: Any
) -> dict[Key, Result]:
    engine = make_engine(target_of(form), speculation=speculation, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, None, request.id)
    return drain(engine)


@cache
def plain(form: str, mode: str, shared: int = 0) -> Texts:
    """What is written for each of the requests alone and without speculation."""
    texts: dict[Key, list[int]] = {}
    for request in requests_of(mode, shared):
        texts |= texts_of(write(form, (request,), {"method": "off"}))
    return texts


def texts_of(results: dict[Key, Result]) -> dict[Key, list[int]]:
    return {key: result.tokens for key, result in results.items()}


def whole(form: str, mode: str, shared: int = 0) -> Texts:
    """Prompt and text of each."""
    texts = plain(form, mode, shared)
    return {(r.id, 0): [*r.prompt, *texts[r.id, 0]] for r in requests_of(mode, shared)}


def ask(k: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k}


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout_changes_no_token(form: str, k: int) -> None:
    watch = watch_mtp(plain(form, "greedy"))
    results = write(form, requests_of("greedy"), ask(k))
    assert texts_of(results) == plain(form, "greedy")
    assert accepted_lengths(results) >= set(range(min(k, 3) + 1))
    assert not wrong_rows(watch, written(form), whole(form, "greedy"))
    assert len(watch.rounds) > 10
