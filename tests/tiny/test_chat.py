"""A conversation: the whole answer is shown, in any colours, and Ctrl-C harms nothing."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import closing
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

import speculon as speculon_package
from speculon import LLM, SamplingParams
from speculon.cli import app
from speculon.cli.chat import TypedTurn, read_turn
from speculon.cli.drafts import OWN, DraftStream, drawn
from speculon.core.errors import InvalidParameter, InvalidRequest
from speculon.decoding.text.tokenizer import UNSURE, Tokenizer, final_text
from speculon.engine.outputs import Completion
from speculon.engine.stepper import uninterrupted
from tests.tiny.checkpoint import byte_tokenizer
from tests.tiny.folders import make_folder
from tests.tiny.scripted import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
FLAGS = ["--method", "ngram", "--policy", "fixed", "--temperature", "0", "--max-tokens", "40", "--ignore-eos"]
WIDE = "10000"  # columns: no line is broken
PROMPT = "\x1b[?2004h> "  # with pasted lines kept together
SGR = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), speculation={"draft": str(folder), "policy": "fixed"}, max_batch_tokens=64)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def chat(folder: Path, *arguments: str, lines: str, **environment: str) -> Result:
    run = CliRunner(env=environment)
    return run.invoke(app, ["chat", "--model", str(folder), *arguments], input=lines, catch_exceptions=False)


def objects(done: Result) -> list[dict[str, Any]]:
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


# what comes in


@pytest.mark.parametrize(
    ("lines", "turn"),
    [
        pytest.param(["hello"], TypedTurn("hello"), id="a line"),
        pytest.param(["/reset"], TypedTurn("/reset"), id="a command"),
        pytest.param(['"""', "a", "", "b", '"""'], TypedTurn("a\n\nb", True), id="quotes alone"),
        pytest.param(
            ['"""', "def f():", '    """Doc."""', '"""'],
            TypedTurn('def f():\n    """Doc."""', True),
            id="Python between",
        ),
        pytest.param(['"""a', 'b"""'], TypedTurn("a\nb", True), id="quotes beside words"),
        pytest.param(
            ['"""/etc is a folder"""'], TypedTurn("/etc is a folder", True), id="one line, no command"
        ),
        pytest.param(['"""\na\n"""'], TypedTurn("a", True), id="pasted at once"),
        pytest.param(["a\nb"], TypedTurn("a\nb"), id="pasted without quotes"),
        pytest.param(['"""', "a"], TypedTurn("a", True), id="the input ends before the quotes"),
    ],
)
def test_a_turn_is_a_line_or_the_text_between_quotes(lines: list[str], turn: TypedTurn) -> None:
    left = iter(lines)

    def read(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    assert read_turn(read) == turn
    assert turn.is_command == (turn.text == "/reset")
    with pytest.raises(EOFError):
        read_turn(read)


# colours


@pytest.mark.parametrize("seed", range(6))
def test_every_character_has_the_source_of_the_token_that_completed_it(seed: int) -> None:
    chance, tokenizer = random.Random(seed), Tokenizer(byte_tokenizer())
    text = "".join(chance.choice("abé✓🙂 \n") for _ in range(chance.randrange(1, 40)))
    ids = tokenizer.encode(text, add_special_tokens=False)[: chance.choice([None, -1])]
    stops = tuple(text[at : at + chance.randrange(1, 5)] for at in range(0, len(text), 7)) if seed % 2 else ()
    sources = [chance.choice(["ngram", "draft_model", None]) for _ in ids]
    stop = stops[-1] if stops and chance.random() < 0.5 else None
    one = Completion(final_text(tokenizer, ids, stop, SamplingParams()), ids, "stop", stop, sources=sources)

    stream, runs, at = DraftStream(tokenizer, SamplingParams(stop=stops)), [], 0
    while at < len(ids) - seed % 3:  # the last tokens come by `finish` alone
        n = chance.randrange(1, 4)
        runs += stream.push(ids[at : at + n], sources[at : at + n])
        at += n
    runs += stream.finish(one)

    assert "".join(part for part, _ in runs) == one.text
    whole = [len(tokenizer.decode(ids[: i + 1]).rstrip(UNSURE)) for i in range(len(ids))]
    owners = [
        next((s for n, s in zip(whole, sources, strict=True) if n > i), None) for i in range(len(one.text))
    ]
    assert [source for part, source in runs for _ in part] == owners
    assert stream.counts.total() == len(ids) and stream.counts[OWN] == sources.count(None)


def test_colours_add_up_to_the_text(folder: Path, llm: LLM) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 100})
    expected = llm.session(params).send("Write a class.").outputs[0]
    flags = [
        "--draft",
        str(folder),
        "--policy",
        "fixed",
        "--temperature",
        "0",
        "--max-tokens",
        "100",
        "--ignore-eos",
    ]
    done = chat(
        folder, *flags, "--show-drafts", lines="Write a class.\n", FORCE_COLOR="1", TERM="xterm", COLUMNS=WIDE
    )
    assert SGR.sub("", done.stdout) == drawn(expected.text) + "\n"
    counts = {source: expected.sources.count(source) for source in ("draft_model", "suffix", None)}
    assert min(counts.values()) > 0 and counts["suffix"] + counts["draft_model"] == expected.stats.accepted
    runs = list(DraftStream(llm.tokenizer, params).finish(expected))
    for colour, source in ((36, "draft_model"), (33, "suffix")):
        painted = re.findall(rf"\x1b\[{colour}m(.*?)\x1b\[0m", done.stdout, re.DOTALL)
        assert "".join(painted) == "".join(drawn(text) for text, owner in runs if owner == source)
        assert f"{source} {counts[source]}" in SGR.sub("", done.stderr)
    assert f"{OWN} {counts[None]}" in SGR.sub("", done.stderr)


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert drawn("a\x1b[2J\r\x9b\tb\n") == "a␛[2J␍\ufffd\tb\n"


