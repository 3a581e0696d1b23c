"""Requests whose undisturbed texts are known, and streams of them through OpenAI's client."""

from __future__ import annotations

import asyncio
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import openai

from speculon import LLM, SamplingParams


@dataclass(frozen=True)
class Case:
    prompt: str
    params: tuple[tuple[str, Any], ...]  # as the API names them
    text: str = ""  # of an undisturbed run without speculation

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.params)


def cases(count: int, tokens: tuple[int, int], seed: int = 0) -> list[Case]:
    """Greedy and seeded, of different lengths; with what one engine writes of all without speculation."""
    rng, source = Random(seed), Path(textwrap.__file__).read_text()
    made = []
    for i in range(count):
        at = rng.randrange(len(source) - 400)
        params: dict[str, Any] = {"max_tokens": rng.randint(*tokens), "temperature": 0.0}
        if i % 2:
            params |= {"temperature": 0.8, "top_p": 0.95, "seed": i}
        made.append(Case(source[at : at + rng.randint(40, 400)], tuple(params.items())))
    prompts, sampling = [case.prompt for case in made], [SamplingParams(**case.options) for case in made]
    with LLM("demo", threads=1, batch_invariant=True, warmup=False, speculation={"method": "off"}) as llm:
        texts = [out.text for out in llm.generate(prompts, sampling)]
    return [Case(case.prompt, case.params, text) for case, text in zip(made, texts, strict=True)]


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


async def stream(api: openai.AsyncOpenAI, case: Case, chunks: list[str] | None = None, **more: object) -> str:
    """The text of one stream, which has to end with a finish reason; `more` are options of ours."""
    chunks = [] if chunks is None else chunks
    finish = None
    async for chunk in await api.completions.create(
        model="demo", prompt=case.prompt, stream=True, **case.options, extra_body=more
    ):
        for choice in chunk.choices:
            chunks.append(choice.text)
            finish = choice.finish_reason or finish
    assert finish in ("stop", "length"), finish
    return "".join(chunks)


async def whole(api: openai.AsyncOpenAI, case: Case) -> str:
    reply = await api.completions.create(model="demo", prompt=case.prompt, **case.options)
    return reply.choices[0].text


class Load:
    """Clients that send one case after another until they are stopped; every text is compared."""

    def __init__(self, url: str, known: list[Case], clients: int = 8):
        self.url, self.known, self.clients = url, known, clients
        self.done, self.wrong, self.errors = 0, list[str](), list[str]()

    async def run(self, stop: asyncio.Event) -> None:
        async with client(self.url) as api:
            await asyncio.gather(*(self._client(api, i, stop) for i in range(self.clients)))

    async def _client(self, api: openai.AsyncOpenAI, number: int, stop: asyncio.Event) -> None:
        rng = Random(number)
        while not stop.is_set():
            case = rng.choice(self.known)
            try:
                text = await stream(api, case)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self.done += 1
            if text != case.text:
                self.wrong.append(case.prompt)

    def check(self) -> None:
        assert self.done and not self.errors and not self.wrong, (self.done, self.errors, len(self.wrong))


def under_load(url: str, known: list[Case], change: Callable[[], None]) -> Load:
    """What clients see while `change` runs."""
    load, stop = Load(url, known), threading.Event()

    async def run() -> None:
        ended = asyncio.Event()
        task = asyncio.create_task(load.run(ended))
        await asyncio.to_thread(stop.wait)
        ended.set()
        await task

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        try:
            change()
        finally:
            stop.set()
        running.result()
    return load
