"""An advice as a file: everything measured, its circumstances, the answer, the settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.bench import report
from speculon.bench.advise import Advice
from speculon.bench.advise_check import Check
from speculon.bench.advise_maths import Estimate, break_even, by_position
from speculon.bench.advise_settings import as_flags, as_toml, next_command, whole
from speculon.bench.advise_words import (
    ACCEPTANCE_LEGEND,
    COSTS_LEGEND,
    LEGEND,
    acceptance_markdown,
    answer,
    costs_markdown,
    markdown,
)

if TYPE_CHECKING:
    from speculon.llm import LLM

FILE = "speculon.toml"
MEASURED = (
    "drafts: every method at every position of texts generated plainly; rounds: walked over them, which is exact for greedy and "
    "seeded texts. costs: the engine's cost model, fitted to whole steps and proposals, alternated. ratio of an estimate: "
    "predicted speed of decoding (the target's reading of prompts left out, the drafter's counted) / plain; low, high: 5 % and "
    "95 % of resampled texts and cost models. checks: held-out prompts, all candidates alternated with plain decoding, ratio of "
    "sums; low, high: 5 % and 95 % of resampled groups of prompts and repeats; again: plain decoding / itself."
)


def to_dict(advice: Advice, argv: Sequence[str], llm: LLM, path: Path | None = None) -> dict[str, Any]:
    """`path` is the file that gets the settings; None: there is none."""
    values, wish, fit = whole(llm.config, advice.settings), advice.wish, advice.worlds[0]
    looping, chosen = [one for one in advice.written if one.loops], advice.chosen
    return {
        "command": shlex.join(["speculon", *argv]),
        "helps": advice.helps,
        "answer": answer(advice),
        "settings": advice.settings,
        "toml": as_toml(values),
        "flags": as_flags(values),
        "next": next_command(path, values),
        "concurrency": wish.at_once,
        "up_to": advice.up_to if advice.helps else None,
        "chosen": {"method": chosen.way.name, "policy": chosen.policy, "k": chosen.k},
        "outcomes": {
            batch: found and found._asdict()
            for batch in wish.batches
            for found in [advice.outcome(chosen, batch)]
        },
        "checks": [of_check(check) for check in advice.checks],
        "estimates": [of_estimate(one) for one in advice.estimates],
        "break_even": {
            w.name: [break_even(advice.round_costs(w, b)) for b in wish.batches]
            for w in advice.ways
            if not w.chain[1:]
        },
        "groups": {name: of_estimate(one) for name, one in advice.groups.items()},
        "looping": {
            "texts": len(looping),
            "estimate": (found := advice.among(looping)) and of_estimate(found),
        },
        "texts": [
            {"name": one.case.name, "tokens": one.tokens, "loops": one.loops} for one in advice.written
        ],
        "lacking": advice.lacking,
        "costs": {
            "state": fit.costs.state(),
            "misfit": fit.misfit(advice.timed),
            "rounds": len(advice.timed),
        },
        "measured": MEASURED,
        "wish": asdict(wish),
        "model": report.model_facts(llm),
        "machine": report.machine(),
        "versions": report.versions(),
        "commit": report.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def of_estimate(one: Estimate) -> dict[str, Any]:
    return {
        "method": one.way.name,
        "chain": one.way.chain,
        "k": one.k,
        "concurrency": one.batch,
        "low": one.low,
        "high": one.high,
        "acceptance": one.acceptance.rate(),
        "per_position": by_position(one.acceptance),
        "draft_cost": one.draft_cost,
        **asdict(one.speed),
    }


def of_check(check: Check) -> dict[str, Any]:
    results = [
        {"method": one.candidate.way.name, "policy": one.candidate.policy, "k": one.candidate.k}
        | {name: getattr(one, name) for name in ("ratio", "low", "high", "tokens_per_call")}
        for one in check.results
    ]
    return {**asdict(check), "results": results}


def title(said: dict[str, Any]) -> str:
    model, machine = said["model"], said["machine"]
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}; "
        f"{machine.get('gpu', machine['cpu'])}, {model['threads']} thread{'s' * (model['threads'] > 1)}"
    )


def write(advice: Advice, said: dict[str, Any], folder: Path) -> list[Path]:
    """`advise.json`, `advise.md`, `speculon.toml` and, where matplotlib is installed, `advise.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    points = "\n".join(f"- {line}" for line in said["answer"])
    parts = [
        f"`{said['command']}`, {said['date'][:10]}: {title(said)}",
        points,
        f"```toml\n{said['toml']}```",
    ]
    tables = [markdown(advice), f"{LEGEND}.", acceptance_markdown(advice), f"{ACCEPTANCE_LEGEND}."]
    tables += [costs_markdown(advice), f"{COSTS_LEGEND}."]
    texts = {
        "advise.json": json.dumps(said, indent=1, allow_nan=False) + "\n",
        "advise.md": "\n\n".join([*parts, *tables]) + "\n",
        FILE: said["toml"],
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [folder / name for name in texts]
    if find_spec("matplotlib"):
        from speculon.bench.advise_chart import draw

        files.append(draw(advice, title(said), folder / "advise.png"))
    return files
