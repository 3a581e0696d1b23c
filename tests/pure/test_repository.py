"""Properties of the repository: light imports, declared dependencies, and nothing in it that is unwanted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz"}
# Each begins with a literal, because files of weights are searched, too.
SECRETS = [
    rb"AKIA[0-9A-Z]{16}",
    rb"hf_(?<=\bhf_)[A-Za-z0-9]{30,}",
    rb"gh(?<=\bgh)[pousr]_[A-Za-z0-9]{30,}",
    rb"sk-(?<=\bsk-)[A-Za-z0-9_-]{24,}",
    rb"xox[abpr]-[\w-]{10,}",
    rb"-----BEGIN [A-Z ]*PRIVATE KEY",
]
# Folders of one machine, and the index from which it takes packages.
PLACES = [rb"/(?<![\w.~-]/)(?:home|root|Users|work)/\w+", rb"https?://[^\s\"'<>]+/simple\b"]
UNWANTED = [re.compile(pattern) for pattern in (*SECRETS, *PLACES)]
# What must start quickly, what plans without tensors, and the server's process, which has no model.
WITHOUT_TORCH = """
speculon speculon.cli speculon.core.config speculon.decoding.text.tokenizer speculon.runtimes.torch.kv.blocks
speculon.checkpoints.headers speculon.speculation.control.policies speculon.speculation.proposers.compose
speculon.speculation.vllm speculon.runtimes.torch.drafters.choose speculon.runtimes.torch.backend
speculon.engine.scheduler speculon.engine.async_engine
speculon.server.app speculon.server.pool.pool speculon.operations.admin.service speculon.operations.cluster
""".split()


def repository_files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    unpacked = [path for path in ROOT.rglob("*") if path.is_file()]  # an archive, without its history
    return [path for path in unpacked if not is_built(path.relative_to(ROOT))]


def is_built(path: Path) -> bool:
    return any(part in ("build", "dist", "__pycache__") or part.startswith(".") for part in path.parts)


def unwanted_in(content: bytes) -> list[bytes]:
    return [found for pattern in UNWANTED for found in pattern.findall(content)]


def test_no_secret_and_no_place_of_one_machine_lies_about() -> None:
    found = {str(path): unwanted_in(path.read_bytes()) for path in repository_files()}
    assert {path: some for path, some in found.items() if some} == {}


@pytest.mark.parametrize(
    "planted",
    [
        *("hf_" + "a1B2" * 9, "ghp_" + "x9" * 18, "sk-" + "a-B_" * 6, "xox" + "b-" + "a1" * 5),
        *("-----BEGIN " + "PRIVATE KEY", "AKIA" + "Q" * 16),
        *("/ho" + "me/somebody", "/wo" + "rk/main", "https://index.example.org/" + "simple"),
    ],
)
def test_what_is_planted_is_found(planted: str) -> None:
    assert unwanted_in(f"token = '{planted}'".encode()) == [planted.encode()]
    assert not unwanted_in(f"task-{planted[:9]} src/home/page ../work/x".encode())


def test_no_pickle_lies_about() -> None:
    for path in repository_files():
        with path.open("rb") as file:
            head = file.read(4)
        pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
        assert path.suffix not in PICKLES and not pickled and head != b"PK\x03\x04", path


def loaded_by(*modules: str) -> set[str]:
    """The heavy packages that importing these modules brings into a process."""
    heavy = {"torch", "transformers", "vllm", "ray"}
    code = f"import {', '.join(modules)}, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.split())


def test_what_must_start_quickly_does_not_import_torch() -> None:
    assert loaded_by(*WITHOUT_TORCH) == set()


def test_a_module_that_imports_torch_is_seen() -> None:
    assert "torch" in loaded_by("speculon", "speculon.decoding.sampling")


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        project["optional-dependencies"][extra] for extra in ("bench", "admin", "ray", "images", "llama")
    ]
    lines = sum(extras, project["dependencies"])
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_").replace("pillow", "PIL") for line in lines}
    declared |= {"llama_cpp"} & {name.removesuffix("_python") for name in declared}
    graph = grimp.build_graph(
        "speculon", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    used = {name for name in graph.modules if graph.is_module_squashed(name)}
    assert "torch" in used and used - sys.stdlib_module_names - declared == set()


def patches_in(source: str) -> list[str]:
    """What assigns to an attribute, or an entry, of what is imported from a library that others use, too."""
    tree, theirs = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(name.asname or name.name.split(".")[0], name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(name.asname or name.name, node.module or "") for name in node.names]
        else:
            continue
        theirs |= {name for name, module in modules if module.split(".")[0] in ("transformers", "gguf")}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target: ast.AST = node.args[0]
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node
        else:
            continue
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target.id in theirs:
            found.append(ast.unparse(node))
    return found


def test_no_library_is_patched() -> None:
    sources = [path for path in repository_files() if "src" in path.parts and path.suffix == ".py"]
    found = {str(path): patches_in(path.read_text(encoding="utf-8")) for path in sources}
    assert len(sources) > 100 and {path: some for path, some in found.items() if some} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import gguf\ngguf.GGUFReader = Reader",
        "import transformers.modeling_gguf_pytorch_utils as reader\nreader.tqdm = quiet",
        "import transformers\ntransformers.utils.logging.tqdm = quiet",
        "from transformers.utils import logging\nlogging.tqdm, other = quiet, 1",
        "from transformers import AutoConfig\nsetattr(AutoConfig, name, value)",
        "from gguf import constants\ndel constants.Keys.LLM",
        "from transformers.activations import ACT2FN\ndef add():\n    ACT2FN['own'] = own",
    ],
)
def test_a_planted_patch_is_found(planted: str) -> None:
    assert len(patches_in(planted)) == 1
    assert patches_in("import torch, gguf\nself.reader = gguf.dequantize(x)\ntorch.odd = gguf.odd") == []


def test_one_version() -> None:
    import speculon

    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(speculon.__version__)}\]", log, re.MULTILINE)
