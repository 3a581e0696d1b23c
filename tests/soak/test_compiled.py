"""The compiled loop writes what the loop writes, with few rows and with many, by each of its programs."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from speculon import LLM, SamplingParams
from speculon.target import linear
from speculon.target.compiled import Programs
from speculon.target.compiled_layers import Program
from speculon.target.linear import Layout, Linear, packed

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRAFTS: Any = {"draft_model": "demo-draft", "eagle3": "demo-eagle3", "dflash": "demo-dflash"}
HEADS: Any = {"eagle3": "demo-eagle3", "dflash": "demo-dflash"}
PROMPTS = ["def add(a, b):", "import os\n\n\nclass Path:\n", "for i in range("]
# too long to share a call with those
LONG = "".join(f"def shift_{n}(value):\n    return value + {n}\n\n\n" for n in range(30))


@pytest.mark.parametrize(("layout", "drafts"), [(Linear, HEADS), (packed, DRAFTS)])
def test_outputs_are_those_of_the_loop(
    layout: Layout, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    plain, fast = (
        LLM("demo", compile=compile, max_num_seqs=4, speculation={"policy": "fixed", "draft": drafts})
        for compile in (False, True)
    )
    fusion = fast.engine.target.runner
    assert fusion.one_loop
    if fusion.form != "compiled":  # headers of Python, for one, may be missing where a compiler is not
        pytest.skip(str(fusion))
    assert fast.engine.target.taps is not None, "every step is tapped"
    runs, calls = {"target": fast.engine.target.runner.run}, Counter[str]()
    for method in drafts:
        drafter: Any = fast.engine.proposers.find(method)
        runs[method] = drafter.model.runner.run if method == "draft_model" else drafter.runner.run
    for of, run in runs.items():
        assert isinstance(run, Programs), of
        for name, program in list(run.programs.items()):
            run.programs[name] = partial(counted, calls, f"{of}: {name}", program)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    lookup: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 8}
    for speculation in ({"method": "off"}, lookup, *({"method": method} for method in drafts)):
        for prompts in (PROMPTS, PROMPTS[:1], [*PROMPTS, LONG]):
            mine, theirs = (llm.generate(prompts, greedy, speculation=speculation) for llm in (fast, plain))
            assert [o.token_ids for o in mine] == [o.token_ids for o in theirs], speculation
            drafted = [output.speculation.drafted for output in mine if output.speculation is not None]
            assert speculation["method"] == "off" or sum(drafted) > 0, speculation
    run = runs["target"]
    assert isinstance(run, Programs)
    assert min(calls[f"target: {name}"] for name in run.programs) > 20, calls
    assert "draft_model" not in runs or calls["draft_model: one"] > 20, calls
    # a drafter is called once in a round, and the more it is accepted, the fewer rounds there are: 15 and 20
    # calls of "few" were seen, which another drafter or layout changes
    assert min(calls[name] for name in ("eagle3: one", "eagle3: few", "eagle3: joint", "dflash: few")) > 0, (
        calls
    )


def counted(calls: Counter[str], name: str, program: Program, *given: Any) -> list[Tensor]:
    calls[name] += 1
    return program(*given)
