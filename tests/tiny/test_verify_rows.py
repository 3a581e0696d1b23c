"""The logits of verify rows are those of the stock model, for each architecture and every accepted length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from speculon.runtimes.torch.batch import Batch
from tests.tiny.conftest import TINY, tiny_target
from tests.tiny.requests import row_error, short_requests
from tests.tiny.scripted import make_engine


@pytest.mark.parametrize("name", TINY)
def test_logits_of_verify_rows_are_the_stock_models(name: str) -> None:
    requests = short_requests(name)
    assert row_error(name, make_engine(tiny_target(name), max_batch_tokens=24), requests) < 1e-4


def test_drafts_one_position_too_far_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Batch.pack

    def shifted(drafted: Any, device: Any) -> Batch:
        batch = pack(drafted, device)
        late = torch.cat([torch.arange(one.rows) >= one.span.length for one in drafted]).long()
        return replace(batch, position_ids=batch.position_ids + late)

    requests = short_requests("llama")
    monkeypatch.setattr(Batch, "pack", shifted)
    assert row_error("llama", make_engine(tiny_target("llama")), requests) > 1e-2
