"""The planted errors of mutants.toml, and where each of them goes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("mutants.toml")


class Stale(Exception):
    """The code that a mutant replaces is gone, or there more than once; the message says which mutant."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One plausible mistake in the package."""

    name: str
    what: str  # the mistake, and what it costs a user
    old: str  # what stands once in the package, in whichever file
    new: str
    tests: tuple[str, ...]  # files that should see it, the fastest first

    def place(self, sources: Mapping[Path, str]) -> Path:
        """The file that has the code to be replaced. Raises `Stale` unless it stands there once."""
        found = [path for path, source in sources.items() if self.old in source]
        count = sum(sources[path].count(self.old) for path in found)
        if count != 1:
            raise Stale(f"{self.name}: its code stands {count} times in the package, not once")
        return found[0]

    def applied(self, source: str) -> str:
        return source.replace(self.old, self.new)


def read_mutants(file: Path = FILE) -> list[Mutant]:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return [
        Mutant(name, table["what"], table["old"], table["new"], tuple(table["tests"]))
        for name, table in tables.items()
    ]


def read_sources(root: Path) -> dict[Path, str]:
    """The package's source files in a checkout, by their paths in it."""
    return {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in sorted((root / "src").rglob("*.py"))
    }
