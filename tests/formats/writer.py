"""Writes small checkpoints from the recorded headers of published ones: tensor names, shapes, config.json.

>>> write_checkpoint(folder, "eagle3/specforge", draft_vocab=40, config={"hidden_size": 64})

Each JSON file beside this module records one family of drafters: `tensors` and `config` as they are
published, `forms` with what each publisher writes differently, and the `sizes` that shapes and values are
written in. A string that begins with "=" is a Python expression in these sizes. `{i}` in the name of a tensor
takes the values that `each` has for it, and a shape may end with " when " and a condition. docs/drafters.md
says what the formats mean. tables.json has what is read of changed checkpoints, and what is refused;
gguf_tokens.json has llama.cpp's ids of the texts in recipes/gguf.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HOME = Path(__file__).parent
TARGET = SimpleNamespace(
    hidden_size=32, vocab_size=96, num_hidden_layers=8, architectures=["Qwen3ForCausalLM"]
)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
ABSENT = object()  # of a key of the config or a tensor: the file has none

Changes = Mapping[str, Any]


def names(family: str) -> list[str]:
    """The forms that are recorded of a family, as `write_checkpoint` takes them."""
    return [f"{family}/{form}" for form in record(family)["forms"]]


@cache
def record(family: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((HOME / f"{family}.json").read_text())
    return recorded


class Checkpoint(SimpleNamespace):
    """A checkpoint in memory: `config`, `tensors` under the names of the record, `stored` under those that
    the publisher writes, and every size of the record as an attribute.
    """


def make_checkpoint(name: str, target: Any = TARGET, seed: int = 0, **given: Any) -> Checkpoint:
    """The checkpoint of a form, for a target with such a config; `given` are sizes of its record.

    A tensor's numbers depend on the seed and its name alone.
    """
    made, shapes = describe(name, target, given)
    made.tensors = {
        tensor: numbers(tensor, shape, f"{seed} {tensor}", made) for tensor, shape in shapes.items()
    }
    made.stored = {published(tensor, made.rename): values for tensor, values in made.tensors.items()}
    return made


def describe(name: str, target: Any, given: Changes) -> tuple[Checkpoint, dict[str, tuple[int, ...]]]:
    """Sizes and config of a form, and the shapes of its tensors."""
    family, _, form = name.partition("/")
    recorded = record(family)
    own: dict[str, Any] = recorded["forms"][form]
    sizes: dict[str, Any] = {
        "form": form,
        "target_hidden": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_layers": target.num_hidden_layers,
        "architecture": (getattr(target, "architectures", None) or ["LlamaForCausalLM"])[0],
        "absent": ABSENT,
    }
    wanted = {**recorded["sizes"], **own.get("sizes", {})}
    assert not (unknown := given.keys() - wanted.keys() - sizes.keys()), f"{name} has no sizes {unknown}"
    given = {size: tuple(value) if isinstance(value, list) else value for size, value in given.items()}
    sizes |= {size: given.get(size) for size in wanted if size not in sizes} | given
    for size, value in wanted.items():
        if is_expression(value) or size not in given:
            sizes[size] = evaluate(value, sizes)
    for part, value in recorded.get("parts", {}).items():
        sizes[part] = evaluate(value, sizes)
    config = evaluate({**recorded.get("config", {}), **own["config"]}, sizes)
    shapes = dict(shapes_of({**recorded["tensors"], **own.get("tensors", {})}, recorded["each"], sizes))
    rename = evaluate(own.get("rename", {}), sizes)
    return Checkpoint(**sizes, config=config, rename=rename, std=recorded.get("std", {})), shapes


def is_expression(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("=")


def evaluate(value: Any, sizes: Changes) -> Any:
    """A value of a record, with its expressions computed; "**" lays a whole table into its own."""
    if is_expression(value):
        return eval(value[1:], dict(sizes))
    if isinstance(value, list):
        return [evaluate(one, sizes) for one in value]
    if not isinstance(value, dict):
        return value
    table: dict[str, Any] = {}
    for key, one in value.items():
        found = evaluate(one, sizes)
        table |= found if key == "**" else {key: found}
    return {key: one for key, one in table.items() if one is not ABSENT}


def shapes_of(tensors: Changes, each: Changes, sizes: Changes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, text in tensors.items():
        shape, _, condition = text.partition(" when ")
        counters = re.findall(r"\{(\w+)\}", name)
        for values in product(*(eval(each[counter], dict(sizes)) for counter in counters)):
            at = dict(zip(counters, values, strict=True))
            if not condition or eval(condition, {**sizes, **at}):
                yield name.format(**at), eval(f"({shape},)", {**sizes, **at})


def published(name: str, rename: Mapping[str, str]) -> str:
    for ours, theirs in rename.items():
        name = name.replace(ours, theirs)
    return name


def numbers(name: str, shape: tuple[int, ...], seed: str, made: Checkpoint) -> Tensor:
    """Random ones that all matter: norms near one, ids that exist."""
    chance = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    if name in ("d2t", "t2d"):
        used = drafted_ids(made)
        mask = torch.zeros(made.vocab_size, dtype=torch.bool).index_fill(0, used, True)
        return used - torch.arange(len(used)) if name == "d2t" else mask
    if name.endswith("token_ordering"):
        return torch.randperm(*shape, generator=chance)
    std = next((std for pattern, std in made.std.items() if re.search(pattern, name)), None)
    if len(shape) == 1 and ("norm" in name or name.endswith("layer_scalar")):
        return torch.randn(shape, generator=chance) * (std or 0.1) + getattr(made, "norm_center", 1)
    return torch.randn(shape, generator=chance) * (std or (0.2 if len(shape) > 1 else 0.4))


def drafted_ids(made: Checkpoint) -> Tensor:
    """Those of the target's tokens that a drafter with fewer of them has, in order."""
    chance = torch.Generator().manual_seed(made.draft_vocab_size)
    return torch.randperm(made.vocab_size, generator=chance)[: made.draft_vocab_size].sort().values


