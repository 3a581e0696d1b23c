"""The demo corpus: who is held out, what an edit is."""

import ast
import random

import pytest

from speculon.measure.bench import corpus

SOURCE = '''def area(width, height):
    """The area; see area.width."""
    area_of = width * height
    widths = [width for _ in range(2)]
    return area_of, widths, "width", self_width
'''


@pytest.fixture
def library(tmp_path):
    """A small library root: 400 modules, one of them not UTF-8, and files outside of the corpus."""
    for i in range(400):
        (tmp_path / f"module_{i}.py").write_text(f"def f_{i}(x):\n    return x\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    for name in ("site-packages/a.py", "encodings/cp037.py", "__pycache__/b.py", "lib2to3/bad_order.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [("statistics.py", True), ("turtle.py", True), ("test/test_re.py", True), ("json/decoder.py", False)],
)
def test_held_out_rule_is_pinned(path, expected):
    """The split is part of the shipped model: a changed rule would put training files in the validation
    split.
    """
    assert corpus.is_held_out(path) is expected


def test_files_split_into_two_disjoint_sides(library):
    everything = corpus.stdlib_files(library)
    held, kept = corpus.stdlib_files(library, held_out=True), corpus.stdlib_files(library, held_out=False)
    assert len(everything) == 401
    assert sorted(held + kept) == everything
    assert held and all(corpus.is_held_out(name) for name in held)


def test_read_source_refuses_other_encodings(library):
    assert corpus.read_source("latin.py", library) is None
    assert corpus.read_source("module_1.py", library) == "def f_1(x):\n    return x\n"


def test_held_out_functions_come_from_held_out_files(library):
    functions = list(corpus.held_out_functions(library))
    assert functions
    assert all(corpus.is_held_out(function.path) for function in functions)


def test_rename_takes_whole_words_only():
    renamed = corpus.rename(SOURCE, "width", "breadth")
    assert "def area(breadth, height)" in renamed
    assert "see area.breadth" in renamed
    assert '"breadth", self_width' in renamed
    assert "widths = [breadth for" in renamed


def test_rename_leaves_backslashes_in_the_new_name_alone():
    assert corpus.rename("a b", "a", r"\1") == r"\1 b"


def test_edit_prompt_and_answer_share_the_fence():
    prompt = corpus.edit_prompt(SOURCE.rstrip(), "width", "breadth")
    answer = corpus.edit_answer(SOURCE.rstrip(), "width", "breadth")
    assert prompt.startswith(
        "Repeat this function with `width` renamed to `breadth`.\n\n```python\ndef area("
    )
    assert answer.startswith("```python\ndef area(breadth,")
    assert prompt.endswith("\n```") and answer.endswith("\n```")
    assert corpus.rename(answer, "breadth", "width") == corpus.fenced(SOURCE.rstrip())


def test_functions_are_moved_to_the_left_margin_with_their_decorators():
    module = "class A:\n    @property\n    def b(self):\n        c = 1\n        return c\n\nx = 2\n"
    (function,) = corpus.functions_in(module, "a.py")
    assert function.source == "@property\ndef b(self):\n    c = 1\n    return c"
    assert function.identifiers == ("b", "c")
    ast.parse(function.source)


def test_functions_of_a_broken_module_are_none():
    assert list(corpus.functions_in("def f(:\n")) == []


def test_drawn_names_are_new_identifiers():
    rng = random.Random(0)
    for _ in range(200):
        name = corpus.draw_new_name(rng, SOURCE)
        assert name.isidentifier()
        assert name not in SOURCE
