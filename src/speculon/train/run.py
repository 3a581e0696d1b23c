"""One training run, from its settings to the finished folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench.provenance import commit, versions
from speculon.train.data import Document, DocumentRows, read_documents, split
from speculon.train.draft_model import DraftModelTraining
from speculon.train.eagle3 import Eagle3Training
from speculon.train.record import TrainingProgress, whole_lines, write_json
from speculon.train.regenerate import evaluate, regenerate
from speculon.train.settings import TrainSettings
from speculon.train.teacher import Dataset, Teacher
from speculon.train.trainer import FIRST, LAST, ROWS, Trainer, refuse_other_run
from speculon.train.training import Training

# by their names on the command line
METHODS: Mapping[str, Callable[[Any], Training[Any, Any]]] = {
    each.method: each for each in (Eagle3Training, DraftModelTraining)
}


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a run. `record` is None where a signal stopped it before its end."""

    step: int
    record: Mapping[str, Any] | None


def train(method: Training[Any, Any], settings: TrainSettings, progress: TrainingProgress) -> Done:
    """Trains a drafter and writes its folder. A run in the same work folder is resumed."""
    # first: the code on disk may change during the run
    made_with = {"argv": sys.argv, "commit": commit(), "versions": versions()}
    if settings.out.resolve() == locate(settings.target).resolve():
        reason = "the target's own folder, which would be overwritten"
        raise InvalidParameter("out", str(settings.out), reason)
    progress.tell("loading the target")
    teacher = Teacher(settings.target, method.taps, settings.precision, settings.device)
    refuse_too_long(settings.length, method.spare, teacher)
    method.check(teacher)
    tokens = Tokenizer(load_tokenizer(settings.target))
    progress.tell("reading the data")
    documents, held = documents_of(settings, tokens, teacher)
    identity = {
        "method": method.method,
        **method.settings.model_dump(mode="json"),
        "target_hash": teacher.fingerprint,
        "dtype": str(teacher.precision),  # of the cached states
    }
    if settings.regenerate:
        refuse_other_run(settings, identity)  # before the texts of another run are used
        documents = regenerate(settings, documents, progress)
    end = end_of(teacher, tokens)
    rows = DocumentRows.of(documents, settings.length, end, settings.prompt_weight, settings.seed)
    held_rows = held_out_rows(settings, held, end)
    if settings.eval_rows and held_rows is None:
        progress.tell("the held-out documents fill no row: no measurements before the end")
    torch.manual_seed(settings.seed)
    drafter = method.drafter(teacher, rows)
    identity[ROWS] = rows.fingerprint
    refuse_other_run(settings, identity)
    folder, limit = settings.folder, settings.cache_gb * 1e9
    dataset = Dataset(teacher, rows, folder / "states.bin", limit)
    held_dataset = Dataset(teacher, held_rows, folder / "states_held.bin", limit) if held_rows else None
    trainer = Trainer(settings, drafter, dataset, held_dataset)
    with (settings.folder / "sessions.jsonl").open("a", encoding="utf-8") as sessions:
        sessions.write(json.dumps({"from_step": trainer.step, **made_with}) + "\n")
    with progress.training() as advance:
        finished = trainer.run(advance)
    if not finished:
        return Done(trainer.step, None)
    progress.tell("writing the folder")
    method.write(drafter, teacher, settings.target, settings.out)
    record = record_of(settings, trainer, identity, documents, rows)
    write_json(settings.out / "training.json", record)
    if settings.eval_prompts and held:
        record["evaluation"] = evaluate(method.speculation(settings.out.absolute()), settings, held, progress)
        write_json(settings.out / "training.json", record)
    return Done(trainer.step, record)


def documents_of(
    settings: TrainSettings, tokens: Tokenizer, teacher: Teacher
) -> tuple[list[Document], list[Document]]:
    """Training documents and held-out ones. Prompts alone will do where answers are regenerated."""
    alone = settings.regenerate > 0
    documents = read_documents(settings.data, tokens, teacher.vocab_size, prompts_alone=alone)
    if not settings.eval_data:
        return split(documents)
    return documents, read_documents(settings.eval_data, tokens, teacher.vocab_size, prompts_alone=alone)


def held_out_rows(settings: TrainSettings, held: list[Document], end: int | None) -> DocumentRows | None:
    """The first rows of the held-out documents; None where they fill none, or `eval_rows` is 0."""
    answered = [document for document in held if any(document.answer)]
    if not settings.eval_rows or sum(len(document.ids) for document in answered) < settings.length:
        return None
    rows = DocumentRows.of(answered, settings.length, end, 0.0, settings.seed)
    return DocumentRows(rows.ids[: settings.eval_rows], rows.weights[: settings.eval_rows])


def refuse_too_long(length: int, spare: int, teacher: Teacher) -> None:
    limit = getattr(teacher.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InvalidParameter("length", length, f"must be at most the target's context, {limit} tokens")
    if length <= 2 * spare:
        raise InvalidParameter(
            "length", length, f"must be more than twice {spare}, the tokens of a draft in training"
        )


def end_of(teacher: Teacher, tokens: Tokenizer) -> int | None:
    """The token that ends a document, if the checkpoint has one."""
    end = tokens.inner.eos_token_id
    ids = getattr(teacher.config, "eos_token_id", None)
    return end if end is not None else ids[0] if isinstance(ids, list) else ids


def record_of(
    settings: TrainSettings,
    trainer: Trainer,
    identity: Mapping[str, Any],
    documents: list[Document],
    rows: DocumentRows,
) -> dict[str, Any]:
    """The content of training.json."""
    first, last = trainer.losses[:FIRST], trainer.losses[-LAST:]
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
        "steps": trainer.step,
        "tokens_seen": trainer.step * settings.rows * settings.length,
        "minutes": round(trainer.elapsed / 60, 2),
        "ended_by": trainer.nearest_limit,
        "loss_at_first": sum(first) / len(first),
        "loss_at_last": sum(last) / len(last),
        "held_out": trainer.measured,
    }
