"""`speculon inspect`: what a checkpoint is, by its headers, and whether it is supported, by loading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from speculon.cli import inspect_drafter
from speculon.cli.app import Json, command
from speculon.cli.options import Given, pick, settings_from
from speculon.cli.screen import EXIT_REFUSED, as_json_error, loading, output, print_json
from speculon.core.config import SpeculationConfig
from speculon.core.errors import MemoryExceeded, ModelError, SpeculonError
from speculon.core.types import capabilities_json
from speculon.decoding.kv.slots import PER_SEQUENCE
from speculon.drafters.families import family_of
from speculon.drafters.mtp.tensors import MTP, find_mtp
from speculon.loading.headers import Checkpoint, read_checkpoint

if TYPE_CHECKING:
    from speculon.core.types import LayerSpec
    from speculon.target.target import Target

Facts = dict[str, Any]

NO_TEXT = "none, token ids only"
STYLES = {"on": "green", "changed": "yellow", "off": "yellow", "refused": "red"}

# what decides whether a drafter fits, and what it takes of memory
FIT = ("draft", "method", "memory_policy", "memory_limit_gb", "additional_memory_gb", "suffix_pools")

# the parts of a memory estimate, whose module needs torch
MEMORY = ("held", "drafters", "scratch", "remembered", "pages", "states", "snapshots", "additional")

WORDS = {
    "path": "folder",
    "architecture": "architecture",
    "model_type": "model type",
    "num_layers": "layers",
    "hidden_size": "hidden width",
    "vocab_size": "vocabulary",
    "max_context": "context",
    "dtype": "dtype",
    "num_parameters": "parameters",
    "num_bytes": "weight files",
    "quantization": "quantization",
    "tensor_types": "tensor types",
    "mtp": "MTP layers",
    "kv_bytes_per_token": "KV per token",
    "layers": "attention",
    "states": "recurrent states",
    "tokenizer": "tokenizer",
    "fused": "fused",
    "batch_invariant": "batch-invariant",
    "notes": "notes",
    "supported": "supported",
    "engine": "engine",
    "draft_fits": "draft fits",
    "memory": "memory with the draft",
}


@command("inspect")
@settings_from(SpeculationConfig, only=FIT)
def inspect(
    *,
    path: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="a folder, a GGUF file, a hub id, or a name")
    ] = "smollm2",
    model: Annotated[str | None, typer.Option(help="the same, as the other commands spell it")] = None,
    fuse: Annotated[
        bool, typer.Option(help="join layers into fewer, faster operations, and list them")
    ] = True,
    load: Annotated[
        bool, typer.Option(help="load it and compare it with its stock forward; without: headers only")
    ] = True,
    target: Annotated[str | None, typer.Option(help="for a drafter: the target to check it against")] = None,
    everything: Annotated[bool, typer.Option("--all", help="also list what is on, with its limits")] = False,
    as_json: Json = False,
    given: Given,
) -> None:
    """Describe a checkpoint or drafter: whether it is supported, and whether a --draft fits it."""
    model = model or path
    family = family_of(folder_of(model))
    if family.checkpoint is None or target is not None:
        inspect_drafter.show(family, target and read_checkpoint(folder_of(target)) or None, as_json)
        return
    facts, refusal = headers(family.checkpoint), None
    if load:
        with loading(as_json) as stage:
            stage("importing torch")
            loaded, refusal = examine(model, pick(SpeculationConfig, given), fuse, stage)
        facts |= loaded
    if as_json:
        print_json(facts)
    else:
        output().print(as_table(facts))
        if table := facts.get("capabilities"):
            output().print("", all_rows(table) if everything else exceptions(table), sep="\n")
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


def examine(
    model: str, speculation: Facts, fuse: bool, tell: Callable[[str], None]
) -> tuple[Facts, SpeculonError | None]:
    """What loading shows, and the error where something is refused: the target, or its engine alone."""
    from speculon.loading.load import load_target

    text = tokenizer_of(model)
    try:
        return {**text, **with_engine(model, speculation, fuse, tell, text["tokenizer"] != NO_TEXT)}, None
    except MemoryExceeded as error:
        return {"memory": error.memory.to_dict(), **as_json_error(error)}, error
    except SpeculonError as error:
        refusal = error
    try:
        target = load_target(model, fused=fuse, batch_invariant=None, progress=tell)
    except SpeculonError as error:
        return {"supported": False, **as_json_error(error)}, error
    missing = "draft_fits" if speculation else "engine"
    return {**text, **target_facts(target), missing: False, **as_json_error(refusal)}, refusal


def tokenizer_of(model: str) -> Facts:
    """What reads and writes texts; where nothing can, the engine takes token ids alone."""
    from speculon.loading.reading import load_tokenizer

    try:
        found = load_tokenizer(model)
    except ModelError as error:
        return {"tokenizer": NO_TEXT, "tokenizer_error": str(error)}
    return {"tokenizer": f"{type(found).__name__}, {len(found)} tokens"}


def folder_of(model: str) -> Path:
    """The folder itself, or that of a hub id, for which the loader is imported, and with it torch."""
    if Path(model).expanduser().exists():
        return Path(model).expanduser()
    from speculon.loading.locate import locate

    return locate(model)


def headers(checkpoint: Checkpoint) -> Facts:
    names = [name for name in WORDS if name in Checkpoint.__slots__]
    facts = {name: getattr(checkpoint, name) for name in names}
    return {
        **facts,
        "mtp": mtp_words(checkpoint),
        "path": str(checkpoint.path),
        "pickled": checkpoint.pickled,
        "remote_code": checkpoint.remote_code,
    }


def mtp_words(checkpoint: Checkpoint) -> str | None:
    """Prediction layers in its files, or why they cannot be used; None where it has none."""
    try:
        found = find_mtp(checkpoint.path)
    except ModelError as error:
        return f"not supported: {error}"
    return f"{found.summary()}: method {MTP}" if found else None


def target_facts(target: Target) -> Facts:
    return {
        "num_parameters": target.num_parameters,
        "max_context": target.max_context,
        "kv_bytes_per_token": sum(layer.bytes_per_token for layer in target.layers),
        "layers": [layer_facts(layer) for layer in target.layers if layer.heads],
        "states": state_facts(target),
        "fused": str(target.runner),
        "batch_invariant": target.invariance,
        "notes": list(target.notes),
        "supported": True,
    }


def with_engine(
    model: str, speculation: Facts, fuse: bool, tell: Callable[[str], None], texts: bool
) -> Facts:
    """The model as an engine holds it, with what it can do; with a drafter, also the memory estimate."""
    from speculon.engine.llm import LLM

    chosen: Facts = {"speculation": speculation} if speculation else {}
    tokenizer: Literal["auto"] | None = "auto" if texts else None
    nothing_kept: Facts = {"warmup": False, "events": None, "state": None}
    engine = LLM(model, fuse=fuse, progress=tell, tokenizer=tokenizer, **nothing_kept, **chosen).engine
    facts = target_facts(engine.target) | {"capabilities": capabilities_json(engine.capabilities())}
    if speculation:
        facts |= {"draft_fits": True, "memory": engine.memory.to_dict()}
    return facts


def state_facts(target: Target) -> Facts | None:
    """How a recurrent target restores its states; None where it has none."""
    if not target.recurrent:
        return None
    return {
        "mixers": len(target.mixers),
        "bytes_per_sequence": PER_SEQUENCE * target.state_bytes,
        "single_rows": {
            type(mixer.module).__name__: mixer.by_row if mixer.continues else None for mixer in target.mixers
        },
    }


def layer_facts(layer: LayerSpec) -> Facts:
    dtype = str(layer.dtype).removeprefix("torch.")
    return {
        "heads": layer.heads,
        "k_dim": layer.k_dim,
        "v_dim": layer.v_dim,
        "window": layer.window,
        "dtype": dtype,
        "chunk": layer.chunk,
    }


def as_table(facts: Facts) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, words in WORDS.items():
        if facts.get(name) not in (None, []):
            table.add_row(Text(words, style="dim"), in_words(name, facts))
    return table


def in_words(name: str, facts: Facts) -> Text:
    value = facts[name]
    if name in ("supported", "draft_fits", "engine") and not value:
        return Text(f"no: {facts['error']['message']}", style="red")
    if name == "supported":
        return Text("yes: equal to its stock forward", style="green")
    if name == "draft_fits":
        return Text("yes", style="green")
    if name == "memory":
        return Text(memory_words(value), style="green" if value["fits"] else "red")
    return Text(plain_words(name, facts))


def exceptions(capabilities: Facts) -> Table:
    """The capabilities that are off, changed or refused, and how many others there are."""
    table = Table(box=None, pad_edge=False, show_header=False)
    found = {feature: row for feature, row in capabilities.items() if row["status"] != "on"}
    for feature, row in found.items():
        table.add_row(feature, Text(row["status"], style=STYLES[row["status"]]), row["reason"])
    others = f"{len(capabilities) - len(found)} more, which --all shows"
    table.add_row("others", Text("on", style=STYLES["on"]), others)
    return table


def all_rows(capabilities: Facts) -> Table:
    """The table of capabilities; parameters of one reason share a row."""
    table = Table(box=None, pad_edge=False, show_header=False)
    alike = Counter(row["reason"] for row in capabilities.values() if is_plain(row))
    for feature, row in capabilities.items():
        shared = is_plain(row) and alike[row["reason"]] > 1
        if not shared:
            most = ", ".join(f"{name} {limit:,}" for name, limit in row["limits"].items())
            reason = row["reason"] + f" ({most})" * bool(most)
            table.add_row(feature, Text(row["status"], style=STYLES[row["status"]]), reason)
    for reason in (reason for reason, count in alike.items() if count > 1):
        names = [name for name, row in capabilities.items() if is_plain(row) and row["reason"] == reason]
        group = names[0].partition(".")[0]
        listed = ", ".join(name.removeprefix(f"{group}.") for name in names)
        table.add_row(f"other {group}", Text("on", style=STYLES["on"]), f"{reason}: {listed}")
    return table


def is_plain(row: Facts) -> bool:
    return row["status"] == "on" and not row["limits"]


def plain_words(name: str, facts: Facts) -> str:
    value = facts[name]
    if name == "layers":
        shapes = Counter(tuple(layer.values()) for layer in value)
        return "\n".join(describe_layers(count, *shape) for shape, count in shapes.items())
    if name == "states":
        ways = ", ".join(
            f"{mixer} goes row by row{'' if rows is None else f' up to {rows}'}"
            for mixer, rows in value["single_rows"].items()
        )
        return f"{value['mixers']} mixers, {size(value['bytes_per_sequence'])} per sequence\n{ways}"
    if name == "num_bytes":
        return size(value) + (" of pickles" if facts["pickled"] else "")
    if name == "kv_bytes_per_token":
        return f"{size(value)}, {size(value * facts['max_context'])} for a full context"
    if isinstance(value, list):
        return "\n".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def memory_words(memory: Facts) -> str:
    parts = ", ".join(f"{name} {size(memory[name])}" for name in MEMORY)
    verdict = "within" if memory["fits"] else "beyond"
    total, limit = size(memory["estimate"]), size(memory["limit"])
    return f"{total} ({parts})\n{verdict} the limit of {limit}: {memory['action']}"


def describe_layers(
    count: int, heads: int, k_dim: int, v_dim: int, window: int | None, dtype: str, chunk: int | None
) -> str:
    width = str(k_dim) if k_dim == v_dim else f"{k_dim}/{v_dim}"
    seen = f"window {window}" if window else f"chunks of {chunk}" if chunk else "full"
    return f"{count} layers, {heads} KV heads x {width} in {dtype}, {seen}"


def size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError
