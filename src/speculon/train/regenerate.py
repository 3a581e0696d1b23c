"""Regenerated answers: a drafter should learn the target's own tokens, not those of other authors."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq

from speculon.core.config import SamplingParams
from speculon.engine.llm import LLM
from speculon.train.data import Document
from speculon.train.progress import Progress
from speculon.train.record import whole_lines
from speculon.train.settings import SHORTEST, TrainSettings

BATCH = 32  # requests at once, and between two writes to the file
GRAM = 16  # tokens whose repetition shows that an answer loops
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


def regenerate(settings: TrainSettings, documents: list[Document], progress: Progress) -> list[Document]:
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
        room = min(settings.length, llm.engine.target.max_context) - settings.regenerate_tokens
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
    return [document_of(record["tokens"], record["prompt_tokens"]) for record in done[: settings.regenerate]]


def cut_prompt(documents: Seq[Document], seed: int, number: int, room: int) -> list[int]:
    """The prompt of a random document, or a piece of a plain text; at most `room` tokens."""
    rng = random.Random(f"{seed}:beginning:{number}")
    document = documents[rng.randrange(len(documents))]
    if document.prompt:
        return list(document.ids[: document.prompt][-room:])
    length = min(room, len(document.ids), rng.randint(SHORTEST, max(SHORTEST, room)))
    start = rng.randrange(len(document.ids) - length + 1)
    return list(document.ids[start : start + length])


def sampling_of(settings: TrainSettings, number: int) -> SamplingParams:
    rng = random.Random(f"{settings.seed}:how:{number}")
    return SamplingParams(
        temperature=rng.choice(TEMPERATURES), max_tokens=settings.regenerate_tokens, seed=rng.randrange(2**32)
    )


def document_of(ids: list[int], prompt: int) -> Document:
    answer = without_loop(ids[prompt:])
    return Document((*ids[:prompt], *answer), (False,) * prompt + (True,) * len(answer), prompt)


def without_loop(ids: list[int]) -> list[int]:
    """The tokens before the first run of GRAM tokens that occurred before."""
    seen: set[tuple[int, ...]] = set()
    for end in range(GRAM, len(ids) + 1):
        gram = tuple(ids[end - GRAM : end])
        if gram in seen:
            return ids[: end - GRAM]
        seen.add(gram)
    return ids
