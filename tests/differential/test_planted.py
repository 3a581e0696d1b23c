"""Mistakes planted in the core: each must turn some case red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.telemetry import RequestStats
from speculon.core.types import Draft, Verdict
from speculon.decoding import sampling
from speculon.decoding import verify as verify_module
from speculon.decoding.rounds import Drafted, Judged
from speculon.decoding.sampling import ScoredRow
from speculon.decoding.text import grammar
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.step import TorchStep
from tests.differential.build import target_of
from tests.differential.compare import must_be_red
from tests.differential.factors import RECURRENT, TORCH, Case, cases

Patch = pytest.MonkeyPatch
TRIED = 4  # cases in which a mistake could show


def one_draft_too_many(patch: Patch) -> None:
    outcomes = verify_module.verdicts_by_rows

    def generous(drafted: list[Drafted], *others: Any) -> list[Verdict]:
        verdicts = outcomes(drafted, *others)
        return [more(one.draft, verdict) for one, verdict in zip(drafted, verdicts, strict=True)]

    def more(draft: Draft, verdict: Verdict) -> Verdict:
        if verdict.path is None and verdict.accepted < len(draft.tokens) and verdict.logprobs is None:
            tokens = (*draft.tokens[: verdict.accepted + 1], verdict.tokens[-1])
            return replace(verdict, tokens=tokens, accepted=verdict.accepted + 1)
        return verdict

    patch.setattr(verify_module, "verdicts_by_rows", generous)


def a_rejected_position_is_kept(patch: Patch, of: Any = TorchStep) -> None:
    leave, committed = of.__exit__, list[Judged]()

    def keeping(step: Any, judged: list[Judged]) -> float:
        committed[:] = judged
        return 0.0

    def leaving(step: Any, *error: Any) -> None:
        for one in committed:
            if one.verdict.accepted < len(one.draft.tokens):
                one.seq.tokens.insert(one.seq.committed, one.draft.tokens[one.verdict.accepted])
                one.seq.committed += 1
        committed.clear()
        leave(step, *error)

    patch.setattr(of, "commit", keeping)
    patch.setattr(of, "__exit__", leaving)


def drafts_one_position_late(patch: Patch) -> None:
    pack = Batch.pack

    def shifted(drafted: Any, device: Any) -> Batch:
        batch = pack(drafted, device)
        placed = [place.drafted for place in batch.placed]
        late = torch.cat([torch.arange(one.rows) >= one.span.length for one in placed]).long()
        return replace(batch, position_ids=batch.position_ids + late)

    patch.setattr(Batch, "pack", shifted)


def noise_without_the_position(patch: Patch) -> None:
    patch.setattr(ScoredRow, "position", property(lambda row: row.seq.num_output))


def penalties_forget_drafts(patch: Patch) -> None:
    patch.setattr(sampling, "count_drafts", lambda *_: None)


def adapters_exchanged(patch: Patch) -> None:
    pack = Batch.pack

    def exchanged(drafted: Any, device: Any) -> Batch:
        batch = pack(drafted, device)
        names, other = batch.adapters, {"one": "two", "two": "one"}
        if len(drafted) < 2:  # in a batch alone, and so not in plain decoding
            return batch
        return replace(batch, adapters=names._replace(runs=tuple((other[n], a, b) for n, a, b in names.runs)))

    patch.setattr(Batch, "pack", exchanged)


def a_mask_one_row_late(patch: Patch) -> None:
    forbid = grammar.forbid

    def late(drafted: Any, device: Any) -> Tensor:
        masks, row = forbid(drafted, device), 0
        for _, draft in drafted:
            if draft:
                masks[row + 1] = masks[row]
            row += len(draft) + 1
        return masks

    patch.setattr(verify_module, "forbid", late)


def states_are_not_restored(patch: Patch) -> None:
    patch.setattr(StateStep, "roll_back", lambda step, kept: False)


def pages_of_rejected_drafts_stay(patch: Patch) -> None:
    close = BlockPool.close

    def keeping(pool: BlockPool, seq: Any) -> None:
        pages = pool.of(seq)
        pages.table, kept = pages.table[:-1], pages.table[-1:]
        close(pool, seq)
        pool.of(seq).table = kept

    patch.setattr(BlockPool, "close", keeping)


def a_counter_counts_twice(patch: Patch) -> None:
    record = RequestStats.record

    def twice(stats: RequestStats, draft: Any, verdict: Any, *others: Any) -> None:
        record(stats, draft, verdict, *others)
        stats.emitted += verdict.accepted

    patch.setattr(RequestStats, "record", twice)


def a_stop_string_ends_at_the_last_token_alone(patch: Patch) -> None:
    """Accepted drafts jump over it."""
    first_stop_string = verify_module.first_stop_string

    def late(seq: Any, tokens: tuple[int, ...]) -> Any:
        found = first_stop_string(seq, tokens)
        return found if found and found[0] == len(tokens) - 1 else None

    patch.setattr(verify_module, "first_stop_string", late)


def drafts(case: Case) -> bool:
    return any(own["method"] == "scripted" and own["policy"] == "fixed" for own in case.requests)


def with_own(name: str, *values: Any) -> Callable[[Case], bool]:
    def wanted(case: Case) -> bool:
        return any(
            own[name] in values
            and own["method"] in ("scripted", "prediction", "draft_model")
            and own["policy"] == "fixed"
            and own["drafts"] > 1
            for own in case.requests
        )

    return wanted


PLANTED: list[tuple[Callable[[Patch], None], Callable[[Case], bool]]] = [
    (one_draft_too_many, drafts),
    (a_rejected_position_is_kept, drafts),
    (drafts_one_position_late, drafts),
    (noise_without_the_position, with_own("sampling", "seeded", "filtered")),
    (penalties_forget_drafts, with_own("sampling", "penalised")),
    (
        adapters_exchanged,
        lambda case: case.shared["batch"] > 1 and any(own["adapter"] for own in case.requests),
    ),
    (a_stop_string_ends_at_the_last_token_alone, with_own("end", "stop string")),
    (a_mask_one_row_late, with_own("form", "regex", "nested")),
    (states_are_not_restored, lambda case: case.shared["target"] in RECURRENT and drafts(case)),
    (pages_of_rejected_drafts_stay, drafts),
    (a_counter_counts_twice, drafts),
]


@pytest.mark.parametrize(("plant", "wanted"), PLANTED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_shows(
    plant: Callable[[Patch], None], wanted: Callable[[Case], bool], monkeypatch: Patch
) -> None:
    tried = [case for case in cases(TORCH, 0) if wanted(case)][:TRIED]
    for case in tried:
        target_of(case.shared["target"], case.shared["dtype"])  # or its load check would refuse the mistake
    plant(monkeypatch)
    must_be_red(tried)
