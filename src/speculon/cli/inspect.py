"""`speculon inspect`: what a checkpoint or drafter is, by its headers, and whether it is supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from speculon.cli.app import Json, command
from speculon.cli.options import Flags, pick, settings_from
from speculon.cli.screen import EXIT_REFUSED, as_json_error, loading, output, print_json
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import MemoryExceeded, ModelError, SpeculonError, UnsupportedModel
from speculon.core.types import capabilities_json
from speculon.decoding.kv.slots import PER_SEQUENCE
from speculon.drafters.config import AUTHORS, DrafterConfig
from speculon.drafters.families import Family, family_of
from speculon.drafters.mtp.tensors import MTP, find_mtp
from speculon.drafters.pairing import check_fit
from speculon.loading.adapter_config import AdapterCheckpoint, is_adapter, read_adapter, read_adapters
from speculon.loading.headers import Checkpoint, read_checkpoint
from speculon.loading.locate import locate

if TYPE_CHECKING:
    from speculon.target.target import Target

Facts = dict[str, Any]

NO_TEXT = "none, token ids only"
STYLES = {"on": "green", "changed": "yellow", "off": "yellow", "refused": "red"}

# what decides whether a drafter fits, and what it takes of memory
FIT = (
    *("draft", "draft_quantization", "method", "suffix_pools"),
    *("memory_policy", "memory_limit_gb", "additional_memory_gb"),
)
# how a model is loaded
FORM = ("dtype", "device", "quantization", "fuse", "compile", "adapters")

# the parts of a memory estimate, whose module needs torch
MEMORY = ("held", "drafters", "scratch", "remembered", "pages", "states", "snapshots", "additional")

LAYER = ("heads", "k_dim", "v_dim", "window", "dtype", "chunk")  # what is told of one

ROWS = (
    "path architecture model_type num_layers hidden_size vocab_size max_context dtype num_parameters "
    "num_bytes quantization tensor_types packed mtp kv_bytes_per_token layers states tokenizer fused "
    "batch_invariant adapters notes supported engine draft_fits memory"
).split()
ADAPTER_ROWS = "path holds base rank targets layers_adapted num_parameters num_bytes supported".split()
DRAFTER_ROWS = (
    "path found method format attention rope taps context block norms own speculative_tokens verifier notes"
).split()
LABELS = {  # where they are not the names
    "path": "folder",
    "num_layers": "layers",
    "hidden_size": "hidden width",
    "vocab_size": "vocabulary",
    "max_context": "context",
    "num_parameters": "parameters",
    "num_bytes": "weight files",
    "mtp": "MTP layers",
    "kv_bytes_per_token": "KV per token",
    "layers": "attention",
    "states": "recurrent states",
    "batch_invariant": "batch-invariant",
    "memory": "memory with the draft",
    "found": "drafter",
    "base": "made for",
    "layers_adapted": "layers",
    "format": "written by",
    "rope": "RoPE",
    "own": "of its own",
    "speculative_tokens": "drafts suggested",
    "verifier": "made for",
}


@command("inspect")
@settings_from(SpeculationConfig, EngineConfig, only=(*FIT, *FORM))
def inspect(
    *,
    path: Annotated[
        str, Argument(metavar="[MODEL]", help="a folder, a GGUF file, a hub id, or a name")
    ] = "smollm2",
    model: Annotated[str | None, Option(help="the same, as the other commands spell it")] = None,
    load: Annotated[
        bool, Option(help="load it and compare it with its stock forward; without: headers only")
    ] = True,
    target: Annotated[str | None, Option(help="for a drafter: the target to check it against")] = None,
    everything: Annotated[bool, Option("--all", help="also list what is on, with its limits")] = False,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Describe a checkpoint or drafter: whether it is supported, and whether a --draft fits it."""
    model = model or path
    if is_adapter(locate(model)):
        show_adapter(model, as_json)
        return
    family = family_of(locate(model))
    if family.checkpoint is None or target is not None:
        show_drafter(family, target and read_checkpoint(locate(target)) or None, as_json)
        return
    facts, refusal = headers(family.checkpoint), None
    own = pick(EngineConfig, flags).get("adapters", {})
    facts["adapters"] = [adapter_words(adapter) for adapter in read_adapters(own)]
    if load:
        with loading(as_json) as stage:
            stage("importing torch")
            form = {name: value for name, value in pick(EngineConfig, flags).items() if name in FORM}
            loaded, refusal = examine(model, pick(SpeculationConfig, flags), form, stage)
        facts |= loaded
    if as_json:
        print_json(facts)
    else:
        output().print(as_table(ROWS, facts, in_words))
        if table := facts.get("capabilities"):
            output().print("", all_rows(table) if everything else exceptions(table), sep="\n")
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