# through a pipe


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(folder: Path, llm: LLM) -> None:
    session = llm.session(GREEDY, system="Be brief.")
    texts = [session.send(line).text for line in ("Write a class.", "Again.")]
    done = chat(folder, *FLAGS, "--system", "Be brief.", lines="Write a class.\n\nAgain.\n")
    assert (done.exit_code, done.stdout) == (0, "".join(text + "\n" for text in texts))
    assert done.stderr.count("ended by --max-tokens; ngram: 40 tokens in ") == 2 == done.stderr.count("\n")


def test_one_object_per_turn_and_commands_on_the_way(folder: Path, llm: LLM) -> None:
    lines = "Write a class.\n/stats\nAgain.\n/undo\n/system Be brief.\n/show-drafts\nAgain.\n/reset\n/stats\n"
    first, stats, again, undone, system, drafts, other, reset, empty = objects(
        chat(folder, *FLAGS, "--json", lines=lines)
    )
    assert (
        first["content"] == "Write a class."
        and first["outputs"][0]["finish_reason"] == "length"
        and first["seconds"] > 0
    )
    assert (stats["turns"], stats["emitted"], stats["length"]) == (1, 40, len(first["prompt_token_ids"]) + 40)
    assert stats["speculation"]["emitted"] == 40
    assert "sources" not in again and len(other["sources"]) == len(other["fates"]) == 40
    assert undone == {"message": "1 turn removed, 1 left"} and reset == {"message": "2 turns removed, 0 left"}
    assert system["message"] == "system message set" and drafts["message"] == "drafts on"
    session = llm.session(GREEDY)
    session.send("Write a class.")
    assert session.send("Again.").text == again["outputs"][0]["text"]
    session.turns.pop()
    session.system = "Be brief."
    assert session.send("Again.").prompt_token_ids == other["prompt_token_ids"]
    assert (empty["turns"], empty["speculation"]["drafted"]) == (0, 0)


