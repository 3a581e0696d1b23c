"""The demo corpus: Python's own standard library, split by a rule any machine can recompute.

Standard library only, no torch: the training recipe, the benchmark and the tests all read the corpus through
this module, so that "held out" and "the edit prompt" mean the same thing everywhere.
"""

import ast
import hashlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PER_MILLE = 30  # of the files are never trained on
MAX_FILE_BYTES = 500_000  # longer files are tables or generated code
SKIPPED_PARTS = frozenset(
    "site-packages dist-packages __pycache__ _bundled encodings pydoc_data encoded_modules data".split()
)
SKIPPED_PREFIXES = ("_sysconfigdata", "bad", "badsyntax_", "_pyrepl_data")
KEYWORD_LIKE = frozenset("self cls super None True False print match case type _".split())


def is_held_out(relative_path: str) -> bool:
    """Whether a file is in the validation split, by the sha256 of its path below the library root."""
    digest = hashlib.sha256(relative_path.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def stdlib_root() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(root: Path | None = None, held_out: bool | None = None) -> list[str]:
    """Sorted posix paths, relative to `root`, of the corpus files; `held_out` keeps one side of the split."""
    base = root or stdlib_root()
    names: list[str] = []
    for path in base.rglob("*.py"):
        relative = path.relative_to(base)
        if SKIPPED_PARTS.intersection(relative.parts) or relative.name.startswith(SKIPPED_PREFIXES):
            continue
        if relative.parts[0].startswith("config-") or not 0 < path.stat().st_size <= MAX_FILE_BYTES:
            continue
        name = relative.as_posix()
        if held_out is None or is_held_out(name) is held_out:
            names.append(name)
    return sorted(names)


def read_source(relative_path: str, root: Path | None = None) -> str | None:
    """The text of one corpus file with `\\n` line ends, or None where it is not UTF-8."""
    try:
        text = ((root or stdlib_root()) / relative_path).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "")


@dataclass(frozen=True)
class CorpusFunction:
    """One function of the corpus, moved to the left margin."""

    path: str
    name: str
    source: str  # without a trailing newline
    identifiers: tuple[str, ...]  # that may be renamed: its own, its parameters, its local variables; sorted


def bound_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    names = {node.name}
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
    return {name for name in names if name not in KEYWORD_LIKE and not name.startswith("__")}


def functions_in(source: str, path: str = "") -> Iterator[CorpusFunction]:
    """Functions and methods of a module that still parse when moved to the left margin, in source order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.split("\n")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(nodes, key=lambda item: item.lineno):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        identifiers = tuple(sorted(bound_names(node)))
        if identifiers and "```" not in text:
            yield CorpusFunction(path, node.name, text, identifiers)


def held_out_functions(root: Path | None = None) -> Iterator[CorpusFunction]:
    """The functions of the held-out files, in path and source order."""
    for path in stdlib_files(root, held_out=True):
        source = read_source(path, root)
        if source is not None:
            yield from functions_in(source, path)


def rename(source: str, old_name: str, new_name: str) -> str:
    """`source` with every whole word `old_name` replaced, in code, strings and comments alike."""
    return re.sub(rf"(?<!\w){re.escape(old_name)}(?!\w)", lambda _: new_name, source)


def edit_prompt(function_source: str, old_name: str, new_name: str) -> str:
    """The user message that asks for a function again with one name changed."""
    return f"Repeat this function with `{old_name}` renamed to `{new_name}`.\n\n{fenced(function_source)}"


def edit_answer(function_source: str, old_name: str, new_name: str) -> str:
    """The one right answer to `edit_prompt`."""
    return fenced(rename(function_source, old_name, new_name))


def fenced(source: str) -> str:
    """A function inside a Python code fence, as in prompts and answers."""
    return f"```python\n{source}\n```"


FIRST_WORDS = (
    "old new raw first last next total final local cached parsed active current shared inner outer left"
    " right base main fast safe known extra hidden open closed ready valid partial merged sorted unique"
    " visible primary"
).split()
SECOND_WORDS = (
    "value item count index name path key node entry buffer line word size result table record token"
    " field state level group order target source offset limit handle option reader writer parser cursor"
    " frame label score unit"
).split()


def draw_new_name(rng: random.Random, taken: str) -> str:
    """A plausible identifier that does not occur in the text `taken`."""
    while True:
        first, second = rng.choice(FIRST_WORDS), rng.choice(SECOND_WORDS)
        both = f"{first}_{second}"
        name = rng.choice((both, f"{second}_{first}", f"{first}{second}", f"{both}_{second[0]}"))
        if not re.search(rf"(?<!\w){name}(?!\w)", taken):
            return name
