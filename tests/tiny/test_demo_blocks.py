"""The block drafter of the demo model: its drafts are accepted."""

from __future__ import annotations

from itertools import islice

import pytest

from speculon import LLM
from speculon.measure.bench import workloads
from speculon.measure.bench.measure import loops

BLOCKS, FEWEST = "demo-dflash", 2.2


def tokens_per_call(llm: LLM) -> float:
    """Greedy, on files that neither target nor drafter saw; texts that loop are left out."""
    find, temperature = workloads.parse("code")
    found = islice(find(llm.tokenizer, workloads.Size(0, 64, llm.engine.max_context)), 12)
    cases = [workloads.at(temperature, case, i) for i, case in enumerate(found)]
    first = llm.generate([case.prompt for case in cases], [case.params for case in cases])
    tokens = calls = 0
    for case in (case for case, text in zip(cases, first, strict=True) if not loops(text.token_ids)):
        plain = llm.generate([case.prompt], case.params)[0]
        out = llm.generate([case.prompt], case.params, speculation={"method": "dflash"})[0]
        assert out.token_ids == plain.token_ids
        assert out.speculation is not None
        tokens, calls = tokens + out.speculation.emitted, calls + out.speculation.target_calls
    assert calls > 20, "too few texts that do not loop"
    return tokens / calls


@pytest.fixture
def llm() -> LLM:
    speculation = {
        "policy": "fixed",
        "method": "off",
        "draft": {"dflash": BLOCKS},
        "num_speculative_tokens": 7,
    }
    return LLM("demo", dtype="float32", device="cpu", prefix_cache=False, speculation=speculation)


@pytest.mark.soak
def test_its_drafts_are_accepted_on_files_it_never_saw(llm: LLM) -> None:
    assert tokens_per_call(llm) > FEWEST
