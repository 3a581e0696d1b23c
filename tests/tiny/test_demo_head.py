"""The drafters of the demo model: their drafts are accepted, and are not if the head is misread."""

from __future__ import annotations

from itertools import islice

import pytest

from speculon import LLM
from speculon.checkpoints.locate import locate
from speculon.measure.bench import corpus, workloads
from speculon.measure.bench.measure import loops
from speculon.runtimes.torch.drafters.config import TargetShape, check_pair
from speculon.runtimes.torch.drafters.eagle3.network import Eagle3Network, agreement
from speculon.runtimes.torch.drafters.families import read_eagle3_config
from speculon.runtimes.torch.drafters.layers import load_network
from speculon.runtimes.torch.drafters.runner import estimate_needs
from speculon.runtimes.torch.loading.load import load_target

HEAD, BLOCKS = "demo-eagle3", "demo-dflash"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "demo",
        dtype="float32",
        device="cpu",
        prefix_cache=False,
        speculation={"policy": "fixed", "method": "off", "draft": {"eagle3": HEAD, "dflash": BLOCKS}},
    )


@pytest.mark.soak
@pytest.mark.parametrize(("method", "k"), [("eagle3", 4), ("dflash", 7)])
def test_it_brings_more_than_two_tokens_a_call_on_files_it_never_saw(llm: LLM, method: str, k: int) -> None:
    """Greedy; texts that loop are left out."""
    find, temperature = workloads.parse("code")
    found = islice(find(llm.tokenizer, workloads.Size(0, 64, llm.engine.max_context)), 12)
    cases = [workloads.at(temperature, case, i) for i, case in enumerate(found)]
    first = llm.generate([case.prompt for case in cases], [case.params for case in cases])
    tokens = calls = 0
    for case in (case for case, text in zip(cases, first, strict=True) if not loops(text.token_ids)):
        plain = llm.generate([case.prompt], case.params)[0]
        speculation = {"method": method, "num_speculative_tokens": k}
        out = llm.generate([case.prompt], case.params, speculation=speculation)[0]
        assert out.token_ids == plain.token_ids
        tokens, calls = tokens + out.speculation.emitted, calls + out.speculation.target_calls
    assert calls > 20, "too few texts that do not run in circles"
    assert tokens / calls > 2.2


def test_taps_in_the_wrong_order_are_seen(llm: LLM) -> None:
    """Single layers of this deep target are much alike; `test_eagle3` shows that each of them is the right
    one.
    """
    target = load_target("demo", dtype="float32", device="cpu")
    config = read_eagle3_config(locate(HEAD))
    own = config.tap_layouts(len(target.layers))[0]
    assert own == (1, 9, 16)
    assert not check_pair(config, TargetShape(256, target.vocab_size, len(target.layers), "Qwen3ForCausalLM"))
    head = load_network(Eagle3Network, config, target)
    layers = estimate_needs(config, own, target, 1, 1, False).layers[1:]
    ids = llm.tokenizer.encode(corpus.read_source(corpus.stdlib_files(held_out=True)[3]) or "")[:300]
    right, wrong = (agreement(head, target, layers, taps, ids) for taps in (own, own[::-1]))
    assert right > 0.5
    assert wrong < right - 0.1
