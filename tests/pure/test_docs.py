"""What the documents say is so: commands parse, settings load, names exist, figures are recorded."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from recipes.charts import answer, readme

from speculon import __version__
from speculon.checkpoints.locate import PACKAGED
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.models import FILE, ModelSettingsFile
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.core.types import Verdict
from speculon.measure.bench.plan import MODES, parse_mode
from speculon.speculation.control.goodput import CAUTION
from speculon.speculation.proposers import registry
from speculon.speculation.proposers.base import TargetFacts
from tests.builders import make_sequence
from tests.documents import (
    GUIDES,
    ROOT,
    blocks,
    calls_in,
    commands,
    fault_of,
    faults_in_python,
    flags,
    flags_shown,
    has_name,
    variables,
)

DOCUMENTS = sorted({*GUIDES, *ROOT.glob("docs/**/*.md")})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def example() -> Any:
    source = blocks(ROOT / "docs" / "proposers.md", "python")[0]
    exec(compile(source, "docs/proposers.md", "exec"), {})
    factory = registry.find_factory(registry.check_method("bigram"))
    return factory(SpeculationConfig(options={"at_least": 1}), TargetFacts(vocab_size=10, max_context=64))


def test_the_example_of_a_proposer_drafts_what_followed(example: Any) -> None:
    first, second = make_sequence([1, 2, 3, 1, 2, 3, 1]), make_sequence([7, 8, 7])
    for seq in (first, second):
        example.admit(seq)
    drafts = example.propose([first, second], [4, 1])
    assert [draft.tokens for draft in drafts] == [(2, 3, 1, 2), (8,)]
    assert set(drafts[0].sources) == {"bigram"}
    first.tokens.extend([2, 9])
    example.observe([first, second], [Verdict((2, 9), 1), Verdict((8,), 0)])
    assert example.propose([first], [4])[0].tokens == ()
    for seq in (first, second):
        example.release(seq)


def faulty(documents: Iterable[Path], faults_of: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """The documents that have faults, and which."""
    return {named(path): faults for path in documents if (faults := faults_of(path))}


def test_links_and_anchors_lead_somewhere() -> None:
    assert faulty(DOCUMENTS, lost) == {}


def lost(document: Path) -> list[str]:
    """Links to no file, and anchors that are no heading."""
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match("https?://", link)]
    found = [link for link in links if not (document.parent / link.partition("#")[0]).exists()]
    for link, anchor in re.findall(r"\]\(([^)\s#]*)#([\w-]+)\)", text):
        if not link.startswith("http") and link not in found:
            if anchor not in headings(document.parent / link if link else document):
                found.append(f"{link}#{anchor}")
    return found


def test_planted_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](page.md) [b](none.md) [c](#a-title) [d](#none) [e](page.md#no)\n")
    assert lost(page) == ["none.md", "#none", "page.md#no"]


def headings(document: Path) -> set[str]:
    """The anchors of a document, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# Commands


def faults(document: Path) -> list[str]:
    found = [(command, fault_of(call)) for command in commands(document) for call in calls_in(command)]
    return [f"{command}: {fault}" for command, fault in found if fault]


