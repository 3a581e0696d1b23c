"""Properties of the repository: a light import, short files and functions, nothing in it that is unwanted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
MAX_FOLDERS, MAX_FOLDER_LINES = 12, 4500  # of the package
MAX_FUNCTION_LINES = 60
MAX_PRIVATE_NAMES = 60  # of the package, in its tests
MAX_PACKAGE_BYTES, MAX_DRAFTER_BYTES = 3_000_000, 25_000_000
MAX_MODELS_BYTES = 45_000_000  # of the tests
UNTRACKED = {"build", "dist", "__pycache__"}
PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"}
# each begins with a literal, which is searched quickly in files of weights
SECRETS = [
    re.compile(pattern)
    for pattern in (
        rb"AKIA[0-9A-Z]{16}",
        rb"hf_(?<=\bhf_)[A-Za-z0-9]{30,}",
        rb"gh(?<=\bgh)[pousr]_[A-Za-z0-9]{30,}",
        rb"sk-(?<=\bsk-)[A-Za-z0-9_-]{24,}",
        rb"xox[abpr]-[\w-]{10,}",
        rb"-----BEGIN [A-Z ]*PRIVATE KEY",
    )
]


def repository_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not is_untracked(path.relative_to(ROOT))]


def is_untracked(path: Path) -> bool:
    return any(
        part in UNTRACKED or part.endswith(".egg-info") or (part[0] == "." and part != ".ci")
        for part in path.parts
    )


def private_names(source: str) -> list[str]:
    """The private names of others that a file reads, imports or assigns; not those of `self` or a base class.

    Nor public ones with an underscore, and those of other packages: transformers, gguf, ray and logging.
    """
    public = {"_replace", "_asdict", "_fields", "_exit"}
    public |= {"_attn_implementation", "_keys_to_ignore_on_load_unexpected", "_build_fields"}
    public |= {"_gguf_parse_value", "_bound_deployment", "_clear_cache"}
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names.append(node.attr)
    return [name for name in names if re.match(r"_[^_]", name) and name not in public]


def secrets_in(content: bytes) -> list[bytes]:
    return [secret for pattern in SECRETS for secret in pattern.findall(content)]


@pytest.mark.parametrize(
    "module",
    [
        "speculon",
        "speculon.cli",
        "speculon.core.config",
        "speculon.decoding.text.tokenizer",
        "speculon.speculation.vllm",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    unwanted = {"torch", "transformers", "vllm"}
    code = f"import {module}, sys; sys.exit(', '.join({unwanted} & set(sys.modules)) or None)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_files_are_short() -> None:
    lengths = {
        path: path.read_text(encoding="utf-8").count("\n")
        for path in repository_files()
        if path.suffix == ".py"
    }
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES} == {}


def folder_lines(sources: dict[str, str]) -> dict[str, int]:
    lines: dict[str, int] = {}
    for path, source in sources.items():
        folder, _, below = path.partition("/")
        if below:
            lines[folder] = lines.get(folder, 0) + source.count("\n")
    return lines


def test_the_package_has_few_folders_and_none_is_large() -> None:
    lines = folder_lines(package_sources())
    assert len(lines) <= MAX_FOLDERS
    assert {folder: n for folder, n in lines.items() if n > MAX_FOLDER_LINES} == {}


def test_a_planted_large_folder_is_found() -> None:
    assert folder_lines({"a/b.py": "\n" * 4000, "a/c/d.py": "\n" * 501, "e.py": "\n"}) == {"a": 4501}


def function_lengths(source: str) -> list[tuple[str, int]]:
    """Name and number of lines of each function, decorators not counted."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


def too_long(sources: dict[str, str]) -> dict[str, int]:
    return {
        f"{file}: {name}": lines
        for file, source in sources.items()
        for name, lines in function_lengths(source)
        if lines > MAX_FUNCTION_LINES
    }


def package_sources() -> dict[str, str]:
    package = ROOT / "src" / "speculon"
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }


def test_functions_are_short() -> None:
    sources = package_sources()
    assert too_long(sources) == {}


def test_tests_read_few_private_names() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert sum(len(private_names(source)) for source in sources) <= MAX_PRIVATE_NAMES


def test_planted_private_names_are_found() -> None:
    planted = "from a import _b\nengine._c.d\nengine.e._f = 1\nself._g.h\nsuper()._i()\npoint._replace(x=1)"
    assert sorted(private_names(planted)) == ["_b", "_c", "_f"]


@pytest.mark.parametrize(("lines", "found"), [(60, {}), (61, {"planted.py: f": 61})])
def test_a_planted_long_function_is_found(lines: int, found: dict[str, int]) -> None:
    body = "\n".join("        pass" for _ in range(lines - 1))
    assert too_long({"planted.py": f"class A:\n    @staticmethod\n    def f():\n{body}\n"}) == found


def test_no_pickle_lies_about() -> None:
    for path in repository_files():
        with path.open("rb") as file:
            head = file.read(4)
        pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
        assert path.suffix not in PICKLES and not pickled and head != b"PK\x03\x04", path


def test_no_secret_lies_about() -> None:
    for path in repository_files():
        assert not secrets_in(path.read_bytes()), path


@pytest.mark.parametrize(
    "planted",
    [
        *("hf_" + "a1B2" * 9, "ghp_" + "x9" * 18, "sk-" + "a-B_" * 6, "xox" + "b-" + "a1" * 5),
        *("-----BEGIN " + "PRIVATE KEY", "AKIA" + "Q" * 16),
    ],
)
def test_a_planted_secret_is_found(planted: str) -> None:
    assert secrets_in(f"token = '{planted}'".encode()) == [planted.encode()]
    assert not secrets_in(f"task-{planted[:9]}".encode())


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in repository_files() if path.is_relative_to(folder))


def test_the_package_stays_small() -> None:
    drafters = bytes_in(ROOT / "src" / "speculon" / "drafters")
    assert drafters <= MAX_DRAFTER_BYTES and bytes_in(ROOT / "src") <= MAX_PACKAGE_BYTES + drafters
    assert bytes_in(ROOT / "tests" / "models") <= MAX_MODELS_BYTES


def test_one_version() -> None:
    import speculon

    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(speculon.__version__)}\]", log, re.MULTILINE)
