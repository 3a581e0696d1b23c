"""Other engines beside ours, on the same checkpoint and prompts, alternated in one run.

python recipes/peers/run.py ENV_FOLDER --out FOLDER, after recipes/peers/setup.sh ENV_FOLDER

With another checkpoint, after TARGET=MODEL DTYPE=bf16 recipes/peers/setup.sh ENV_FOLDER ENGINES:

python recipes/peers/run.py ENV_FOLDER --target MODEL --dtype bfloat16 --data FILE --engines ...

A GGUF file as the target is read by llama.cpp and by speculon as it is, and needs none of its conversions.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engines.worker import Settings
from figures import Cell, Record, Row, cut, row
from judge import Judge
from plan import MODES, OFF, OURS, STOCK, Mode, modes_of, place
from process import Worker
from report import write
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import GenerationConfig

from speculon import __version__
from speculon.checkpoints.gguf.header import is_gguf, read_gguf
from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench.data import read_prompts
from speculon.measure.bench.provenance import commit, machine
from speculon.measure.bench.workloads import BuilderTable, Case, Size, build, fingerprint

OPTIONS = "engines modes dtype workloads concurrency prompts groups max_tokens repeats threads clock".split()
WALL, CPU = "wall", "cpu"  # seconds of a turn; CPU seconds are those of all threads of the worker
CONTEXT = 2048  # of the demo checkpoint; SmolLM2 has more


def main() -> int:
    args = arguments()
    console = Console(stderr=True)
    size = Size(args.prompts, args.max_tokens, CONTEXT, max(args.concurrency))
    tokenizer = Tokenizer(load_tokenizer(str(args.target)))
    more = first_turns(args.data) if args.data else {}
    args.workloads = args.workloads or [*more] or ["code", "edit"]
    cases = {name: build(name, tokenizer, size, more) for name in args.workloads}
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = started(modes_of(args.engines, args.modes), args, stack, console)
        rows, records = measure(workers, cases, args, console)
    files = write(args.out, facts(args, cases, workers), rows, records)
    console.print("wrote", *map(str, files))
    silent = [f"{one.workload} at {one.concurrency}: {one.engine} {one.mode}" for one in rows if one.silent]
    if silent:
        console.print("[red]asked to speculate, and did not, or no draft was accepted:", "; ".join(silent))
    return int(bool(silent))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("envs", type=Path, help="where setup.sh put the engines")
    parser.add_argument("--out", type=Path, default=Path("build/peers"), help="folder of the results")
    parser.add_argument("--engines", type=listed, default=list(MODES))
    parser.add_argument("--modes", type=listed, help="of these engines; all of them if none is named")
    parser.add_argument("--target", type=locate, help="another checkpoint than the demo's")
    parser.add_argument("--draft", type=locate, help="a drafter for it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--data", type=Path, help="prompts of a file; its categories are the workloads")
    parser.add_argument("--workloads", type=listed, help="NAME or NAME@TEMPERATURE (default: code,edit)")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(part) for part in listed(text)], default=[1, 8]
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each workload")
    parser.add_argument("--groups", type=int, help="at most so many groups of prompts in a cell")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=(WALL, CPU), default=WALL, help="cpu: where others use the cores")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.target is None:
        args.target, args.draft = locate("demo"), args.draft or locate("demo-draft")
    fp32_alone = {"openvino", "vllm"} & {*args.engines}
    if args.dtype != "float32" and fp32_alone:
        parser.error(f"{', '.join(sorted(fp32_alone))}: measured in float32 alone")
    args.eos = eos_of(args.target)
    return args


def eos_of(target: Path) -> tuple[int, ...]:
    if is_gguf(target):
        return read_gguf(target).end_ids
    config = GenerationConfig.from_pretrained(target, local_files_only=True)
    ids = config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,)


def first_turns(path: Path) -> BuilderTable:
    """The file's categories, without turns that follow an answer."""
    file = read_prompts(path)
    first = {name: [one for one in some if not one.follows] for name, some in file.prompts.items()}
    return replace(file, prompts=first).workloads


def listed(text: str) -> list[str]:
    return text.split(",")


def started(
    modes: list[Mode], args: argparse.Namespace, stack: ExitStack, console: Console
) -> dict[Mode, Worker]:
    """One after the other; each is stopped until its turn."""
    found: dict[Mode, Worker] = {}
    places = {engine: place(engine, args.envs.resolve(), args.target, args.draft) for engine in args.engines}
    with console.status("starting") as status:
        for mode in modes:
            status.update(f"starting {mode}")
            at = places[mode.engine]
            settings = Settings(
                method=mode.method,
                k=mode.k,
                target=str(at.target),
                draft=at.draft and str(at.draft),
                dtype=args.dtype,
                threads=args.threads,
                context=CONTEXT,
                texts=max(args.concurrency),
                eos=args.eos,
                server=str(at.server) if at.server else None,
            )
            log = args.out / f"{mode.engine}-{mode.name.replace(':', '-')}.log"
            found[mode] = stack.enter_context(closing(Worker(mode, at, settings, log)))
            if found[mode].refusal and mode.name == OFF:
                raise SystemExit(
                    f"{mode} does not start, so there is nothing to compare: {found[mode].refusal}; see {log}"
                )
            if found[mode].refusal:
                console.print(f"{mode} refused: {found[mode].refusal}")
    return found