def test_commands_parse() -> None:
    assert faulty(GUIDES, faults) == {}
    shown = [call[:2] for document in GUIDES for command in commands(document) for call in calls_in(command)]
    names = {call[1] for call in shown if call[0] == "speculon" and len(call) > 1}
    assert {"generate", "chat", "serve", "bench", "check", "inspect", "train"} <= names


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("speculon serve --modell demo", "--modell"),
        ("speculon serv --model demo", "no such command"),
        ("cat x | speculon generate --block-size many", "--block-size many"),
        ("speculon generate --policy fixd", "--policy fixd"),
        ("SPECULON_BLOCK_SIZE=16 speculon train eagle4 --target demo", "eagle4"),
        ("make demonstration", "no target"),
        ("python -m recipes.charts.readmes", "no file"),
        ("python recipes/peers/run.py ENV --engine x", "no flag --engine"),
        ("curl -s localhost:8000/v1/completion", "no route"),
        ("curl -X POST localhost:8000/v1/models/coder/laod", "no route"),
        ("curl localhost:8000/admin/api/overviews", "no route"),
        ("serve run speculon.operations.cluster:app replica=2", "unknown field"),
        ("serve run speculon.operations.cluster:application", "no application"),
        ("speculonn --help", "no program"),
    ],
)
def test_a_planted_wrong_command_is_found(planted: str, fault: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{planted}\n```\n", encoding="utf-8")
    assert fault in "\n".join(faults(page))


def unknown_flags(document: Path) -> list[str]:
    return [flag for flag in flags_shown(document) if flag not in flags()]


def test_flags_exist() -> None:
    assert faulty((path for path in GUIDES if "recipes" not in path.parts), unknown_flags) == {}


def test_a_planted_wrong_flag_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("set `--block-size 32`, `--policy` or `--polizy NAME`", encoding="utf-8")
    assert unknown_flags(page) == ["--polizy"]


def test_the_wheel_has_the_version() -> None:
    assert f"speculon-{__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text(encoding="utf-8")


# Settings


def load(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig | None:
    """A block of settings, as a speculon.toml or as settings of models; None for a part of another file."""
    tables = tomllib.loads(source)
    if "project" in tables:
        return None
    if "models" in tables:
        (folder / FILE).write_text(source, encoding="utf-8")
        file = ModelSettingsFile(folder / FILE, registry.methods())
        return [file.settings_of(name).config for name in tables["models"]][-1]
    (folder / "speculon.toml").write_text(source, encoding="utf-8")
    monkeypatch.chdir(folder)
    return EngineConfig()


def test_settings_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, document in enumerate(GUIDES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for source in blocks(document, "toml"):
            load(source, folder, monkeypatch)


def test_a_planted_wrong_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="polizy"):
        load('[speculation]\npolizy = "fixed"\n', tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="line 2: models.a.polizy"):
        load('[models.a]\npolizy = "fixed"\n', tmp_path, monkeypatch)


def unknown_variables(document: Path) -> list[str]:
    shown = re.findall(r"\bSPECULON_[A-Z_]+[A-Z]", document.read_text(encoding="utf-8"))
    return [name for name in shown if name not in variables()]


def test_variables_exist(tmp_path: Path) -> None:
    assert faulty(GUIDES, unknown_variables) == {}
    planted = tmp_path / "page.md"
    planted.write_text("SPECULON_BLOCK_SIZE, SPECULON_SERVE__PORT and SPECULON_BLOCK_SIZES", encoding="utf-8")
    assert unknown_variables(planted) == ["SPECULON_BLOCK_SIZES"]


# Python


def python_faults(document: Path) -> list[str]:
    return [fault for source in blocks(document, "python") for fault in faults_in_python(source)]


def test_python_in_documents_parses_and_its_names_exist() -> None:
    assert faulty(GUIDES, python_faults) == {}


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("from speculon import LLMs", "speculon.LLMs"),
        ("from speculon.nowhere import LLM", "speculon.nowhere.LLM"),
        ("SamplingParams(temprature=0)", "SamplingParams(temprature)"),
        ("LLM('demo', speculations={})", "LLM(speculations)"),
        ("llm.generate('x', params, speculation={'methods': 'off'})", "generate(methods)"),
        ("decoder.step(ids, params, n=2)", "step(n)"),
    ],
)
def test_a_planted_wrong_name_is_found(planted: str, fault: str) -> None:
    assert faults_in_python(planted) == [fault]


# Figures and examples


def test_readme_has_the_recorded_figures() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme.new_readme()
    bench, peers = readme.read(readme.GRID, "bench.json"), readme.read(readme.PEERS, "peers.json")
    assert (ROOT / "docs/benchmarks/README.md").read_text(encoding="utf-8") == readme.index(bench, peers)


def test_a_planted_other_figure_is_found() -> None:
    bench = readme.read(readme.GRID, "bench.json")
    before = readme.figures(bench)
    readme.overall(bench)["over_best"]["ratio"] += 0.1
    assert readme.figures(bench) != before


def test_the_picture_of_readme_shows_the_recorded_answer() -> None:
    run = answer.read()
    drawn = answer.draw(run)
    assert answer.PICTURE.read_text(encoding="utf-8") == drawn
    assert (answer.FOLDER / "README.md").read_text(encoding="utf-8") == answer.page(run)
    assert all(len(run["seconds"][mode]) >= 3 for mode in ("plain", "speculative"))
    run["seconds"]["speculative"] = [2 * value for value in run["seconds"]["speculative"]]
    assert answer.draw(run) != drawn and answer.page(run) != (answer.FOLDER / "README.md").read_text("utf-8")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_sizes_of_models_are_those_of_their_files() -> None:
    sizes = {name: f"{package.size / 1e6:.0f} MB" for name, package in PACKAGED.items()}
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^ *\| `(\w+)` \|[^|]*\| (\d+ MB) \|", page, re.MULTILINE)) == sizes
    readme_sizes = re.findall(r"\b\d+ MB\b", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme_sizes == [sizes["smollm2"]]


def modes_of(document: str) -> list[str]:
    """The modes in a document's commands."""
    return [mode for some in re.findall(r"--modes ([^\s`]+)", document) for mode in some.split(",")]


def test_modes_in_commands_are_modes() -> None:
    for document in ("docs/guide.md", "docs/bench.md"):
        modes = modes_of((ROOT / document).read_text(encoding="utf-8"))
        assert modes and [parse_mode(mode).label for mode in modes] == modes
    with pytest.raises(InvalidParameter):
        [parse_mode(mode) for mode in modes_of("`speculon bench --modes suffix:8,auto+adaptive`")]


PLAIN_MS, DRAFTING_MS, ROW_MS, CALL_MS, OWN_MS = 5.0, 0.3, 0.2, 0.4, 0.4  # T(1, 0, 0), c, d, a = b, e


