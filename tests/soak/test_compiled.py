"""The compiled loop, with the real compiler, writes what the loop writes, with few rows and with many.

In fp32: tests/soak/test_background.py compiles in bf16, where programs have the bits of the loop.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.model.compiled import FEW, BetweenProgram, Program
from tests.tiny.kernels import where_invariant

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
PROMPTS = ["def add(a, b):", "import os\n\n\nclass Path:\n", "for i in range("]
LONG = "".join(f"def shift_{n}(value):\n    return value + {n}\n\n\n" for n in range(30))
LIMIT = 1e-5  # of the largest logit; 7e-7 was seen


def test_outputs_are_those_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program between attentions, and programs of operations around it: alone, together, with drafts, and
    beside a prompt of many rows.
    """
    rows: set[bool] = set()
    call = Program.__call__

    def counted(self: Program, *inputs: Any) -> Any:
        rows.add(len(inputs[0]) <= FEW)
        return call(self, *inputs)

    monkeypatch.setattr(Program, "__call__", counted)
    speculation: Any = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 8}
    settings: Any = {"quantization": "int4", "dtype": "float32", "max_num_seqs": 4}
    settings |= {"warmup": False, "batch_invariant": True, "speculation": speculation}
    with where_invariant():
        fast = LLM("demo-draft", compile="now", **settings)
    target: Any = fast.engine.runtime.target
    if target.runner.form != "compiled":  # headers of Python, for one, may be missing where a compiler is not
        pytest.skip(str(target.runner))
    between = target.runner.run.between
    assert target.batch_invariant and between and all(isinstance(run, BetweenProgram) for run in between)
    plain = LLM("demo-draft", compile="off", **settings)
    expected = paged_logits(plain.engine.runtime.target)
    assert difference(paged_logits(target), expected) <= LIMIT

    greedy = SamplingParams(temperature=0, max_tokens=64)
    alone = [fast.generate(prompt, greedy, speculation={"method": "off"})[0].token_ids for prompt in PROMPTS]
    rows.clear()
    drafted = fast.generate([*PROMPTS, LONG], greedy)
    assert [out.token_ids for out in drafted[:-1]] == alone
    assert sum(out.speculation.drafted for out in drafted) > 0
    assert rows == {True, False}, "programs for few rows and for many"
