"""No module of the package imports itself through others, imports for type checking included."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.pure.test_layers import read_sources, resolve

KNOWN: list[set[str]] = []

Graph = dict[str, set[str]]


def imported_modules(source: str, modules: set[str]) -> Iterator[str]:
    """Every module of ours that a source names in an import, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found = (resolve(name, False, modules) for name in names)
        yield from (one.name for one in found if one.ours and one.name in modules)


def graph_of(sources: dict[str, str]) -> Graph:
    modules = set(sources)
    return {name: {*imported_modules(source, modules)} - {name} for name, source in sources.items()}


def reachable(start: str, graph: Graph) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending.extend(new)
    return seen


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one module."""
    reach = {name: reachable(name, graph) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_no_module_imports_itself_through_others() -> None:
    found = [circle for circle in circles(graph_of(read_sources())) if set(circle) not in KNOWN]
    assert not found, "; ".join(" <-> ".join(circle) for circle in found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        pytest.param("target.target", "import speculon.loading.load", id="at run time"),
        pytest.param("target.target", "def f():\n    from speculon.loading import load", id="in a function"),
        pytest.param(
            "target.target",
            "if TYPE_CHECKING:\n    from speculon.loading.load import load_target",
            id="for type checking",
        ),
    ],
)
def test_a_planted_circle_is_found(module: str, line: str) -> None:
    sources = read_sources()
    sources[module] += "\n" + line
    planted = [circle for circle in circles(graph_of(sources)) if set(circle) not in KNOWN]
    assert any({"target.target", "loading.load"} <= set(circle) for circle in planted)


def test_two_circles_are_two() -> None:
    graph: Graph = {"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"c"}, "e": {"a"}}
    assert circles(graph) == [["a", "b"], ["c", "d"]]
