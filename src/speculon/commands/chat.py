"""`speculon chat`: a conversation in a terminal, shown as it is written; the lines of a pipe are turns, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from speculon.commands.drafts import DraftStream, Run, colour_of, drawn, legend, painted
from speculon.commands.options import Given, as_json_error, engine_settings, pick
from speculon.commands.screen import EXIT_REFUSED, account, errors, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.errors import InvalidParameter, InvalidRequest, NeverFits, SpeculonError, TooLong
from speculon.proposers.registry import check_method, known_methods
from speculon.telemetry import RequestStats

if TYPE_CHECKING:
    from speculon.llm import LLM, RequestOutput, Session

QUOTES = '"""'
QUIT = ("/quit", "/exit", "/bye")
HELP: Mapping[str, str] = {
    "/help": "this list",
    "/reset": "begin anew",
    "/undo": "take the last turn back",
    "/stats": "the account of the whole conversation",
    "/system TEXT": "set the system message, from the next turn on; without TEXT: remove it",
    "/show-drafts": "colour what was guessed, or stop it",
    "/quit": "leave; so does Ctrl-D",
}
KEYS = f"Ctrl-C ends an answer and keeps what was written. {QUOTES} begins and ends a text of several lines."
FIRST_TRY = "The demo model is no assistant: it writes Python, best with --temperature 0. Try: Write a Python function named `__repr__`."


@dataclass(frozen=True, slots=True)
class Task:
    """How the conversation is to be held."""

    system: str | None = None
    raw: bool = False  # no roles: texts are continued as they are
    show_drafts: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """What came in by one line, or by several between quotes."""

    text: str
    quoted: bool = False

    @property
    def is_command(self) -> bool:
        return self.text.startswith("/") and not self.quoted


def run(task: Task, given: Given, speculative_config: str | None) -> None:
    params = SamplingParams(**pick(SamplingParams, given))
    settings = engine_settings(given, speculative_config)
    config = EngineConfig(**settings)  # what is wrong is told before torch is imported
    check_method(config.speculation.method)
    if config.warmup is None:  # one user waits for the first token: costs are measured on the way
        settings["warmup"] = False
    with loading(task.as_json) as tell:
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
    if not task.raw and not llm.tokenizer.has_chat_template:
        raise InvalidRequest(
            f"{llm.config.model} has no chat template: --raw continues what you type as plain text"
        )
    chat = Chat(llm, params, task, interactive=sys.stdin.isatty())
    chat.session.prompt("hello")  # a template that refuses the system message does so now
    chat.hold()
    if chat.refused and not chat.interactive:
        raise typer.Exit(EXIT_REFUSED)


