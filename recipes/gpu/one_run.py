"""All that a GPU is asked while it can be had, in one command of at most 8 minutes.

    python -m recipes.gpu.one_run --out FOLDER
    python -m recipes.gpu.one_run --out FOLDER --tiny      # the same code with a tiny model, on a CPU, too

Models with random weights in the shapes of Llama 3.2 1B and Llama 3.1 8B, in bf16, as they come and with
captured graphs: whole decoding steps; verify steps of several rows with their launches, the time in which the
device works and the gaps; the call of a random EAGLE-3 head. Steps are compared with the time that reading
the weights once takes at the speed of a copy. Last `tests/gpu`.

Each part is a process of its own, which is ended when its seconds are over; what a part leaves is for the
next ones. FOLDER/one_run.json and one_run.md are written again after every figure, so what was measured is
there whatever happens later. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

from speculon.measure.bench.provenance import commit, machine, versions, write_files
from speculon.measure.bench.tables import markdown_table, number

TOTAL, RESERVE, LEAST = 480.0, 10.0, 15.0  # seconds: of all, for the end, and of a part that is begun
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {  # as their config.json files have them
    "Llama 3.2 1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": {**ROPE, "factor": 32.0}},
    "Llama 3.1 8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"head_dim": 128, "tie_word_embeddings": False, "rope_parameters": {**ROPE, "factor": 8.0}},
    "tiny": {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048}
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": {**ROPE, "factor": 8.0}},
}
SECONDS = {"Llama 3.2 1B": 110.0, "Llama 3.1 8B": 170.0, "tiny": 300.0}
TESTS, TESTS_SECONDS = "tests/gpu", 190.0
FORMS = {"as it comes": False, "captured": True}
OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured of a model."""

    sequences: tuple[int, ...] = (1, 8, 32)
    rows: tuple[int, ...] = (1, 4, 8)
    context: int = 512
    tokens: int = 48  # of each sequence, for whole steps
    copy: int = 1 << 30  # bytes
    draft_vocab: int = 32000


TINY = Sizes((1, 2), (1, 4), 24, 12, 1 << 20, 128)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: float  # at most, with what earlier parts left
    command: list[str]
    read: Callable[[Iterable[str]], Iterator[Row]]  # its lines on stdout -> figures


# the process that measures one model


