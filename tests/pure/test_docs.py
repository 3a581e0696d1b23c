"""What the documents say is so: examples run, links lead somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculon.bench.plan import MODES, parse_mode
from speculon.config import SpeculationConfig
from speculon.core import Verdict
from speculon.errors import InvalidParameter
from speculon.proposers import registry
from speculon.proposers.base import TargetFacts
from tests.builders import make_sequence

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(registry, "_registered", {})
    source = blocks(ROOT / "docs" / "proposers.md", "python")[0]
    exec(compile(source, "docs/proposers.md", "exec"), {})
    factory = registry.find_factory(registry.check_method("bigram"))
    yield factory(SpeculationConfig(options={"at_least": 1}), TargetFacts(vocab_size=10, max_context=64))


def test_the_example_of_a_proposer_drafts_what_followed(example: Any) -> None:
    first, second = make_sequence([1, 2, 3, 1, 2, 3, 1]), make_sequence([7, 8, 7])
    for seq in (first, second):
        example.admit(seq)
    drafts = example.propose([first, second], [4, 1], None)
    assert [draft.tokens for draft in drafts] == [(2, 3, 1, 2), (8,)]
    assert set(drafts[0].sources) == {"bigram"}
    first.tokens.extend([2, 9])
    example.observe([first, second], [Verdict((2, 9), 1), Verdict((8,), 0)], None)
    assert example.propose([first], [4], None)[0].tokens == ()
    for seq in (first, second):
        example.release(seq)


def test_the_example_stays_short() -> None:
    class_body = blocks(ROOT / "docs" / "proposers.md", "python")[0].partition("class Bigram")[2]
    assert sum(bool(line.strip()) for line in class_body.splitlines()) <= 35


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "#")):
            assert (document.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_compiles(document: Path) -> None:
    for source in blocks(document, "python"):
        compile(source, str(document), "exec")


def modes_of(document: str) -> list[str]:
    """The modes in a document's commands."""
    return [mode for some in re.findall(r"--modes ([^\s`]+)", document) for mode in some.split(",")]


@pytest.mark.parametrize("document", ["README.md", "docs/bench.md"])
def test_modes_in_commands_are_modes(document: str) -> None:
    modes = modes_of((ROOT / document).read_text(encoding="utf-8"))
    assert modes and [parse_mode(mode).label for mode in modes] == modes


def test_a_planted_mode_of_another_form_is_found() -> None:
    with pytest.raises(InvalidParameter):
        [parse_mode(mode) for mode in modes_of("`speculon bench --modes suffix:8,auto+adaptive`")]


def words_of(document: str) -> str:
    """Without line breaks, nor the marks of quoted lines."""
    return " ".join(re.sub(r"^>", "", document, flags=re.MULTILINE).split())


def test_the_default_modes_are_those_in_the_document() -> None:
    listed = ", ".join(f"`{mode}`" for mode in MODES)
    document = words_of((ROOT / "docs" / "bench.md").read_text(encoding="utf-8"))
    assert f"are compared, as far as their drafters are given: {listed}." in document


def missing(parts: list[str], document: str) -> list[str]:
    """What a record has and a document has not."""
    return [part for part in parts if words_of(part) not in words_of(document)]


def test_the_example_of_an_advice_is_the_one_that_was_run() -> None:
    folder = ROOT / "docs" / "benchmarks" / "advise"
    record = json.loads((folder / "advise.json").read_text(encoding="utf-8"))
    document = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
    parts = [f"`{record['command']}`", record["answer"][0], record["answer"][-1], record["toml"]]
    assert missing([*parts, f"`{record['next']}`"], document) == []
    assert missing([record["answer"][0].replace("x", "y")], document) != []


def table_rows(lines: list[str]) -> set[tuple[str, ...]]:
    """(method, concurrency, K, figures) of the lines of a table of speeds."""
    return {tuple(line.split()) for line in lines if re.match(r"\S+ +\d+ +(\d+|-) .*x", line)}


def test_the_speeds_of_the_example_are_those_of_the_record() -> None:
    record = (ROOT / "docs" / "benchmarks" / "advise" / "advise.md").read_text(encoding="utf-8")
    rows = {
        (method, concurrency, *figures[:5])
        for line in record.splitlines()
        if re.match(r"\| \d+ \| \S+ \| (\d+|-) \| ", line)
        for concurrency, method, *figures in [line.strip("| ").split(" | ")]
    }
    shown = table_rows((ROOT / "docs" / "advise.md").read_text(encoding="utf-8").splitlines())
    assert len(shown) == 10 and shown <= rows
    assert not table_rows(["suffix  1 8  1.71x  1.75x 1.44-2.56  1.86"]) <= rows
