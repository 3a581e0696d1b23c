"""The picture at the top of README: one answer, plain and speculative, with the time that each took.

    python -m recipes.charts.answer --record    # measures, and writes docs/benchmarks/answer
    python -m recipes.charts.answer             # draws docs/images/answer.svg from it

The recorded run also has the first command of README with what it printed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks" / "answer"
PICTURE = ROOT / "docs" / "images" / "answer.svg"
REPEATS = 3
FIRST = (
    "speculon generate --model smollm2 --chat --temperature 0 --max-tokens 40 "
    '--prompt "Write a Python function that reverses a list."'
)
LINES = 17  # of the answer
WIDTH, COLUMN, TOP, LINE, FONT, LONGEST = 840, 410, 42, 15, 11, 240  # pixels
FAMILY = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
INK, DRAFT = "#7d8590", "#2f81c7"  # 4 : 1 or more on white and on GitHub's dark grey
TITLE = 'font-size="12" font-weight="bold"'
NEWLINE = "\n"

Row = dict[str, Any]


def record() -> None:
    """Answers the demo's edit in turns, plainly and with the defaults, and none learns from another."""
    from speculon import LLM, SamplingParams
    from speculon.cli.demo import PROMPTS
    from speculon.cli.drafts import DraftStream
    from speculon.measure.bench.measure import Measurement, measure
    from speculon.measure.bench.plan import parse_mode
    from speculon.measure.bench.provenance import commit, machine, versions, write_files
    from speculon.measure.bench.workloads import Case, ask

    prompt, began = PROMPTS[-1], machine()
    llm = LLM("smollm2", prefix_cache=False)
    params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens)
    case = Case(prompt.title, ask(llm.tokenizer, prompt.text), params)
    modes = {
        "plain": parse_mode("off").speculation,
        "speculative": {**parse_mode("auto").speculation, "pool": ""},
    }
    for speculation in modes.values():  # kernels are chosen at their first use
        measure(llm, [case], speculation)
    runs: dict[str, list[Measurement]] = {name: [] for name in modes}
    for repeat in range(REPEATS):
        for name in sorted(modes, reverse=bool(repeat % 2)):
            runs[name].append(measure(llm, [case], modes[name]))
    if len({run.texts[0] for mode in runs.values() for run in mode}) > 1:
        raise SystemExit("the texts differ")
    answer = llm.generate([case.prompt], params, speculation=modes["speculative"])[0].outputs[0]
    command = [sys.executable, "-m", "speculon.cli", *shlex.split(FIRST)[1:]]
    first = subprocess.run(command, check=True, capture_output=True, text=True)
    data = {
        "command": "python -m recipes.charts.answer --record",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": began,
        "versions": versions(),
        "model": "smollm2",
        "prompt": prompt.text,
        "tokens": len(answer.token_ids),
        "seconds": {name: [round(run.seconds, 3) for run in mode] for name, mode in runs.items()},
        "target_calls": {name: mode[-1].stats.target_calls for name, mode in runs.items()},
        "pieces": list(DraftStream(llm.tokenizer, params, case.prompt).finish(answer)),
        "first": {"text": first.stdout, "account": first.stderr.strip().splitlines()[-1]},
    }
    write_files(FOLDER, "answer.json", data, "README.md", page(data))


def read() -> Row:
    found: Row = json.loads((FOLDER / "answer.json").read_text(encoding="utf-8"))
    return found


def seconds(data: Row, mode: str) -> float:
    return median(data["seconds"][mode])


def gain(data: Row) -> float:
    return seconds(data, "plain") / seconds(data, "speculative")


def page(data: Row) -> str:
    """docs/benchmarks/answer/README.md."""
    rows = [
        f"| {name} | {', '.join(f'{value:.2f}' for value in data['seconds'][name])} "
        f"| {seconds(data, name):.2f} | {data['target_calls'][name]} |"
        for name in ("plain", "speculative")
    ]
    where = f"{data['model']}, {data['machine']['cpu']}, {data['machine']['cores']} cores"
    return f"""# One answer, plain and speculative

`{data["command"]}` at {data["commit"]}, {data["date"][:10]}: {where}.

The model writes the class of its prompt again under another name, greedily, in {data["tokens"]} tokens:
{REPEATS} times plainly and {REPEATS} times with the defaults, in turns. All {2 * REPEATS} texts are equal.

| mode | seconds | median | calls of the model |
|---|---|---|---|
{NEWLINE.join(rows)}

Most of this answer is in its prompt, so this is a good case for lookups. The [questions of
Spec-Bench](../smollm2-spec-bench/bench.md) show others.
"""


def lines_of(pieces: list[list[str | None]]) -> list[list[tuple[str, bool]]]:
    """The answer in lines, each in runs of text and whether they were drafts."""
    lines: list[list[tuple[str, bool]]] = [[]]
    for text, source in pieces:
        for number, part in enumerate((text or "").split("\n")):
            if number:
                lines.append([])
            if part:
                lines[-1].append((part, source is not None))
    return lines


def draw(data: Row) -> str:
    """Both columns have the same text; drafts are coloured in the second one."""
    lines = lines_of(data["pieces"])
    height = TOP + LINE * (min(len(lines), LINES) + 1) + 60
    slow, fast = (f"{seconds(data, mode):.1f} s" for mode in ("plain", "speculative"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'font-family="{FAMILY}" font-size="{FONT}" fill="{INK}">',
        f"<title>The same {data['tokens']} tokens, plain in {slow} and speculative in {fast}</title>",
        *column(data, lines, "plain", 4, height),
        *column(data, lines, "speculative", WIDTH - COLUMN, height),
        written(4, height - 4, f'<tspan fill="{DRAFT}">blue</tspan>: accepted drafts', 'font-size="10"'),
    ]
    return "\n".join([*parts, "</svg>", ""])


def column(
    data: Row, lines: list[list[tuple[str, bool]]], mode: str, left: int, height: int
) -> Iterator[str]:
    """A title, the text, and a bar as long as its time."""
    ours = mode == "speculative"
    yield written(left, 18, "the same text with speculon" if ours else "plain decoding", TITLE)
    for row, line in enumerate(lines[:LINES]):
        runs = "".join(
            f'<tspan fill="{DRAFT}">{escape(text)}</tspan>' if draft and ours else escape(text)
            for text, draft in line
        )
        yield written(left, TOP + LINE * row, runs, 'xml:space="preserve"')
    if len(lines) > LINES:
        yield written(left, TOP + LINE * LINES, "...")
    length, top = LONGEST * seconds(data, mode) / seconds(data, "plain"), height - 42
    colour = DRAFT if ours else INK
    yield f'<rect x="{left}" y="{top}" width="{length:.1f}" height="12" rx="2" fill="{colour}"/>'
    took = f"{seconds(data, mode):.1f} s, {data['target_calls'][mode]} calls"
    yield written(left + length + 8, top + 11, took, TITLE)


def written(x: float, y: float, text: str, how: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {how}>{text}</text>'


def main() -> None:
    if "--record" in sys.argv[1:]:
        record()
    PICTURE.write_text(draw(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
