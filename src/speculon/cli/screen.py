"""What commands share: loading a model, errors as one line, progress and log on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from speculon.checkpoints.headers import lacks_chat_template
from speculon.checkpoints.locate import locate
from speculon.core.config import EngineConfig
from speculon.core.errors import InvalidRequest, ModelError, SpeculonError
from speculon.core.garbage import kept_for_good
from speculon.core.types import reasons_in_words

if TYPE_CHECKING:
    from speculon.core.telemetry import SpeculationStats
    from speculon.engine.llm import LLM

EXIT_REFUSED = 2


def errors() -> Console:
    """The present stderr; a terminal breaks lines at words, a pipe gets them whole."""
    return console(stderr=True)


def output(quiet: bool = False) -> Console:
    """The present stdout, likewise."""
    return console(quiet=quiet)


def console(**where: bool) -> Console:
    made = Console(highlight=False, **where)  # type: ignore[arg-type]
    made.soft_wrap = not made.is_terminal
    return made


def answered(command: Callable[..., None]) -> Callable[..., None]:
    """Turns a `SpeculonError` into one line (or JSON object) and exit code 2."""

    @wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except SpeculonError as error:
            show_error(error, values.get("as_json", False))
            raise typer.Exit(EXIT_REFUSED) from None

    return run


def show_error(error: SpeculonError, as_json: bool) -> None:
    if as_json:
        print_json(as_json_error(error))
    else:
        errors().print(f"{type(error).__name__}: {error}", style="red", markup=False)


def as_json_error(error: SpeculonError) -> Mapping[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def print_json(value: Any) -> None:
    """One object, one line. A NaN would be no JSON, so it fails here."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line on stderr beside the output."""
    errors().print(text, style="dim", markup=False)


class LogLines(logging.Handler):
    """The log on stderr. A line that comes while a text is being streamed waits for the end of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.streaming = False
        self.waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.waiting.append(self.format(record))
        if not self.streaming:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            errors().print("\n".join(self.waiting), markup=False)
            self.waiting.clear()


def show_log() -> None:
    """One line per request on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LogLines()])


@contextmanager
def streaming() -> Iterator[None]:
    """Holds the log's lines back; the text that is written inside ends with a newline."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogLines)]
    for handler in handlers:
        handler.streaming = True
    try:
        yield
    finally:
        for handler in handlers:
            handler.streaming = False
            handler.flush()


@contextmanager
def loading(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the name of a stage; yields the function that sets the stage."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with bar(as_json, "starting", *columns) as (progress, task):
        yield lambda stage: progress.update(task, description=stage)


@contextmanager
def counting(
    as_json: bool, what: str, total: int | None, unit: str = "", *, still: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar with the time left; yields the function that advances it. A `still` bar is drawn only then."""
    done = TextColumn(f"{{task.completed:.0f}}{'' if total is None else f'/{total}'} {unit}")
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeElapsedColumn(), *left)
    with bar(as_json, what, *columns, total=total, still=still) as (progress, task):
        yield lambda n: progress.update(task, advance=n, refresh=still)


@contextmanager
def bar(
    as_json: bool, what: str, *columns: ProgressColumn, total: int | None = None, still: bool = False
) -> Iterator[tuple[Progress, Any]]:
    stderr = errors()
    hidden = as_json or not stderr.is_terminal
    # during a measurement no thread may draw: it would compete for the interpreter
    with Progress(*columns, console=stderr, transient=True, disable=hidden, auto_refresh=not still) as shown:
        yield shown, shown.add_task(what, total=total)


def load_llm(settings: Mapping[str, Any], as_json: bool, no_template: str | None = None) -> LLM:
    """Imports torch and loads the model, under a spinner.

    With `no_template`, raises `InvalidRequest` with this advice for a checkpoint without a chat template,
    before it is loaded.
    """
    with loading(as_json) as stage:
        if no_template is not None and lacks_template(config := EngineConfig(**settings)):
            raise InvalidRequest(f"{config.model} has no chat template: {no_template}")
        stage("importing torch")
        with kept_for_good():
            from speculon.engine.llm import LLM

            return LLM(progress=stage, **settings)


def lacks_template(config: EngineConfig) -> bool:
    """False where there is no checkpoint: loading it tells why."""
    try:
        return lacks_chat_template(locate(config.model, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return False


def account(done: SpeculationStats, reasons: Mapping[str, int]) -> str:
    """What speculation did, and why rounds had none, in one line."""
    why = reasons_in_words(reasons)
    shadow = [in_shadow(*figures) for figures in done.shadow.items()]
    if not done.rounds:
        none = f"no speculation: {why or 'the text ended before the first round'}"
        return "; ".join([none, *shadow])
    stop = f" and {done.stop_tokens} stop token{'s' * (done.stop_tokens > 1)}" if done.stop_tokens else ""
    line = (
        f"{'+'.join(done.by_source)}: {done.emitted} tokens{stop} in {done.target_calls} target calls, "
        f"{done.tokens_per_target_call:.2f} per call; "
        f"{done.acceptance_rate:.0%} of {done.drafted} drafts accepted"
    )
    if done.saved_ms is not None:
        line += f"; {'saved' if done.saved_ms >= 0 else 'lost'} about {abs(done.saved_ms) / 1e3:.2f} s"
    return "; ".join([line, *shadow, *([f"plain rounds: {why}"] if why else [])])


def in_shadow(method: str, figures: Mapping[str, Any]) -> str:
    """What drafts under policy `shadow` would have saved."""
    accepted, drafted = figures["accepted"], figures["drafted"]
    return (
        f"{method} in shadow: {accepted / drafted:.0%} of {drafted} drafts would have been accepted, "
        f"{1 + accepted / figures['rounds']:.2f} tokens per round with them"
    )