class Chat:
    """A conversation with a person, or with the other end of a pipe.

    The answers go to stdout, all else to stderr.
    """

    def __init__(self, llm: LLM, params: SamplingParams, task: Task, interactive: bool):
        self.llm, self.params, self.interactive = llm, params, interactive
        self.as_json, self.show_drafts = task.as_json, task.show_drafts
        self.session: Session = llm.session(params, system=task.system, raw=task.raw)
        self.refused = 0
        self.out = Console(highlight=False)
        self._read = terminal_reader(quiet=task.as_json) if interactive else pipe_reader

    def hold(self) -> None:
        """Turn by turn until the end of the input.

        A refused turn changes nothing, and the next one may come.
        """
        if self.interactive and not self.as_json:
            self.greet()
        while True:
            try:
                said = listen(self._read)
                if said.is_command and said.text.strip() in QUIT:
                    return
                if said.is_command:
                    self.obey(said.text.strip())
                elif said.text.strip():
                    self.answer(said.text)
            except SpeculonError as error:
                self.refuse(error)
            except EOFError:
                return self.end_line()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.end_line()  # at the prompt: what was typed is dropped

    def greet(self) -> None:
        target = self.llm.engine.target
        kind = "Text is continued as it is." if self.session.raw else ""
        self.tell(
            f"{self.llm.config.model}: {target.num_parameters / 1e6:.1f} M parameters, {target.device}. /help helps. {kind}"
        )
        if self.llm.config.model == "demo" and not self.session.raw:
            self.tell(FIRST_TRY)
        if self.show_drafts:
            self.explain_colours()

    def answer(self, content: str) -> None:
        """One turn: the answer as it is written, then what it took.

        Ctrl-C ends it; the pages are free at once.
        """
        from speculon.llm import uninterrupted

        text, began, turns = (
            DraftStream(self.llm.tokenizer, self.params),
            perf_counter(),
            len(self.session.turns),
        )
        try:
            with closing(self.session.stream(content, self.with_room(content))) as events:
                for event in events:
                    with uninterrupted():
                        self.write(*text.push(event.tokens, event.sources))
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        if len(self.session.turns) == turns:
            self.end_line()
            return self.tell("interrupted before the first word: the turn is taken back")
        output = self.session.turns[-1].output
        self.write(*text.finish(output.outputs[0]), ("\n", None))
        self.conclude(content, output, text, perf_counter() - began)

    def with_room(self, content: str) -> SamplingParams:
        """Where --max-tokens is not given, half of the context that is left: the next turn needs some, too."""
        if self.params.max_tokens is not None:
            return self.params
        left = self.llm.engine.max_context - len(self.session.prompt(content))
        return self.params.model_copy(update={"max_tokens": max(1, left // 2)})

    def write(self, *runs: Run) -> None:
        if self.as_json:
            return
        for source, group in groupby(runs, key=lambda run: run[1]):
            text = "".join(part for part, _ in group)
            text = drawn(text) if self.out.is_terminal else text
            sys.stdout.write(
                painted(text, source) if source and self.show_drafts and self.shows_colour else text
            )
        sys.stdout.flush()

    def conclude(self, content: str, output: RequestOutput, text: DraftStream, seconds: float) -> None:
        one = output.outputs[0]
        if self.as_json:
            sources = {"sources": one.sources} if self.show_drafts else {}
            return print_json(
                {"content": content, **output.to_dict(), **sources, "seconds": round(seconds, 3)}
            )
        if self.show_drafts:
            errors().print(legend(text.counts))
        half = "half of the context left is written, --max-tokens allows more; "
        limit = half if self.params.max_tokens is None else "ended by --max-tokens; "
        cause = {"abort": "interrupted; ", "length": limit}
        self.tell(
            f"{cause.get(one.finish_reason or '', '')}{account(one.speculation, one.reasons)}; {seconds:.2f} s"
        )

    def obey(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.help(),
            "/reset": lambda _: self.forget(len(self.session.turns)),
            "/undo": lambda _: self.forget(1),
            "/stats": lambda _: self.stats(),
            "/system": self.set_system,
            "/show-drafts": lambda _: self.toggle_drafts(),
        }
        if name not in commands:
            raise InvalidParameter(
                "command", name, f"known are {', '.join(HELP)}; {QUOTES} before a text that begins with /"
            )
        commands[name](argument.strip())

    def help(self) -> None:
        width = max(map(len, HELP))
        self.tell("\n".join([*(f"{name:<{width}}  {what}" for name, what in HELP.items()), KEYS]))

    def forget(self, count: int) -> None:
        """The last turns; their pages stay until others need them."""
        turns = self.session.turns
        gone = min(count, len(turns))
        del turns[len(turns) - gone :]
        self.tell(f"{counted(gone)} taken back, {len(turns)} left")

    def set_system(self, text: str) -> None:
        before, self.session.system = self.session.system, text or None
        try:
            if text and self.session.raw:
                raise InvalidParameter("system", text, "a raw conversation has no roles")
            self.session.prompt("hello")
        except SpeculonError:
            self.session.system = before
            raise
        self.tell("system message set" if text else "no system message")

    def toggle_drafts(self) -> None:
        self.show_drafts = not self.show_drafts
        if self.show_drafts and not self.as_json:
            self.explain_colours()
        else:
            self.tell(f"drafts {'on' if self.show_drafts else 'off'}")

    def explain_colours(self) -> None:
        if not self.shows_colour:
            return self.tell("this output shows no colours; guesses are counted after each answer")
        names = [
            Text(name, style=colour_of(name))
            for name in known_methods()
            if name not in ("off", "auto", "synthetic")
        ]
        errors().print(
            Text.assemble("Guessed and confirmed: ", Text(", ").join(names), "; plain is the model's own.")
        )

    def stats(self) -> None:
        total = RequestStats()
        for turn in self.session.turns:
            total.add(turn.output.outputs[0].stats)
        sent = sum(len(turn.output.prompt_token_ids) for turn in self.session.turns)
        length = len(self.session.turns[-1].tokens) if self.session.turns else 0
        done, context = total.speculation(), self.llm.engine.max_context
        if self.as_json:
            facts: dict[str, Any] = {
                "turns": len(self.session.turns),
                "emitted": total.emitted,
                "length": length,
            }
            facts |= {"max_context": context, "prompt_tokens": sent, "cached_tokens": total.cached_tokens}
            return print_json(
                {**facts, "reasons": dict(total.reasons), "speculation": done and done.to_dict()}
            )
        self.tell(
            f"{counted(len(self.session.turns))}, {length} of {context} tokens; {total.emitted} written; "
            f"{total.cached_tokens} of {sent} prompt tokens were in pages already\n{account(done, total.reasons)}"
        )

    def refuse(self, error: SpeculonError) -> None:
        self.refused += 1
        if self.session.turns and isinstance(error, TooLong | NeverFits):
            error = type(error)(f"{error}: /reset begins anew, /undo takes the last turn back")
        if self.as_json:
            print_json(as_json_error(error))
        else:
            errors().print(f"{type(error).__name__}: {error}", style="red", markup=False)

    def tell(self, text: str) -> None:
        """To the person; to a program as an object."""
        print_json({"said": text}) if self.as_json else errors().print(
            text.strip(), style="dim", markup=False
        )

    def end_line(self) -> None:
        if self.interactive and not self.as_json:
            errors().print()

    @property
    def shows_colour(self) -> bool:
        return self.out.color_system is not None and not self.out.no_color


def counted(turns: int) -> str:
    return f"{turns} turn{'s' * (turns != 1)}"


def listen(read: Callable[[str], str]) -> Said:
    """The next line, or all lines of a quoted text. Raises `EOFError` at the end."""
    text = read("> ")
    if not text.startswith(QUOTES):
        return Said(text)
    while not closed(text):
        try:
            text += "\n" + read(". ")
        except EOFError:
            break
    inner = text.rstrip()[len(QUOTES) :] if closed(text) else text[len(QUOTES) :] + QUOTES
    return Said(inner.removesuffix(QUOTES).strip("\n"), quoted=True)


def closed(text: str) -> bool:
    """Quotes on a line of their own end at the next such line: what is between may be Python.

    Others end where a line does.
    """
    first, *others = text.split("\n")
    if first.rstrip() == QUOTES:
        return bool(others) and others[-1].rstrip() == QUOTES
    return len(text.rstrip()) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)


def pipe_reader(_: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InvalidParameter("stdin", None, str(error)) from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def terminal_reader(quiet: bool) -> Callable[[str], str]:
    """Line editing and, within this run, history by readline; nothing is written to disk."""
    try:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one text
    except ImportError:
        pass
    beside = not sys.stdout.isatty()  # the prompt must not get into a file of answers

    def read(prompt: str) -> str:
        if beside and not quiet:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        try:
            return input("" if beside or quiet else prompt)
        except UnicodeDecodeError as error:
            raise InvalidParameter("line", None, str(error)) from None

    return read
