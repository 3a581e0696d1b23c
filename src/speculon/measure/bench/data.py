"""Prompts of a file as workloads: Spec-Bench, chats, plain prompts and HumanEval, as JSON lines or gzip.

turns: Spec-Bench; through the chat template. A later turn follows the target's own answers to those before.
messages: a chat, up to the last turn that is not the assistant's, through the chat template.
prompt: a plain text that is continued; HumanEval has these, with a `task_id`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.core.config import SamplingParams
from speculon.core.errors import BenchError, DataError, InvalidParameter, InvalidRequest
from speculon.decoding.text.tokenizer import Tokenizer, check_messages
from speculon.measure.bench.workloads import Builder, Case, Size
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

DATA = "data"  # in a list of workloads: every category of the file
KNOWN = "turns (Spec-Bench), messages (a chat), or prompt (a plain text, as in HumanEval)"
NO_TEMPLATE = "is a chat, and the model has no chat template: use another model, or lines with `prompt`"
PLAIN_NAME = re.compile(r"[^\w./+-]+")  # what a workload's name has instead: no @ and no comma


@dataclass(frozen=True, slots=True)
class DataPrompt:
    """A line of the file: a text that is continued, or a chat that is answered."""

    place: str  # file and line
    name: str
    content: str | Sequence[Mapping[str, Any]]
    options: tuple[Any, ...] = ()  # a chat's tools, and its template's variables
    follows: bool = False  # whether the prompt before it is its earlier turn


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of a file by workload, `data:CATEGORY`, in the order of the file."""

    path: Path
    digest: str
    prompts: Mapping[str, Sequence[DataPrompt]] = field(default_factory=dict)

    @property
    def workloads(self) -> dict[str, tuple[Builder, float | None]]:
        """A builder of cases and the usual temperature, by name."""
        return {name: (partial(cases, self.path, name, some), 0) for name, some in self.prompts.items()}

    def facts(self) -> dict[str, Any]:
        """What a report says of it."""
        counts = {name: len(some) for name, some in self.prompts.items()}
        return {"file": self.path.name, "sha256": self.digest, "prompts": counts}


def read_prompts(path: Path) -> PromptFile:
    """Raises `DataError` with the file, the line and the reason."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from None
    by_workload: dict[str, list[DataPrompt]] = {}
    # not splitlines(): JSON strings may contain other line separators
    for number, line_text in enumerate(text.split("\n"), 1):
        if line_text.strip():
            name, prompts = read_line(line_text, f"{path}:{number}", stem)
            by_workload.setdefault(name, []).extend(prompts)
    if not by_workload:
        raise DataError(f"{path}: the file has no prompts")
    return PromptFile(path, hashlib.sha256(raw).hexdigest(), by_workload)


def read_line(line: str, place: str, stem: str) -> tuple[str, list[DataPrompt]]:
    """The workload of a line, and its prompts: one for each turn."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: this line is not JSON ({error})") from None
    key = next((key for key in READERS if isinstance(record, dict) and key in record), None)
    if key is None:
        raise DataError(f"{place}: this line has none of the keys {KNOWN}")
    try:
        contents, options = READERS[key](record)
        category = category_of(record, stem)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from None
    workload = PLAIN_NAME.sub("-", category).strip("-") or "prompts"
    number = place.rpartition(":")[2]
    name = str(record.get("task_id", record.get("question_id", f"line {number}")))
    return f"{DATA}:{workload}", [
        DataPrompt(place, f"{name} turn {turn}" if turn > 1 else name, content, options, follows=turn > 1)
        for turn, content in enumerate(contents, 1)
    ]


def category_of(record: Mapping[str, Any], stem: str) -> str:
    """Its category; of `HumanEval/0` the part before the number; else the name of the file."""
    category = record.get("category")
    if category is None:
        task = record.get("task_id")
        return task.partition("/")[0] if isinstance(task, str) and "/" in task else stem
    if not isinstance(category, str):
        raise ValueError("category must be a string")
    return category


Contents = tuple[
    Sequence[str | Sequence[Mapping[str, Any]]], tuple[Any, ...]
]  # of each turn, and their options


def turns_of(record: Mapping[str, Any]) -> Contents:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError("turns must be a list of strings, none of them empty")
    return [[{"role": "user", "content": turn}] for turn in turns], ()


def chat(record: Mapping[str, Any]) -> Contents:
    messages, tools = record["messages"], record.get("tools") or []
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not isinstance(tools, list) or not isinstance(variables, dict):
        raise ValueError("messages and tools must be lists, and chat_template_kwargs an object")
    check_messages(messages)
    ends = [end for end, message in enumerate(messages, 1) if message["role"] in ("user", "tool")]
    if not ends:
        raise ValueError("messages must have at least one message of a user")
    return [messages[: ends[-1]]], (tools, variables)


def plain(record: Mapping[str, Any]) -> Contents:
    if not isinstance(record["prompt"], str) or not record["prompt"]:
        raise ValueError("prompt must be a string, not empty")
    return [record["prompt"]], ()


READERS = {"turns": turns_of, "messages": chat, "prompt": plain}


def cases(
    path: Path, name: str, prompts: Sequence[DataPrompt], tokenizer: Tokenizer, size: Size
) -> Iterator[Case]:
    """The prompts that fit the context. Raises `BenchError` where they are fewer than run at once."""
    params, fitting = SamplingParams(max_tokens=size.max_tokens), 0
    for prompt in prompts:
        tokens = encode(prompt, tokenizer)
        if 0 < len(tokens) <= size.context - size.max_tokens:
            fitting += 1
            yield Case(f"{name} {prompt.name}", tokens, params)
    if fitting < size.concurrency:
        raise BenchError(
            f"workload {name}: only {fitting} of {len(prompts)} prompts in {path} leave room for "
            f"{size.max_tokens} new tokens in a context of {size.context}, and concurrency is "
            f"{size.concurrency}; lower --max-tokens or --concurrency"
        )


def answered(
    prompts: Mapping[str, Sequence[DataPrompt]], llm: LLM, max_tokens: int
) -> dict[str, list[DataPrompt]]:
    """Later turns with the turns before them, which the target answers greedily, without speculation.

    Turns after one that leaves no room for `max_tokens` are left out.
    """
    chats = {name: conversations(some) for name, some in prompts.items()}
    params, plain = SamplingParams(temperature=0, max_tokens=max_tokens), {"method": OFF}
    room, turn = llm.engine.max_context - max_tokens, 1
    while waiting := [chat for chat in chain(*chats.values()) if len(chat) > turn]:
        tokens = [encode(chat[turn - 1], llm.tokenizer) for chat in waiting]
        for chat, prompt in zip(waiting, tokens, strict=True):
            if len(prompt) > room:
                del chat[turn:]
        pairs = [(chat, prompt) for chat, prompt in zip(waiting, tokens, strict=True) if len(chat) > turn]
        outputs = llm.generate([prompt for _, prompt in pairs], params, speculation=plain) if pairs else []
        for (chat, _), output in zip(pairs, outputs, strict=True):
            answer = {"role": "assistant", "content": output.text}
            chat[turn] = replace(chat[turn], content=[*chat[turn - 1].content, answer, *chat[turn].content])
        turn += 1
    return {name: list(chain(*some)) for name, some in chats.items()}


def conversations(prompts: Sequence[DataPrompt]) -> list[list[DataPrompt]]:
    """The turns of each line."""
    chats: list[list[DataPrompt]] = []
    for prompt in prompts:
        if prompt.follows:
            chats[-1].append(prompt)
        else:
            chats.append([prompt])
    return chats


def encode(prompt: DataPrompt, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content)
    if not tokenizer.has_chat_template:
        raise InvalidParameter(DATA, prompt.place, NO_TEMPLATE)
    try:
        text = tokenizer.render_chat(prompt.content, *prompt.options)
    except InvalidRequest as error:
        raise DataError(f"{prompt.place}: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False)
