"""What vLLM calls of a custom proposer, read from the installed vLLM: it may change with each release."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.metadata import packages_distributions, requires, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from speculon.speculation.vllm import Proposer
from tests.documents import ROOT

spec = find_spec("vllm")
pytestmark = pytest.mark.skipif(spec is None, reason="vLLM is not installed: make vllm-test")
INSTALLED = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()

PAGE = ROOT / "docs/vllm.md"
RUNNER = "v1/worker/gpu_model_runner.py"
WRITTEN_FOR = {
    "sampled_token_ids": "sampled_token_ids",
    "num_tokens_no_spec": "self.input_batch.num_tokens_no_spec",
    "token_ids_cpu": "self.input_batch.token_ids_cpu",
    "slot_mappings": "slot_mappings",
}
# source file -> what the plug-in relies on there, as it is written, and what that is
RELIED_ON = {
    "v1/spec_decode/custom_class_proposer.py": {"user_class(vllm_config)": "the class gets the VllmConfig"},
    "v1/worker/cpu_model_runner.py": {"self.drafter.load_model(self.model)": "load_model gets the model"},
    "v1/executor/multiproc_executor.py": {
        "unique_reply_rank=self.output_rank": "drafts are taken from one rank",
        "self.world_size - self.parallel_config.tensor_parallel_size": "that is the first of the last stage",
    },
    "config/speculative.py": {"'custom_class'": "there is a method custom_class"},
    "config/parallel.py": {
        "rank: int": "the rank",
        "tensor_parallel_size: int": "the number of tensor-parallel ranks",
        "pipeline_parallel_size: int": "the number of pipeline stages",
        "distributed_executor_backend:": "who starts the ranks",
    },
    "config/scheduler.py": {"max_num_batched_tokens: int": "the rows of a step"},
    "config/model.py": {
        "max_model_len: int": "the longest text",
        "def get_vocab_size(self": "the size of the vocabulary",
        "hf_text_config": "the model's own settings",
    },
}


def source(file: str) -> str:
    """As `ast` writes it, without comments: line breaks do not count."""
    return ast.unparse(ast.parse((INSTALLED / file).read_text(encoding="utf-8")))


def fault(runner: str) -> str | None:
    """What is wrong with the runner's call of `propose`, in words."""
    calls = [
        node
        for branch in ast.walk(ast.parse(runner))
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "spec_config.method == 'custom_class'"
        for statement in branch.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".propose")
    ]
    if len(calls) != 1:
        return f"vLLM's runner calls propose {len(calls)} times for method custom_class, not once"
    given = [*map(ast.unparse, calls[0].args)]
    named = {str(keyword.arg): ast.unparse(keyword.value) for keyword in calls[0].keywords}
    try:
        bound = inspect.signature(Proposer.propose).bind("self", *given, **named).arguments
    except TypeError as error:
        return f"vLLM calls propose({ast.unparse(calls[0]).partition('propose(')[2]}: {error}"
    for name, expression in WRITTEN_FOR.items():
        if bound.get(name) != expression:
            return f"vLLM gives {bound.get(name)} as {name} of propose; it was {expression}"
    return None


def test_propose_is_called_as_it_was_written_for() -> None:
    assert fault(source(RUNNER)) is None


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("propose(sampled_token_ids, self", "propose(self", "vLLM gives .* as num_tokens_no_spec|missing"),
        ("token_ids_cpu, slot_mappings=", "token_ids_cpu, request_ids=", "unexpected keyword .*request_ids"),
        (
            "self.input_batch.token_ids_cpu, slot",
            "self.token_ids, slot",
            "gives self.token_ids as token_ids_cpu",
        ),
        ("== 'custom_class'", "== 'custom'", "calls propose 0 times"),
    ],
)
def test_a_planted_change_is_told_in_words(before: str, after: str, complaint: str) -> None:
    text = source(RUNNER)
    place = text.index("custom_class", text.index("def propose_draft_token_ids")) - 40
    changed = text[:place] + text[place:].replace(before, after, 1)
    assert changed != text
    assert re.search(complaint, fault(changed) or "")


@pytest.mark.parametrize("file", RELIED_ON)
def test_what_the_plugin_relies_on_is_there(file: str) -> None:
    text = source(file)
    missing = [what for piece, what in RELIED_ON[file].items() if piece not in text]
    assert not missing, f"{' '.join(installed())} has changed {file}: {'; '.join(missing)}"


def test_this_version_is_in_the_table() -> None:
    name, number = installed()
    tested = re.findall(r"^\| `(vllm[\w-]*)` ([\d.]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert (name, number) in tested, f"{name} {number} is not in the table of docs/vllm.md"


def go_together(*lists: list[str]) -> bool:
    """Whether one version of transformers satisfies all these lists of requirements."""
    both = SpecifierSet()
    for one in map(Requirement, chain(*lists)):
        both &= one.specifier if one.name == "transformers" else SpecifierSet()
    return any(end.version in both for end in both)  # a lower bound does where any version does


def test_pip_cannot_resolve_an_extra() -> None:
    """Where this fails, speculon may have an extra `vllm`, and docs/vllm.md has to say so."""
    assert not go_together(requires("speculon") or [], requires(installed()[0]) or [])


def test_requirements_that_go_together_are_found() -> None:
    assert go_together(["transformers>=5.23,<6", "torch"], ["transformers<5.30,>=5.16.1"])


def installed() -> tuple[str, str]:
    """Name and version of the distribution that has vLLM."""
    name = packages_distributions()["vllm"][0]
    return name, version(name)
