"""The command line.

A command's module is imported when the command is named; this one never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speculon import __version__
from speculon.commands.options import Given, pick, settings_from
from speculon.commands.screen import answered, show_log
from speculon.config import MAX_DRAFTS, EngineConfig, SamplingParams, SpeculationConfig
from speculon.serve_config import ServeConfig
from speculon.train.settings import DraftSettings, HeadSettings, TrainSettings

app = typer.Typer(
    name="speculon",
    help="Lossless speculative decoding: the model's own text, several tokens per call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="machine-readable: JSON on stdout and nothing else")]

SpeculativeConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="vLLM's form of the speculation options; single options win over it"),
]


def main() -> None:
    app()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda on: on and show_version())
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="a log line per request, on stderr")
    ] = False,
) -> None:
    if verbose:
        show_log()


def show_version() -> None:
    typer.echo(f"speculon {__version__}")
    raise typer.Exit


@app.command()
@answered
@settings_from(SamplingParams, SpeculationConfig, EngineConfig)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="text to continue; may be repeated")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="a file to continue; may be repeated; - is stdin")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="each prompt is a message, answered through the chat template")
    ] = False,
    system: Annotated[str | None, typer.Option(help="system message; implies --chat")] = None,
    prediction_file: Annotated[
        Path | None, typer.Option(help="a file with what the text will mostly be: it is drafted from")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006 (made by settings_from)
) -> None:
    """Continue prompts, from --prompt, --prompt-file or stdin; a single text is shown as it is written."""
    from speculon.commands.generate import Task, run

    run(
        Task(prompt or [], prompt_file or [], chat or system is not None, system, prediction_file),
        given,
        speculative_config,
        as_json,
    )


@app.command()
@answered
@settings_from(ServeConfig, SpeculationConfig, EngineConfig)
def serve(
    speculative_config: SpeculativeConfig = None,
    given: Given = {},  # noqa: B006
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with speculation that every request can steer and see."""
    from speculon.commands.serve import run

    run(given, speculative_config)


@app.command()
@answered
@settings_from(SamplingParams, SpeculationConfig, EngineConfig, without=("n",))
def chat(
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="no chat template: what you type is continued as plain text")
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="colour each token that was guessed, by what guessed it")
    ] = False,
    speculative_config: SpeculativeConfig = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="machine-readable: one JSON object per turn on stdout")
    ] = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Talk with a model, in a terminal or line by line through a pipe; /help lists the commands."""
    from speculon.commands.chat import Task, run

    run(Task(system, raw, show_drafts, as_json), given, speculative_config)


@app.command()
@answered
@settings_from(SpeculationConfig)
def inspect(
    path: Annotated[str, typer.Argument(metavar="[MODEL]", help="a folder, a hub id, or `demo`")] = "demo",
    model: Annotated[str | None, typer.Option(help="the same, as the other commands spell it")] = None,
    fuse: Annotated[
        bool, typer.Option(help="rewrite layers where that computes the same, and say which")
    ] = True,
    load: Annotated[
        bool, typer.Option(help="load it and check it against its stock forward; without: headers only")
    ] = True,
    target: Annotated[
        str | None, typer.Option(help="of a drafter: the model it is to draft for; says whether it fits")
    ] = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Say what a checkpoint or drafter is, whether it is carried or refused, and what it takes of memory with
    a --draft.
    """
    from speculon.commands.inspect import run

    run(model or path, load, pick(SpeculationConfig, given), fuse, as_json, target)


