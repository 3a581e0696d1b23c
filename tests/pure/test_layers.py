"""The table of layers in docs/architecture.md, against what the modules import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "speculon"
TABLE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d) \| (.+?) \|(.*)\| (yes|no) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    layer: int
    modules: tuple[str, ...]
    below: range  # layers it may import
    beside: tuple[str, ...]  # and modules, by name or pattern
    torch: bool


@dataclass(frozen=True)
class Import:
    name: str  # of a module, dotted; our own without `speculon.`
    ours: bool
    at_import: bool  # runs when the module is imported, not when a function is called


Graph = dict[str, frozenset[Import]]


@cache
def read_table(text: str) -> tuple[Row, ...]:
    rows = []
    for layer, modules, may, torch in ROW.findall(text):
        names = re.findall(r"`([^`]+)`", may)
        span = re.search(r"(\d)(?:–(\d))?", re.sub(r"`[^`]*`", "", may))
        below = range(int(span[1]), int(span[2] or span[1]) + 1) if span else range(0)
        rows.append(
            Row(int(layer), tuple(re.findall(r"`([^`]+)`", modules)), below, tuple(names), torch == "yes")
        )
    return tuple(rows)


@cache
def row_of(module: str, rows: tuple[Row, ...]) -> Row | None:
    """The row that names the module; else the first whose pattern fits."""
    exact = [row for row in rows if module in row.modules]
    fitting = [row for row in rows if any(fnmatchcase(module, pattern) for pattern in row.modules)]
    return next(iter(exact + fitting), None)


def read_sources() -> dict[str, str]:
    """Module name -> source. A package's empty `__init__` is no module of its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        source = path.read_text(encoding="utf-8")
        if source.strip() or not name.endswith(".__init__"):
            found[name.removesuffix(".__init__")] = source
    return found


@cache
def imports_of(source: str, modules: frozenset[str]) -> frozenset[Import]:
    return frozenset(
        resolve(f"{module}.{name}" if inner(f"{module}.{name}") in modules else module, at_import, modules)
        for module, name, at_import in names_imported(source)
    )


@cache
def names_imported(source: str) -> frozenset[tuple[str, str, bool]]:
    return frozenset(find_imports(source))


def find_imports(source: str) -> Iterator[tuple[str, str, bool]]:
    """(module, name in it, whether at import) of each import at run time, not under `if TYPE_CHECKING`."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while pending:
        node, at_import = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend((child, at_import) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((str(node.module), alias.name, at_import) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for parts in ("body", "orelse", "handlers", "finalbody", "cases"):  # no expression has statements
            pending.extend((child, at_import and not inside) for child in getattr(node, parts, ()))


def inner(name: str) -> str:
    """The name of a module of ours, which is without `speculon.` here."""
    return name.removeprefix("speculon").lstrip(".")


def resolve(name: str, at_import: bool, modules: Set[str]) -> Import:
    if name != "speculon" and not name.startswith("speculon."):
        return Import(name, False, at_import)
    module = inner(name)
    while module and module not in modules and "." in module:
        module = module.rpartition(".")[0]
    return Import(module or "__init__", True, at_import)


def breaches(table: str, sources: dict[str, str]) -> list[str]:
    """Every sentence in which the sources break the table."""
    rows, found = read_table(table), []
    graph = {name: imports_of(source, frozenset(sources)) for name, source in sources.items()}
    for name, imports in graph.items():
        row = row_of(name, rows)
        if row is None:
            found.append(f"{name} stands in no row")
            continue
        for other in sorted({i.name for i in imports if i.ours and i.name != name}):
            there = row_of(other, rows)
            named = any(fnmatchcase(other, pattern) for pattern in row.beside)
            if not named and (there is None or there.layer not in row.below):
                found.append(f"{name} imports {other}")
        if not row.torch and (path := path_to_torch(name, graph)):
            found.append(f"{name} brings torch in: {' -> '.join(path)}")
    found.extend(f"a cycle: {' -> '.join(cycle)}" for cycle in cycles(graph))
    return found


def path_to_torch(start: str, graph: Graph) -> list[str] | None:
    paths, seen = [[start]], {start}
    for path in paths:
        for i in graph.get(path[-1], ()):
            if i.at_import and not i.ours and i.name.split(".")[0] in ("torch", "transformers"):
                return [*path, i.name]
            if i.at_import and i.ours and i.name not in seen:
                seen.add(i.name)
                paths.append([*path, i.name])
    return None


def cycles(graph: Graph) -> list[list[str]]:
    """One path for each module that reaches itself, lazy imports included; each cycle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in graph:
        paths, seen = [[start]], set()
        for path in paths:
            for i in sorted((i for i in graph.get(path[-1], ()) if i.ours), key=lambda i: i.name):
                if i.name == start:
                    found.setdefault(frozenset(path), [*path, start])
                elif i.name not in seen:
                    seen.add(i.name)
                    paths.append([*path, i.name])
    return list(found.values())


