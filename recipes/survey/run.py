"""Every causal type of transformers as a small random model: supported, refused by name, or not made.

    python -m recipes.survey.run --out docs/benchmarks/architectures

Of a supported type the greedy tokens are compared with the stock model's own greedy loop: plain, with drafts
from lookups, and in a batch. Then, in bf16 and with weights that give large activations, its distance to fp32
is compared with the stock model's. The command fails where a type differs, or fails in another way than by
name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from recipes.survey.coarse import bf16_error_ratio
from recipes.survey.compare import K, compare
from recipes.survey.models import NotMade, first_line, small_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from speculon.core.errors import SpeculonError, UnsupportedModel
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import FURTHER

COMMAND = "python -m recipes.survey.run --out docs/benchmarks/architectures"
Row = dict[str, Any]
ORDER = ("differs", "failed", "supported", "refused", "not made")
FAILURES = {"differs", "failed"}


def survey(model_type: str) -> Row:
    """One type's outcome, with the reason unless it is supported."""
    try:
        model = small_model(model_type)
    except NotMade as error:
        return {"outcome": "not made", "reason": str(error)}
    try:
        # as a checkpoint: into weights of its own, so that layers are fused
        target = wrap_model(model, share=False)
    except SpeculonError as error:
        return {"outcome": "refused", "reason": first_line(error)}
    except Exception as error:
        return {"outcome": "failed", "reason": f"{type(error).__name__} at load: {first_line(error)}"}
    try:
        found = compare(model, target)
    except Exception as error:
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    if found.difference:
        return {"outcome": "differs", "reason": found.difference}
    try:
        coarse = {"bf16": bf16_error_ratio(model), "reason": ""}
    except UnsupportedModel as error:
        coarse = {"bf16": None, "reason": f"in bf16: {first_line(error)}"}
    except Exception as error:
        return {"outcome": "failed", "reason": f"in bf16: {type(error).__name__}: {first_line(error)}"}
    return {"outcome": "supported", "drafted": found.drafted, "accepted": found.accepted, **coarse}


def as_markdown(report: Row) -> str:
    types: dict[str, Row] = report["types"]
    counts = Counter(row["outcome"] for row in types.values())
    made = len(types) - counts["not made"]
    order = sorted(types.items(), key=lambda item: (ORDER.index(item[1]["outcome"]), item[0]))
    lines = [
        "# Supported causal types of transformers",
        "",
        f"`{report['command']}`,",
        f"{report['date']}, transformers {report['transformers']}, torch {report['torch']}, in fp32 on a",
        f"CPU, {report['minutes']} minutes.",
        "",
        "A small random model of each type goes through the checks of a checkpoint. Of a supported one the",
        f"greedy tokens are those of the stock model's own loop: plain, with up to {K} drafts from lookups,",
        "and in a batch. Drafts of both runs are counted.",
        "",
        "The distance is that of a row's log-probabilities to those in fp32 (median), over the stock",
        f"model's, both in bf16. Every norm has a few large weights. {FURTHER:g} is allowed at load.",
        "",
        f"**{counts['supported']} of {made} types are supported**, {counts['refused']} are refused with a",
        f"reason, {counts['differs'] + counts['failed']} differ or fail. No small model could be made of",
        f"{counts['not made']} more.",
        "",
        "| type | outcome | drafts accepted | distance in bf16 | reason |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {row['outcome']} | {drafts(row)} | {distance(row)} | {cell(row['reason'])} |"
            for name, row in order
        ),
    ]
    return "\n".join(lines) + "\n"


def drafts(row: Row) -> str:
    return f"{row['accepted']} of {row['drafted']}" if "drafted" in row else ""


def distance(row: Row) -> str:
    return f"{row['bf16']:.2f}" if row.get("bf16") is not None else ""


def cell(reason: str) -> str:
    return reason.replace("|", "/").replace("<", "&lt;")


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a type differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for architectures.json and README.md")
    parser.add_argument("--only", nargs="*", help="these types alone")
    given = parser.parse_args(arguments)
    began, types = time.monotonic(), {}
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type in given.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            types[model_type] = survey(model_type)
            print(model_type, *types[model_type].values(), file=sys.stderr, flush=True)
    transformers.logging.set_verbosity(level)
    report = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "types": types,
    }
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "architectures.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (given.out / "README.md").write_text(as_markdown(report), encoding="utf-8")
    counts = Counter(row["outcome"] for row in types.values())
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER))
    return int(any(counts[outcome] for outcome in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