def test_a_refused_turn_is_named_and_the_next_one_comes(folder: Path) -> None:
    lines = "hello\n" + "x" * 3000 + "\n/nope\n/reset\nhello\n"
    done = chat(folder, *FLAGS, lines=lines)
    errors = [line for line in done.stderr.splitlines() if re.match(r"[A-Z]\w+: ", line)]
    assert done.exit_code == 2 and len(errors) == 2 and done.stdout.count("\n") >= 2
    assert re.fullmatch(
        r"TooLong: .*\d+.* > context 1024.*: /reset starts a new conversation, /undo removes the last turn",
        errors[0],
    )
    assert errors[1].startswith("InvalidParameter: command = '/nope': must be one of /help, /reset")
    machine = objects(chat(folder, *FLAGS, "--json", lines=lines))
    assert [set(one) for one in machine[1:3]] == [{"error"}, {"error"}]
    assert machine[0]["outputs"][0]["text"] == machine[4]["outputs"][0]["text"]


def test_a_full_context_is_refused_with_the_numbers(folder: Path) -> None:
    flags = ["--temperature", "0", "--ignore-eos", "--max-context", "64"]
    answered, refused, reset, again = chat(
        folder, *flags, lines="hello\nhello\n/reset\nhello\n"
    ).stderr.splitlines()
    assert all(line.startswith("half of the remaining context is used, ") for line in (answered, again))
    assert re.match(r"TooLong: prompt \d+ .*> context 64.*: /reset starts a new conversation", refused)
    assert reset == "1 turn removed, 0 left"


def test_without_a_template_texts_are_continued_if_asked(folder: Path, llm: LLM, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in folder.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    (base / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    refused = chat(base, *FLAGS, lines="def f():\n")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "has no chat template: --raw continues what you type as plain text" in refused.stderr
    first, second = objects(chat(base, *FLAGS, "--raw", "--json", lines="def f():\nclass A:\n"))
    text = "def f():" + first["outputs"][0]["text"]
    assert first["outputs"][0]["text"] == llm.generate("def f():", GREEDY)[0].text
    assert (
        llm.tokenizer.decode(second["prompt_token_ids"])
        == text + "\n" * (not text.endswith("\n")) + "class A:"
    )
    with_system = chat(base, "--raw", "--system", "Be brief.", lines="x\n")
    assert (
        with_system.exit_code == 2
        and "system = 'Be brief.': a raw conversation has no roles" in with_system.stderr
    )


# sessions


def test_a_streamed_turn_is_the_sent_one(llm: LLM) -> None:
    streamed, sent = llm.session(GREEDY), llm.session(GREEDY)
    for content in ("Write a class.", "Again."):
        tokens = [token for event in streamed.stream(content) for token in event.tokens]
        assert tokens == sent.send(content).token_ids == streamed.turns[-1].output.token_ids
    assert streamed.messages == sent.messages and [turn.content for turn in streamed.turns] == [
        "Write a class.",
        "Again.",
    ]


def test_a_turn_that_is_closed_early_keeps_what_was_written(llm: LLM) -> None:
    session = llm.session(GREEDY)
    with closing(session.stream("Write a class.")) as events:
        seen = [*next(events).tokens, *next(events).tokens]
    partial = session.turns[-1].output
    assert (partial.token_ids, partial.finish_reason) == (seen, "abort")
    assert partial.outputs[0].stats.emitted == len(seen) and partial.text == llm.tokenizer.decode(seen)
    assert session.messages[-1] == {"role": "assistant", "content": partial.text}
    before = llm.engine.counters.totals.cached_tokens
    assert session.send("Again.").token_ids and llm.engine.counters.totals.cached_tokens > before
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_turn_that_was_refused_or_failed_leaves_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = llm.session(GREEDY)
    session.send("hello")
    for content, params, error in (
        ("a\ud800", None, InvalidParameter),
        ("x", SamplingParams(n=2), InvalidParameter),
    ):
        with pytest.raises(error):
            session.send(content, params)
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.send("again")
    assert len(session.turns) == 1 and not llm.engine.has_work
    with pytest.raises(InvalidRequest, match="roles"):
        llm.session(system="x", raw=True)


# Ctrl-C


def test_it_waits_for_the_end_of_a_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
    assert done == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=uninterrupted()(lambda: done.append(2)))
    thread.start()
    thread.join()
    assert done == [1, 2]


@pytest.mark.parametrize(("at_step", "long"), [(0, False), (2, False), (1, True), (5, True)])
def test_ctrl_c_inside_a_step_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, at_step: int, long: bool
) -> None:
    content = "Write a class. " * (20 if long else 1)  # several steps of prompt before the first token
    session, step, count = llm.session(GREEDY), llm.engine.step, 0

    def interrupted() -> Any:
        nonlocal count
        if count == at_step:
            signal.raise_signal(signal.SIGINT)
        count += 1
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.send(content)
    with pytest.raises(KeyboardInterrupt):
        count = 0
        llm.generate(content, GREEDY)
    monkeypatch.undo()
    assert_idle(llm)
    whole = llm.session(GREEDY).send(content).token_ids
    if session.turns:  # with the tokens of the step in which it happened
        written = session.turns[-1].output
        assert written.token_ids == whole[: len(written.token_ids)] and written.outputs[
            0
        ].stats.emitted == len(written.token_ids)
    else:
        assert long and at_step < 3