def test_the_code_keeps_the_table() -> None:
    assert breaches(TABLE.read_text(encoding="utf-8"), read_sources()) == []


def test_every_row_is_read_and_names_something() -> None:
    rows = read_table(TABLE.read_text(encoding="utf-8"))
    assert [row.layer for row in rows] == sorted(row.layer for row in rows)
    assert {row.layer for row in rows} == set(range(10))
    assert sum(len(row.modules) for row in rows) == len({name for row in rows for name in row.modules})


NGRAM = "speculation.proposers.ngram"
PLANTED = [
    pytest.param(
        "decoding.verify",
        f"from speculon.{NGRAM} import NGram",
        f"decoding.verify imports {NGRAM}",
        id="upward",
    ),
    pytest.param(
        "decoding.verify",
        "def f():\n    import speculon.engine.llm",
        "decoding.verify imports engine.llm",
        id="in a function",
    ),
    pytest.param(
        "speculation.control.policy",
        "from speculon.decoding.kv import blocks",
        "speculation.control.policy imports decoding.kv.blocks",
        id="by name",
    ),
    pytest.param(
        NGRAM,
        "import speculon.speculation.proposers.synthetic",
        f"{NGRAM} imports speculation.proposers.synthetic",
        id="sideways",
    ),
    pytest.param(
        "drafters.eagle3.proposer",
        "import speculon.drafters.dflash.network",
        "drafters.eagle3.proposer imports drafters.dflash.network",
        id="another method",
    ),
    pytest.param(
        "server.app",
        "def f():\n    from speculon.operations.admin.routes import add_admin",
        "server.app imports operations.admin.routes",
        id="the administration",
    ),
    pytest.param(
        "core.errors", "from speculon import LLM", "core.errors imports __init__", id="the package itself"
    ),
    pytest.param(
        "decoding.kv.blocks",
        "import torch.nn",
        "decoding.kv.blocks brings torch in: decoding.kv.blocks -> torch.nn",
        id="torch",
    ),
    pytest.param(
        "core.types",
        "try:\n    import torch\nfinally:\n    pass",
        "speculation.control.policy brings torch in",
        id="by a path",
    ),
    pytest.param(
        "core.logs",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import speculon.engine.llm",
        "core.logs imports engine.llm",
        id="else",
    ),
    pytest.param("target.target", "import speculon.target.fuse", "a cycle: ", id="cycle"),
    pytest.param("utils", "", "utils stands in no row", id="no row"),
]


@pytest.mark.parametrize(("module", "line", "complaint"), PLANTED)
def test_a_planted_breach_is_found(module: str, line: str, complaint: str) -> None:
    sources = read_sources()
    sources[module] = sources.get(module, "") + "\n" + line
    found = breaches(TABLE.read_text(encoding="utf-8"), sources)
    assert any(sentence.startswith(complaint) for sentence in found), found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.types", "if TYPE_CHECKING:\n    import torch\n    from speculon.engine.llm import LLM"),
        ("cli", "def f():\n    import torch\n    from speculon.engine.llm import LLM"),
        ("drafters.mine", "import torch\nfrom speculon.speculation.proposers.base import Proposer"),
    ],
)
def test_what_is_allowed_is_not_found(module: str, line: str) -> None:
    sources = read_sources()
    sources[module] = sources.get(module, "") + "\n" + line
    assert breaches(TABLE.read_text(encoding="utf-8"), sources) == []


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = ("bench", "admin", "ray", "images")
    extras = [line for extra in names for line in project["optional-dependencies"][extra]]
    declared = {
        re.split(r"[^\w-]", line)[0].replace("-", "_") for line in [*project["dependencies"], *extras]
    }
    declared = {"PIL" if name == "pillow" else name for name in declared}
    sources = read_sources()
    used = {
        i.name.split(".")[0]
        for source in sources.values()
        for i in imports_of(source, frozenset(sources))
        if not i.ours
    }
    assert used - set(sys.stdlib_module_names) - declared == set()
