"""The figures of README, and the index of docs/benchmarks with its charts, from the recorded runs.

    python -m recipes.charts.readme

Run it again after a benchmark was recorded. It writes docs/images/*.svg, docs/benchmarks/README.md, and the
lines of README between the marks.
"""

from __future__ import annotations

import json
import re
import textwrap
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from recipes.charts import answer

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images"
GRID, PEERS = "smollm2-spec-bench", "smollm2-peers"  # the runs of README and of the index
PLUGGED = ("speculon", "nothing")  # modes of vLLM that are not its own
NAMES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM (CPU)"}
INK = "#7d8590"  # text and axes: 4 : 1 or more on white and on GitHub's dark grey
PLAIN, FIXED, OURS = "#8b949e", "#e08a2e", "#2f81c7"
TYPES = re.compile(r"<!-- types -->.*?<!-- end -->")
# folder -> what was measured, as docs/benchmarks/README.md lists it
TOPICS = {
    "Speculation against plain decoding": {
        "smollm2-spec-bench": "SmolLM2 in bf16 on 13 categories of Spec-Bench",
        "smollm2-q4-spec-bench": "the same in 4 bits, single requests, with compiled programs",
        "smollm2-q4-spec-bench-eight": "the same, 8 requests at once",
        "answer": "the answer of README's picture, plain and with drafts",
        "2-cores": "the toy model on an Intel chip, with the policy `auto` of that time",
        "2-cores-amd": "the toy model on an AMD chip",
        "2-cores-bf16": "the toy model in bf16: n-gram lookup and a draft model",
        "2-cores-widened": "the toy model widened to 80 M parameters, with a draft model",
        "eagle3": "an EAGLE-3 head beside a draft model",
        "blocks": "a DFlash drafter and an EAGLE-3 head at several loads",
        "trees": "chains and trees of equal size",
        "acceptance": "matching, rejection sampling and block verification at temperature 1",
        "recurrent": "recurrent hybrid models",
        "vllm": "speculon's lookups inside vLLM",
        "cuda": "a GPU: tests, steps and an EAGLE-3 head",
    },
    "Other engines beside speculon": {
        "smollm2-peers": "SmolLM2 in bf16: transformers and llama.cpp",
        "smollm2-q4-peers": "SmolLM2 in 4 bits: llama.cpp",
        "smollm2-q4-plain": "the same, plain decoding alone, without and with compiled programs",
        "gemma3-peers": "Gemma 3 270M in bf16: transformers and llama.cpp",
        "peers": "the toy model on an Intel chip: transformers, OpenVINO, llama.cpp and vLLM",
        "peers-amd": "the same on an AMD chip",
        "llama-smollm2": "llama-server beside speculon on llama.cpp: SmolLM2, with drafts",
        "llama-smollm2-edit": "the same, where a function is edited or a text is repeated",
        "llama-smollm2-plain": "the same, plain decoding and long prompts",
        "llama-smollm2-eight": "the same, code and qa again, 8 requests at once",
        "llama-gemma3-plain": "the same with Gemma 3 270M",
    },
    "Equal texts": {
        "check": "`speculon check`: is the output the target's?",
        "llama-check": "the same for SmolLM2 in 4 bits on llama.cpp",
        "humaneval": "HumanEval with and without speculation",
        "evaluation": "lm-evaluation-harness with and without speculation",
        "invariance": "which kernels add in one order, and what batch invariance costs",
        "architectures": "which types of transformers run",
        "quantized": "perplexity and speed in 4 and 8 bits",
        "mutants": "which planted errors the tests find",
    },
    "Serving": {
        "serving": "time to the first token and between tokens, and what HTTP costs",
        "cluster": "replicas, simulated and measured",
        "dashboard": "what an open page of the dashboard costs",
    },
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "speculon",
    "font.family": "sans-serif",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Row = dict[str, Any]


def read(folder: str, name: str) -> Row:
    found: Row = json.loads((BENCHMARKS / folder / name).read_text(encoding="utf-8"))
    return found


def cells(bench: Row) -> list[Row]:
    """Of each workload and concurrency: the default and the best fixed mode over plain decoding."""
    return [
        {
            "workload": category(row["workload"]),
            "concurrency": row["concurrency"],
            "default": row["over_plain"]["ratio"],
            "fixed": row["over_plain"]["ratio"] / row["over_best"]["ratio"],
        }
        for row in bench["against_best_fixed"]
        if row["mode"] == "auto" and row["concurrency"] is not None
    ]


def overall(bench: Row) -> Row:
    return next(
        row for row in bench["against_best_fixed"] if row["mode"] == "auto" and row["workload"] == "all"
    )


def engines(peers: Row) -> list[Row]:
    """Of each engine, workload and concurrency: tokens per second, plain and by its best speculative mode."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in peers["rows"]:
        if row["mode"].partition(":")[0] in PLUGGED:
            continue
        key = (row["engine"], row["workload"], row["concurrency"])
        cell = found.setdefault(
            key, {"engine": key[0], "workload": key[1], "concurrency": key[2], "best": None}
        )
        speed = None if row["refused"] else row["tokens_per_second"]
        if row["mode"] == "off":
            cell["plain"] = speed
        elif speed is not None:
            cell["best"] = max(speed, cell["best"] or 0)
    return list(found.values())


def category(workload: str) -> str:
    """`data:math_reasoning` -> `math reasoning`."""
    return workload.partition(":")[2].replace("_", " ") or workload


def panel_title(workload: str, concurrency: int) -> str:
    return f"{category(workload)}, " + ("one sequence" if concurrency == 1 else f"{concurrency} sequences")


def chart_of_default(bench: Row) -> Figure:
    rows = cells(bench)
    counts = sorted({row["concurrency"] for row in rows})
    figure = Figure(figsize=(8, 1 + 1.3 * len(counts)), layout="constrained")
    for (panel,), count in zip(figure.subplots(len(counts), 1, squeeze=False), counts, strict=True):
        shown = [row for row in rows if row["concurrency"] == count]
        for shift, key, colour, label in (
            (-0.2, "fixed", FIXED, "best fixed mode"),
            (0.2, "default", OURS, "default"),
        ):
            places = [i + shift for i in range(len(shown))]
            bars = panel.bar(places, [row[key] for row in shown], 0.38, color=colour, label=label)
            panel.bar_label(bars, [f"{row[key]:.1f}" for row in shown], padding=1, fontsize=6.5, color=INK)
        panel.axhline(1, color=PLAIN, linewidth=1, label="plain decoding")
        panel.set_xticks(range(len(shown)), [row["workload"].replace(" ", "\n") for row in shown])
        panel.set_title("one sequence" if count == 1 else f"{count} sequences", fontsize=8)
    figure.supylabel("speed, x plain decoding", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def chart_of_engines(peers: Row) -> Figure:
    rows = engines(peers)
    counts, workloads = (list(dict.fromkeys(row[key] for row in rows)) for key in ("concurrency", "workload"))
    figure = Figure(figsize=(8, 0.4 + 1.5 * len(counts)), layout="constrained")
    panels = figure.subplots(len(counts), len(workloads), sharey=True, squeeze=False).flat
    for panel, (count, workload) in zip(panels, product(counts, workloads), strict=True):
        shown = [row for row in rows if (row["workload"], row["concurrency"]) == (workload, count)][::-1]
        best = [max(row["best"] or 0, row["plain"] or 0) for row in shown]
        colours = [OURS if row["engine"].startswith("speculon") else FIXED for row in shown]
        bars = panel.barh(range(len(shown)), best, 0.66, color=colours)
        panel.bar_label(bars, [f"{value:.0f}" for value in best], padding=2, fontsize=6.5, color=INK)
        for i, row in enumerate(shown):
            panel.plot([row["plain"]] * 2, [i - 0.33, i + 0.33], color=INK, linewidth=1.5)
        panel.set_yticks(range(len(shown)), [NAMES.get(row["engine"], row["engine"]) for row in shown])
        panel.set_xlim(0, max(best) * 1.2)
        panel.set_title(panel_title(workload, count), fontsize=8)
    figure.supxlabel("tokens per second: bar, best mode; line, plain decoding", fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(text + "\n", encoding="utf-8")


def chip(machine: Row) -> str:
    return re.sub(r"\(R\)|\(TM\)| Processor", "", str(machine["cpu"])).strip()


def machine(found: Row) -> str:
    return f"{chip(found)}, {found['cores']} cores"


def cores(run: Row) -> str:
    """The machine of a recorded run, in words."""
    return f"{run['machine']['cores']} cores of an {chip(run['machine'])}"


def figures(bench: Row) -> str:
    """What README says about speed."""
    plan, over_best = bench["plan"], overall(bench)["over_best"]["ratio"]
    modes = " and ".join(f"`{mode}`" for mode in plan["modes"] if mode != "auto")
    measured = f"""The table gives the speed of the defaults as a multiple of that of plain decoding, for
    SmolLM2-135M in bf16 on {cores(bench)}. The prompts are {plan["prompts"]} of each of the
    {len(plan["workloads"])} categories of the test set Spec-Bench, and each way of decoding answered
    them {plan["repeats"]} times ([all modes](docs/benchmarks/{GRID}/bench.md#all-modes))."""
    table = [
        "| requests at once | average | lowest category | highest category |",
        "|---|---|---|---|",
        *(speeds(bench, count) for count in sorted(plan["concurrency"])),
    ]
    alone = ratios(bench, 1)
    gaining = sum(ratio > 1 for ratio in alone.values())
    assert all(cell["concurrency"] == 1 for cell in cells(bench))  # of which `over_best` is the mean
    meaning = f"""A single request gains in {gaining} of {len(alone)} categories. On average the defaults
    answer it {over_best:.2f} times as fast as the fastest of plain decoding, {modes} (the number limits the
    drafts in a round). But a small model often repeats itself: {looping(bench)} of the texts without drafts
    end in a loop, which is easy to draft, so a model without loops gains less. {max(plan["concurrency"])}
    requests at once gain little, because they keep the processor busy."""
    return "\n\n".join([filled(measured), "\n".join(table), filled(meaning)])


def speeds(bench: Row, count: int) -> str:
    """A row of README's table: the geometric mean, the least and the most over the categories."""
    found = ratios(bench, count)
    least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    mean = geometric_mean(found.values())
    return f"| {count} | {mean:.2f} | {found[least]:.2f} ({least}) | {found[most]:.2f} ({most}) |"


def ratios(bench: Row, count: int) -> dict[str, float]:
    """Category -> the default over plain decoding, with this many requests at once."""
    return {
        category(cell["workload"]): cell["ratio"]
        for cell in bench["cells"]
        if (cell["mode"], cell["concurrency"]) == ("auto", count)
    }


def picture(run: Row) -> str:
    """README's picture with what it shows."""
    slow, fast = (answer.seconds(run, mode) for mode in ("plain", "speculative"))
    shown = f"""SmolLM2-135M repeats a class under a new name, in {slow:.1f} s with *plain decoding*
    (no drafts), and in {fast:.1f} s with the defaults ([medians of {answer.REPEATS}
    runs](docs/benchmarks/answer/README.md) on {cores(run)}). Copying suits a *lookup*, which finds the
    last few words at an earlier place of the text, and drafts what followed there."""
    return f"![The same answer, plain and with drafts](docs/images/answer.svg)\n\n{filled(shown)}"


def first_output(run: Row) -> str:
    """README's first command and what it printed; the times are those of the recorded run."""
    printed = f"{run['first']['text'].strip()}\n{textwrap.fill(run['first']['account'], 106)}"
    # indented, because the output has fences of its own
    return f"```bash\n{answer.FIRST}\n```\n\n{textwrap.indent(printed, '    ')}"


def filled(paragraph: str) -> str:
    words = " ".join(paragraph.split())
    return textwrap.fill(words, 110, break_long_words=False, break_on_hyphens=False)


def looping(bench: Row) -> str:
    """The share of plain texts, over all cells."""
    plain = [cell for cell in bench["cells"] if cell["mode"] == "off"]
    share = sum(cell["looping"] * cell["texts"] for cell in plain) / sum(cell["texts"] for cell in plain)
    return f"{share:.0%}".replace("%", " %")


def lead(rows: list[Row], engine: str) -> str:
    """The least and the largest ratio of an engine's best mode to that of the best other engine."""
    speed = {
        (row["engine"], row["workload"], row["concurrency"]): max(row["best"] or 0, row["plain"] or 0)
        for row in rows
    }
    places = {place for name, *place_ in speed for place in [tuple(place_)] if name == engine}
    ratios = [
        speed[(engine, *place)]
        / max(
            value
            for (name, *other), value in speed.items()
            if tuple(other) == place and not name.startswith("speculon")
        )
        for place in places
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def between(text: str, name: str, block: str) -> str:
    """The text with `block` between the two marks of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def new_readme() -> str:
    """README with the figures of the recorded runs."""
    readme, run = (ROOT / "README.md").read_text(encoding="utf-8"), answer.read()
    types = read("architectures", "architectures.json")["types"].values()
    supported = sum(row["outcome"] == "supported" for row in types)
    made = sum(row["outcome"] != "not made" for row in types)
    readme = re.sub(TYPES, f"<!-- types -->{supported} of {made}<!-- end -->", readme)
    readme = between(readme, "picture", picture(run))
    readme = between(readme, "first output", first_output(run))
    return between(readme, "figures", figures(read(GRID, "bench.json")))


def facts(folder: Path) -> Row:
    """Date, chip and page of a recorded run: from its JSON, else from the head of its text."""
    text = "\n".join(path.read_text(encoding="utf-8")[:2000] for path in sorted(folder.glob("*.md")))
    run: Row = {}
    for path in sorted(folder.glob("*.json"), reverse=True):
        run = {**run, **json.loads(path.read_text(encoding="utf-8"))}
    dates = re.findall(r"\b20\d\d-\d\d-\d\d\b", text)
    chips = re.findall(r"AMD EPYC|Intel Xeon|NVIDIA \w+", text.replace("(R)", ""))
    return {
        "date": str(run.get("date", ""))[:10]
        or next(iter(dates), f"commit {run.get('commit', 'not recorded')}"),
        "chip": machine(run["machine"]) if "machine" in run else (chips or ["see there"])[0],
        "page": min((path.name for path in folder.iterdir()), key=lambda name: (preference(name), name)),
    }


def preference(name: str) -> int:
    """The first of the files that a reader should open has the least number."""
    return (name != "README.md") + (not name.endswith(".md"))


def index(bench: Row, peers: Row) -> str:
    """docs/benchmarks/README.md."""
    lines = [
        "# Recorded benchmarks",
        "",
        "> For those who want to check a figure or repeat a run. Each row is a folder, whose files have the",
        "> date, the machine, the command and all figures of a run. `python -m recipes.charts.readme` writes",
        "> this page from these files.",
        "",
        "A command without `--model` or `--target` used `demo`, the toy model of the tests with 10.9 M",
        "parameters, which was the default of that time.",
    ]
    folders = {path.name: path for path in sorted(BENCHMARKS.iterdir()) if path.is_dir()}
    described = {name for runs in TOPICS.values() for name in runs}
    others = {"Other runs": {name: name for name in folders if name not in described}}
    for topic, runs in {**TOPICS, **others}.items():
        rows = [run_row(folders[name], what) for name, what in runs.items() if name in folders]
        if rows:
            head = ["| what was measured | date | machine |", "|---|---|---|"]
            lines += ["", f"## {topic}", "", *head, *rows]
    after = "Next: [bench](../bench.md) measures speculation on your own machine."
    return "\n".join([*lines, "", *default_table(bench), "", *engine_table(peers), "", after, ""])


def run_row(folder: Path, what: str) -> str:
    found = facts(folder)
    return f"| [{what}]({folder.name}/{found['page']}) | {found['date']} | {found['chip']} |"


def default_table(bench: Row) -> list[str]:
    return [
        "## The default against plain decoding and the best fixed mode",
        "",
        f"Multiples of the speed of plain decoding ([{GRID}]({GRID}/bench.md)): geometric means over",
        "groups of prompts. README has the medians of the same run, so its figures differ a little.",
        "",
        "![The default and the best fixed mode, as multiples of plain decoding](../images/default.svg)",
        "",
        "| workload | concurrency | default | best fixed mode |",
        "|---|---|---|---|",
        *(
            f"| {row['workload']} | {row['concurrency']} | {row['default']:.2f} | {row['fixed']:.2f} |"
            for row in cells(bench)
        ),
    ]


def engine_table(peers: Row) -> list[str]:
    rows = engines(peers)
    places = list(dict.fromkeys((row["workload"], row["concurrency"]) for row in rows))
    names = list(dict.fromkeys(row["engine"] for row in rows))
    shown = {(row["engine"], row["workload"], row["concurrency"]): row for row in rows}
    heads = " | ".join(f"{NAMES.get(name, name)}: plain | speculative" for name in names)
    lines = [
        "## Other engines on the same checkpoint and machine",
        "",
        f"Tokens per second, plain and by the best speculative mode ([{PEERS}]({PEERS}/peers.md)).",
        f"speculon's best mode is {lead(rows, 'speculon')} times as fast as the best of any other engine.",
        "",
        "![Tokens per second of other engines](../images/peers.svg)",
        "",
        f"| workload | concurrency | {heads} |",
        "|---|---|" + "---|---|" * len(names),
    ]
    for workload, count in places:
        cells = [number(shown[name, workload, count][key]) for name in names for key in ("plain", "best")]
        lines.append(f"| {category(workload)} | {count} | " + " | ".join(cells) + " |")
    return lines


def number(speed: float | None) -> str:
    return "refused" if speed is None else f"{speed:.0f}"


def main() -> None:
    bench, peers = read(GRID, "bench.json"), read(PEERS, "peers.json")
    with matplotlib.rc_context(STYLE):
        save(chart_of_default(bench), IMAGES / "default.svg")
        save(chart_of_engines(peers), IMAGES / "peers.svg")
    answer.PICTURE.write_text(answer.draw(answer.read()), encoding="utf-8")
    (BENCHMARKS / "README.md").write_text(index(bench, peers), encoding="utf-8")
    (ROOT / "README.md").write_text(new_readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
