"""llama-server beside `speculon serve --runtime llama`: one GGUF file, equal prompts, alternated in one run.

python -m recipes.llama.run --server PATH/llama-server --model FILE.gguf --data spec-bench-dev.jsonl
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from recipes.llama.figures import AUTO, OURS, PLAIN, REFERENCE, THEIRS, Turn, lines, markdown, never_drafted
from recipes.llama.servers import DRAFT_TYPES, TYPES, Served, Text
from recipes.peers.figures import Label
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from speculon.checkpoints.gguf.header import read_gguf
from speculon.core.config import EngineConfig, SamplingParams
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench import workloads
from speculon.measure.bench.data import read_prompts
from speculon.measure.bench.provenance import commit, machine, versions, write_files
from speculon.measure.bench.workloads import BuilderTable, Case, Size, build
from speculon.runtimes.llama.backend import tokenizer as tokenizer_of
from speculon.runtimes.llama.library import library
from speculon.runtimes.llama.memory import BYTES, bytes_per_token, padded

COLUMNS = (*Progress.get_default_columns(), TimeElapsedColumn())
CONTEXT = 2048
LONG = 1500  # tokens of a long prompt
WARM_UP_TOKENS = 32
CELLS = {"plain": ["code"], "long": ["long"], "edit": ["edit", "quote"], "spec": ["the categories of --data"]}


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompts in groups that are written at once, and the modes that write each group in turn."""

    workload: str
    concurrency: int
    cases: list[Case]
    warm: list[Case]  # a group whose turn is not measured
    modes: list[Label]

    @property
    def groups(self) -> list[list[Case]]:
        count = self.concurrency
        return [self.cases[i : i + count] for i in range(0, len(self.cases) - count + 1, count)]