@app.command()
@answered
@settings_from(SpeculationConfig, EngineConfig, without=("method", "state"))
def bench(
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="of code, edit, prose, mixed, warm; NAME@T at temperature T (default: all)"
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="METHOD:K/POLICY/RULE, all but the method may be left out: auto, suffix:8, auto:8/solo, "
            "draft_model:4/rejection; without POLICY a mode with K is fixed, and one without K runs under --policy "
            "(default: methods at several K, and auto under three policies)",
        ),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="texts written at once (default: 1,4,8)")
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="per workload (default: 32)")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="written per prompt at most (default: 128)")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="of everything; medians are reported (default: 1)")
    ] = None,
    with_transformers: Annotated[
        bool | None, typer.Option(help="also transformers' own generate, one text at a time")
    ] = None,
    widen: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="widen the target to N million parameters: the same text at a larger model's cost",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="8 prompts of 64 tokens, 1 and 4 at once")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="for bench.json, bench.md, bench.png (default: speculon-bench; none with --json)",
        ),
    ] = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Compare modes on held-out code, edits and prose, alternated in one run, with plain decoding measured
    twice; policies against the best fixed mode."""
    from speculon.commands.bench import numbers, run, words

    asked = {
        "workloads": words("workloads", workloads),
        "modes": words("modes", modes),
        "concurrency": numbers("concurrency", concurrency),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "with_transformers": with_transformers,
        "widen": widen,
    }
    run(asked, quick, out, given, as_json)


@app.command()
@answered
def replay(
    file: Annotated[Path, typer.Argument(help="a record of rounds, as --events writes it")],
    policy: Annotated[
        str, typer.Option(metavar="LIST", help="a policy, plain, or fixed:K; fixed alone is several K")
    ] = "goodput,fixed",
    seed: Annotated[int, typer.Option(help="of the luck that the record leaves open")] = 0,
    as_json: Json = False,
) -> None:
    """Say what a record of rounds reached, and what other policies would have, by simulation without a model."""
    from speculon.commands.replay import run

    run(file, policy, seed, as_json)


@app.command()
@answered
@settings_from(SamplingParams, SpeculationConfig, EngineConfig, without=("n", "state"))
def advise(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="a sample prompt; may be repeated")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="a sample prompt, or with .jsonl one prompt or chat a line; may be repeated; - is stdin"
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="each prompt is a message, answered through the chat template")
    ] = False,
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="in place of prompts: of code, edit, prose; NAME@T (for demo: all three)"
        ),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="texts at once to measure (default: 1,2,4,8)")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="texts at once that the settings are for (default: 1)")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="of the live check; 0: none (default: 2)")] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="put the advice into FILE, a speculon.toml, as its [speculation]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="for advise.json, advise.md, advise.png (default: speculon-advise; none with --json)",
        ),
    ] = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Measure whether drafting helps here, with what, how far and for how many texts at once; check it; write
    the settings.
    """
    from speculon.commands.advise import Prompts, run
    from speculon.commands.bench import numbers, words

    asked = {"concurrency": numbers("concurrency", concurrency), "at_once": at_once, "repeats": repeats}
    run(
        Prompts(prompt or [], prompt_file or [], chat, words("workloads", workloads)),
        {name: value for name, value in asked.items() if value is not None},
        write,
        out,
        given,
        as_json,
    )


@app.command()
@answered
@settings_from(SpeculationConfig, EngineConfig)
def check(
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="text to continue; may be repeated (default: 16 that come along)"
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="a file to continue; may be repeated; - is stdin")
    ] = None,
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help='a way of sampling, as {"temperature": 0.6}; may be repeated (default: three)',
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="of a greedy or seeded text (default: 64)")] = None,
    runs: Annotated[
        int | None, typer.Option(help="sampled texts per arm, prompt and sampler (default: 192)")
    ] = None,
    positions: Annotated[int | None, typer.Option(help="tokens of a sampled text (default: 12)")] = None,
    cases: Annotated[
        int | None, typer.Option(help="prompts that are sampled from: the first ones (default: 4)")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="seeded texts per prompt and sampler (default: 4)")
    ] = None,
    control: Annotated[
        float | None,
        typer.Option(
            help="share of the wrong drafts that the control keeps, and must be found by (default: 0.5)"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of the check itself (default: 0)")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer runs of fewer prompts: sees only coarser errors")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="for report.md, check.json, check.png")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Prove on your own models that speculation changes no text: exit code 0 when it passes, 1 when not, 2
    for bad input.
    """
    from speculon.commands.check import CheckOptions, run

    sizes = {
        "max_tokens": max_tokens,
        "runs": runs,
        "positions": positions,
        "cases": cases,
        "seeds": seeds,
        "seed": seed,
    }
    task = CheckOptions(
        prompt or [], prompt_file or [], sampler or [], {**sizes, "control": control}, quick, out
    )
    run(task, given, speculative_config, as_json)


@app.command()
@answered
@settings_from(EngineConfig, without=("state",))
def demo(
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_DRAFTS, help="K drafts in every round (default: as the engine's policy decides)"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each, alternated")] = 3,
    number: Annotated[int, typer.Option(min=1, help="which of the held-out functions and files")] = 1,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Edit and continue code that the shipped model has never seen, with and without speculation."""
    from speculon.commands.demo import run

    run(num_speculative_tokens, rounds, number, given, as_json)


trainer = typer.Typer(
    help="Train a drafter for a target of one's own, from texts of one's own.", no_args_is_help=True
)
app.add_typer(trainer, name="train")


@trainer.command("eagle3")
@answered
@settings_from(TrainSettings, HeadSettings)
def train_eagle3(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Train an EAGLE-3 head, which guesses from the target's hidden states; the same command goes on after an
    interruption.
    """
    from speculon.commands.train import run

    run("eagle3", given, as_json)


@trainer.command("draft")
@answered
@settings_from(TrainSettings, DraftSettings)
def train_draft(as_json: Json = False, given: Given = {}) -> None:  # noqa: B006
    """Distil a small language model that guesses what the target says; the same command goes on after an
    interruption.
    """
    from speculon.commands.train import run

    run("draft", given, as_json)


if __name__ == "__main__":
    main()