def example_of_deciding(k: int) -> tuple[float, float]:
    """Tokens and ms of a round with k drafts for one sequence, by the costs of the example."""
    tokens = sum(0.7**j for j in range(k + 1))
    step = PLAIN_MS + (DRAFTING_MS + ROW_MS * k if k else 0)
    return tokens, step + (CALL_MS + CALL_MS * k + OWN_MS * k if k else 0)


def rows_of_the_example(prices: list[float]) -> list[list[str]]:
    """What the table of deciding.md has to say."""
    rows = []
    for k in range(5):
        tokens, ms = example_of_deciding(k)
        gains = [tokens - 1 - price * (ms - PLAIN_MS) for price in prices]
        shown = [f"{gain:.2f}" if k else "0" for gain in gains]
        rows.append([f"{k}", f"{tokens:.2f}" if k else "1", f"{ms:.1f}", f"{tokens / ms:.3f}", *shown])
    return rows


def test_the_example_of_deciding_follows_from_its_costs() -> None:
    page = (ROOT / "docs" / "deciding.md").read_text(encoding="utf-8")
    assert "T = 4.7 + 0.3 B + 0.3 M + 0.2 N |" in page and "P = 0.4 + 0.4 k + 0.4 n k |" in page
    (head,) = re.findall(r"^\| k \| tokens .*$", page, re.MULTILINE)
    prices = [float(price) for price in re.findall(r"r = ([\d.]+)", head)]
    table = re.findall(r"^\| [0-4] \|.*$", page, re.MULTILINE)
    assert [row.replace("*", "").strip("| ").split(" | ") for row in table] == rows_of_the_example(prices)
    speeds = [tokens / ms for tokens, ms in map(example_of_deciding, range(17))]
    assert prices == [round(speeds[0], 3), round(speeds[4], 3)] and max(speeds) == speeds[3]
    for price, best in zip(prices, (4, 3), strict=True):
        gains = [tokens - price * ms for tokens, ms in map(example_of_deciding, range(17))]
        assert max(gains) == gains[best], "the choice at this price"
    price = 1.13  # of eight sequences
    assert round(8 / (4.7 + 0.3 * 8), 2) == price and "r = 8 / 7.1 = 1.13" in page
    lookup, caution = price * ROW_MS, 1 + CAUTION * (1 - 1 / 8)
    asked = lookup * caution
    assert f"{lookup:.3f} tokens" in page and f"{caution:.2f} times as much, or {asked:.3f}" in words_of(page)
    assert 0.9**11 > asked > 0.9**12
    draft, first = price * (ROW_MS + OWN_MS), price * DRAFTING_MS
    assert f"costs {draft:.2f} tokens" in words_of(page) and f"{first:.2f} more, {draft + first:.2f}" in page


def test_another_cost_changes_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OWN_MS", 0.3)
    with pytest.raises(AssertionError):
        test_the_example_of_deciding_follows_from_its_costs()


def words_of(document: str) -> str:
    """Without line breaks, nor the marks of quoted lines."""
    return " ".join(re.sub(r"^>", "", document, flags=re.MULTILINE).split())


def test_the_default_modes_are_those_in_the_document() -> None:
    listed = ", ".join(f"`{mode}`" for mode in MODES)
    document = words_of((ROOT / "docs" / "bench.md").read_text(encoding="utf-8"))
    assert f"are compared, as far as their drafters are given: {listed}." in document


# The site


def pages_in(navigation: str) -> set[str]:
    return set(re.findall(r"[\s\[]([\w/-]+\.md)\b", navigation))


def objects_without_source(reference: str) -> list[str]:
    """The objects that a reference page shows and no module of the package has."""
    shown = re.findall(r"^::: (\S+)$", reference, re.MULTILINE)
    return [name for name in shown if not has_name(*name.rpartition(".")[::2])]


def test_the_site_has_every_guide() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")}
    written |= {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert written - pages_in(navigation) == set()
    outside = {"overview.md", "contributing.md", "changelog.md"}
    assert [page for page in pages_in(navigation) - outside if not (ROOT / "docs" / page).is_file()] == []
    assert pages_in("  - Chat: nowhere.md\n") == {"nowhere.md"}


def linked(index: str) -> set[str]:
    return set(re.findall(r"\]\(([\w-]+\.md)", index))


def test_the_first_page_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - linked(index) == set()
    assert pages - linked(index.replace("](chat.md", "](chats.md")) == {"chat.md"}


def unlisted(index: str, folder: Path) -> list[str]:
    """The decisions of a folder that its index does not link to."""
    return [path.name for path in sorted(folder.glob("0*.md")) if f"]({path.name})" not in index]


def test_the_index_of_decisions_has_each() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert unlisted(index, folder) == []
    planted = index.replace("](001-", "](901-")
    assert unlisted(planted, folder) == ["001-parallel-samples-share-prompt-pages.md"]


def test_the_reference_shows_what_exists() -> None:
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert objects_without_source(text) == [] and "\n::: " in text, named(page)
    assert objects_without_source("::: speculon.engine.llm.LLMs\n::: speculon.core.errors\n") == [
        "speculon.engine.llm.LLMs"
    ]
