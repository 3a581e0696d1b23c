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
from speculon.bench.advise_maths import Estimate, Prices
from speculon.bench.advise_settings import as_flags, as_toml
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

MEASURED = (
    "guesses: every method at every position of texts written plainly; rounds: walked over them, which is exact for greedy "
    "and seeded texts. costs: median ms of whole engine steps and of proposals, alternated, levelled by cycle. ratio: expected "
    "speed of decoding (the target's reading of prompts left out, the drafter's counted) / plain; low, high: 5 % and 95 % of "
    "bootstrapped texts and times. checks: other prompts, alternated pairs, ratio of sums."
)


def to_dict(advice: Advice, argv: Sequence[str], llm: LLM) -> dict[str, Any]:
    prices = Prices.of(advice.costs)
    return {
        "command": shlex.join(["speculon", *argv]),
        "helps": advice.helps,
        "answer": answer(advice),
        "settings": advice.settings,
        "toml": as_toml(advice.settings),
        "flags": as_flags(advice.settings),
        "at_once": advice.wish.at_once,
        "up_to": advice.up_to if advice.helps else None,
        "candidate": of_estimate(advice.candidate),
        "estimates": [of_estimate(one) for one in advice.estimates],
        "needs": {
            way.name: [need(advice, way, crowd) for crowd in advice.wish.crowds] for way in advice.ways if len(way.chain) == 1
        },
        "groups": {name: [of_estimate(one) for one in some] for name, some in advice.groups.items()},
        "looping": {
            "texts": sum(text.loops for text in advice.written),
            "estimates": [of_estimate(one) for one in advice.looping],
        },
        "texts": [{"name": text.case.name, "tokens": text.tokens, "loops": text.loops} for text in advice.written],
        "lacking": advice.lacking,
        "checks": [of_check(check) for check in advice.checks],
        "costs": {
            "verify": [[crowd, k, prices.verify.at(crowd, k), len(ms)] for (crowd, k), ms in sorted(advice.costs.verify.items())],
            "draft": {
                method: [[crowd, k, prices.draft[method].at(crowd, k), len(ms)] for (crowd, k), ms in sorted(samples.items())]
                for method, samples in advice.costs.draft.items()
            },
            "start": prices.start,
        },
        "measured": MEASURED,
        "wish": asdict(advice.wish),
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
        "at_once": one.texts,
        "low": one.low,
        "high": one.high,
        "pays": one.pays,
        "acceptance": one.walk.acceptance,
        "per_position": one.walk.per_position,
        "guess_cost": one.guess_cost,
        **asdict(one.speed),
    }


def need(advice: Advice, way: Any, crowd: int) -> dict[str, Any]:
    needed = advice.break_even(way, crowd)
    return {
        "at_once": crowd,
        "acceptance": needed and needed[0],  # null: impossible
        "k": needed and needed[1],
        "guess_cost": advice.dearest_guess(way, crowd),
    }


def of_check(check: Check) -> dict[str, Any]:
    return {**asdict(check), "setting": of_estimate(check.setting), "at_its_tokens": check.at_its_tokens, "agrees": check.agrees}


def title(said: dict[str, Any]) -> str:
    model, machine = said["model"], said["machine"]
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}; "
        f"{machine.get('gpu', machine['cpu'])}, {model['threads']} thread{'s' * (model['threads'] > 1)}"
    )


def write(advice: Advice, said: dict[str, Any], folder: Path) -> list[Path]:
    """`advise.json`, `advise.md` and, where matplotlib is installed, `advise.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "advise.json", folder / "advise.md"]
    files[0].write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    points = "\n".join(f"- {line}" for line in said["answer"])
    parts = [f"`{said['command']}`, {said['date'][:10]}: {title(said)}", points, f"```toml\n{said['toml']}```"]
    tables = [markdown(advice), f"{LEGEND}.", acceptance_markdown(advice), f"{ACCEPTANCE_LEGEND}."]
    tables += [costs_markdown(advice), f"{COSTS_LEGEND}."]
    files[1].write_text("\n\n".join([*parts, *tables]) + "\n", encoding="utf-8")
    if find_spec("matplotlib"):
        from speculon.bench.advise_chart import draw

        files.append(draw(advice, title(said), folder / "advise.png"))
    return files
