"""Models in the cache folder of the Hugging Face hub. Nothing is fetched, and nothing is written there."""

from __future__ import annotations

from pathlib import Path

PREFIX = "models--"


def hub_id(path: str | Path) -> str | None:
    """`org/name` of a snapshot's folder in a cache of the hub, or of a file in one; None for other paths."""
    for folder in (Path(path), Path(path).parent):
        repo = folder.parent.parent.name
        if folder.parent.name == "snapshots" and repo.startswith(PREFIX):
            return repo.removeprefix(PREFIX).replace("--", "/")
    return None


def cached_models() -> dict[str, Path]:
    """`org/name` -> its snapshot in the cache: that of the main branch, else the latest; with a config."""
    from huggingface_hub import constants

    found: dict[str, Path] = {}
    try:
        repos = sorted(Path(constants.HF_HUB_CACHE).glob(f"{PREFIX}*"))
    except OSError:  # unreadable: no model in it can be loaded
        return found
    for repo in repos:
        snapshot = snapshot_of(repo)
        if snapshot is not None and (name := hub_id(snapshot)) is not None:
            found[name] = snapshot
    return found


def snapshot_of(repo: Path) -> Path | None:
    try:
        main = repo / "refs" / "main"
        commit = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
        snapshots = [path for path in (repo / "snapshots").iterdir() if (path / "config.json").is_file()]
        return max(snapshots, key=lambda path: (path.name == commit, path.stat().st_mtime), default=None)
    except (OSError, UnicodeDecodeError):
        return None
