"""The target's answers to prompts: those that a drafter learns, and those on which it is evaluated."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from speculon.core.config import SamplingParams
from speculon.core.errors import EngineError
from speculon.core.telemetry import RequestStats
from speculon.core.types import reasons_in_words
from speculon.engine.llm import LLM
from speculon.train.data import Document
from speculon.train.record import TrainingProgress, whole_lines
from speculon.train.settings import SHORTEST, TrainSettings

BATCH = 32  # requests at once, and between two writes to the file
GRAM = 16  # tokens whose repetition shows that an answer loops
MAX_DRAFTS = 8  # of a round that is evaluated
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


def regenerate(
    settings: TrainSettings, documents: list[Document], progress: TrainingProgress
) -> list[Document]:
    """The target's answers to prompts, or to pieces of plain texts. They are kept in the work folder."""
    file = settings.folder / "regenerated.jsonl"
    done = [json.loads(line) for line in whole_lines(file)]
    if len(done) < settings.regenerate:
        progress.tell("loading the target to regenerate answers")
        llm = LLM(
            settings.target,
            device=settings.device,
            max_num_seqs=BATCH,
            speculation={"method": "auto", "policy": "goodput"},
        )
        room = min(settings.length, llm.engine.max_context) - settings.regenerate_tokens
        with (
            progress.counting("regenerating", settings.regenerate, "answers") as advance,
            file.open("a", encoding="utf-8") as out,
        ):
            advance(len(done))
            for first in range(len(done), settings.regenerate, BATCH):
                numbers = range(first, min(first + BATCH, settings.regenerate))
                prompts = [cut_prompt(documents, settings.seed, number, room) for number in numbers]
                params = [sampling_of(settings, number) for number in numbers]
                for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                    done.append({"tokens": [*prompt, *output.token_ids], "prompt_tokens": len(prompt)})
                    out.write(json.dumps(done[-1]) + "\n")
                out.flush()
                advance(len(numbers))
        llm.close()
    records = [(record["tokens"], record["prompt_tokens"]) for record in done[: settings.regenerate]]
    return [Document.of(ids[:prompt], without_loop(ids[prompt:])) for ids, prompt in records]


def cut_prompt(documents: Sequence[Document], seed: int, number: int, room: int) -> list[int]:
    """The prompt of a random document, or a piece of a plain text; at most `room` tokens."""
    rng = random.Random(f"{seed}:beginning:{number}")
    source = documents[rng.randrange(len(documents))]
    if source.prompt:
        return list(source.ids[: source.prompt][-room:])
    length = min(room, len(source.ids), rng.randint(SHORTEST, max(SHORTEST, room)))
    start = rng.randrange(len(source.ids) - length + 1)
    return list(source.ids[start : start + length])


def sampling_of(settings: TrainSettings, number: int) -> SamplingParams:
    rng = random.Random(f"{settings.seed}:how:{number}")
    return SamplingParams(
        temperature=rng.choice(TEMPERATURES), max_tokens=settings.regenerate_tokens, seed=rng.randrange(2**32)
    )


def without_loop(ids: list[int]) -> list[int]:
    """The tokens before the first run of GRAM tokens that occurred before."""
    seen: set[tuple[int, ...]] = set()
    for end in range(GRAM, len(ids) + 1):
        gram = tuple(ids[end - GRAM : end])
        if gram in seen:
            return ids[: end - GRAM]
        seen.add(gram)
    return ids


def evaluate(
    speculation: Mapping[str, Any],
    settings: TrainSettings,
    held: Sequence[Document],
    progress: TrainingProgress,
) -> dict[str, Any]:
    """Greedy decoding after held-out prompts, one at a time, up to the first loop, which is easy to draft."""
    progress.tell("evaluating on held-out prompts")
    drafts = min(MAX_DRAFTS, speculation["num_speculative_tokens"])
    fixed = {**speculation, "policy": "fixed", "num_speculative_tokens": drafts}
    llm = LLM(settings.target, device=settings.device, speculation=fixed)
    room = min(settings.length, llm.engine.max_context) - settings.eval_tokens
    total = RequestStats()
    order = random.Random(settings.seed).sample(held, len(held))
    with progress.counting("evaluating", settings.eval_prompts, "prompts") as advance:
        for number in range(settings.eval_prompts):
            prompt = cut_prompt([order[number % len(order)]], settings.seed, number, room)
            params = SamplingParams(temperature=0, max_tokens=settings.eval_tokens)
            plain = llm.generate([prompt], params, speculation={"method": "off"})[0]
            if length := len(without_loop(plain.token_ids)):
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                total.add(llm.generate([prompt], params)[0].outputs[0].stats)
            advance(1)
    llm.close()
    account = total.speculation()
    if not account.rounds:
        raise EngineError(f"no draft was made after the held-out prompts: {reasons_in_words(total.reasons)}")
    return {
        "prompts": settings.eval_prompts,
        "drafts_per_round": drafts,
        "emitted": account.emitted,
        "target_calls": account.target_calls,
        "tokens_per_target_call": round(account.tokens_per_target_call, 3),
        "acceptance_rate": round(account.acceptance_rate, 4),
        "acceptance_per_position": [round(share, 4) for share in account.per_position],
    }
