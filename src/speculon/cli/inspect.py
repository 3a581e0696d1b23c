"""`speculon inspect`: what a checkpoint or drafter is, by its headers, and whether it is supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from speculon.checkpoints.adapter_config import AdapterCheckpoint, is_adapter, read_adapter, read_adapters
from speculon.checkpoints.headers import Checkpoint, read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.cli.app import Json, command
from speculon.cli.options import Flags, pick, settings_from
from speculon.cli.screen import EXIT_REFUSED, as_json_error, loading, output, print_json
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import MemoryExceeded, ModelError, SpeculonError, UnsupportedModel
from speculon.core.types import capabilities_json
from speculon.decoding.text.tool_calls import parser_for
from speculon.runtimes.torch.drafters.config import AUTHORS, DrafterConfig
from speculon.runtimes.torch.drafters.families import Family, family_of
from speculon.runtimes.torch.drafters.mtp.tensors import MTP, find_mtp
from speculon.runtimes.torch.drafters.pairing import check_fit
from speculon.speculation.proposers.registry import AUTO

if TYPE_CHECKING:
    from speculon.runtimes.base import Backend

Details = dict[str, Any]

NO_TEXT = "none, token ids only"
TOOLS = {  # how the calls of functions are written
    "template": "tool calls as its chat template writes them",
    "generic": "tool calls in a generic form, because its chat template has no known one",
}
ACTIONS = {  # what the memory policy does with an estimate beyond the limit
    "use": ", which memory_policy allows",
    "plain": ", so drafters are not loaded (memory_policy)",
    "refuse": ", so the model is refused (memory_policy)",
}
STYLES = {"on": "green", "changed": "yellow", "off": "yellow", "refused": "red"}

# what decides whether a drafter fits, and how much memory it takes
FIT = (
    *("draft", "draft_quantization", "method", "suffix_pools"),
    *("memory_policy", "memory_limit_gb", "additional_memory_gb"),
)
# how a model is loaded
FORM = (
    *("runtime", "dtype", "device", "quantization", "fuse", "compile", "adapters"),
    *("gpu_layers", "kv_cache_type", "flash_attention", "mmap", "tensor_split", "rpc", "repack"),
)

# the parts of a memory estimate, whose module needs torch
MEMORY = ("held", "drafters", "scratch", "remembered", "pages", "states", "snapshots", "additional")

FOR_TESTS = ("synthetic",)  # methods that no user drafts with: they imitate an acceptance rate

# the fields of an attention layer's `LayerSpec` that are shown

HEADERS = (  # the facts of a `Checkpoint` that are told
    "architecture model_type num_layers hidden_size vocab_size max_context dtype num_parameters num_bytes "
    "pickled remote_code quantization tensor_types"
).split()
DETAILS = (  # what the summary leaves out
    "model_type hidden_size vocab_size quantization tensor_types mtp layers states tokenizer fused memory"
).split()
ADAPTER_ROWS = "path holds base rank targets layers_adapted num_parameters num_bytes supported".split()
DRAFTER_ROWS = (
    "path found method format attention rope taps context block norms own speculative_tokens verifier notes"
).split()
LABELS = {  # where they are not the names
    "path": "folder",
    "hidden_size": "hidden width",
    "vocab_size": "vocabulary",
    "num_parameters": "parameters",
    "num_bytes": "weight files",
    "mtp": "MTP layers",
    "layers": "attention",
    "states": "recurrent states",
    "memory": "memory estimate",
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
    everything: Annotated[
        bool, Option("--all", help="also show the details of the model, and every capability with its limits")
    ] = False,
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
        output().print(summary(facts))
        if everything:
            output().print("", as_table(DETAILS, facts, detail_words), sep="\n")
        if everything and "capabilities" in facts:
            output().print("", all_rows(facts["capabilities"]), sep="\n")
        elif load and not everything:
            output().print("\nEvery capability with its limits: --all, or --json for programs.", style="dim")
    if refusal:
        raise typer.Exit(EXIT_REFUSED)


# facts


def examine(
    model: str, speculation: Details, form: Details, tell: Callable[[str], None]
) -> tuple[Details, SpeculonError | None]:
    """What loading shows, and the error where something is refused: the target, or its engine alone."""
    from speculon.runtimes.registry import for_settings

    backend = for_settings(config := EngineConfig(model=model, **form, speculation=speculation))
    text = tokenizer_facts(backend, config)
    try:
        return {**text, **with_engine(model, speculation, form, tell, text["tokenizer"] != NO_TEXT)}, None
    except MemoryExceeded as error:
        return {**text, "memory": error.memory.to_dict(), **as_json_error(error)}, error
    except SpeculonError as error:
        refusal = error
    try:
        alone = backend.describe_alone(model, form, tell)
    except SpeculonError as error:
        return {"supported": False, **as_json_error(error)}, error
    missing = "draft_fits" if speculation else "engine"
    return {**text, **alone, missing: False, **as_json_error(refusal)}, refusal


def tokenizer_facts(backend: Backend, config: EngineConfig) -> Details:
    """What reads and writes texts; where nothing can, the engine takes token ids alone."""
    try:
        tokenizer = backend.tokenizer(config)
    except ModelError as error:
        return {"tokenizer": NO_TEXT, "tokenizer_error": str(error), "chat": False, "tools": None}
    own_form = parser_for(tokenizer.template_for(tools=True)) is not None
    return {
        "tokenizer": f"{type(tokenizer.inner).__name__}, {tokenizer.vocab_size} tokens",
        "chat": tokenizer.has_chat_template,
        "tools": ("template" if own_form else "generic") if tokenizer.has_chat_template else None,
    }


def headers(checkpoint: Checkpoint) -> Details:
    try:
        mtp = find_mtp(checkpoint.path)
        mtp_words = f"{mtp.summary()}: method {MTP}" if mtp else None
    except ModelError as error:
        mtp_words = f"not supported: {error}"
    facts = {name: getattr(checkpoint, name) for name in HEADERS}
    return {"path": str(checkpoint.path), **facts, "mtp": mtp_words}


def with_engine(
    model: str, speculation: Details, form: Details, tell: Callable[[str], None], texts: bool
) -> Details:
    """The model as an engine holds it, with its methods, its capabilities and its memory."""
    from speculon.engine.llm import LLM

    chosen: Details = {"speculation": speculation} if speculation else {}
    tokenizer: Literal["auto"] | None = "auto" if texts else None
    nothing_kept: Details = {"warmup": False, "events": None, "state": None}
    engine = LLM(model, progress=tell, tokenizer=tokenizer, **form, **nothing_kept, **chosen).engine
    facts = engine.runtime.describe() | {
        "method": engine.proposers.default,
        "drafters": {name: str(draft) for name, draft in engine.config.speculation.drafts.items()},
        "capabilities": capabilities_json(engine.capabilities()),
        "pool_tokens": engine.runtime.facts.capacity,
    }
    return facts | {"draft_fits": True} if speculation else facts


# the summary


def summary(facts: Details) -> Table:
    """What a user asks first of a model, in a few sentences."""
    table = two_columns()
    for label, text, style in summary_rows(facts):
        table.add_row(Text(label, style="dim"), Text(text, style=style))
    return table


def summary_rows(facts: Details) -> Iterator[tuple[str, str, str]]:
    """Labels, texts and their styles."""
    yield "model", f"{Path(facts['path']).name}: {facts['architecture']}, {model_size(facts)}", ""
    yield "at", facts["path"], ""
    if facts.get("supported"):
        yield "supported", f"yes: {facts['checked']}", "green"
    elif "error" in facts and "memory" not in facts:
        yield "supported", f"no: {facts['error']['message']}", "red"
    if "tokenizer" in facts:
        yield "takes", "; ".join(takes(facts)), ""
    if "tokenizer" not in facts and "error" not in facts:
        yield "takes", context_words(facts), ""
        yield "runs", "not loaded: only the headers of its files were read", ""
    if "fused" in facts:
        yield "runs", f"on {facts['device']} in {facts['dtype']}; {facts['speed']}", ""
        yield "weights", "; ".join(facts["packed"]) or size(facts["weight_bytes"]), ""
    if facts["adapters"]:
        yield "adapters", "\n".join(facts["adapters"]), ""
    if "pool_tokens" in facts:
        yield "memory", held_words(facts), ""
    if "batch_invariant" in facts:
        yield "batch-invariant", *batch_words(facts["batch_invariant"])
    if facts.get("notes"):
        yield "notes", "\n".join(facts["notes"]), "yellow"
    if "capabilities" in facts:
        yield from method_rows(facts)
    if refused := list(refused_parameters(facts.get("capabilities", {}))):
        yield "refuses", "\n".join(refused), "yellow"
    for name, label in (("draft_fits", "draft fits"), ("engine", "engine")):
        if name in facts:
            text = "yes" if facts[name] else f"no: {facts['error']['message']}"
            yield label, text, "green" if facts[name] else "red"
    if "memory" in facts and ("draft_fits" in facts or "error" in facts):
        yield "memory estimate", memory_words(facts["memory"]), "green" if facts["memory"]["fits"] else "red"


def model_size(facts: Details) -> str:
    parts = [f"{facts['num_layers']} layers" if facts["num_layers"] else ""]
    if count := facts["num_parameters"]:
        parts.append(f"{count / 1e6:,.1f} M parameters" if count >= 1e6 else f"{count:,} parameters")
    return ", ".join(
        filter(None, [*parts, f"{size(facts['num_bytes'])} of {'pickles' if facts['pickled'] else 'files'}"])
    )


def takes(facts: Details) -> Iterator[str]:
    if facts["tokenizer"] == NO_TEXT:
        yield "token ids only, because it has no usable tokenizer"
    elif not facts["chat"]:
        yield "text, but no chats (it has no chat template)"
    else:
        yield f"text, and chats with tools ({TOOLS[facts['tools']]})"
    if "fused" in facts:
        yield "images" if facts["images"] is None else f"no images ({facts['images']})"
    yield context_words(facts)


def context_words(facts: Details) -> str:
    return f"up to {facts['max_context']:,} tokens" if facts["max_context"] else "a context of unknown length"


def held_words(facts: Details) -> str:
    memory, tokens, each = facts["memory"], facts["pool_tokens"], facts["kv_bytes_per_token"]
    held = f"the process holds {size(memory['measured'])} now, libraries included"
    pages = f"its KV pages take up to {size(memory['pages'])}: {tokens:,} tokens of {size(each)}"
    if facts["states"]:
        pages += f", and {size(facts['states']['bytes_per_sequence'])} of recurrent states a sequence"
    return f"{held}; {pages}"


def batch_words(invariance: str) -> tuple[str, str]:
    answer, _, why = invariance.partition(": ")
    if answer == "yes":
        return "yes, the results are the same in any batch, bit for bit", "green"
    why = why or "the setting batch_invariant is off"
    return f"no, in another batch two tokens of nearly equal probability may change places ({why})", "yellow"


def method_rows(facts: Details) -> Iterator[tuple[str, str, str]]:
    """The methods that can draft here, by what they draft from, and why each other one cannot."""
    rows = {
        feature.removeprefix("methods."): row
        for feature, row in facts["capabilities"].items()
        if feature.startswith("methods.")
    }
    asked = rows.pop(AUTO)["reason"]
    usable, unusable = dict[str, list[str]](), dict[str, list[str]]()
    for name, row in rows.items():
        drafter, reason = facts["drafters"].get(name), row["reason"]
        if name in FOR_TESTS:
            continue
        if row["status"] == "on":
            usable.setdefault(f"{reason} ({drafter})" if drafter else reason, []).append(name)
        else:
            without_layers = name == MTP and facts["mtp"] is None
            reason = "the checkpoint has no MTP layers" if without_layers else reason
            unusable.setdefault(reason, []).append(name)
    first = f"by default {facts['method']}{f', which {asked}' * (facts['method'] == AUTO)}"
    yield "methods", "\n".join([first, *by_reason(usable)]), ""
    if unusable:
        yield "unavailable", "\n".join(by_reason(unusable)), "yellow"


def by_reason(names: Mapping[str, list[str]]) -> Iterator[str]:
    return (f"{', '.join(some)}: {reason}" for reason, some in names.items())


def refused_parameters(capabilities: Details) -> Iterator[str]:
    """The fields of a request that this model refuses."""
    reasons = dict[str, list[str]]()
    for feature, row in capabilities.items():
        group, _, name = feature.partition(".")
        if group == "parameters" and row["status"] == "refused":
            reasons.setdefault(row["reason"], []).append(name)
    return by_reason(reasons)


# details


def two_columns() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def as_table(
    rows: Iterable[str], facts: Details, in_words: Callable[[str, Any, Details], str | Text]
) -> Table:
    """A row for each fact that is known."""
    table = two_columns()
    for name in rows:
        if facts.get(name) not in (None, []):
            label = Text(LABELS.get(name, name.replace("_", " ")), style="dim")
            table.add_row(label, in_words(name, facts[name], facts))
    return table


def all_rows(capabilities: Details) -> Table:
    """The table of capabilities; parameters of one reason share a row."""
    plain: dict[str, list[str]] = {}  # reason -> features without limits
    for feature, row in capabilities.items():
        if row["status"] == "on" and not row["limits"]:
            plain.setdefault(row["reason"], []).append(feature)
    shared = {reason: features for reason, features in plain.items() if len(features) > 1}
    table = Table(box=None, pad_edge=False, show_header=False)
    for feature, row in capabilities.items():
        if feature not in shared.get(row["reason"], ()):
            limits = ", ".join(f"{name} {limit:,}" for name, limit in row["limits"].items())
            text = row["reason"] + f" ({limits})" * bool(limits)
            table.add_row(feature, Text(row["status"], style=STYLES[row["status"]]), text)
    for reason, features in shared.items():
        group = features[0].partition(".")[0]
        listed = ", ".join(feature.removeprefix(f"{group}.") for feature in features)
        table.add_row(f"other {group}", Text("on", style=STYLES["on"]), f"{reason}: {listed}")
    return table


def detail_words(name: str, value: Any, facts: Details) -> str:
    if name == "memory":
        return memory_words(value)
    if name == "layers":
        return "\n".join(
            f"{count} layers, {kind}" for kind, count in Counter(map(layer_words, value)).items()
        )
    if name == "states":
        ways = ", ".join(
            f"{mixer} computes row by row{'' if rows is None else f' up to {rows} rows'}"
            for mixer, rows in value["single_rows"].items()
        )
        return f"{value['mixers']} mixers, {size(value['bytes_per_sequence'])} per sequence\n{ways}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def memory_words(memory: Details) -> str:
    parts = ", ".join(f"{name} {size(memory[name])}" for name in MEMORY if memory.get(name))
    verdict = "within" if memory["fits"] else "beyond"
    total, limit = size(memory["estimate"]), size(memory["limit"])
    then = "" if memory["fits"] else ACTIONS[memory["action"]]
    return f"{total} ({parts})\n{verdict} the limit of {limit}{then}"


def layer_words(layer: Details) -> str:
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
    facts: Details = {"path": path, "holds": "a LoRA adapter of a target"}
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
    facts: Details = {
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


def head_facts(config: DrafterConfig) -> Details:
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


def drafter_words(name: str, value: Any, facts: Details) -> Text:
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
