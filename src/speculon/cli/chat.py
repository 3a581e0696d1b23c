"""`speculon chat`: a conversation, streamed to a terminal; the lines of a pipe are turns, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from speculon.cli.app import SpeculativeConfig, command
from speculon.cli.drafts import DraftStream, StyledRun, WordWrap, drawn, legend, painted
from speculon.cli.generate import adapter_of, load_for_one_user
from speculon.cli.options import Flags, settings_from
from speculon.cli.screen import EXIT_REFUSED, account, errors, print_json, say, show_error, streaming
from speculon.core.config import EngineConfig, SamplingParams, SpeculationConfig
from speculon.core.errors import InvalidParameter, InvalidRequest, NeverFits, SpeculonError, TooLong
from speculon.core.telemetry import RequestStats

if TYPE_CHECKING:
    from speculon.engine.llm import LLM, Session
    from speculon.engine.outputs import RequestOutput

QUOTES = '"""'
QUIT = ("/quit", "/exit", "/bye")
HELP: Mapping[str, str] = {
    "/help": "this list",
    "/reset": "start a new conversation",
    "/undo": "remove the last turn",
    "/stats": "figures of the whole conversation",
    "/system TEXT": "set the system message, from the next turn on; without TEXT: remove it",
    "/show-drafts": "colour accepted drafts, or stop it",
    "/quit": "leave; so does Ctrl-D",
}
RAW = "--raw continues what you type as plain text"
KEYS = f"Ctrl-C ends an answer and keeps its text. {QUOTES} begins and ends a message of several lines."


@dataclass(frozen=True, slots=True)
class TypedTurn:
    """The input of one line, or of several between quotes."""

    text: str
    quoted: bool = False

    @property
    def is_command(self) -> bool:
        return self.text.startswith("/") and not self.quoted


@command("chat")
@settings_from(SamplingParams, SpeculationConfig, EngineConfig, without=("n",))
def chat(
    *,
    system: Annotated[str | None, Option(help="system message")] = None,
    raw: Annotated[
        bool, Option("--raw", help="no chat template: what you type is continued as plain text")
    ] = False,
    show_drafts: Annotated[
        bool, Option("--show-drafts", help="colour accepted drafts by the method that drafted them")
    ] = False,
    speculative_config: SpeculativeConfig = None,
    as_json: Annotated[
        bool, Option("--json", help="machine-readable: one JSON object per turn on stdout")
    ] = False,
    flags: Flags,
) -> None:
    """Talk with a model, in a terminal or line by line through a pipe. /help lists the commands."""
    llm, params = load_for_one_user(flags, speculative_config, as_json, None if raw else RAW)
    if not raw and not llm.tokenizer.has_chat_template:
        raise InvalidRequest(f"{llm.config.model} has no chat template: {RAW}")
    conversation = Chat(
        llm, llm.session(params, system=system, raw=raw, adapter=adapter_of(llm.config)), show_drafts, as_json
    )
    conversation.session.prompt("hello")  # a template that refuses the system message fails here
    conversation.run()
    if conversation.refused and not conversation.interactive:
        raise typer.Exit(EXIT_REFUSED)


