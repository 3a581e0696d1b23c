"""An advice as files: everything measured and where it was, the answer, the settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.advise.advice import Advice
from speculon.advise.answer import answer
from speculon.advise.maths import SpeedEstimate, break_even, by_position
from speculon.advise.settings import as_flags, as_toml, next_command, whole
from speculon.advise.tables import (
    ACCEPTANCE_LEGEND,
    COSTS_LEGEND,
    LEGEND,
    acceptance_markdown,
    costs_markdown,
    markdown,
)
from speculon.advise.trial import Trial
from speculon.bench import provenance

if TYPE_CHECKING:
    from speculon.llm import LLM

FILE = "speculon.toml"
MEASURED = (
    "drafts: of every method at every position of texts generated plainly; rounds: counted over them, which "
    "is "
    "exact for greedy and seeded texts. costs: the engine's cost model, fitted to whole steps and proposals, "
    "alternated. ratio of an estimate: predicted speed of decoding (the target's reading of prompts left "
    "out, the "
    "drafter's counted) / plain; low, high: 5 % and 95 % of resampled texts and cost models. trials: "
    "held-out "
    "prompts, all candidates alternated with plain decoding, ratio of sums; low, high: 5 % and 95 % of "
    "resampled "
    "groups of prompts and repeats; again: plain decoding / itself."
)


def to_dict(advice: Advice, argv: Sequence[str], llm: LLM, path: Path | None = None) -> dict[str, Any]:
    """`path` is the file that gets the settings; None: there is none."""
    values, plan, fit = whole(llm.config, advice.settings), advice.plan, advice.fits[0]
    looping, chosen = [one for one in advice.continuations if one.loops], advice.chosen
    return {
        "command": shlex.join(["speculon", *argv]),
        "helps": advice.helps,
        "answer": answer(advice),
        "settings": advice.settings,
        "toml": as_toml(values),
        "flags": as_flags(values),
        "next": next_command(path, values),
        "concurrency": plan.at_once,
        "up_to": advice.up_to if advice.helps else None,
        "chosen": {"method": chosen.cascade.name, "policy": chosen.policy, "k": chosen.k},
        "speedups": {
            batch: found and found._asdict()
            for batch in plan.batches
            for found in [advice.speedup(chosen, batch)]
        },
        "trials": [of_trial(trial) for trial in advice.trials],
        "estimates": [of_estimate(one) for one in advice.estimates],
        "break_even": {
            w.name: [break_even(advice.round_costs(w, b)) for b in plan.batches]
            for w in advice.cascades
            if not w.methods[1:]
        },
        "groups": {name: of_estimate(one) for name, one in advice.groups.items()},
        "looping": {
            "texts": len(looping),
            "estimate": (found := advice.among(looping)) and of_estimate(found),
        },
        "texts": [
            {"name": one.case.name, "tokens": one.tokens, "loops": one.loops} for one in advice.continuations
        ],
        "lacking": advice.lacking,
        "costs": {
            "state": fit.costs.state(),
            "misfit": fit.misfit(advice.timed),
            "rounds": len(advice.timed),
        },
        "measured": MEASURED,
        "plan": asdict(plan),
        "model": provenance.model_facts(llm),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def of_estimate(one: SpeedEstimate) -> dict[str, Any]:
    return {
        "method": one.cascade.name,
        "chain": one.cascade.methods,
        "k": one.k,
        "concurrency": one.batch,
        "low": one.low,
        "high": one.high,
        "acceptance": one.acceptance.rate(),
        "per_position": by_position(one.acceptance),
        "draft_cost": one.draft_cost,
        **asdict(one.speed),
    }


def of_trial(trial: Trial) -> dict[str, Any]:
    results = [
        {"method": one.candidate.cascade.name, "policy": one.candidate.policy, "k": one.candidate.k}
        | {name: getattr(one, name) for name in ("ratio", "low", "high", "tokens_per_call")}
        for one in trial.results
    ]
    return {**asdict(trial), "results": results}


def title(record: dict[str, Any]) -> str:
    model, machine = record["model"], record["machine"]
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}; "
        f"{machine.get('gpu', machine['cpu'])}, {model['threads']} thread{'s' * (model['threads'] > 1)}"
    )


def write(advice: Advice, record: dict[str, Any], folder: Path) -> list[Path]:
    """`advise.json`, `advise.md`, `speculon.toml` and, where matplotlib is installed, `advise.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    points = "\n".join(f"- {line}" for line in record["answer"])
    parts = [
        f"`{record['command']}`, {record['date'][:10]}: {title(record)}",
        points,
        f"```toml\n{record['toml']}```",
    ]
    tables = [markdown(advice), f"{LEGEND}.", acceptance_markdown(advice), f"{ACCEPTANCE_LEGEND}."]
    tables += [costs_markdown(advice), f"{COSTS_LEGEND}."]
    texts = {
        "advise.json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "advise.md": "\n\n".join([*parts, *tables]) + "\n",
        FILE: record["toml"],
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [folder / name for name in texts]
    if find_spec("matplotlib"):
        from speculon.advise.chart import draw

        files.append(draw(advice, title(record), folder / "advise.png"))
    return files