def main() -> int:
    args = arguments()
    console = Console(stderr=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(EngineConfig(model=str(args.model), runtime="llama"))
    plan = planned(args, tokenizer)
    known, turns = facts(args, plan), list[Turn]()
    try:
        with Progress(*COLUMNS, console=console) as progress:
            run(plan, args, turns, progress)
    finally:  # an error must not lose what was measured before it
        found = lines(turns)
        if turns:
            data = {**known, "rows": [asdict(one) for one in found]}
            files = write_files(args.out, "llama.json", data, "llama.md", markdown(title(known), found))
            console.print("wrote", *map(str, files))
    if never := never_drafted(found):
        console.print("[red]should speculate, and drafted nothing in the whole run:", ", ".join(never))
    return int(bool(never))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="llama-server beside speculon on llama.cpp")
    parser.add_argument("--server", type=Path, required=True, help="the program llama-server")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--draft", type=Path, help="a GGUF file of a draft model for it")
    parser.add_argument("--data", type=Path, help="prompts for the cell spec, such as spec-bench-dev.jsonl")
    parser.add_argument("--out", type=Path, default=Path("build/llama"), help="folder of the results")
    parser.add_argument("--cells", type=lambda text: text.split(","), help=f"of {', '.join(CELLS)}")
    parser.add_argument("--concurrency", type=lambda text: [*map(int, text.split(","))], default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache-type", choices=list(BYTES), default="f16")
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--gpu-layers", type=int, help="layers on the GPU (default: each server's own)")
    parser.add_argument("--no-repack", action="store_true", help="where rearranged weights end a process")
    args = parser.parse_args()
    args.cells = args.cells or [name for name in CELLS if name != "spec" or args.data]
    if "spec" in args.cells and not args.data or {*args.cells} - {*CELLS}:
        parser.error(f"--cells {','.join(args.cells)}: of {', '.join(CELLS)}, and spec needs --data FILE")
    args.sequences = max(args.concurrency)
    headers = [read_gguf(path) for path in (args.model, args.draft) if path]
    args.context = min(CONTEXT, headers[0].number("context_length") or CONTEXT)
    each = max(bytes_per_token(header, args.kv_cache_type) for header in headers)
    # a little more than needed, because the number of sequences is rounded down
    args.kv_memory_gb = 1.01 * args.sequences * padded(args.context) * each / 2**30
    return args


def planned(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Cell]:
    """The prompts of every cell, as token ids."""
    size = Size(args.prompts, args.max_tokens, args.context, args.sequences)
    data = categories(args.data, args.sequences) if "spec" in args.cells else {}
    more: BuilderTable = {"long": (long_prompts, 0), "quote": (quotes, 0), **data}
    types = [*TYPES, *(DRAFT_TYPES if args.draft else ())]
    every = [PLAIN, *((THEIRS, name) for name in types), REFERENCE, (OURS, AUTO)]
    warm = build("prose@0", tokenizer, Size(args.sequences, WARM_UP_TOKENS, args.context))
    found = []
    for name in args.cells:
        modes = [PLAIN, REFERENCE] if name in ("plain", "long") else every
        for workload in data if name == "spec" else CELLS[name]:
            cases = build(workload, tokenizer, size, more)
            counts = [1] if name == "long" else args.concurrency
            if len(cases) < max(counts):
                raise SystemExit(f"{workload}: {len(cases)} prompts, and {max(counts)} are written at once")
            found += [Cell(workload, count, cases, warm[:count], modes) for count in counts]
    return found


def long_prompts(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    """The beginnings of held-out files, of which only the next token is written."""
    for path, source in workloads.shuffled("long", workloads.held_out_sources()):
        tokens = tokenizer.encode(source[: LONG * 12])
        if LONG <= len(tokens) and LONG < size.context:
            yield Case(path, tokens[:LONG], SamplingParams(max_tokens=1))


def quotes(tokenizer: Tokenizer, size: Size) -> Iterator[Case]:
    """A held-out docstring is to be repeated word for word."""
    for path, text in workloads.shuffled("quote", workloads.docstrings()):
        if workloads.FEWEST_TOKENS <= len(tokenizer.encode(text)) < size.max_tokens:
            prompt = workloads.ask(tokenizer, f"Repeat this text word for word.\n\n{text}")
            yield Case(path, prompt, SamplingParams(max_tokens=size.max_tokens), text)


def categories(path: Path, fewest: int) -> BuilderTable:
    """First turns of each category. Categories with too few prompts for a batch are one, `data:others`."""
    file = read_prompts(path)
    first = {name: [one for one in some if not one.follows] for name, some in file.prompts.items()}
    kept = {name: some for name, some in first.items() if len(some) >= fewest}
    small = [some for name, some in first.items() if name not in kept]
    others = {"data:others": [one for row in zip_longest(*small) for one in row if one]} if small else {}
    return replace(file, prompts={**kept, **others}).workloads


def run(plan: list[Cell], args: argparse.Namespace, turns: list[Turn], progress: Progress) -> None:
    """Starts a server for each mode, and adds the turns of one cell after the other."""
    task = progress.add_task("", total=sum(len(turns_of(cell, args.repeats)) for cell in plan))
    with ExitStack() as stack:
        served: dict[Label, Served] = {}
        for label in dict.fromkeys(label for cell in plan for label in cell.modes):
            progress.update(task, description=f"starting {' '.join(label)}")
            served[label] = stack.enter_context(closing(Served(*label, args)))
            served[label].start()
        for cell in plan:
            new, name = list[Turn](), f"{cell.workload} at {cell.concurrency}"
            for label, repeat, number in turns_of(cell, args.repeats):
                progress.update(task, description=f"{name}: {' '.join(label)}")
                if number is None and served[label].remembers:
                    served[label].start()  # again: a repeat must not find the texts of the one before
                group = cell.warm if number is None else cell.groups[number]
                texts = served[label].write([case.prompt for case in group], group[0].params.max_tokens or 1)
                if number is not None:
                    new.append(turn(cell, repeat, number, label, texts))
                progress.advance(task)
            for one in lines(new):
                speed = f"{one.tokens_per_second or 0:.1f} tokens/s, first token after {one.first_ms:.0f} ms"
                progress.console.print(f"{name}: {one.engine} {one.mode}: {speed}")
            turns += new


def turns_of(cell: Cell, repeats: int) -> list[tuple[Label, int, int | None]]:
    """Mode, repeat and group of each turn, in order. The mode that goes first changes with every group.

    Each repeat begins with a turn of every mode that is not measured; its group is None.
    """
    found: list[tuple[Label, int, int | None]] = []
    for repeat in range(repeats):
        found += [(mode, repeat, None) for mode in cell.modes]
        for group in range(len(cell.groups)):
            first = (repeat * len(cell.groups) + group) % len(cell.modes)
            found += [(mode, repeat, group) for mode in (*cell.modes[first:], *cell.modes[:first])]
    return found


def turn(cell: Cell, repeat: int, group: int, label: Label, texts: list[Text]) -> Turn:
    engine, mode = label
    return Turn(
        workload=cell.workload,
        concurrency=cell.concurrency,
        repeat=repeat,
        group=group,
        engine=engine,
        mode=mode,
        seconds=max(one.seconds for one in texts),
        tokens=[one.text for one in texts],
        drafted=sum(one.drafted for one in texts),
        accepted=sum(one.accepted for one in texts),
        written=sum(one.tokens for one in texts),
        prompt_tokens=sum(len(case.prompt) for case in cell.groups[group]),
        first=[one.first for one in texts],
    )


def facts(args: argparse.Namespace, plan: list[Cell]) -> dict[str, Any]:
    """What a stranger needs to repeat the run."""
    done = subprocess.run([args.server, "--version"], capture_output=True, text=True, check=False)
    told = re.search(r"^version: (.*)", done.stderr + done.stdout, re.MULTILINE)
    own = {
        "llama-cpp-python": f"{version('llama-cpp-python')} with {library().llama_version().decode()}",
        THEIRS: told[1] if told else "unknown",
    }
    return {
        "command": f"python -m recipes.llama.run {shlex.join(Path(part).name for part in sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": args.model.name,
        "data": read_prompts(args.data).facts() if args.data else None,
        "threads": args.threads,
        "machine": machine(),
        "versions": {**versions(), **own},
        "workloads": {cell.workload: workloads.fingerprint(cell.cases) for cell in plan},
    }


def title(known: dict[str, Any]) -> str:
    numbers = ", ".join(f"{name} {number}" for name, number in known["versions"].items())
    where = f"{known['machine']['cpu']}, {known['threads']} threads"
    ratios = "x: speed by that of the other mode, median over pairs of the same prompts in the same repeat"
    return (
        f"`{known['command']}` at {known['commit']}, {known['date'][:10]}: {where}. {numbers}.\n\n{ratios}."
    )


if __name__ == "__main__":
    sys.exit(main())
