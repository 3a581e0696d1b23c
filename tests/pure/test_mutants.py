"""The planted errors of recipes/mutants fit the source; the command that plants them tells red from green."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes.mutants.checkout import TestsFailed
from recipes.mutants.planted import Mutant, Stale, read_mutants, read_sources
from recipes.mutants.run import Finding, run_all
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]


def test_each_mutant_changes_one_place_of_the_package_and_compiles() -> None:
    sources = read_sources(ROOT)
    for mutant in read_mutants():
        place = mutant.place(sources)
        changed = mutant.applied(sources[place])
        assert changed != sources[place] and mutant.tests, mutant.name
        compile(changed, str(place), "exec")


def test_the_tests_that_mutants_name_are_there() -> None:
    named = {test for mutant in read_mutants() for test in mutant.tests}
    assert [test for test in sorted(named) if not (ROOT / test.partition("::")[0]).is_file()] == []


def planted(old: str, new: str = "0", tests: tuple[str, ...] = ("tests/tiny/test_sum.py",)) -> Mutant:
    return Mutant(f"{old} is {new}", "a wrong sum", old, new, tests)


@pytest.mark.parametrize(("old", "times"), [("a - b", 0), ("a", 3)])
def test_a_mutant_without_its_one_place_is_refused(old: str, times: int) -> None:
    with pytest.raises(Stale, match=f"stands {times} times"):
        planted(old).place({Path("x.py"): "a + b", Path("y.py"): "a, a"})


SUM = "def add(a, b):\n    while a < 0:\n        a, b = a + 1, b - 1\n    return a + b\n"
TEST = "from speculon import add\n\n\ndef test_add():\n    assert add(-1, 3) == add(1, 1) == 2\n"
RED = "def test_red():\n    raise ValueError\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a package of one function and one test."""
    for path, text in (
        ("src/speculon/__init__.py", SUM),
        ("tests/tiny/test_sum.py", TEST),
        ("tests/pure/test_other.py", "def test_other():\n    pass\n"),
        ("tests/pure/test_red.py", RED),
        ("pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["soak", "gpu", "alone"]\n'),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def run(mutants: list[Mutant], checkout: Path, suite: str = "hints") -> list[Finding]:
    return run_all(mutants, suite, 1, Console(quiet=True), checkout, libraries=())


def test_a_mutant_is_red_or_has_survived_and_a_test_that_is_gone_is_told(checkout: Path) -> None:
    unseen = planted("a + b", "b + a", ("tests/gone.py", "tests/tiny/test_sum.py"))
    red, survivor = run([planted("a + b", "a - b"), unseen], checkout)
    assert (red.suite, red.test, red.missing) == ("tiny", "tests/tiny/test_sum.py::test_add", [])
    assert (survivor.suite, survivor.test, survivor.missing) == (None, None, ["tests/gone.py"])
    assert (checkout / "src/speculon/__init__.py").read_text(encoding="utf-8") == SUM


def test_a_test_that_is_red_without_an_error_says_nothing(checkout: Path) -> None:
    """Neither one that the mutant names, nor one of the suite."""
    with pytest.raises(TestsFailed, match="test_red is red without it"):
        run([planted("a + b", "a - b", ("tests/pure/test_red.py",))], checkout)
    with pytest.raises(TestsFailed, match="red without it"):
        run([planted("a + b", "b + a")], checkout, "test")
