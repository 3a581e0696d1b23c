"""The compiled loop writes what the loop writes, with few rows and with many."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.measure.check.exact import Margin, judge
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.model.compiled import FEW, BetweenProgram, Program
from tests.tiny.kernels import where_invariant

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRAFTS: Any = {"draft_model": "demo-draft", "eagle3": "demo-eagle3", "dflash": "demo-dflash"}
PROMPTS = ["def add(a, b):", "import os\n\n\nclass Path:\n", "for i in range("]
LONG = "".join(f"def shift_{n}(value):\n    return value + {n}\n\n\n" for n in range(30))
# of the largest logit; 7e-7 and 0.006 were seen
LIMITS = {"float32": 1e-5, "bfloat16": 0.02}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_are_those_of_the_loop(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[bool] = set()
    call = Program.__call__

    def counted(self: Program, *inputs: Any) -> Any:
        rows.add(len(inputs[0]) <= FEW)
        return call(self, *inputs)

    monkeypatch.setattr(Program, "__call__", counted)
    settings: Any = {"max_num_seqs": 4, "dtype": dtype, "speculation": {"policy": "fixed", "draft": DRAFTS}}
    fast = LLM("demo", compile="now", **settings)
    fusion = fast.engine.runtime.target.runner
    assert fusion.one_loop
    if fusion.form != "compiled":  # headers of Python, for one, may be missing where a compiler is not
        pytest.skip(str(fusion))
    if dtype == "bfloat16" and not fast.engine.runtime.target.batch_invariant:
        pytest.skip(fast.engine.runtime.target.invariance)
    plain = LLM("demo", **settings) if dtype == "float32" else fast
    greedy = SamplingParams(temperature=0, max_tokens=64)
    expected: dict[int, list[list[int]]] = {}
    lookup: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 8}
    rows.clear()
    for speculation in ({"method": "off"}, lookup, *({"method": method} for method in DRAFTS)):
        for prompts in (PROMPTS, PROMPTS[:1], [*PROMPTS, LONG]):
            mine = fast.generate(prompts, greedy, speculation=speculation)
            if len(prompts) not in expected:
                others = plain.generate(prompts, greedy, speculation={"method": "off"})
                expected[len(prompts)] = [output.token_ids for output in others]
            texts = [output.token_ids for output in mine]
            differ = [*judge(fast, [*map(fast.tokenizer.encode, prompts)], expected[len(prompts)], texts)]
            near = Margin([], half=False, invariant=fast.engine.runtime.target.batch_invariant).limit
            wrong = [one for one in differ if one.regret is None or one.regret >= near]
            assert not wrong, (speculation, wrong)
            drafted = [output.speculation.drafted for output in mine]
            assert speculation["method"] == "off" or sum(drafted) > 0, speculation
    assert rows == {True, False}, "programs for few rows and for many"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_in_one_program_between_attentions(dtype: str) -> None:
    speculation: Any = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 8}
    settings: Any = {"quantization": "int4", "dtype": dtype, "max_num_seqs": 4}
    settings |= {"warmup": False, "batch_invariant": True, "speculation": speculation}
    with where_invariant():
        llm = LLM("demo-draft", compile="now", **settings)
    target: Any = llm.engine.runtime.target
    if target.runner.form != "compiled":
        pytest.skip(str(target.runner))
    between = target.runner.run.between
    assert target.batch_invariant and between and all(isinstance(run, BetweenProgram) for run in between)
    plain = LLM("demo-draft", **settings)
    expected = paged_logits(plain.engine.runtime.target)
    assert difference(paged_logits(target), expected) <= LIMITS[dtype]
    params = SamplingParams(temperature=0, max_tokens=48)
    alone = [llm.generate(prompt, params, speculation={"method": "off"})[0].token_ids for prompt in PROMPTS]
    drafted = llm.generate([*PROMPTS, LONG], params)  # prompts of many rows beside drafts
    assert [out.token_ids for out in drafted[:-1]] == alone
    assert sum(out.speculation.drafted for out in drafted) > 0
