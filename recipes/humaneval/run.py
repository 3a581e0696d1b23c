"""HumanEval with and without drafts: the same completions, token for token, and so the same pass@1.

python -m recipes.humaneval.run MODEL HumanEval.jsonl.gz [--modes auto,suffix] [--draft DRAFTER]
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculon import LLM, SamplingParams

# where a completion of a base model goes on beyond its function
STOP = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\n@")
SECONDS = 10  # of a task's tests
REQUEST = "Complete this function. Answer with the whole function in one block of code.\n\n```python\n{}```"
BLOCK = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


def read_tasks(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def complete(llm: LLM, tasks: list[dict[str, str]], mode: str, batch: int, tokens: int) -> dict[str, Any]:
    """Greedy completions, `batch` at once, of an engine that remembers no answers."""
    stop = () if llm.tokenizer.has_chat_template else STOP
    params = SamplingParams(temperature=0, max_tokens=tokens, stop=stop)
    speculation = {"method": mode, "pool": ""}
    began, outputs = time.perf_counter(), []
    for i in range(0, len(tasks), batch):
        prompts = [prompt_of(llm, task) for task in tasks[i : i + batch]]
        outputs += llm.generate(prompts, params, speculation=speculation)
        print(f"\r{mode}: {len(outputs)} of {len(tasks)}", end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    totals = [out.speculation for out in outputs]
    return {
        "mode": mode,
        "seconds": seconds,
        "ids": [out.token_ids for out in outputs],
        "texts": [out.text for out in outputs],
        "drafted": sum(one.drafted for one in totals),
        "accepted": sum(one.accepted for one in totals),
    }


def prompt_of(llm: LLM, task: dict[str, str]) -> list[int]:
    """The task as a chat where the model has a template, else as a text that it continues."""
    if not llm.tokenizer.has_chat_template:
        return llm.tokenizer.encode(task["prompt"])
    return llm.tokenizer.apply_chat([{"role": "user", "content": REQUEST.format(task["prompt"])}])


def program_of(task: dict[str, str], answer: str) -> str:
    """An answer with the whole function in a block of code replaces the prompt, another one continues it."""
    block = BLOCK.search(answer)
    if block and f"def {task['entry_point']}" in block[1]:
        return f"{task['prompt']}    pass\n\n{block[1]}"
    return task["prompt"] + answer


def passes(task: dict[str, str], answer: str) -> bool:
    """Whether the tests of a task pass, in a process of its own."""
    program = f"{program_of(task, answer)}\n{task['test']}\ncheck({task['entry_point']})\n"
    command = [sys.executable, "-I", "-c", program]
    try:
        return subprocess.run(command, capture_output=True, timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--modes", default="auto,suffix")
    parser.add_argument("--draft", help="a drafter, which mode auto then uses")
    parser.add_argument("--tasks", type=int, default=164)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tasks = read_tasks(arguments.data)[: arguments.tasks]
    speculation = {"draft": arguments.draft} if arguments.draft else {}
    llm = LLM(arguments.model, threads=arguments.threads, prefix_cache=False, speculation=speculation)
    runs = [
        complete(llm, tasks, mode, arguments.batch, arguments.tokens)
        for mode in ("off", *arguments.modes.split(","))
    ]
    plain, rows = runs[0], []
    for run in runs:
        equal = sum(a == b for a, b in zip(run["ids"], plain["ids"], strict=True))
        passed = sum(passes(task, text) for task, text in zip(tasks, run["texts"], strict=True))
        tokens = sum(map(len, run["ids"]))
        row = {key: run[key] for key in ("mode", "drafted", "accepted")}
        rows.append(
            {
                **row,
                "equal": equal,
                "tasks": len(tasks),
                "pass@1": round(passed / len(tasks), 4),
                "tokens": tokens,
                "seconds": round(run["seconds"], 1),
            }
        )
        print(json.dumps(rows[-1]))
    if arguments.out:
        arguments.out.write_text(json.dumps({"modes": rows}, indent=2) + "\n")
    if any(row["equal"] != len(tasks) for row in rows):
        sys.exit("completions differ")
    if not all(row["drafted"] for row in rows[1:]):
        sys.exit("a mode drafted nothing")


if __name__ == "__main__":
    main()
