"""The folder of a checkpoint: given by its path, by a hub id, or by the name of a shipped one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from speculon.errors import ModelNotFound

DEMO = Path(__file__).resolve().parent.parent / "demo"
SHIPPED = {
    "demo": DEMO / "target",
    "demo-draft": DEMO / "draft",
    "demo-eagle3": DEMO / "eagle3",
    "demo-dflash": DEMO / "dflash",
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(
    path: str | Path, *, trust_remote_code: bool = False, allow_pickle: bool = False, fetch: bool = True
) -> Path:
    """The folder of `path`; a hub id is fetched, or found in the cache when offline or without `fetch`."""
    if str(path) in SHIPPED:
        return SHIPPED[str(path)]
    folder = Path(path).expanduser()
    if folder.exists() or not HUB_ID.fullmatch(str(path)):
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    patterns += ["*.bin"] * allow_pickle + ["*.py"] * trust_remote_code
    try:
        return Path(
            snapshot_download(
                str(path),
                allow_patterns=patterns,
                ignore_patterns=["*/*", "consolidated*"],
                local_files_only=not fetch,
            )
        )
    except Exception as error:
        offline = "; HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelNotFound(
            f"{path}: no such folder, and the hub has none of that name ({first_line(error)}){offline}"
        ) from error


def refuse_missing(path: str | Path) -> None:
    """Raises `ModelNotFound` where `path` is neither a folder nor may be a hub id. It imports nothing."""
    folder = Path(path).expanduser()
    if not (str(path) in SHIPPED or folder.exists() or HUB_ID.fullmatch(str(path))):
        raise ModelNotFound(f"{folder}: no such folder")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters of it."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
