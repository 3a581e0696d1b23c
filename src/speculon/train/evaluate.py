"""What a finished drafter is worth: drafted and verified by the engine itself, on texts it has not seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from speculon.config import SamplingParams
from speculon.errors import EngineError
from speculon.llm import LLM
from speculon.telemetry import RequestStats
from speculon.train.data import Document
from speculon.train.progress import Progress
from speculon.train.regenerate import beginning, unlooped
from speculon.train.settings import TrainSettings

MOST = 8  # drafts of a round, at most


def evaluate(
    speculation: Mapping[str, Any], settings: TrainSettings, held: Seq[Document], progress: Progress
) -> dict[str, Any]:
    """Greedy texts after held-out prompts, one at a time, each up to where it begins to repeat itself: loops
    are easy.
    """
    progress.tell("drafting on held-out texts")
    asked = {
        **speculation,
        "policy": "fixed",
        "num_speculative_tokens": min(MOST, speculation["num_speculative_tokens"]),
    }
    llm = LLM(settings.target, device=settings.device, speculation=asked)
    room = min(settings.length, llm.engine.target.max_context) - settings.eval_tokens
    total = RequestStats()
    order = random.Random(settings.seed).sample(held, len(held))
    with progress.counting("drafting", settings.eval_prompts, "texts") as advance:
        for number in range(settings.eval_prompts):
            prompt = beginning([order[number % len(order)]], settings.seed, number, room)
            length = first_loop(llm, prompt, settings.eval_tokens)
            if length:
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                total.add(llm.generate([prompt], params)[0].outputs[0].stats)
            advance(1)
    llm.close()
    done = total.speculation()
    if done is None:
        raise EngineError(f"no draft was made on held-out texts: {dict(total.reasons)}")
    return {
        "prompts": settings.eval_prompts,
        "drafts_per_round": asked["num_speculative_tokens"],
        "emitted": done.emitted,
        "target_calls": done.target_calls,
        "tokens_per_target_call": round(done.tokens_per_target_call, 3),
        "acceptance_rate": round(done.acceptance_rate, 4),
        "acceptance_per_position": [round(share, 4) for share in done.per_position],
    }


def first_loop(llm: LLM, prompt: list[int], most: int) -> int:
    """Tokens that the target writes before it begins to repeat itself."""
    written = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=most), speculation={"method": "off"}
    )[0]
    return len(unlooped(written.token_ids))
