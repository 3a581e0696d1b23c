"""Gemma 4's assistants change no token, and their rows are those of transformers, whatever happens to pages."""

from __future__ import annotations

import random
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from speculon.core.config import SamplingParams
from tests.builders import spread
from tests.tiny.assistant_forms import (
    FORMS,
    NAME,
    Round,
    Texts,
    folder_of,
    target_of,
    watch_assistants,
    wrong_rows,
)
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, texts_of
from tests.tiny.test_parity import GREEDY, MODES, OFF, accepted_lengths

KS = (1, 3, 7)
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prompts in chunks": {"max_batch_tokens": 7},
    "a page each token": {"block_size": 1},
    "few pages": {"num_blocks": 40, "max_num_seqs": 8},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3},
    "stock layers": {"fuse": False},
}
CHOSEN = spread(SETTINGS, FORMS, MODES, KS)


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    chance = random.Random(7)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 31, 1, 17, 8, 24)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=40 - 3 * i, seed=50 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, None, f"q{i}"))
    return tuple(requests)


def ask(form: str, k: int = 3) -> dict[str, Any]:
    return {"draft": {NAME: str(folder_of(form))}, "method": NAME, "num_speculative_tokens": k}


def write(
    form: str, requests: tuple[Request, ...], speculation: dict[str, Any], **settings: Any
) -> dict[Key, Result]:
    engine = make_engine(target_of(form), speculation=speculation, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


@cache
def plain(form: str, mode: str, shared: int = 0) -> Texts:
    """What is written for each of the requests alone and without speculation."""
    texts: dict[Key, list[int]] = {}
    for request in requests_of(mode, shared):
        texts |= {key: one.tokens for key, one in write(form, (request,), {"method": "off"}).items()}
    return texts


def whole(form: str, mode: str, shared: int = 0) -> Texts:
    """Prompt and text of each."""
    texts = plain(form, mode, shared)
    return {(r.id, 0): [*r.prompt, *texts[r.id, 0]] for r in requests_of(mode, shared)}


@pytest.mark.parametrize(("form", "k"), list(zip(FORMS, cycle(KS), strict=False)))
def test_rows_are_those_of_transformers(form: str, k: int) -> None:
    watch = watch_assistants(plain(form, "greedy"))
    results = write(form, requests_of("greedy"), ask(form, k))
    assert texts_of(results) == plain(form, "greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_rows(form, watch, whole(form, "greedy"))
    assert max(one.length for one in watch) > 40 and len(watch) > 20
