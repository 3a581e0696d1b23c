"""Hooks of mkdocs: pages outside docs/, lists of pages, outputs of the tutorial, links that leave docs/."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RUN = "tutorial.md"  # its blocks run, and the site shows what they print
FOLDERS = {"Decisions": "decisions", "Recorded benchmarks": "benchmarks"}  # sections of all pages of a folder


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of whole folders into the navigation: the folder's own first, then those below."""
    docs = ROOT / "docs"
    for section in config.nav or []:
        for title, folder in FOLDERS.items():
            if title in section:
                found = {str(path.relative_to(docs)) for path in (docs / folder).rglob("*.md")}
                section[title] = sorted(found - linked(config.nav), key=place_in_section)
    return config


def place_in_section(page: str) -> tuple[int, str, bool, str]:
    folder, _, name = page.rpartition("/")
    return page.count("/"), folder, name != "README.md", name


def linked(navigation: Any) -> set[str]:
    """The pages that mkdocs.yml itself has in its navigation."""
    if isinstance(navigation, str):
        return {navigation} if navigation.endswith(".md") else set()
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return set().union(*map(linked, parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files that the site does not have become their paths; the tutorial gets its outputs."""
    if page.file.src_uri == RUN:
        markdown = filled(ROOT / "docs" / RUN)

    def inside(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or not target:
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        place = "." if page.file.src_uri in OUTSIDE.values() else posixpath.join("docs", here)
        path = posixpath.normpath(posixpath.join(place, target))
        if path in OUTSIDE:
            return f"[{text}]({posixpath.relpath(OUTSIDE[path], here or '.')}{anchor})"
        outside = (
            not path.startswith("docs/")
            if place != "."
            else (ROOT / path).exists() and not (ROOT / "docs" / path).exists()
        )
        return f"{text} (`{path}`)" if outside or path.endswith((".json", ".toml", ".py")) else match[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", inside, markdown)


def filled(page: Path) -> str:
    """The page with the output of its blocks. Raises `PluginError`, which ends the build, where one fails."""
    target = ROOT / "build" / page.name
    target.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "recipes.site.blocks", str(page), str(target)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise PluginError(f"{page.name}: a block failed, see above")
    return target.read_text(encoding="utf-8")
