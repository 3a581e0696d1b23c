"""lm-evaluation-harness against the server, with speculation off and on: the scores must be the same.

python -m recipes.evaluation.run LM_EVAL --out FOLDER      # from the top folder; LM_EVAL: the harness'
command
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.serving.server import Server

from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench.corpus import held_out_functions
from speculon.measure.bench.provenance import commit, machine
from speculon.measure.bench.workloads import Size, build

TASKS = Path(__file__).with_name("tasks")
DATA = Path("build/evaluation")  # as the tasks have it
CONTEXT, ANSWER = 2048, 256  # tokens
FEWEST_LINES = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lm_eval", help="the harness' command, in an environment of its own")
    parser.add_argument("--methods", default="off,auto", help="of the servers, one after the other")
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--concurrent", type=int, default=8, help="requests at once")
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    write_data(args.items)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {method: evaluate(method, args) for method in args.methods.split(",")}
    first, *others = (one["scores"] for one in found.values())
    report = {
        "command": sys.argv[1:],
        "commit": commit(),
        "machine": machine(),
        "items": args.items,
        **found,
    }
    (args.out / "scores.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(0 if all(other == first for other in others) else "the scores differ")


def evaluate(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """The scores of one server, and what its engine counted meanwhile."""
    # fixed: the most rounds with drafts
    flags = ("--model", "demo", "--method", method, "--policy", "fixed", "--threads", "1")
    with Server(*flags, log=args.out / f"server-{method}.log") as server:
        model = {
            "model": "demo",
            "tokenizer": locate("demo"),
            "tokenizer_backend": "huggingface",
            "base_url": f"{server.url}/v1/completions",
            "num_concurrent": args.concurrent,
            "max_length": CONTEXT,
            "eos_string": "<|im_end|>",
        }
        command = [
            args.lm_eval,
            "run",
            "--model",
            "local-completions",
            "--include_path",
            TASKS,
            "--log_samples",
        ]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
        command += [
            "--tasks",
            ",".join(path.stem for path in sorted(TASKS.glob("*.yaml"))),
            "--output_path",
            args.out / method,
        ]
        home = (args.out / "home").resolve()
        subprocess.run(command, check=True, env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"})
        counted = server.metrics()
    results = max((args.out / method).rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    scores = {
        task: {
            name: value
            for name, value in sorted(metrics.items())
            if isinstance(value, float) and "stderr" not in name
        }
        for task, metrics in json.loads(results.read_text())["results"].items()
    }
    names = {
        "answers": "speculon_sequences_total",
        "rounds": "speculon_speculative_rounds_total",
        "accepted": "speculon_accepted_tokens_total",
    }
    return {
        "scores": scores,
        "counted": {name: int(counted.get(metric, 0)) for name, metric in names.items()},
    }


def write_data(items: int) -> None:
    tokenizer = Tokenizer(load_tokenizer("demo"))
    renames = build("edit", tokenizer, Size(items, ANSWER, CONTEXT))
    DATA.mkdir(parents=True, exist_ok=True)
    write("next_line", list(islice(next_lines(), items)))
    write(
        "rename",
        [{"prompt": tokenizer.decode(case.prompt, False), "answer": case.reference} for case in renames],
    )


def next_lines() -> Iterator[dict[str, Any]]:
    """A held-out function up to one of its lines, that line, and three lines of as much indentation from
    elsewhere.
    """
    rng = random.Random("next line")
    functions = [function.source.splitlines(keepends=True) for function in held_out_functions()]
    rng.shuffle(functions)
    shelf: dict[int, list[str]] = {}
    for lines in functions:
        if len(lines) < FEWEST_LINES:
            continue
        at = rng.randrange(FEWEST_LINES // 2, len(lines) - 1)
        right, indent = lines[at], len(lines[at]) - len(lines[at].lstrip())
        others = [line for line in shelf.get(indent, []) if line != right]
        if right.strip() and len(others) >= 3 and sum(map(len, lines)) < 2 * CONTEXT:
            choices = [right, *rng.sample(others, 3)]
            rng.shuffle(choices)
            yield {"context": "".join(lines[:at]), "choices": choices, "answer": choices.index(right)}
        if right.strip():
            shelf.setdefault(indent, []).append(right)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