def write_checkpoint(
    folder: str | Path,
    name: str,
    target: Any = TARGET,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    pickled: bool = False,
    prefix: str = "",
    config: Changes | None = None,
    tensors: Changes | None = None,
    rename: Mapping[str, str] | None = None,
    **given: Any,
) -> Path:
    """Writes `make_checkpoint(name, target, seed, **given)` with planted changes, and returns the folder.

    `prefix` goes before every name. `changed` says what `config` may be, `changed_tensors` the same of
    `tensors` and `rename`.
    """
    folder, made = Path(folder), make_checkpoint(name, target, seed, **given)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        prefix + tensor: values.to(dtype) if values.is_floating_point() else values
        for tensor, values in made.stored.items()
    }
    config_file, weights = files_of(name)
    (folder / config_file).write_text(json.dumps(changed(made.config, config or {}), indent=2))
    save_weights(folder / weights, changed_tensors(stored, tensors or {}, rename or {}), shards, pickled)
    return folder


def files_of(name: str) -> tuple[str, str]:
    """The files of config and weights."""
    config, weights = record(name.partition("/")[0]).get("files", (CONFIG, WEIGHTS))
    return config, weights


def changed(table: Changes, changes: Changes) -> dict[str, Any]:
    """A config with other values; `a.b` is key b of table a, and None takes a key away."""
    made = dict(table)
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        if rest:
            made[first] = changed(made.get(first, {}), {rest: value})
        elif value is None:
            made.pop(first, None)
        else:
            made[first] = value
    return made


def changed_tensors(
    tensors: dict[str, Tensor], changes: Changes, rename: Mapping[str, str]
) -> dict[str, Tensor]:
    """None takes a tensor away, a list is another shape, and an expression may use the tensor as `t`;
    `rename` exchanges parts of names.
    """
    made = dict(tensors)
    for name, change in changes.items():
        if change is None:
            del made[name]
        elif is_expression(change):
            made[name] = evaluate(change, {"torch": torch, "t": tensors.get(name)})
        else:
            made[name] = torch.ones(change)
    return {published(name, rename): values for name, values in made.items()}


def change_checkpoint(
    source: Path,
    folder: Path,
    *,
    config: Changes | None = None,
    tensors: Changes | None = None,
    rename: Mapping[str, str] | None = None,
) -> Path:
    """A copy of a checkpoint that lies in one file, with planted changes."""
    folder.mkdir(parents=True, exist_ok=True)
    written = json.loads((source / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(changed(written, config or {})))
    stored = changed_tensors(load_file(source / WEIGHTS), tensors or {}, rename or {})
    save_weights(folder / WEIGHTS, stored)
    return folder


def save_weights(file: Path, tensors: dict[str, Tensor], shards: int = 1, pickled: bool = False) -> None:
    if pickled:
        torch.save(tensors, file.with_name("pytorch_model.bin"))
    elif shards == 1:
        save_file(tensors, file, {"format": "pt"})
    else:
        ordered = sorted(tensors)
        files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": ordered[i::shards] for i in range(shards)}
        for part, own in files.items():
            save_file({name: tensors[name] for name in own}, file.with_name(part))
        weight_map = {name: part for part, own in files.items() for name in own}
        index = {"metadata": {}, "weight_map": weight_map}
        file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))


def write_published(folder: Path, name: str) -> dict[str, Any]:
    """Writes config and header at the recorded sizes of a published checkpoint, over a sparse file of zeros;
    the ids that it drafts are the first ones. Returns what is recorded of it.
    """
    family, _, form = name.partition("/")
    recorded: dict[str, Any] = record(family)["forms"][form]["published"]
    made, shapes = describe(name, SimpleNamespace(**recorded["target"]), recorded["sizes"])
    (folder / CONFIG).write_text(json.dumps(made.config))
    header, ends = dict[str, Any](), {}
    for tensor, shape in shapes.items():
        kind, width = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}.get(tensor, ("BF16", 2))
        start = max(ends.values(), default=0)
        ends[tensor] = start + width * prod(shape)
        stored = published(tensor, made.rename)
        header[stored] = {"dtype": kind, "shape": shape, "data_offsets": [start, ends[tensor]]}
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + max(ends.values()))
        if "t2d" in shapes:
            file.seek(8 + len(text) + ends["t2d"] - prod(shapes["t2d"]))
            file.write(b"\1" * prod(shapes["d2t"]))
    return recorded
