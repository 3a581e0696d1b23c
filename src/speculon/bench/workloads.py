"""What is written in a benchmark: files the demo model never saw, the same on every run.

code: a held-out file of the standard library is continued, greedily.
edit: a held-out function is to be repeated with one name changed, through the chat template, greedily.
prose: a held-out docstring is continued at temperature 1, each case with a seed of its own.
NAME@T: the same cases at another temperature.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from speculon.config import SamplingParams
from speculon.demo import corpus
from speculon.errors import BenchError, InvalidParameter
from speculon.text import Tokenizer

PROMPT_TOKENS = 256  # of a file that is continued
FEWEST_TOKENS = 24  # of a docstring's beginning, and of an answer
DOCSTRING_CHARS = 160


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: list[int]
    params: SamplingParams
    reference: str | None = None  # the one right answer, where there is one


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked of a workload."""

    cases: int
    max_tokens: int
    context: int

    @property
    def prompt_tokens(self) -> int:
        return min(PROMPT_TOKENS, self.context - self.max_tokens)


T = TypeVar("T")
Builder = Callable[[Tokenizer, Size], Iterator[Case]]


def build(name: str, tokenizer: Tokenizer, size: Size) -> list[Case]:
    """The first cases of a workload that fit the context; fewer than asked for is an error."""
    find, temperature = parse(name)
    if size.prompt_tokens < 1:
        raise InvalidParameter("max_tokens", size.max_tokens, f"the context is {size.context} tokens")
    cases = [at(temperature, case, i) for i, case in enumerate(islice(find(tokenizer, size), size.cases))]
    if len(cases) < size.cases:
        raise BenchError(
            f"workload {name}: {len(cases)} of {size.cases} cases found among the held-out files in {corpus.stdlib_root()}"
            f" for {size.max_tokens} new tokens in a context of {size.context}"
        )
    return cases


def parse(text: str) -> tuple[Builder, float]:
    """Who finds the cases of `NAME` or `NAME@T`, and at which temperature they are written."""
    name, at_sign, number = text.partition("@")
    if name not in WORKLOADS:
        raise InvalidParameter("workloads", text, f"known are {', '.join(WORKLOADS)}")
    find, usual = WORKLOADS[name]
    try:
        temperature = float(number) if at_sign else usual
    except ValueError:
        raise InvalidParameter("workloads", text, "is NAME or NAME@TEMPERATURE") from None
    return find, SamplingParams(temperature=temperature).temperature  # which names its own limits


def at(temperature: float, case: Case, number: int) -> Case:
    """The case at a temperature. Without a seed of its own it gets one, so that every mode samples the same text."""
    seed = number if temperature and case.params.seed is None else case.params.seed
    return replace(case, params=case.params.model_copy(update={"temperature": temperature, "seed": seed}))


def code(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    params = SamplingParams(max_tokens=size.max_tokens)
    for path, source in shuffled("code", held_out_sources()):
        lines = source.splitlines(keepends=True)
        start = random.Random(f"code {path}").randrange(max(1, len(lines) - 60))
        # a character is at most a few bytes, and a token at least one: enough text for the prompt, not the whole file
        tokens = tokenizer.encode("".join(lines[start:])[: size.prompt_tokens * 12])
        if len(tokens) >= size.prompt_tokens:
            yield Case(f"{path}:{start + 1}", tokens[: size.prompt_tokens], params)


def edit(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    params = SamplingParams(max_tokens=size.max_tokens)
    for function in shuffled("edit", corpus.held_out_functions()):
        rng = random.Random(f"edit {function.path} {function.name}")
        old = rng.choice(function.identifiers)
        new = corpus.draw_new_name(rng, function.source)
        answer = corpus.edit_answer(function.source, old, new)
        if len(answer) > 16 * size.max_tokens or not FEWEST_TOKENS <= len(tokenizer.encode(answer)) < size.max_tokens:
            continue
        prompt = ask(tokenizer, corpus.edit_prompt(function.source, old, new))
        if len(prompt) + size.max_tokens <= size.context:
            yield Case(f"{function.path}: {function.name}, {old} -> {new}", prompt, params, answer)


def prose(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    for seed, (path, text) in enumerate(shuffled("prose", docstrings())):
        tokens = tokenizer.encode(text)
        prompt = tokens[: min(len(tokens) // 2, size.prompt_tokens)]
        if len(prompt) >= min(FEWEST_TOKENS, size.prompt_tokens):
            yield Case(path, prompt, SamplingParams(seed=seed, max_tokens=size.max_tokens))


WORKLOADS: dict[str, tuple[Builder, float]] = {"code": (code, 0), "edit": (edit, 0), "prose": (prose, 1)}  # usual temperature


def ask(tokenizer: Tokenizer, message: str) -> list[int]:
    """Through the chat template; a checkpoint without one gets the message as a plain prompt."""
    if tokenizer.inner.chat_template:
        return tokenizer.apply_chat([{"role": "user", "content": message}])
    return tokenizer.encode(message + "\n\n")


def held_out_sources() -> Iterator[tuple[str, str]]:
    for path in corpus.stdlib_files(held_out=True):
        if source := corpus.read_source(path):
            yield path, source


def docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings that are prose: long enough, without interpreter sessions."""
    for path, source in held_out_sources():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= DOCSTRING_CHARS and ">>>" not in text:
                    yield f"{path}: {getattr(node, 'name', 'module')}", text


def shuffled(name: str, things: Iterable[T]) -> list[T]:
    found = list(things)
    random.Random(f"speculon bench {name}").shuffle(found)
    return found


def fingerprint(cases: list[Case]) -> str:
    """Tells whether two benchmarks wrote the same: the standard library differs between versions of Python.

    The temperature stands in the workload's name.
    """
    digest = hashlib.sha256()
    for case in cases:
        digest.update(repr((case.prompt, case.params.max_tokens, case.params.seed)).encode())
    return digest.hexdigest()[:16]
