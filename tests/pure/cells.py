"""Cells of a benchmark, made up."""

from __future__ import annotations

from speculon.core.telemetry import PARTS
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.plan import AGAIN


def make_cell(mode: str = "ngram:4", **fields: object) -> Cell:
    defaults: dict[str, object] = {
        "workload": "code",
        "concurrency": 1,
        "mode": mode,
        "policy": "fixed",
        "texts": 8,
        "tokens": 512,
        "tokens_per_second": 200.0,
        "decode_tokens_per_second": 210.0,
        "ratio": 2.0,
        "ratio_quartiles": (1.5, 2.5),
        "decode_ratio": 2.1,
        "ratio_without_loops": 1.8,
        "texts_without_loops": 6,
        "tokens_per_target_call": 2.5,
        "acceptance_rate": 0.5,
        "per_position": [0.8, 0.5],
        "sources": {"ngram": 1.0},
        "rejection": False,
        "ms_by_rows": {1: (5.0, 10), 3: (6.0, 30), 5: (7.0, 90)},
        "profile": dict(zip(PARTS, (0.1, 0.0, 1.2, 8.3, 0.3, 0.0, 0.1), strict=True)),
        "overhead": 0.05,
        "looping": 0.25,
        "exact": None,
        "different": 0,
        "tie_nats": [],
        "reasons": {"no_match": 3},
        "diagnosis": None if mode in ("off", AGAIN) else "pays",
        "per_repeat": [200.0, 200.0],
        "speeds": [[200.0, 200.0], [200.0, 200.0]],
    }
    return Cell(**(defaults | fields))  # type: ignore[arg-type]