def examine(
    model: str, speculation: Facts, form: Facts, tell: Callable[[str], None]
) -> tuple[Facts, SpeculonError | None]:
    """What loading shows, and the error where something is refused: the target, or its engine alone."""
    from speculon.loading.load import load_target

    text = tokenizer_of(model)
    try:
        return {**text, **with_engine(model, speculation, form, tell, text["tokenizer"] != NO_TEXT)}, None
    except MemoryExceeded as error:
        return {"memory": error.memory.to_dict(), **as_json_error(error)}, error
    except SpeculonError as error:
        refusal = error
    try:
        others = {name: value for name, value in form.items() if name != "fuse"}
        fused = form.get("fuse", True)
        target = load_target(model, fused=fused, batch_invariant=None, progress=tell, **others)
    except SpeculonError as error:
        return {"supported": False, **as_json_error(error)}, error
    missing = "draft_fits" if speculation else "engine"
    return {**text, **target_facts(target), missing: False, **as_json_error(refusal)}, refusal


def tokenizer_of(model: str) -> Facts:
    """What reads and writes texts; where nothing can, the engine takes token ids alone."""
    from speculon.loading.reading import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except ModelError as error:
        return {"tokenizer": NO_TEXT, "tokenizer_error": str(error)}
    return {"tokenizer": f"{type(tokenizer).__name__}, {len(tokenizer)} tokens"}


def headers(checkpoint: Checkpoint) -> Facts:
    try:
        mtp = find_mtp(checkpoint.path)
        mtp_words = f"{mtp.summary()}: method {MTP}" if mtp else None
    except ModelError as error:
        mtp_words = f"not supported: {error}"
    names = [*(name for name in ROWS if name in Checkpoint.__slots__), "pickled", "remote_code"]
    facts = {name: getattr(checkpoint, name) for name in names}
    return {**facts, "mtp": mtp_words, "path": str(checkpoint.path)}


def target_facts(target: Target) -> Facts:
    """Of a loaded target; `states` say how a recurrent one restores them."""
    states = {
        "mixers": len(target.mixers),
        "bytes_per_sequence": PER_SEQUENCE * target.state_bytes,
        "single_rows": {
            type(mixer.module).__name__: mixer.by_row if mixer.continues else None for mixer in target.mixers
        },
    }
    return {
        "num_parameters": target.num_parameters,
        "max_context": target.max_context,
        "kv_bytes_per_token": sum(layer.bytes_per_token for layer in target.layers),
        "layers": [
            {name: getattr(layer, name) for name in LAYER}
            | {"dtype": str(layer.dtype).removeprefix("torch.")}
            for layer in target.layers
            if layer.heads
        ],
        "states": states if target.recurrent else None,
        "packed": target.packed,
        "fused": str(target.runner),
        "batch_invariant": target.invariance,
        "adapters": [f"{name}: {adapter}" for name, adapter in target.adapters.items()],
        "notes": list(target.notes),
        "supported": True,
    }


def with_engine(
    model: str, speculation: Facts, form: Facts, tell: Callable[[str], None], texts: bool
) -> Facts:
    """The model as an engine holds it, with what it can do; with a drafter, also the memory estimate."""
    from speculon.engine.llm import LLM

    chosen: Facts = {"speculation": speculation} if speculation else {}
    tokenizer: Literal["auto"] | None = "auto" if texts else None
    nothing_kept: Facts = {"warmup": False, "events": None, "state": None}
    engine = LLM(model, progress=tell, tokenizer=tokenizer, **form, **nothing_kept, **chosen).engine
    facts = target_facts(engine.target) | {"capabilities": capabilities_json(engine.capabilities())}
    if speculation:
        facts |= {"draft_fits": True, "memory": engine.memory.to_dict()}
    return facts


