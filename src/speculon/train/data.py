"""Rows of tokens from files. They depend on data, seed and step alone, so a resumed run reads the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speculon.core.errors import DataError, InvalidRequest

if TYPE_CHECKING:
    from speculon.decoding.text.tokenizer import Tokenizer

ALONE = " (prompts without answers take --regenerate N: the target then answers them)"
HELD_OUT = 50  # one document in so many is never trained on

TokenArray = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, a mask of the answers, and the length of the first prompt (0: a plain text, all learned)."""

    ids: tuple[int, ...]
    answer: tuple[bool, ...]
    prompt: int

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Document:
        return cls((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer), len(prompt))


def read_documents(
    paths: Iterable[Path], tokenizer: Tokenizer, vocab_size: int, *, prompts_alone: bool = False
) -> list[Document]:
    """Every document of files and folders, in order of names. Raises DataError with file and line.

    With `prompts_alone` a prompt without an answer is a document of its own, in which nothing is learned.
    """
    paths = list(paths)
    readers = PROMPT_READERS if prompts_alone else RECORD_READERS
    documents = [
        document
        for path in paths
        for file in files_of(path)
        for document in documents_in(file, tokenizer, readers, named=file == path)
    ]
    if not documents:
        raise DataError(
            f"{', '.join(map(str, paths))}: there are no documents{'' if prompts_alone else ALONE}"
        )
    largest = max(max(document.ids) for document in documents)
    if largest >= vocab_size:
        raise DataError(f"token id {largest}: the target's vocabulary ends at {vocab_size - 1}")
    return documents


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file below a folder that is not hidden."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def documents_in(file: Path, tokenizer: Tokenizer, readers: Readers, named: bool) -> Iterator[Document]:
    """The documents of a file. One that is not UTF-8 is refused if it was named, else skipped."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        if not named:
            return
        raise DataError(f"{file}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if file.suffix == ".jsonl":
        # not splitlines(): JSON strings may contain other line separators
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield from read_line(line, f"{file}:{number}", tokenizer, readers)
    elif text.strip():
        yield from whole({"text": text}, tokenizer)


def read_line(line: str, place: str, tokenizer: Tokenizer, readers: Readers) -> Iterator[Document]:
    """One line of JSONL, read according to its keys."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: this line is not JSON ({error})") from None
    keys = next((keys for keys in readers if isinstance(record, dict) and keys <= record.keys()), None)
    if keys is None:
        known = "; ".join(" and ".join(sorted(keys)) for keys in readers)
        advice = ALONE if isinstance(record, dict) and "prompt" in record else ""
        raise DataError(f"{place}: this line has none of the keys {known}{advice}")
    try:
        yield from readers[keys](record, tokenizer)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{place}: {error}") from None


def chat(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    """Messages of the assistant, but for an opening one, are answers: what each adds to the rendered chat."""
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages must be a list of objects with a role")
    options = (record.get("tools") or (), record.get("chat_template_kwargs"))
    ids, answer = list[int](), list[bool]()
    rendered, prompt = "", 0
    for number, message in enumerate(messages, 1):
        if any(before.get("images") for before in messages[:number]):
            break  # an answer to an image that was not captured
        # an opening message answers no prompt: it is part of the next one
        if message["role"] != "assistant" or number == 1:
            continue
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} has neither content nor tool_calls")
        before = tokenizer.render_chat(messages[: number - 1], *options)
        try:
            after = tokenizer.render_chat(messages[:number], *options, answer_follows=False)
        except InvalidRequest:
            break  # some templates cannot render an answer that calls a tool
        if not before.startswith(rendered) or not after.startswith(before):
            break  # the template rewrites earlier turns: those up to here are kept
        for part, learned in ((before[len(rendered) :], False), (after[len(before) :], True)):
            more = tokenizer.encode(part, add_special_tokens=False)
            ids += more
            answer += [learned] * len(more)
            prompt = prompt or (len(ids) if not learned else 0)
        rendered = after
    if any(answer):
        yield Document(tuple(ids), tuple(answer), prompt)


