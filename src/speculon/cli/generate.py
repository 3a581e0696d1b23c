"""`speculon generate`: a single completion is streamed, several are written as a batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from speculon.checkpoints.locate import refuse_missing
from speculon.cli.app import Json, SpeculativeConfig, command
from speculon.cli.options import Flags, engine_settings, pick, settings_from
from speculon.cli.pull import offer_to_pull
from speculon.cli.screen import account, counting, load_llm, print_json, say, streaming
from speculon.core.config import EngineConfig, RequestSpeculation, SamplingParams, SpeculationConfig
from speculon.core.errors import InvalidParameter
from speculon.speculation.proposers.registry import check_method

if TYPE_CHECKING:
    from speculon.engine.llm import LLM
    from speculon.engine.outputs import RequestOutput

NO_TEMPLATE = "without --chat the prompt is continued as plain text"


@command("generate")
@settings_from(SamplingParams, SpeculationConfig, EngineConfig)
def generate(
    *,
    prompt: Annotated[
        list[str] | None, Option("--prompt", "-p", help="text to continue; may be repeated")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, Option(metavar="FILE", help="file to continue; may be repeated; -: stdin")
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="each prompt is a message, answered through the chat template")
    ] = False,
    system: Annotated[str | None, Option(help="system message; implies --chat")] = None,
    prediction_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="file with the expected text: drafts are read from it"),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Continue prompts from --prompt, --prompt-file or stdin. A single completion is streamed."""
    texts = read_prompts(prompt or [], prompt_file or [])
    prediction = read_text(prediction_file, "prediction-file") if prediction_file else None
    speculation = RequestSpeculation(prediction=prediction)
    chat = chat or system is not None
    llm, params = load_for_one_user(flags, speculative_config, as_json, NO_TEMPLATE if chat else None)
    if chat:
        first = [{"role": "system", "content": system}] if system is not None else []
        prompts = [llm.tokenizer.apply_chat([*first, {"role": "user", "content": text}]) for text in texts]
    else:
        prompts = [llm.tokenizer.encode(text) for text in texts]
    if len(prompts) == 1 and params.n == 1 and not as_json:
        return stream(llm, prompts[0], params, speculation)
    adapter = adapter_of(llm.config)
    total = None if params.max_tokens is None else params.max_tokens * params.n * len(prompts)
    with counting(as_json, "writing", total, "tokens") as advance:
        outputs = llm.generate(
            prompts, params, speculation=speculation, adapter=adapter, on_token=lambda _, n: advance(n)
        )
    for text, output in zip(texts, outputs, strict=True):
        print_json({"prompt": text, **output.to_dict()}) if as_json else show(text, output, params)


def load_for_one_user(
    flags: Flags, speculative_config: str | None, as_json: bool, no_template: str | None
) -> tuple[LLM, SamplingParams]:
    """The model, and the parameters of the command line over the model's own, which are shown.

    Wrong settings are refused before torch is imported.
    """
    params = SamplingParams(**pick(SamplingParams, flags))
    settings = engine_settings(flags, speculative_config)
    config = EngineConfig(**settings)
    adapter_of(config)
    check_method(config.speculation.method)
    offer_to_pull(config.model, as_json)
    refuse_missing(config.model)
    if config.warmup is None:  # a single user waits for the first token: costs are measured meanwhile
        settings["warmup"] = False
    llm = load_llm(settings, as_json, no_template)
    defaults = llm.default_params
    merged = params.over(defaults)
    values = merged.model_dump(include=defaults.model_fields_set - params.model_fields_set)
    if values and not as_json:
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        say(f"from the model's generation_config.json: {shown}")
    return llm, merged


def adapter_of(config: EngineConfig) -> str:
    """The adapter of a single user, who has none or one. Raises `InvalidParameter` for several."""
    if len(config.adapters) > 1:
        raise InvalidParameter(
            "adapter", [*config.adapters], "this command takes one adapter; `speculon serve` takes several"
        )
    return next(iter(config.adapters), "")


def read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    """Those of --prompt, then the files; without any, stdin unless it is a terminal."""
    texts = [*prompts, *map(read_text, files)]
    if not texts and not sys.stdin.isatty():
        texts = [read_text(Path("-"))]
    if not texts or "" in texts:  # refused before a model is loaded
        advice = "must not be empty: give a text with --prompt, with --prompt-file or on stdin"
        raise InvalidParameter("prompt", "" if texts else None, advice)
    return texts


def stream(llm: LLM, prompt: list[int], params: SamplingParams, speculation: RequestSpeculation) -> None:
    """Streams the text to stdout. The account goes to stderr, so that a pipe has the text alone."""
    from speculon.decoding.text.tokenizer import Stream
    from speculon.engine.outputs import Completion, RequestOutput, absorb

    text = Stream.of(llm.tokenizer, params, prompt)
    output = RequestOutput([], [Completion()])
    with streaming():
        for event in llm.events(prompt, params, speculation=speculation, adapter=adapter_of(llm.config)):
            absorb(output, event)
            new = text.push(event.tokens)
            sys.stdout.write(new + (text.flush(event.finish.matched) if event.finish else ""))
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    say(account(output.speculation, output.reasons))


def show(prompt: str, output: RequestOutput, params: SamplingParams) -> None:
    head = prompt.strip().splitlines()[0][:60] if prompt.strip() else ""
    for i, completion in enumerate(output.outputs, 1):
        number = f" ({i} of {params.n})" if params.n > 1 else ""
        sys.stdout.write(f"==> {head}{number}\n{completion.text}\n")
        sys.stdout.flush()
        say(account(completion.speculation, completion.reasons))


def read_text(path: Path, name: str = "prompt-file") -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidParameter(name, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidParameter(name, str(path), str(error)) from None
