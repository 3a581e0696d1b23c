"""One training run from its settings to the finished folder; the story of `speculon train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from speculon.errors import InvalidParameter
from speculon.models.load import load_tokenizer, locate
from speculon.text import Tokenizer
from speculon.train.course import FIRST, LAST, ROWS, Advance, Course, same_run
from speculon.train.data import Document, Rows, read_documents, split
from speculon.train.evaluate import evaluate
from speculon.train.export import circumstances, write_json
from speculon.train.regenerate import regenerate, whole_lines
from speculon.train.settings import TrainSettings
from speculon.train.teacher import Looks, Teacher


class Kind(Protocol):
    """What `train eagle3` and `train draft` differ in."""

    method: str
    taps: tuple[int, ...] | None

    @property
    def settings(self) -> Any: ...
    @property
    def spare(self) -> int: ...
    # raises InvalidParameter for a form that does not fit the target
    def check(self, teacher: Teacher) -> None: ...
    def student(self, teacher: Teacher, rows: Rows) -> nn.Module: ...
    def write(self, student: Any, teacher: Teacher, target: str, folder: Path) -> None: ...
    def speculation(self, folder: Path) -> Mapping[str, Any]: ...


class Watch(Protocol):
    """Where a run shows how far it is."""

    def tell(self, stage: str) -> None: ...
    def counting(self, what: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...
    def training(self) -> AbstractContextManager[Advance]: ...


@dataclass(frozen=True, slots=True)
class Done:
    """A run that has ended. `record` is None where it was asked to stop before its end."""

    step: int
    record: Mapping[str, Any] | None


def train(kind: Kind, settings: TrainSettings, watch: Watch) -> Done:
    """Trains a drafter and writes its folder; goes on where an earlier run in the same work folder was."""
    made_with = circumstances()  # now: the code on disk may change while it runs
    if settings.out.resolve() == locate(settings.target).resolve():
        raise InvalidParameter(
            "out", str(settings.out), "the target's own folder, which would be overwritten"
        )
    watch.tell("loading the target")
    teacher = Teacher(settings.target, kind.taps, settings.precision, settings.device)
    refuse_too_long(settings.length, kind.spare, teacher)
    kind.check(teacher)
    tokens = Tokenizer(load_tokenizer(settings.target))
    watch.tell("reading the texts")
    documents, held = documents_of(settings, tokens, teacher)
    identity = {
        "method": kind.method,
        **kind.settings.model_dump(mode="json"),
        "target_hash": teacher.fingerprint,
    }
    if settings.regenerate:
        same_run(settings, identity)  # texts are no other run's
        documents = regenerate(settings, documents, watch)
    rows = Rows.of(documents, settings.length, end_of(teacher, tokens), settings.prompt_weight, settings.seed)
    held_rows = held_out_rows(settings, held, end_of(teacher, tokens))
    if settings.eval_rows and held_rows is None:
        watch.tell("the held-out texts fill no row: nothing is measured before the end")
    torch.manual_seed(settings.seed)
    student = kind.student(teacher, rows)
    identity[ROWS] = rows.fingerprint
    same_run(settings, identity)
    limit = settings.cache_gb * 1e9
    looks = Looks(teacher, rows, settings.folder / "looks.bin", limit)
    held_looks = Looks(teacher, held_rows, settings.folder / "looks_held.bin", limit) if held_rows else None
    course = Course(settings, student, looks, held_looks)
    with (settings.folder / "sessions.jsonl").open("a", encoding="utf-8") as sessions:
        sessions.write(json.dumps({"from_step": course.step, **made_with}) + "\n")
    with watch.training() as advance:
        finished = course.run(advance)
    if not finished:
        return Done(course.step, None)
    watch.tell("writing the folder")
    kind.write(student, teacher, settings.target, settings.out)
    record = facts_of(settings, course, identity, documents, rows)
    write_json(settings.out / "training.json", record)
    if settings.eval_prompts and held:
        record["evaluation"] = evaluate(kind.speculation(settings.out), settings, held, watch)
        write_json(settings.out / "training.json", record)
    return Done(course.step, record)


def documents_of(
    settings: TrainSettings, tokens: Tokenizer, teacher: Teacher
) -> tuple[list[Document], list[Document]]:
    """Texts to learn from, and held-out ones."""
    documents = read_documents(settings.data, tokens, teacher.vocab_size)
    if not settings.eval_data:
        return split(documents)
    return documents, read_documents(settings.eval_data, tokens, teacher.vocab_size)


def held_out_rows(settings: TrainSettings, held: list[Document], end: int | None) -> Rows | None:
    """The first rows of the held-out texts; None where they do not fill one, or nobody wants them."""
    if not settings.eval_rows or sum(len(document.ids) for document in held) < settings.length:
        return None
    rows = Rows.of(held, settings.length, end, 0.0, settings.seed)
    return Rows(rows.ids[: settings.eval_rows], rows.weights[: settings.eval_rows])


def refuse_too_long(length: int, spare: int, teacher: Teacher) -> None:
    limit = getattr(teacher.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InvalidParameter("length", length, f"the target reaches {limit} tokens")
    if length <= 2 * spare:
        raise InvalidParameter("length", length, f"more than twice the {spare} steps that are learned")


def end_of(teacher: Teacher, tokens: Tokenizer) -> int | None:
    """The token that ends a text, if the checkpoint has one."""
    end = tokens.inner.eos_token_id
    ids = getattr(teacher.config, "eos_token_id", None)
    return end if end is not None else ids[0] if isinstance(ids, list) else ids


def facts_of(
    settings: TrainSettings,
    course: Course,
    identity: Mapping[str, Any],
    documents: list[Document],
    rows: Rows,
) -> dict[str, Any]:
    """What the record says of the run."""
    first, last = course.losses[:FIRST], course.losses[-LAST:]
    return {
        "method": identity["method"],
        "settings": json.loads(settings.model_dump_json()),
        "form": dict(identity),
        "data": {
            "documents": len(documents),
            "tokens": sum(len(document.ids) for document in documents),
            "answer_tokens": sum(sum(document.answer) for document in documents),
            "rows": len(rows),
            "hash": rows.fingerprint,
        },
        "sessions": [json.loads(line) for line in whole_lines(settings.folder / "sessions.jsonl")],
        "steps": course.step,
        "tokens_seen": course.step * settings.rows * settings.length,
        "minutes": round(course.elapsed / 60, 2),
        "loss_at_first": sum(first) / len(first),
        "loss_at_last": sum(last) / len(last),
        "held_out": course.measured,
    }
