"""What a benchmark writes: held-out files, the same on every run.

code: a held-out file of the standard library is continued, greedily.
edit: a held-out function is repeated with one name changed, through the chat template, greedily.
prose: a held-out docstring is continued at temperature 1, each case with a seed of its own.
mixed: the first cases of these three, in turn.
warm: users have a held-out function edited several times; each right answer is the next prompt's source, and
    a user's earlier answers may be drafted from.
NAME@T: the same cases at another temperature.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TypeVar

from speculon.core.config import SamplingParams
from speculon.core.errors import BenchError, InvalidParameter
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench import corpus

PROMPT_TOKENS = 256  # of a file that is continued
FEWEST_TOKENS = 24  # of a docstring's beginning, and of an answer
DOCSTRING_CHARS = 160
EDITS = 4  # of one user, at most


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: list[int]
    params: SamplingParams
    reference: str | None = None  # the one right answer, where there is one
    user: str = ""  # whose earlier answers it may be drafted from; "": no pool


@dataclass(frozen=True, slots=True)
class Size:
    """How many cases, and how long."""

    cases: int
    max_tokens: int
    context: int
    concurrency: int = 1  # the highest

    @property
    def prompt_tokens(self) -> int:
        return min(PROMPT_TOKENS, self.context - self.max_tokens)

    @property
    def edits(self) -> int:
        """Of each user of an edit loop: fewer where there would not be a user for each sequence."""
        return max(1, min(EDITS, self.cases // self.concurrency))


T = TypeVar("T")
Builder = Callable[[Tokenizer, Size], Iterator[Case]]
BuilderTable = Mapping[str, tuple[Builder, float | None]]  # usual temperature; None: several


def build(name: str, tokenizer: Tokenizer, size: Size, more: BuilderTable | None = None) -> list[Case]:
    """The first cases of a workload that fit the context; too few are an error.

    `more` are workloads that are not built in. They decide themselves how many are too few.
    """
    builder, temperature = parse(name, more)
    if size.prompt_tokens < 1:
        raise InvalidParameter(
            "max_tokens", size.max_tokens, f"must be below the context, {size.context} tokens"
        )
    cases = [at(temperature, case, i) for i, case in enumerate(islice(builder(tokenizer, size), size.cases))]
    if len(cases) < size.cases and name.partition("@")[0] in WORKLOADS:
        raise BenchError(
            f"workload {name}: only {len(cases)} of {size.cases} cases found among the held-out files in "
            f"{corpus.stdlib_root()} for {size.max_tokens} new tokens in a context of {size.context}; lower "
            "--prompts "
            "or --max-tokens"
        )
    return cases


def groups_of(cases: list[Case], concurrency: int) -> list[list[Case]]:
    """Full groups of cases that run in one batch.

    The cases of one user stay in order, one at a time.
    """
    by_user: dict[str, list[Case]] = defaultdict(list)
    for i, case in enumerate(cases):
        by_user[case.user or f"{i}"].append(case)
    longest = max(map(len, by_user.values()))
    queues = [queue for queue in by_user.values() if len(queue) == longest]
    starts = range(0, len(queues) - concurrency + 1, concurrency)
    rows = (queues[i : i + concurrency] for i in starts)
    return [list(group) for row in rows for group in zip(*row, strict=True)]


def parse(text: str, more: BuilderTable | None = None) -> tuple[Builder, float | None]:
    """The builder of `NAME` or `NAME@T`, and the temperature; None: each case has its own."""
    name, at_sign, number = text.partition("@")
    known = {**WORKLOADS, **(more or {})}
    if name not in known:
        raise InvalidParameter("workloads", text, f"must be one of {', '.join(known)}")
    builder, usual = known[name]
    try:
        temperature = float(number) if at_sign else usual
    except ValueError:
        raise InvalidParameter("workloads", text, "must be NAME or NAME@TEMPERATURE") from None
    # it names its limits
    return builder, None if temperature is None else SamplingParams(temperature=temperature).temperature


def at(temperature: float | None, case: Case, number: int) -> Case:
    """The case at a temperature, with a seed, so that every mode samples the same text."""
    if temperature is None:
        return case
    seed = number if temperature and case.params.seed is None else case.params.seed
    return replace(case, params=case.params.model_copy(update={"temperature": temperature, "seed": seed}))


def code(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    params = SamplingParams(max_tokens=size.max_tokens)
    for path, source in shuffled("code", held_out_sources()):
        lines = source.splitlines(keepends=True)
        start = random.Random(f"code {path}").randrange(max(1, len(lines) - 60))
        # enough text for the prompt, not the whole file
        tokens = tokenizer.encode("".join(lines[start:])[: size.prompt_tokens * 12])
        if len(tokens) >= size.prompt_tokens:
            yield Case(f"{path}:{start + 1}", tokens[: size.prompt_tokens], params)


def edit(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    for function in shuffled("edit", corpus.held_out_functions()):
        rng = random.Random(f"edit {function.path} {function.name}")
        old = rng.choice(function.identifiers)
        new = corpus.draw_new_name(rng, function.source)
        if case := edit_of(tokenizer, size, function, function.source, old, new):
            yield case


def warm(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    users = count(1)
    for function in shuffled("warm", corpus.held_out_functions()):
        rng = random.Random(f"warm {function.path} {function.name}")
        names, source, loop = list(function.identifiers), function.source, list[Case]()
        rng.shuffle(names)
        for i in range(size.edits):
            at_name = i % len(names)
            old, names[at_name] = names[at_name], corpus.draw_new_name(rng, source)
            case = edit_of(tokenizer, size, function, source, old, names[at_name])
            if case is None:
                break
            loop.append(case)
            source = corpus.rename(source, old, names[at_name])
        else:
            user = f"user {next(users)}"
            yield from (replace(case, user=user) for case in loop)


def edit_of(
    tokenizer: Tokenizer, size: Size, function: corpus.CorpusFunction, source: str, old: str, new: str
) -> Case | None:
    """None where the answer is too short, or does not fit."""
    answer = corpus.edit_answer(source, old, new)
    too_long = len(answer) > 16 * size.max_tokens  # in characters: need not be encoded
    if too_long or not FEWEST_TOKENS <= len(tokenizer.encode(answer)) < size.max_tokens:
        return None
    prompt = ask(tokenizer, corpus.edit_prompt(source, old, new))
    if len(prompt) + size.max_tokens > size.context:
        return None
    name = f"{function.path}: {function.name}, {old} -> {new}"
    return Case(name, prompt, SamplingParams(max_tokens=size.max_tokens), answer)


def prose(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    for seed, (path, text) in enumerate(shuffled("prose", docstrings())):
        tokens = tokenizer.encode(text)
        prompt = tokens[: min(len(tokens) // 2, size.prompt_tokens)]
        if len(prompt) >= min(FEWEST_TOKENS, size.prompt_tokens):
            yield Case(path, prompt, SamplingParams(seed=seed, max_tokens=size.max_tokens))


def mixed(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    builders = (WORKLOADS[name] for name in ("code", "edit", "prose"))
    parts = [(builder(tokenizer, size), temperature) for builder, temperature in builders]
    for i in count():
        for some, temperature in parts:
            case = next(some, None)
            if case is None:
                return
            yield at(temperature, case, i)


WORKLOADS: BuilderTable = {
    "code": (code, 0),
    "edit": (edit, 0),
    "prose": (prose, 1),
    "mixed": (mixed, None),
    "warm": (warm, 0),
}


def in_loops(name: str) -> bool:
    """Whether its users have several requests, one after the other."""
    return name.partition("@")[0] == "warm"


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
    order = list(things)
    random.Random(f"speculon bench {name}").shuffle(order)
    return order


def fingerprint(cases: list[Case]) -> str:
    """Whether two benchmarks wrote the same: the standard library differs between versions of Python.

    The temperature is in the workload's name.
    """
    digest = hashlib.sha256()
    for case in cases:
        digest.update(repr((case.prompt, case.params.max_tokens, case.params.seed)).encode())
    return digest.hexdigest()[:16]
