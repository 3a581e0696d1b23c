"""Waiting times of `speculon serve` under vLLM's load generator: to the first token and between tokens,
speculation off and on.

python -m recipes.serving.latency PYTHON --out FOLDER      # PYTHON: of the environment that has vLLM; see the
README
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from recipes.serving.server import Server

from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench.provenance import commit, machine
from speculon.measure.bench.workloads import Size, build

# The same as `vllm bench serve`, whose entry point asks for a package name that the CPU build does not have.
GENERATOR = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FIGURES = [f"{which}_{name}_ms" for name in ("ttft", "itl", "tpot") for which in ("p50", "p99")]
HEAD = [
    "at once",
    "speculation",
    "tokens/s",
    "first token p50",
    "p99",
    "between arrivals p50",
    "p99",
    "per token p50",
    "p99",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="of the environment that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/serving"))
    parser.add_argument("--methods", default="off,auto")
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--prompts", type=int, default=32, help="held-out code to continue, 256 tokens each")
    parser.add_argument("--tokens", type=int, default=128, help="written per prompt")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of which medians are taken; the methods alternate"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = measure(args)
    report = {"command": shlex.join(sys.argv[1:]), "commit": commit(), "machine": machine(), "rows": rows}
    (args.out / "latency.json").write_text(json.dumps(report, indent=1) + "\n")
    table = as_table(rows)
    (args.out / "latency.md").write_text(table)
    print(table)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One server per method, both up all the time; only one has requests at a time."""
    methods, levels = args.methods.split(","), [int(level) for level in args.concurrency.split(",")]
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_prompts(folder / "prompts.jsonl", args.prompts, args.tokens)
        flags = (
            "--model",
            "demo",
            "--threads",
            str(args.threads),
            "--no-prefix-cache",
            "--suffix-pools",
            "0",
        )
        servers = {
            method: stack.enter_context(
                Server(*flags, "--method", method, log=args.out / f"server-{method}.log")
            )
            for method in methods
        }
        for repeat in range(args.repeats):
            for level in levels:
                for method in methods if repeat % 2 == 0 else reversed(methods):
                    found = generate(args, servers[method].url, folder, level)
                    runs.setdefault((level, method), []).append(found)
                    print(
                        f"{repeat + 1}/{args.repeats}: {level} concurrent, {method}: {found}",
                        file=sys.stderr,
                        flush=True,
                    )
    return [
        {"concurrency": level, "method": method, **medians(runs[level, method])}
        for level in levels
        for method in methods
    ]


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def generate(args: argparse.Namespace, url: str, folder: Path, level: int) -> dict[str, float]:
    prompts = min(args.prompts, 8 * level)
    options = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": "demo",
        "tokenizer": locate("demo"),
        "dataset-name": "custom",
        "dataset-path": folder / "prompts.jsonl",
        "custom-output-len": args.tokens,
        "num-prompts": prompts,
        "num-warmups": level,
        "max-concurrency": level,
        "temperature": 0,
        "percentile-metrics": "ttft,itl,tpot",
        "metric-percentiles": "50,99",
        "result-dir": folder,
        "result-filename": "result.json",
    }
    command = [
        args.python,
        "-c",
        GENERATOR,
        "--ignore-eos",
        "--skip-chat-template",
        "--disable-tqdm",
        "--save-result",
    ]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"the load generator ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    result = json.loads((folder / "result.json").read_text())
    assert result["completed"] == prompts and not result.get("failed"), result
    return {"tokens_per_second": result["output_throughput"], **{name: result[name] for name in FIGURES}}


def write_prompts(path: Path, count: int, tokens: int) -> None:
    tokenizer = Tokenizer(load_tokenizer("demo"))
    cases = build("code", tokenizer, Size(count, tokens, 2048))
    path.write_text("".join(json.dumps({"prompt": tokenizer.decode(case.prompt)}) + "\n" for case in cases))


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for row in rows:
        figures = [f"{row['tokens_per_second']:.0f}", *(f"{row[name]:.1f}" for name in FIGURES)]
        lines.append("| " + " | ".join([str(row["concurrency"]), row["method"], *figures]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
