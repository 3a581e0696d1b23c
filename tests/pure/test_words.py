"""Texts and names use the field's words, and sentences are short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT
from tests.prose import MAX_WORDS, PRIVATE, long_sentences, private_words, wide_lines, words_of

# Widen these when a folder is clean.
CLEAN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "recipes", "src", "tests")
SHORT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs")
LATER = ("docs/configuration.md",)  # has wide lines
RECORDED = "docs/benchmarks"  # written by a run; README.md and serving.md are written by hand
# file or folder -> rules that an ordinary use of the word breaks there
ALLOWED: dict[str, tuple[str, ...]] = {
    "recipes/demo/train.py": ("join",),  # a parameter of torch.multiprocessing
    "src/speculon/measure/check/plan.py": ("door, house",),  # the text of a prompt
    "tests/clients/load/test_guidellm.py": ("kind",),  # a parameter of guidellm
    "tests/pure/test_words.py": tuple(PRIVATE),  # planted
}

LONG = " ".join(["word"] * (MAX_WORDS + 1))
HALF = " ".join(["Word"] * (MAX_WORDS // 2 + 1))


def files(names: tuple[str, ...], *suffixes: str) -> list[Path]:
    found = [
        file
        for name in names
        for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    found = [file for file in found if file != ROOT / "tests" / "prose.py"]  # has the patterns themselves
    return sorted(file for file in found if file.suffix in suffixes and not is_recorded(file))


def is_recorded(file: Path) -> bool:
    return file.is_relative_to(ROOT / RECORDED) and file.name not in ("README.md", "serving.md")


def allowed_in(file: Path) -> tuple[str, ...]:
    name = str(file.relative_to(ROOT))
    return tuple(rule for place, rules in ALLOWED.items() if name.startswith(place) for rule in rules)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def faults(paths: Iterable[Path], look: Callable[[Path, str], list[Any]]) -> dict[str, list[Any]]:
    """What is found in each file that has something."""
    found = {named(path): look(path, path.read_text(encoding="utf-8")) for path in paths}
    assert found, "no file was read"
    return {name: some for name, some in found.items() if some}


@pytest.mark.parametrize("place", CLEAN)
def test_no_private_word(place: str) -> None:
    read = files((place,), ".md", ".py")
    assert faults(read, lambda path, text: private_words(text, allowed_in(path))) == {}


@pytest.mark.parametrize("place", SHORT)
def test_sentences_are_short(place: str) -> None:
    assert faults(files((place,), ".md"), lambda path, text: long_sentences(text)) == {}


@pytest.mark.parametrize("place", SHORT)
def test_lines_are_not_wide(place: str) -> None:
    narrow = [path for path in files((place,), ".md") if named(path) not in LATER]
    assert faults(narrow, lambda path, text: wide_lines(text)) == {}


def test_a_planted_fault_is_named_with_its_file() -> None:
    planted = ROOT / "tests" / "pure" / "test_words.py"
    found = faults([ROOT / "README.md", planted], lambda path, text: private_words(text))
    assert [*found] == [named(planted)] and len(found[named(planted)]) >= len(PRIVATE)


@pytest.mark.parametrize("planted", [LONG, f"```python\n{'x' * 111}\n```", f"- {'x' * 110}"])
def test_a_planted_wide_line_is_found(planted: str) -> None:
    assert len(wide_lines(planted)) == 1
    assert wide_lines(f"| {'x' * 111} |\n\n```\n{'x' * 111}\n```\n\n[a](b) {'x' * 111}\n") == []


def test_exceptions_are_needed() -> None:
    for name, rules in ALLOWED.items():
        text = "\n".join(file.read_text(encoding="utf-8") for file in files((name,), ".md", ".py"))
        assert {rule for _, rule in private_words(text)} >= set(rules), name


PLANTED = {
    "guess": "the model guesses two tokens",
    "stands, fell": "a draft stands while it equals the sample",
    "crowd": "alone or in a crowd",
    "texts at once": "eight texts at once",
    "luck": "a run of bad luck",
    "hope": "the policy hopes for four tokens",
    "promise": "memory is promised to it",
    "awake, rest": "a drafter that has rested",
    "rehearsal": "the rehearsal takes two seconds",
    "kind": "verdict.kind",
    "trust, doubt": "self.trust",
    "worth, wanted, came": "wanted = 4",
    "grade": "the grade of a draft",
    "join": "--join",
    "sheet, dialect": "the sheet of a head",
    "course, student": "the course of a student",
    "door, house": "refused at the door",
    "wire, pulse, news": "the wire of the engine",
    "prove, race": "models/prove.py",
    "scout": "the scouts of a grammar",
    "said, told, asked": "asked = 3",
    "carried": "what is not carried is refused",
    "look-up": "a look-up takes 10 us",
}
ORDINARY = [
    "MAX = 8  # guess",
    "of course the race condition is gone; the exponential race(logits)",
    "the rest of the tokens; trust_remote_code; a hopper",
    "improve, provenance, trace, brace, embrace, grader",
    "the two joined, ', '.join(names), a joint call",
    "told apart, worth the cost, as asked",
    "indoor, warehouse, newsletter, wired, impulse",
    'a kind of layer; mankind; view.kind(layer); argsort(x, kind="stable")',
]


@pytest.mark.parametrize("rule", PRIVATE)
def test_a_planted_private_word_is_found(rule: str) -> None:
    assert rule in [found for _, found in private_words(f"first line\n{PLANTED[rule]}\n")]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_words_are_not(text: str) -> None:
    assert private_words(text) == []


@pytest.mark.parametrize(
    "planted",
    [f"{LONG}.", f"Short. {LONG}\n\nShort.", f"- {LONG}\n- short", f"| short | {LONG} |", f"> {LONG}"],
)
def test_a_planted_long_sentence_is_found(planted: str) -> None:
    assert len(long_sentences(planted)) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG}\n```",
        f"`{LONG}`",
        f"[short](https://example.org/{'x' * 99})",
        f"{HALF}. {HALF}",
    ],
)
def test_code_and_addresses_are_not_sentences(text: str) -> None:
    assert long_sentences(text) == []


def test_a_sign_is_no_word() -> None:
    assert words_of("a [link text](there.md) = 3 - b") == ["a", "link", "text", "3", "b"]