def test_ctrl_c_before_the_first_step_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = llm.engine.add_request

    def interrupted(*arguments: Any, **more: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return add(*arguments, **more)

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.session(GREEDY).send("hello")
    assert_idle(llm)


# in a terminal


class Terminal:
    """The command in a pseudo-terminal; its stderr is a file."""

    def __init__(self, stderr: Path, *arguments: str):
        self.ours, theirs = os.openpty()
        source = str(Path(speculon_package.__file__ or "").parents[1])
        env = {**os.environ, "PYTHONPATH": source, "TERM": "xterm", "COLUMNS": WIDE}
        env = {name: value for name, value in env.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        with stderr.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "speculon.cli", *arguments],
                stdin=theirs,
                stdout=theirs,
                stderr=file,
                env=env,
                start_new_session=True,
                preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
            )
        os.close(theirs)

    def write(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def read(self, until: str, seconds: float = 60) -> str:
        """All that comes, up to a text."""
        seen, end = b"", time.monotonic() + seconds
        while until.encode() not in seen:
            assert time.monotonic() < end, (until, seen)
            if select.select([self.ours], [], [], 0.1)[0]:
                seen += os.read(self.ours, 4096)
        return seen.decode()

    def interrupt(self) -> str:
        """Ctrl-C, up to the prompt after it.

        Python's `input()` does not see a signal that comes right before it waits: then another one follows.
        """
        self.write("\x03")
        if not select.select([self.ours], [], [], 10.0)[0]:
            self.write("\x03")
        return self.read(PROMPT)


def test_a_conversation_in_a_terminal(folder: Path, llm: LLM, tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    flags = [
        "--draft",
        str(folder),
        "--policy",
        "fixed",
        "--temperature",
        "0",
        "--ignore-eos",
        "--threads",
        "1",
        "--show-drafts",
    ]
    terminal = Terminal(stderr, "chat", "--model", str(folder), *flags)
    terminal.read(PROMPT)
    terminal.write("dropped")
    terminal.read("dropped")  # it waits
    terminal.interrupt()
    terminal.write('"""\nWrite a\n')
    terminal.read("Write a")
    terminal.write('class.\n"""\n')
    text = terminal.read("\x1b[36m")  # it is on its way
    text += terminal.interrupt()
    shown = (
        SGR.sub("", text.removesuffix(PROMPT))
        .rpartition("\x1b[?2004l\r")[2]
        .replace("\r\n", "\n")
        .replace("^C", "")
    )
    terminal.write("/stats\n")
    terminal.read(PROMPT)
    terminal.write("\x1b[200~two\nlines\x1b[201~\n")  # pasted
    terminal.read("\x1b[36m")
    terminal.interrupt()
    terminal.write("\x04")
    assert terminal.process.wait(30) == 0
    os.close(terminal.ours)
    messages = stderr.read_text()
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    whole = drawn(llm.session(greedy).send("Write a\nclass.").text)
    assert messages.count("interrupted; ") == 2 and "\n1 turn, " in messages and "Error" not in messages, (
        messages
    )
    assert shown and shown.endswith("\n") and whole.startswith(shown.strip("\n")), (shown, whole)
