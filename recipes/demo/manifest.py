"""A record of exactly which files a model was trained on."""

import hashlib
import re
from pathlib import Path

from speculon.measure.bench import corpus


def manifest(root: Path) -> dict[str, object]:
    """Count, bytes and one hash of each side of the split, and the names of the held-out files."""
    return {
        "source": f"the standard library of Python {python_version(root)}",
        "licence": "PSF-2.0",
        "train": digest(root, corpus.stdlib_files(root, held_out=False)),
        "held_out": digest(root, corpus.stdlib_files(root, held_out=True)),
        "held_out_files": corpus.stdlib_files(root, held_out=True),
    }


def digest(root: Path, names: list[str]) -> dict[str, object]:
    """Count and bytes of files, and the sha256 of their lines `sha256  path`, as `sha256sum` prints them."""
    lines, total = [], 0
    for name in names:
        content = (root / name).read_bytes()
        total += len(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    return {
        "files": len(names),
        "bytes": total,
        "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }


def python_version(root: Path) -> str:
    """The version a library belongs to, from the header beside it or else from the folder's name."""
    header = root.parent.parent / "include" / root.name / "patchlevel.h"
    found = re.search(r'PY_VERSION\s+"([^"]+)"', header.read_text()) if header.exists() else None
    return found[1] if found else root.name.removeprefix("python")