class Chat:
    """A conversation with a person, or through a pipe. Answers go to stdout, all else to stderr."""

    def __init__(self, llm: LLM, session: Session, show_drafts: bool, as_json: bool):
        self.llm, self.session, self.show_drafts, self.as_json = llm, session, show_drafts, as_json
        self.interactive = sys.stdin.isatty()
        self.refused = 0
        self.out = Console(highlight=False)
        self.wrap = WordWrap(self.out.width)
        self._read = line_reader(self.interactive, quiet=as_json)

    def run(self) -> None:
        """Turn by turn until the end of the input. A refused turn changes nothing."""
        if self.interactive and not self.as_json:
            facts = self.llm.engine.runtime.facts
            raw = "Text is continued as it is." if self.session.raw else ""
            size = f"{facts.parameters / 1e6:.1f} M parameters, {facts.form['device']}"
            self.tell(f"{self.llm.config.model}: {size}. /help lists the commands. {raw}")
        while True:
            try:
                turn = read_turn(self._read)
                if turn.is_command and turn.text.strip() in QUIT:
                    return
                if turn.is_command:
                    self.run_command(turn.text.strip())
                elif turn.text.strip():
                    self.answer(turn.text)
            except SpeculonError as error:
                self.refuse(error)
            except EOFError:
                return self.end_line()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.end_line()  # at the prompt: the typed line is dropped

    def answer(self, content: str) -> None:
        """One turn: the answer is streamed, then its figures are printed. Ctrl-C ends it."""
        prompt, began = self.session.prompt(content), perf_counter()
        text = DraftStream(self.llm.tokenizer, self.session.params, prompt)
        self.wrap, turns = WordWrap(self.out.width), len(self.session.turns)
        with streaming():
            self.stream(content, text)
            new = self.session.turns[turns:]
            if new:
                self.write(*text.finish(new[0].output.outputs[0]), ("\n", None))
            else:
                self.end_line()
        if not new:
            return self.tell("interrupted before the first token: the turn is removed")
        self.conclude(content, new[0].output, text, perf_counter() - began)

    def stream(self, content: str, text: DraftStream) -> None:
        from speculon.engine.stepper import uninterrupted

        try:
            with closing(self.session.stream(content, self.with_room(content))) as events:
                for event in events:
                    with uninterrupted():
                        self.write(*text.push(event.tokens, event.sources))
        except KeyboardInterrupt:
            if not self.interactive:
                raise

    def with_room(self, content: str) -> SamplingParams:
        """Without --max-tokens, half of the remaining context: the next turn needs some, too."""
        if self.session.params.max_tokens is not None:
            return self.session.params
        left = self.llm.engine.max_context - len(self.session.prompt(content))
        return self.session.params.model_copy(update={"max_tokens": max(1, left // 2)})

    def write(self, *runs: StyledRun) -> None:
        if self.as_json:
            return
        shown: Iterable[StyledRun] = runs
        if self.out.is_terminal:
            shown = self.wrap.push((drawn(text), source) for text, source in runs)
        coloured = self.show_drafts and self.shows_colour
        for source, group in groupby(shown, key=lambda run: run[1]):
            text = "".join(part for part, _ in group)
            sys.stdout.write(painted(text, source) if source and coloured else text)
        sys.stdout.flush()

    def conclude(self, content: str, output: RequestOutput, text: DraftStream, seconds: float) -> None:
        answer = output.outputs[0]
        if self.as_json:
            drafts = {"sources": answer.sources, "fates": answer.fates} if self.show_drafts else {}
            return print_json(
                {"content": content, **output.to_dict(), **drafts, "seconds": round(seconds, 3)}
            )
        if self.show_drafts:
            errors().print(legend(text.counts))
        half = "half of the remaining context is used, --max-tokens allows more; "
        limit = half if self.session.params.max_tokens is None else "ended by --max-tokens; "
        cause = {"abort": "interrupted; ", "length": limit}.get(answer.finish_reason or "", "")
        self.tell(f"{cause}{account(answer.speculation, answer.reasons)}; {seconds:.2f} s")

    def run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name:
            case "/help":
                width = max(map(len, HELP))
                self.tell("\n".join([*(f"{name:<{width}}  {what}" for name, what in HELP.items()), KEYS]))
            case "/reset":
                self.forget(len(self.session.turns))
            case "/undo":
                self.forget(1)
            case "/stats":
                self.stats()
            case "/system":
                self.set_system(argument.strip())
            case "/show-drafts":
                self.show_drafts = not self.show_drafts
                self.tell(f"drafts {'on' if self.show_drafts else 'off'}")
            case _:
                known = (
                    f"must be one of {', '.join(HELP)}; to send a text that begins with /, put {QUOTES} "
                    "before it"
                )
                raise InvalidParameter("command", name, known)

    def forget(self, count: int) -> None:
        """Removes the last turns; their pages stay until others need them."""
        turns = self.session.turns
        removed = min(count, len(turns))
        del turns[len(turns) - removed :]
        self.tell(f"{counted(removed)} removed, {len(turns)} left")

    def set_system(self, text: str) -> None:
        before, self.session.system = self.session.system, text or None
        try:
            if text and self.session.raw:
                raise InvalidParameter(
                    "system", text, "a raw conversation has no roles, so it can have no system message"
                )
            self.session.prompt("hello")
        except SpeculonError:
            self.session.system = before
            raise
        self.tell("system message set" if text else "no system message")

    def stats(self) -> None:
        total = RequestStats()
        for turn in self.session.turns:
            total.add(turn.output.outputs[0].stats)
        done, turns = total.speculation(), self.session.turns
        figures = {
            "turns": len(turns),
            "emitted": total.emitted,
            "length": len(turns[-1].tokens) if turns else 0,
            "max_context": self.llm.engine.max_context,
            "prompt_tokens": sum(len(turn.output.prompt_token_ids) for turn in turns),
            "cached_tokens": total.cached_tokens,
        }
        if self.as_json:
            reasons, speculation = dict(total.reasons), done.to_dict()
            return print_json({**figures, "reasons": reasons, "speculation": speculation})
        self.tell(
            f"{counted(len(turns))}, {figures['length']} of {figures['max_context']} tokens; "
            f"{total.emitted} written; {total.cached_tokens} of {figures['prompt_tokens']} prompt tokens "
            f"from the prefix cache\n{account(done, total.reasons)}"
        )

    def refuse(self, error: SpeculonError) -> None:
        self.refused += 1
        if self.session.turns and isinstance(error, TooLong | NeverFits):
            error = type(error)(f"{error}: /reset starts a new conversation, /undo removes the last turn")
        show_error(error, self.as_json)

    def tell(self, text: str) -> None:
        """A message: a line on stderr, or an object under --json."""
        if self.as_json:
            print_json({"message": text})
        else:
            say(text.strip())

    def end_line(self) -> None:
        if self.interactive and not self.as_json:
            errors().print()

    @property
    def shows_colour(self) -> bool:
        return self.out.color_system is not None and not self.out.no_color


def counted(turns: int) -> str:
    return f"{turns} turn{'s' * (turns != 1)}"


def read_turn(read: Callable[[str], str]) -> TypedTurn:
    """The next line, or all lines of a quoted text. Raises `EOFError` at the end."""
    text = read("> ")
    if not text.startswith(QUOTES):
        return TypedTurn(text)
    while not closed(text):
        try:
            text += "\n" + read(". ")
        except EOFError:
            break
    inner = text.rstrip()[len(QUOTES) :] if closed(text) else text[len(QUOTES) :] + QUOTES
    return TypedTurn(inner.removesuffix(QUOTES).strip("\n"), quoted=True)


def closed(text: str) -> bool:
    """Quotes alone on a line end at the next such line, so Python fits between; others end with a line."""
    first, *others = text.split("\n")
    if first.rstrip() == QUOTES:
        return bool(others) and others[-1].rstrip() == QUOTES
    return len(text.rstrip()) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)


def line_reader(interactive: bool, quiet: bool) -> Callable[[str], str]:
    """The lines of a pipe, or of a terminal with editing and the history of this run, by readline; nothing is
    written to disk.
    """
    if interactive:
        try:
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one text
        except ImportError:
            pass
    beside = not sys.stdout.isatty()  # the prompt must not end up in a file of answers

    def read(prompt: str) -> str:
        prompt = prompt if interactive and not quiet else ""
        if beside:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        try:
            return input("" if beside else prompt)
        except UnicodeDecodeError as error:
            raise InvalidParameter("line", None, str(error)) from None

    return read
