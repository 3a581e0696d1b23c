"""Hooks of mkdocs: the pages outside docs/, the list of decisions, and links that leave docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the decisions into the navigation, in their order."""
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    for section in config.nav or []:
        if "Decisions" in section:
            section["Decisions"] = [f"decisions/{name}" for name in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files that the site does not have become their paths."""

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