def as_table(rows: Iterable[str], facts: Facts, in_words: Callable[[str, Any, Facts], str | Text]) -> Table:
    """A row for each fact that is known."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in rows:
        if facts.get(name) not in (None, []):
            label = Text(LABELS.get(name, name.replace("_", " ")), style="dim")
            table.add_row(label, in_words(name, facts[name], facts))
    return table


def in_words(name: str, value: Any, facts: Facts) -> Text:
    if name in ("supported", "draft_fits", "engine") and not value:
        return Text(f"no: {facts['error']['message']}", style="red")
    if name == "supported":
        return Text("yes: equal to its stock forward", style="green")
    if name == "draft_fits":
        return Text("yes", style="green")
    if name == "memory":
        return Text(memory_words(value), style="green" if value["fits"] else "red")
    return Text(plain_words(name, value, facts))


def exceptions(capabilities: Facts) -> Table:
    """The capabilities that are off, changed or refused, and how many others there are."""
    limited = {feature: row for feature, row in capabilities.items() if row["status"] != "on"}
    rows = [(feature, row["status"], row["reason"]) for feature, row in limited.items()]
    return row_table([*rows, ("others", "on", f"{len(capabilities) - len(limited)} more, which --all shows")])


def all_rows(capabilities: Facts) -> Table:
    """The table of capabilities; parameters of one reason share a row."""
    plain: dict[str, list[str]] = {}  # reason -> features without limits
    for feature, row in capabilities.items():
        if row["status"] == "on" and not row["limits"]:
            plain.setdefault(row["reason"], []).append(feature)
    shared = {reason: features for reason, features in plain.items() if len(features) > 1}
    rows = []
    for feature, row in capabilities.items():
        if feature not in shared.get(row["reason"], ()):
            limits = ", ".join(f"{name} {limit:,}" for name, limit in row["limits"].items())
            rows.append((feature, row["status"], row["reason"] + f" ({limits})" * bool(limits)))
    for reason, features in shared.items():
        group = features[0].partition(".")[0]
        listed = ", ".join(feature.removeprefix(f"{group}.") for feature in features)
        rows.append((f"other {group}", "on", f"{reason}: {listed}"))
    return row_table(rows)


def row_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Features, whether they are on, and why."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for feature, status, reason in rows:
        table.add_row(feature, Text(status, style=STYLES[status]), reason)
    return table


def plain_words(name: str, value: Any, facts: Facts) -> str:
    if name == "layers":
        return "\n".join(
            f"{count} layers, {kind}" for kind, count in Counter(map(layer_words, value)).items()
        )
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


def layer_words(layer: Facts) -> str:
    k_dim, v_dim, window, chunk = (layer[name] for name in ("k_dim", "v_dim", "window", "chunk"))
    width = str(k_dim) if k_dim == v_dim else f"{k_dim}/{v_dim}"
    span = f"window {window}" if window else f"chunks of {chunk}" if chunk else "full"
    return f"{layer['heads']} KV heads x {width} in {layer['dtype']}, {span}"


def size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.{int(unit != 'bytes')}f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


# adapters


def show_adapter(path: str, as_json: bool) -> None:
    """Prints what a LoRA adapter is. Exits with a refusal where it is not supported."""
    facts: Facts = {"path": path, "holds": "a LoRA adapter of a target"}
    refusal = None
    try:
        adapter = read_adapter(locate(path).name, path)
        facts |= {
            "base": adapter.base,
            "rank": adapter.rank,
            "targets": list(adapter.targets),
            "layers_adapted": len(adapter.layers),
            "num_parameters": adapter.num_parameters,
            "num_bytes": adapter.num_bytes,
            "supported": True,
        }
    except ModelError as error:
        refusal = error
        facts |= {"supported": False, **as_json_error(error)}
    if as_json:
        print_json(facts)
    else:
        output().print(as_table(ADAPTER_ROWS, facts, drafter_words))
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


def adapter_words(adapter: AdapterCheckpoint) -> str:
    where = f"{len(adapter.layers)} layers ({', '.join(adapter.targets)})"
    return f"{adapter.name}: rank {adapter.rank}, {where}, {size(adapter.num_bytes)}"


# drafters


def show_drafter(family: Family, target: Checkpoint | None, as_json: bool) -> None:
    """Prints what it is. Exits with a refusal where it is unsupported, or does not fit the target."""
    facts: Facts = {
        "path": str(family.path),
        "found": family.summary,
        "method": family.method,
        **(head_facts(family.head) if family.head else {}),
    }
    refusal = None
    try:
        if family.method is None:
            raise UnsupportedModel(f"{family.path}: {family.refusal}")
        if target is not None:
            facts |= {"fits": True, "target": str(target.path), "odd": list(check_fit(family, target))}
            if family.head:
                facts["found"] = family.for_target(target.num_layers).summary
                facts["taps"] = family.head.describe_taps(target.num_layers)
    except ModelError as error:
        refusal = error
        facts |= {"fits": False, "target": target and str(target.path), **as_json_error(error)}
    if as_json:
        print_json(facts)
    else:
        verdict = "fits" if facts.get("target") else "supported"
        shown = {**facts, verdict: facts.get("fits")}
        output().print(as_table([*DRAFTER_ROWS, verdict], shown, drafter_words))
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


def head_facts(config: DrafterConfig) -> Facts:
    windows = sorted({window for window in config.windows if window})
    return {
        "format": config.format,
        "attention": f"{config.heads} heads of {config.head_dim}, {config.kv_heads} for keys and values, "
        + (f"window {', '.join(map(str, windows))}" if windows else "full"),
        "rope": ", ".join(f"{name} {value}" for name, value in sorted(config.rope.items())),
        "taps": config.describe_taps(),
        "context": config.max_context,
        "block": config.describe_block(),
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


def drafter_words(name: str, value: Any, facts: Facts) -> Text:
    if name in ("fits", "supported"):
        if not value:
            return Text(f"no: {facts['error']['message']}", style="red")
        words = (f"yes: {facts['target']}", *facts["odd"]) if "target" in facts else ("yes",)
        return Text("\n".join(words), style="green")
    if name == "num_bytes":
        return Text(size(value))
    if name == "format":
        return Text(AUTHORS[value])
    between = "\n" if name == "notes" else ", "
    return Text(between.join(value) if isinstance(value, list) else str(value))
