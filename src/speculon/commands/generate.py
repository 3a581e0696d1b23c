"""`speculon generate`: a single completion is streamed, several are written as a batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speculon.checkpoints.locate import refuse_missing
from speculon.commands.options import Given, engine_settings, pick
from speculon.commands.screen import account, counting, errors, loading, over_defaults, print_json, streaming
from speculon.commands.templates import refuse_chat
from speculon.config import EngineConfig, RequestSpeculation, SamplingParams
from speculon.errors import InvalidParameter
from speculon.proposers.registry import check_method

if TYPE_CHECKING:
    from speculon.llm import LLM
    from speculon.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Task:
    """What to continue."""

    prompts: list[str]
    files: list[Path]
    chat: bool = False
    system: str | None = None
    prediction: Path | None = None

    def texts(self) -> list[str]:
        """All prompts: those of --prompt, then files; without any, stdin unless it is a terminal."""
        found = [*self.prompts, *(read_text(path) for path in self.files)]
        if not found and not sys.stdin.isatty():
            found = [read_text(Path("-"))]
        if not found or "" in found:  # refused before a model is loaded
            raise InvalidParameter(
                "prompt", "" if found else None, "give a text by --prompt, --prompt-file or on stdin"
            )
        return found


def run(task: Task, given: Given, speculative_config: str | None, as_json: bool) -> None:
    params = SamplingParams(**pick(SamplingParams, given))
    settings = engine_settings(given, speculative_config)
    texts = task.texts()
    speculation = RequestSpeculation(
        prediction=read_text(task.prediction, "prediction-file") if task.prediction else None
    )
    config = EngineConfig(**settings)  # refuses wrong settings before torch is imported
    check_method(config.speculation.method)
    refuse_missing(config.model)
    if config.warmup is None:  # a single user waits for the first token: costs are measured meanwhile
        settings["warmup"] = False
    with loading(as_json) as tell:
        if task.chat:
            refuse_chat(config, "without --chat the prompt is continued as plain text")
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
    params = over_defaults(params, llm.default_params, as_json)
    prompts = [encode(llm, task, text) for text in texts]
    if len(prompts) == 1 and params.n == 1 and not as_json:
        return stream(llm, prompts[0], params, speculation)
    total = None if params.max_tokens is None else params.max_tokens * params.n * len(prompts)
    with counting(as_json, "writing", total, "tokens") as advance:
        outputs = llm.generate(prompts, params, speculation=speculation, on_token=lambda _, n: advance(n))
    for text, output in zip(texts, outputs, strict=True):
        print_json({"prompt": text, **output.to_dict()}) if as_json else show(text, output, params)


def encode(llm: LLM, task: Task, text: str) -> list[int]:
    if not task.chat:
        return llm.tokenizer.encode(text)
    system = [{"role": "system", "content": task.system}] if task.system is not None else []
    return llm.tokenizer.apply_chat([*system, {"role": "user", "content": text}])


def stream(llm: LLM, prompt: list[int], params: SamplingParams, speculation: RequestSpeculation) -> None:
    """Streams the text to stdout. The account goes to stderr, so that a pipe has the text alone."""
    from speculon.outputs import Completion, RequestOutput, absorb
    from speculon.text import Stream

    text = Stream.of(llm.tokenizer, params, prompt)
    output = RequestOutput([], [Completion()])
    with streaming():
        for event in llm.events(prompt, params, speculation=speculation):
            absorb(output, event)
            new = text.push(event.tokens)
            sys.stdout.write(new + (text.flush(event.finish.matched) if event.finish else ""))
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    errors().print(account(output.speculation, output.reasons), style="dim", markup=False)


def show(prompt: str, output: RequestOutput, params: SamplingParams) -> None:
    head = prompt.strip().splitlines()[0][:60] if prompt.strip() else ""
    for i, one in enumerate(output.outputs):
        number = f" ({i + 1} of {params.n})" if params.n > 1 else ""
        sys.stdout.write(f"==> {head}{number}\n{one.text}\n")
        sys.stdout.flush()
        errors().print(account(one.speculation, one.reasons), style="dim", markup=False)


def read_text(path: Path, name: str = "prompt-file") -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidParameter(name, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidParameter(name, str(path), str(error)) from None
