"""`speculon inspect` of a drafter: what its headers say, and whether it fits a target."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from speculon.cli.screen import EXIT_REFUSED, as_json_error, output, print_json
from speculon.core.errors import ModelError, UnsupportedModel
from speculon.drafters.config import AUTHORS
from speculon.drafters.dflash.config import DFlashConfig
from speculon.drafters.eagle3.config import Eagle3Config
from speculon.drafters.families import Family
from speculon.drafters.pairing import check_fit
from speculon.loading.headers import Checkpoint

Facts = dict[str, Any]

WORDS = {
    "path": "folder",
    "found": "drafter",
    "method": "method",
    "format": "written by",
    "attention": "attention",
    "rope": "RoPE",
    "taps": "taps",
    "context": "context",
    "block": "block",
    "norms": "norms",
    "own": "of its own",
    "speculative_tokens": "drafts suggested",
    "verifier": "made for",
    "notes": "notes",
}


def show(family: Family, target: Checkpoint | None, as_json: bool) -> None:
    """Prints what it is. Exits with a refusal where it is unsupported, or does not fit the target."""
    facts, refusal = facts_of(family), None
    try:
        if family.method is None:
            raise UnsupportedModel(f"{family.path}: {family.refusal}")
        if target is not None:
            facts |= fit_of(family, target)
    except ModelError as error:
        refusal = error
        facts |= {"fits": False, "target": target and str(target.path), **as_json_error(error)}
    print_json(facts) if as_json else output().print(as_table(facts))
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


def facts_of(family: Family) -> Facts:
    return {
        "path": str(family.path),
        "found": family.summary,
        "method": family.method,
        **(head_facts(family.head) if family.head else {}),
    }


def head_facts(config: Eagle3Config | DFlashConfig) -> Facts:
    windows = sorted({window for window in config.windows if window})
    return {
        "format": config.format,
        "attention": f"{config.heads} heads of {config.head_dim}, {config.kv_heads} for keys and values, "
        + (f"window {', '.join(map(str, windows))}" if windows else "full"),
        "rope": ", ".join(f"{name} {value}" for name, value in sorted(config.rope.items())),
        "taps": config.describe_taps(),
        "context": config.max_context,
        "block": config.describe_block() if isinstance(config, DFlashConfig) else None,
        "norms": [
            name
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            if getattr(config, name, False)
        ],
        "own": [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in config.names],
        "speculative_tokens": config.speculative_tokens,
        "verifier": list(config.verifier),
        "notes": list(config.notes),
    }


def fit_of(family: Family, target: Checkpoint) -> Facts:
    odd = check_fit(family, target)
    facts: Facts = {"fits": True, "target": str(target.path), "odd": list(odd)}
    if family.head:
        facts |= {
            "found": family.for_target(target.num_layers).summary,
            "taps": family.head.describe_taps(target.num_layers),
        }
    return facts


def as_table(facts: Facts) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, words in WORDS.items():
        if facts.get(name) not in (None, []):
            table.add_row(Text(words, style="dim"), Text(in_words(name, facts[name])))
    if "fits" in facts:
        table.add_row(Text("fits" if facts["target"] else "supported", style="dim"), verdict(facts))
    return table


def in_words(name: str, value: Any) -> str:
    if name == "format":
        return AUTHORS[value]
    between = "\n" if name == "notes" else ", "
    return between.join(value) if isinstance(value, list) else str(value)


def verdict(facts: Facts) -> Text:
    if not facts["fits"]:
        return Text(f"no: {facts['error']['message']}", style="red")
    return Text("\n".join((f"yes: {facts['target']}", *facts["odd"])), style="green")