def chat_or_prompt(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    """A chat, or, where it has no answer and ends with a user's turn, a prompt alone."""
    answered = list(chat(record, tokenizer))
    yield from answered
    messages = record["messages"]
    seen = any(message.get("images") for message in messages)
    if not answered and messages and messages[-1]["role"] != "assistant" and not seen:
        rendered = tokenizer.render_chat(
            messages, record.get("tools") or (), record.get("chat_template_kwargs")
        )
        if ids := tokenizer.encode(rendered, add_special_tokens=False):
            yield Document.of(ids, ())


def prompt_alone(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    if ids := tokenizer.encode(text_of(record, "prompt")):
        yield Document.of(ids, ())


def completion(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    prompt = tokenizer.encode(text_of(record, "prompt"))
    if answer := tokenizer.encode(text_of(record, "completion"), add_special_tokens=False):
        yield Document.of(prompt, answer)


def whole(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    if ids := tokenizer.encode(text_of(record, "text")):
        yield Document.of((), ids)


def token_ids(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Document]:
    """Token ids, of which the first `prompt_tokens` are a prompt."""
    ids, prompt = record["tokens"], record.get("prompt_tokens", 0)
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError("tokens must be a list of token ids")
    if not isinstance(prompt, int) or not 0 <= prompt <= len(ids):
        raise ValueError(f"prompt_tokens = {prompt!r}: must be from 0 to the number of tokens, {len(ids)}")
    if len(ids) > prompt:
        yield Document.of(ids[:prompt], ids[prompt:])


def text_of(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise TypeError(f"{key} must be a string")
    return str(record[key])


DocumentReader = Callable[[Mapping[str, Any], "Tokenizer"], Iterator[Document]]
Readers = Mapping[frozenset[str], DocumentReader]
RECORD_READERS: Readers = {
    frozenset({"messages"}): chat,
    frozenset({"prompt", "completion"}): completion,
    frozenset({"tokens"}): token_ids,
    frozenset({"text"}): whole,
}
PROMPT_READERS: Readers = {
    **RECORD_READERS,
    frozenset({"messages"}): chat_or_prompt,
    frozenset({"prompt"}): prompt_alone,  # the last: one with a completion is read above
}


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, split by a hash of their tokens, so that copies stay together."""
    sides: tuple[list[Document], list[Document]] = [], []
    for each in documents:
        sides[int.from_bytes(digest(np.array(each.ids, np.int32))) % HELD_OUT == 0].append(each)
    learned, held = sides
    if not held and len(learned) > 1:
        held.append(learned.pop())
    return learned, held


def digest(*arrays: np.ndarray[Any, Any]) -> bytes:
    hashed = blake2b(digest_size=8)
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Documents packed into rows: ids [n, T], and the loss weight of each token's successor [n, T].

    A document ends with `end`, where the target has such a token. Attention crosses document borders.
    """

    ids: TokenArray
    weights: Floats

    @classmethod
    def of(
        cls, documents: Sequence[Document], length: int, end: int | None, prompt_weight: float, seed: int
    ) -> DocumentRows:
        """Raises DataError where all documents together do not fill one row."""
        order = random.Random(f"{seed}:pack").sample(range(len(documents)), len(documents))
        tail = [] if end is None else [end]
        ids = np.concatenate([np.array([*documents[i].ids, *tail], np.int32) for i in order])
        answers = np.concatenate([np.array([*documents[i].answer, *(True for _ in tail)]) for i in order])
        following = np.append(np.where(answers, np.float32(1), np.float32(prompt_weight))[1:], np.float32(0))
        count = len(ids) // length
        if not count:
            raise DataError(
                f"the texts have {len(ids)} tokens in all, but one row needs {length}: give more, or lower "
                "--length"
            )
        rows, weights = (each[: count * length].reshape(count, length) for each in (ids, following))
        useful = weights.sum(-1) > 0
        if not useful.any():
            raise DataError(
                "no row has a token of an answer to learn: use longer rows, or texts with answers"
            )
        return cls(rows[useful], weights[useful])

    def __len__(self) -> int:
        return len(self.ids)

    def chosen(self, seed: int, step: int, count: int) -> list[int]:
        """The rows of step `step` (from 0); each epoch has its own order."""
        picked: list[int] = []
        orders: dict[int, list[int]] = {}
        for place in range(step * count, (step + 1) * count):
            epoch, offset = divmod(place, len(self))
            if epoch not in orders:
                orders[epoch] = random.Random(f"{seed}:{epoch}").sample(range(len(self)), len(self))
            picked.append(orders[epoch][offset])
        return picked

    def hash(self, rows: Sequence[int]) -> str:
        """A hash of a batch of these rows."""
        return digest(self.ids[list(rows)], self.weights[list(rows)]).hex()

    @property
    def fingerprint(self) -> str:
        """A hash of all rows."""
        return digest(self.ids, self.weights).hex()
