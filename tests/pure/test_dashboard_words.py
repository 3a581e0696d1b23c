"""The dashboard's strings: each in every language, with the same fields, and each used."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from speculon.core.types import Reason
from speculon.operations.admin.ui import NAVIGATION
from speculon.operations.admin.ui.colours import METHODS, colour_of, symbol_of
from speculon.operations.admin.ui.words import FOLDER, LANGUAGES, UiWords, language_of, table
from speculon.speculation.proposers.registry import TABLE, WITH_WEIGHTS

UI = FOLDER.parent
PICTURES = Path(__file__).parents[2] / "docs" / "images" / "dashboard"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted(UI.glob("*.py"))}
PAGES = {path.stem for path in FOLDER.glob("*.toml")}
KEY = re.compile(r"([a-z_]+)\.([a-z_0-9]*)")
FIELD = re.compile(r"{(\w+)}")


def keys_in(source: str) -> tuple[set[str], set[str]]:
    """(keys, beginnings of keys): those of `f"page.part_{name}"` are beginnings."""
    whole, begun = set(), set()
    tree = ast.parse(source)
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            first = node.values[0]
            if isinstance(first, ast.Constant) and (found := KEY.fullmatch(str(first.value))):
                begun |= {found[0]} if found[1] in PAGES else set()
        elif isinstance(node, ast.Constant) and id(node) not in inside and isinstance(node.value, str):
            if (found := KEY.fullmatch(node.value)) and found[1] in PAGES and found[2]:
                whole.add(found[0])
    return whole, begun


def unknown_and_unused(sources: dict[str, str], known: set[str]) -> tuple[set[str], set[str]]:
    whole, begun = set(), set()
    for source in sources.values():
        keys, beginnings = keys_in(source)
        whole |= keys
        begun |= beginnings
    unused = {key for key in known - whole if not key.startswith(tuple(begun))}
    return whole - known, unused


def test_each_string_has_each_language_and_the_same_fields() -> None:
    for key, strings in table().items():
        assert list(strings) == list(LANGUAGES), key
        assert all(text.strip() for text in strings.values()), key
        assert len({tuple(sorted(FIELD.findall(text))) for text in strings.values()}) == 1, key


def test_each_key_in_the_code_exists_and_each_key_is_used() -> None:
    assert unknown_and_unused(SOURCES, set(table())) == (set(), set())


def test_each_reason_has_a_string() -> None:
    assert {f"overview.reason_{reason.value}" for reason in Reason} <= set(table())


def test_each_method_has_a_place_and_a_sign_of_its_own() -> None:
    assert set(METHODS) == {*TABLE, *WITH_WEIGHTS}
    signs = {(colour_of(method), symbol_of(method)) for method in METHODS}
    assert len(signs) == len(METHODS)


def test_planted_faults_are_found() -> None:
    planted = SOURCES | {"planted.py": 'words("overview.nowhere")'}
    assert unknown_and_unused(planted, set(table()))[0] == {"overview.nowhere"}
    assert unknown_and_unused(SOURCES, {*table(), "log.nobody"})[1] == {"log.nobody"}


@pytest.mark.parametrize(
    ("chosen", "accepted", "language"),
    [
        (None, "ko-KR,ko;q=0.9,en;q=0.8", "ko"),
        (None, "fr, ja;q=0.5, zh;q=0.7", "zh"),
        (None, "ko;q=0, en", "en"),
        (None, "", "en"),
        (None, "ja;q=x", "en"),
        ("zh", "ko", "zh"),
        ("xx", "ja", "ja"),
    ],
)
def test_the_language_of_a_reader(chosen: str | None, accepted: str, language: str) -> None:
    assert language_of(chosen, accepted) == language
    assert UiWords(language)("log.note", lines=3).count("3") == 1


# the pictures in the documents


def outdated(pictures: dict[str, bytes], recorded: dict[str, Any], menu: list[str]) -> set[str]:
    """The pictures that show another menu than the dashboard has, or that have no record of their own."""
    found = set()
    for name, data in pictures.items():
        known = recorded.get(name, {})
        same = known.get("sha256") == hashlib.sha256(data).hexdigest() and known.get("menu") == menu
        found |= set() if same else {name}
    return found | recorded.keys() - pictures.keys()


def menu() -> list[str]:
    words = UiWords("en")
    return [words(f"shell.{name}") for name in NAVIGATION]


def test_the_pictures_show_the_menu_that_there_is() -> None:
    """`python -m recipes.dashboard.shots --parts dashboard` takes them anew."""
    pictures = {path.name: path.read_bytes() for path in PICTURES.glob("*.png")}
    recorded = json.loads((PICTURES / "menu.json").read_text(encoding="utf-8"))
    assert pictures and outdated(pictures, recorded, menu()) == set()


@pytest.mark.parametrize("planted", ["an entry that is gone", "another picture", "no record", "no picture"])
def test_a_planted_old_picture_is_found(planted: str) -> None:
    pictures = {"log.png": b"a picture"}
    record = {"sha256": hashlib.sha256(b"a picture").hexdigest(), "menu": menu()}
    assert outdated(pictures, {"log.png": record}, menu()) == set()
    if planted == "an entry that is gone":
        record["menu"] = [*menu(), "Benchmark"]
    elif planted == "another picture":
        pictures = {"log.png": b"an older one"}
    recorded = {} if planted == "no record" else {"log.png": record}
    assert outdated({} if planted == "no picture" else pictures, recorded, menu()) == {"log.png"}
