"""Commands that write text with a model, and `inspect`, which describes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speculon.cli.app import AsChat, Json, PromptFiles, Prompts, SpeculativeConfig, command
from speculon.commands.options import MONITOR, NO_REQUESTS, Given, pick, settings_from
from speculon.commands.sections import MODELS, SERVER, TEXT
from speculon.config import MAX_DRAFTS, EngineConfig, SamplingParams, ServeConfig, SpeculationConfig

# what decides whether a drafter fits, and what it takes of memory
FIT = ("draft", "method", "memory_policy", "memory_limit_gb", "additional_memory_gb", "suffix_pools")


@command(TEXT)
@settings_from(EngineConfig, without=("state", *NO_REQUESTS))
def demo(
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_DRAFTS, help="K drafts in every round (default: set by the policy)"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each mode, alternated")] = 2,
    as_json: Json = False,
    given: Given = {},  # noqa: B006 (made by settings_from)
) -> None:
    """A model answers questions and edits code, with and without speculation, and both texts are compared."""
    from speculon.commands.demo import run

    run(num_speculative_tokens, rounds, given, as_json)


@command(TEXT)
@settings_from(SamplingParams, SpeculationConfig, EngineConfig, without=MONITOR)
def generate(
    prompt: Prompts = None,
    prompt_file: PromptFiles = None,
    chat: AsChat = False,
    system: Annotated[str | None, typer.Option(help="system message; implies --chat")] = None,
    prediction_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="file with the expected text: drafts are read from it"),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Continue prompts from --prompt, --prompt-file or stdin. A single completion is streamed."""
    from speculon.commands.generate import Task, run

    run(
        Task(prompt or [], prompt_file or [], chat or system is not None, system, prediction_file),
        given,
        speculative_config,
        as_json,
    )


@command(TEXT)
@settings_from(SamplingParams, SpeculationConfig, EngineConfig, without=("n", *MONITOR))
def chat(
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="no chat template: what you type is continued as plain text")
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="colour accepted drafts by the method that drafted them")
    ] = False,
    speculative_config: SpeculativeConfig = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="machine-readable: one JSON object per turn on stdout")
    ] = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Talk with a model, in a terminal or line by line through a pipe. /help lists the commands."""
    from speculon.commands.chat import Task, run

    run(Task(system, raw, show_drafts, as_json), given, speculative_config)


@command(SERVER)
@settings_from(ServeConfig, SpeculationConfig, EngineConfig, without=("model",))
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="a folder, a GGUF file, a hub id, or a name such as `smollm2`; may be repeated, the first "
            "is the default (default: smollm2)"
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="engines of one model, on Ray Serve; needs pip install 'speculon[ray]'"
        ),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    given: Given = {},  # noqa: B006
) -> None:
    """Serve models over HTTP with OpenAI's API. Each request can set its speculation and get its figures."""
    if replicas is None:
        from speculon.commands.serve import run

        return run(given, model or [], speculative_config)
    from speculon.commands.serve_replicas import run as run_replicas

    run_replicas(given, model or [], speculative_config, replicas)


@command(MODELS)
@settings_from(SpeculationConfig, only=FIT)
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="a folder, a GGUF file, a hub id, or a name")
    ] = "smollm2",
    model: Annotated[str | None, typer.Option(help="the same, as the other commands spell it")] = None,
    fuse: Annotated[
        bool, typer.Option(help="join layers into fewer, faster operations, and list them")
    ] = True,
    load: Annotated[
        bool, typer.Option(help="load it and compare it with its stock forward; without: headers only")
    ] = True,
    target: Annotated[str | None, typer.Option(help="for a drafter: the target to check it against")] = None,
    everything: Annotated[bool, typer.Option("--all", help="also list what is on, with its limits")] = False,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Describe a checkpoint or drafter: whether it is supported, and whether a --draft fits it."""
    from speculon.commands.inspect import run

    run(model or path, load, pick(SpeculationConfig, given), fuse, as_json, target, everything)
