"""Evaluates a finished drafter: the engine drafts and verifies with it after held-out prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from speculon.core.config import SamplingParams
from speculon.core.errors import EngineError
from speculon.core.telemetry import RequestStats
from speculon.engine.llm import LLM
from speculon.train.data import Document
from speculon.train.progress import Progress
from speculon.train.regenerate import cut_prompt, without_loop
from speculon.train.settings import TrainSettings

MOST = 8  # drafts of a round, at most


def evaluate(
    speculation: Mapping[str, Any], settings: TrainSettings, held: Seq[Document], progress: Progress
) -> dict[str, Any]:
    """Greedy decoding after held-out prompts, one at a time, up to the first loop, which is easy to draft."""
    progress.tell("evaluating on held-out prompts")
    drafts = min(MOST, speculation["num_speculative_tokens"])
    fixed = {**speculation, "policy": "fixed", "num_speculative_tokens": drafts}
    llm = LLM(settings.target, device=settings.device, speculation=fixed)
    room = min(settings.length, llm.engine.target.max_context) - settings.eval_tokens
    total = RequestStats()
    order = random.Random(settings.seed).sample(held, len(held))
    with progress.counting("evaluating", settings.eval_prompts, "prompts") as advance:
        for number in range(settings.eval_prompts):
            prompt = cut_prompt([order[number % len(order)]], settings.seed, number, room)
            length = first_loop(llm, prompt, settings.eval_tokens)
            if length:
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                total.add(llm.generate([prompt], params)[0].outputs[0].stats)
            advance(1)
    llm.close()
    account = total.speculation()
    if account is None:
        raise EngineError(f"no draft was made after held-out prompts: {dict(total.reasons)}")
    return {
        "prompts": settings.eval_prompts,
        "drafts_per_round": drafts,
        "emitted": account.emitted,
        "target_calls": account.target_calls,
        "tokens_per_target_call": round(account.tokens_per_target_call, 3),
        "acceptance_rate": round(account.acceptance_rate, 4),
        "acceptance_per_position": [round(share, 4) for share in account.per_position],
    }


def first_loop(llm: LLM, prompt: list[int], most: int) -> int:
    """Tokens that the target generates before its output loops."""
    output = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=most), speculation={"method": "off"}
    )[0]
    return len(without_loop(output.token_ids))