def measure_model(name: str, sizes: Sizes) -> Iterator[Row]:
    """Figures of one model with random weights; of a form that fails, why."""
    import gc

    import torch
    from recipes.gpu import forwards

    from speculon.core.errors import SpeculonError
    from speculon.runtimes.torch.loading import load

    device = load.pick_device("auto")
    if name == "tiny":
        replay_on_cpu()
    bandwidth = forwards.copy_bandwidth(device, sizes.copy)
    model = random_model(SHAPES[name], device)
    for form, captured in FORMS.items():
        try:
            began = monotonic()
            target = load.wrap_model(model, name=name, share=False, compile=captured)
            known = {"form": form, "read_ms": forwards.weights_read(target) / bandwidth * 1e3}
            loaded = {"seconds": monotonic() - began, "runner": str(target.runner), "bandwidth": bandwidth}
            for row in measure_target(target, captured, sizes):
                yield {**row, **known, **(loaded if row["figure"] == "load" else {})}
            del target
        except (SpeculonError, RuntimeError) as error:  # for example, it needs more memory than there is
            yield {"figure": "failed", "form": form, "reason": f"{type(error).__name__}: {error}"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_target(target: Any, captured: bool, sizes: Sizes) -> Iterator[Row]:
    from recipes.gpu import forwards

    head = forwards.random_head(target, sizes.draft_vocab)
    runner = forwards.run_head(head, target, captured)
    yield {"figure": "load", "weights": forwards.weights_read(target), "head": str(runner)}
    for sequences in sizes.sequences:
        step, forward = forwards.step_ms(target, sequences, sizes.context, sizes.tokens)
        yield {"figure": "step", "sequences": sequences, "ms": step, "forward_ms": forward}
        head_cost = forwards.head_cost(head, runner, target, sequences, sizes.context)
        yield {"figure": "head", "sequences": sequences, **fields_of(head_cost)}
        for rows in sizes.rows:
            cost = forwards.forward_cost(target, sequences, rows, sizes.context)
            yield {"figure": "verify", "sequences": sequences, "rows": rows, **fields_of(cost)}


def random_model(shape: dict[str, Any], device: Any) -> Any:
    """In bf16, made on the device: its weights are never in the host's memory."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16).eval()


def replay_on_cpu() -> None:
    """A CPU has no graphs: pieces are called again in their place, so that the same code runs."""
    from speculon.runtimes.torch.model.captured import RECORDERS, CapturedPiece

    def call_again(piece: CapturedPiece) -> CapturedPiece:
        piece()
        return piece

    RECORDERS.setdefault("cpu", lambda device: call_again)


def fields_of(cost: Any) -> Row:
    return {"ms": cost.ms, "busy_ms": cost.busy_ms, "gaps_ms": cost.gaps_ms, "launches": cost.launches}


# the process that has the clock


def parts_of(tiny: bool, tests: bool) -> list[Part]:
    names = ["tiny"] if tiny else [name for name in SHAPES if name != "tiny"]
    here = [sys.executable, "-m", "recipes.gpu.one_run", "--model"]
    parts = [Part(name, SECONDS[name], [*here, name], read_rows) for name in names]
    jobs = str(min(8, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", TESTS, "-v", "-rN", "-n", jobs]  # no test is named twice
    return [*parts, *[Part(TESTS, TESTS_SECONDS, command, read_tests)] * tests]


def read_rows(lines: Iterable[str]) -> Iterator[Row]:
    """A figure of each line that is one; other lines are a library's, and go to stderr."""
    for line in lines:
        if line.startswith('{"figure": '):
            yield json.loads(line)
        else:
            print(line, end="", file=sys.stderr)


def read_tests(lines: Iterable[str]) -> Iterator[Row]:
    """The outcomes so far, after each test; only the lines of tests that failed are kept."""
    counts, failed = Counter[str](), list[str]()
    for line in lines:
        if "::" in line and (outcome := OUTCOME.search(line)):
            counts[outcome[1].lower()] += 1
            if outcome[1] in ("FAILED", "ERROR"):
                failed.append(line.strip())
            yield {"figure": "tests", "counts": dict(counts), "failed": list(failed)}
        else:
            print(line, end="", file=sys.stderr)


def run_part(part: Part, seconds: float, take: Callable[[Row], None]) -> str:
    """Runs a part and hands on its figures; how it ended. After `seconds` it is killed with its children."""
    began, killed = monotonic(), []
    child = subprocess.Popen(part.command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def kill() -> None:
        killed.append(True)
        os.killpg(child.pid, signal.SIGKILL)

    timer = Timer(seconds, kill)
    timer.start()
    assert child.stdout is not None
    try:
        with child.stdout as lines:
            for row in part.read(lines):
                take({"part": part.name, **row})
        code = child.wait()
    finally:
        timer.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if killed:
        return f"ended after its {seconds:.0f} s"
    return f"{monotonic() - began:.0f} s" + (f", exit status {code}" if code else "")


def run_all(parts: list[Part], folder: Path, total: float = TOTAL) -> dict[str, Any]:
    """All parts within `total` seconds; the report as far as it goes, which is in the folder as well."""
    end, left = monotonic() + total - RESERVE, 0.0
    report: dict[str, Any] = {"commit": commit(), "versions": versions(), "parts": {}, "rows": []}
    rows: list[Row] = report["rows"]

    def take(row: Row) -> None:
        if row["figure"] == "tests":  # each has all outcomes so far
            rows[:] = [kept for kept in rows if kept["figure"] != "tests"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        write(report, folder)

    for part in parts:
        began = monotonic()
        seconds = min(part.seconds + left, end - began)
        if seconds < min(LEAST, part.seconds):
            report["parts"][part.name] = "not begun: no time was left"
        else:
            report["parts"][part.name] = run_part(part, seconds, take)
            left = max(0.0, seconds - (monotonic() - began))
        write(report, folder)
    report["machine"] = machine()  # imports torch, so it comes last
    write(report, folder)
    return report


def write(report: dict[str, Any], folder: Path) -> None:
    write_files(folder, "one_run.json", report, "one_run.md", page(report))


# the page


def page(report: dict[str, Any]) -> str:
    where = report.get("machine", {})
    texts = [f"# On {where.get('gpu', where.get('cpu', 'a device'))}"]
    texts.append(f"torch {report['versions']['torch']}, speculon {report['commit']}.")
    endings = [f"- {name}: {ending}" for name, ending in report["parts"].items()]
    texts.append("\n".join(endings))
    for name in dict.fromkeys(row["part"] for row in report["rows"]):
        texts += [f"## {name}", *tables([row for row in report["rows"] if row["part"] == name])]
    return "\n\n".join(text for text in texts if text) + "\n"


def tables(rows: list[Row]) -> Iterator[str]:
    """The figures of one part."""
    by_figure: dict[str, list[Row]] = {}
    for row in rows:
        by_figure.setdefault(row["figure"], []).append(row)
    for load in by_figure.get("load", []):
        weights = f"{load['weights'] / 1e9:.3f} GB of weights at {load['bandwidth'] / 1e12:.2f} TB/s"
        runners = f"{load['runner']}; its head: {load['head']}"
        yield f"{load['form']}: {runners}; {weights}; loaded in {load['seconds']:.1f} s."
    for failed in by_figure.get("failed", []):
        yield f"{failed['form']}: {failed['reason']}"
    for figure, title in (("step", "decoding steps"), ("verify", "forwards"), ("head", "calls of the head")):
        if figure in by_figure:
            yield f"### {title}"
            yield markdown_table(HEADS[figure], [CELLS[figure](row) for row in by_figure[figure]])
    for tests in by_figure.get("tests", []):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tests["counts"].items())
        yield "\n".join([counts, *(f"- {line}" for line in tests["failed"])])


HEADS = {
    "step": ("form", "sequences", "step, ms", "forward, ms", "reading the weights / step"),
    "verify": (
        *("form", "sequences", "rows of each", "ms", "device busy, ms", "gaps, ms", "launches"),
        "reading the weights / forward",
    ),
    "head": ("form", "sequences", "ms", "device busy, ms", "gaps, ms", "launches"),
}


def call_cells(row: Row) -> list[str]:
    gaps = [number(row[name], ".3f") for name in ("ms", "busy_ms", "gaps_ms")]
    return [*gaps, f"{row['launches']:.0f}"]


def share(row: Row) -> str:
    return f"{row['read_ms'] / row['ms']:.0%}"


CELLS: dict[str, Callable[[Row], list[Any]]] = {
    "step": lambda row: [
        *(row["form"], row["sequences"], f"{row['ms']:.3f}", f"{row['forward_ms']:.3f}", share(row))
    ],
    "verify": lambda row: [row["form"], row["sequences"], row["rows"], *call_cells(row), share(row)],
    "head": lambda row: [row["form"], row["sequences"], *call_cells(row)],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("one_run"), help="folder of the report")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the two, on any device")
    parser.add_argument("--no-tests", action="store_true", help=f"without {TESTS}")
    parser.add_argument("--model", choices=list(SHAPES), help=argparse.SUPPRESS)  # a part of the run
    args, began = parser.parse_args(), monotonic()
    if args.model:
        for row in measure_model(args.model, TINY if args.model == "tiny" else Sizes()):
            print(json.dumps(row), flush=True)
        return
    if not args.tiny:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("one_run measures a CUDA device, and torch sees none here; --tiny tries it out")
    run_all(parts_of(args.tiny, not args.no_tests), args.out, TOTAL - (monotonic() - began))


if __name__ == "__main__":
    main()
