"""A streamed text is broken between words, however it arrives, and loses nothing."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from rich.cells import cell_len

from speculon.cli.drafts import StyledRun, WordWrap


def wrapped(text: str, width: int, cuts: random.Random | None = None) -> str:
    wrap, shown, at = WordWrap(width), "", 0
    while at < len(text):
        n = cuts.randrange(1, 6) if cuts else len(text)
        shown += "".join(part for part, _ in wrap.push([(text[at : at + n], None)]))
        at += n
    return shown + "".join(part for part, _ in wrap.flush())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("one two three", "one two \nthree", id="between words"),
        pytest.param("one three\nfour", "one three\nfour", id="a line that just fits"),
        pytest.param("one threes\n", "one \nthrees\n", id="a line that is one too long"),
        pytest.param("123456789 two", "123456789\ntwo", id="a blank at the edge"),
        pytest.param("a 123456789012 b", "a \n123456789012 b", id="a word that is longer than a line"),
        pytest.param("    indented text", "    \nindented \ntext", id="an indented line"),
        pytest.param("\n\n  x\n", "\n\n  x\n", id="empty lines and indentation stay"),
        pytest.param("日本 日本 x", "日本 日本\nx", id="wide characters"),
    ],
)
def test_lines_of_nine_columns(text: str, expected: str) -> None:
    assert wrapped(text, 9) == expected
    assert wrapped(text, 1000) == text


@pytest.mark.parametrize("seed", range(3))
def test_it_does_not_matter_in_which_pieces_a_text_arrives(seed: int) -> None:
    chance, width = random.Random(seed), random.Random(seed).choice([7, 20, 80])
    text = "".join(chance.choice(["ab", "cdefg", "日本", " ", " ", "\n", "x" * 9]) for _ in range(200))
    shown = wrapped(text, width, chance)
    assert "".join(shown.split()) == "".join(text.split())
    assert shown.split() == text.split() or max(map(cell_len, text.split())) >= width
    for line in shown.split("\n"):
        assert cell_len(line) <= width or max(map(cell_len, line.split())) >= width


def test_each_part_of_a_word_keeps_its_source() -> None:
    wrap = WordWrap(9)
    runs: list[StyledRun] = [("one tw", None), ("o thr", "suffix"), ("ee", "ngram"), (" end", None)]
    shown = [*wrap.push(runs), *wrap.flush()]
    joined = [
        ("".join(text for text, _ in group), source) for source, group in groupby(shown, lambda r: r[1])
    ]
    assert joined == [
        *(("one tw", None), ("o ", "suffix"), ("\n", None), ("thr", "suffix"), ("ee", "ngram")),
        (" end", None),
    ]
