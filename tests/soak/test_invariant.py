"""Batch-invariant in bf16 over HTTP: 32 clients with other methods, K and seeds get the plain texts."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from recipes.serving.server import Server

from speculon import LLM, SamplingParams
from speculon.core.config.file import CACHE
from speculon.measure.bench.workloads import Size, build
from speculon.runtimes.torch.loading.batch_check import differing
from speculon.runtimes.torch.model.linear import packable
from tests.tiny.conftest import TINY
from tests.tiny.kernels import where_invariant
from tests.tiny.test_invariant import invariant_or_skipped

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not packable(torch.bfloat16, torch.device("cpu")), reason="no products in bf16 here"),
]

CLIENTS, REQUESTS, TOKENS = 32, 96, 48
PAGES = 160  # fewer than 32 sequences take, so that some are preempted
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "compile": "off"}


def bodies(llm: LLM) -> list[dict[str, Any]]:
    """Requests that differ in prompt, sampling, method and K; some share the beginning of their prompt."""
    chance = random.Random(0)
    cases = build("code", llm.tokenizer, Size(12, TOKENS, llm.engine.max_context))
    found = []
    for seed in range(REQUESTS):
        prompt = chance.choice(cases).prompt
        body: dict[str, Any] = {
            "prompt": prompt[: chance.choice([len(prompt), 30, 100])],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": chance.choice([0, 0.8]),
            "top_p": chance.choice([1.0, 0.9]),
            "logprobs": 3,
            "seed": seed,
            "speculation": {
                "method": chance.choice(["off", "suffix", "draft_model", "eagle3", "auto"]),
                "num_speculative_tokens": chance.randint(1, 16),
            },
        }
        found.append(body)
    return found


def complete(url: str, body: dict[str, Any]) -> tuple[str, list[float]]:
    data = json.dumps(body).encode()
    request = Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_texts_and_log_probabilities_over_http_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the server uses the layout of weights that this process measures
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    draft = {"draft_model": "demo-draft", "eagle3": "demo-eagle3"}
    with where_invariant():
        llm = LLM("demo", batch_invariant=True, warmup=False, speculation={"draft": draft}, **SETTINGS)
    requests, expected = bodies(llm), []
    for body in requests:
        names = ("max_tokens", "ignore_eos", "temperature", "top_p", "logprobs", "seed")
        params = SamplingParams(**{name: body[name] for name in names})
        (out,) = llm.generate(body["prompt"], params, speculation={"method": "off"})
        expected.append((out.text, [entry.logprob for entry in out.logprobs or ()]))
    flags = ["--model", "demo", "--dtype", "bfloat16", "--threads", "1", "--batch-invariant"]
    flags += ["--compile", "off"]
    flags += ["--draft", json.dumps(draft), "--num-blocks", str(PAGES), "--max-num-seqs", str(CLIENTS)]

    with Server(*flags, log=tmp_path / "log") as server, ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(partial(complete, server.url), requests))
        counted = server.metrics()
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [logprobs for _, logprobs in found] == [logprobs for _, logprobs in expected]
    assert counted["speculon_preemptions_total"] > 0, "pages were to run out"
    assert counted["speculon_accepted_tokens_total"] > 0


@pytest.mark.parametrize("name", TINY)
def test_logits_in_fp16_are_bitwise_equal_in_every_batch(name: str) -> None:
    """All 14 on an Intel Xeon with AMX, 13 on an AMD EPYC."""
    assert differing(invariant_or_skipped(name, torch.float16)) is None