def measure(
    workers: dict[Mode, Worker], cases: dict[str, list[Case]], args: argparse.Namespace, console: Console
) -> tuple[list[Row], list[Record]]:
    rows: list[Row] = []
    records: list[Record] = []
    judge = Judge(args.target)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        turns = sum(
            1 + args.repeats * min(args.prompts // count, args.groups or args.prompts)
            for count in args.concurrency
        )
        task = progress.add_task("", total=turns * len(cases) * len(workers))
        for name, some in cases.items():
            for count in args.concurrency:
                progress.update(task, description=f"{name} at {count}")
                few = some[: args.groups * count] if args.groups else some
                new, refusals = measure_cell(
                    (name, count), workers, few, args, lambda: progress.advance(task)
                )
                if some[0].params.temperature == 1:
                    new = [
                        replace(one, nats=judge.nats(zip(prompts(some, one), one.tokens, strict=True)))
                        for one in new
                    ]
                rows.extend(
                    summary(
                        (name, count), list(workers), new, refusals, greedy=not some[0].params.temperature
                    )
                )
                records.extend(new)
                for mode, reason in refusals.items():
                    progress.console.print(f"{name} at {count}: {mode} refused: {reason}")
    return rows, records


def prompts(cases: list[Case], record: Record) -> list[list[int]]:
    """Those of the record's group."""
    first = record.group * record.concurrency
    return [case.prompt for case in cases[first : first + record.concurrency]]


def measure_cell(
    cell: Cell, workers: dict[Mode, Worker], cases: list[Case], args: argparse.Namespace, advance: Any
) -> tuple[list[Record], dict[Mode, str]]:
    """Every mode beside every other in time; who goes first changes.

    A mode that refuses once is out of the cell.
    """
    name, count = cell
    groups = [cases[i : i + count] for i in range(0, len(cases) - count + 1, count)]  # full ones only
    records: list[Record] = []
    refusals: dict[Mode, str] = {}

    def turn(mode: Mode, repeat: int, group: int) -> None:
        advance()
        if mode in refusals:
            return
        params = groups[group][0].params
        prompts = [case.prompt for case in groups[group]]
        answer = workers[mode].ask(
            prompts=prompts, max_tokens=params.max_tokens, temperature=params.temperature
        )
        if "refused" in answer:
            refusals[mode] = answer["refused"]
        elif repeat >= 0:
            cpu_seconds = answer.pop("cpu_seconds")
            if args.clock == CPU:
                answer["seconds"] = cpu_seconds
            answer["tokens"] = [cut(tokens, args.eos) for tokens in answer["tokens"]]
            records.append(Record(name, count, repeat, group, mode.engine, mode.name, **answer))

    modes = list(workers)
    for mode in modes:
        turn(mode, -1, 0)  # warm-up, discarded
    for repeat in range(args.repeats):
        for group in range(len(groups)):
            first = (repeat * len(groups) + group) % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                turn(mode, repeat, group)
    return records, refusals


def summary(
    cell: Cell, modes: list[Mode], records: list[Record], refusals: dict[Mode, str], greedy: bool
) -> list[Row]:
    return [
        Row(*cell, mode.engine, mode.name, refused=refusals[mode])
        if mode in refusals
        else row(cell, (mode.engine, mode.name), records, greedy, stock=(STOCK, OFF), ours=(OURS, OFF))
        for mode in modes
    ]


def facts(
    args: argparse.Namespace, cases: dict[str, list[Case]], workers: dict[Mode, Worker]
) -> dict[str, Any]:
    """What a stranger needs to repeat the run."""
    versions = {OURS: __version__}
    for mode, worker in workers.items():
        for name, number in worker.first.get("versions", {}).items():
            versions[name if name in (OURS, mode.engine) else f"{name} of {mode.engine}"] = number
    plan = {
        name: value
        for name, value in vars(args).items()
        if name not in ("envs", "out", "target", "draft", "data", "eos")
    }
    return {
        "command": shlex.join(["python", "recipes/peers/run.py", "ENV_FOLDER", *options(args)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": described(args.target),
        "data": read_prompts(args.data).facts() if args.data else None,
        "plan": plan,
        "machine": machine(),
        "versions": versions,
        "workloads": {
            name: {"cases": len(some), "fingerprint": fingerprint(some)} for name, some in cases.items()
        },
        "modes": [asdict(mode) for mode in workers],
    }


def described(target: Path) -> str:
    found = read_checkpoint(target)
    return f"{target.name}, {(found.num_parameters or 0) / 1e6:.1f} M parameters, {found.num_layers} layers"


def options(args: argparse.Namespace) -> list[str]:
    """What was args, without the folders of this machine."""
    files = (("target", args.target), ("draft", args.draft), ("data", args.data))
    found = [part for name, path in files if path for part in (f"--{name}", path.name)]
    for name in OPTIONS:
        value = getattr(args, name)
        if value is None:
            continue
        found += [
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if isinstance(value, list) else str(value),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
