"""Answers written anew by the target: a drafter should learn what its target says, not what others wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq

from speculon.config import SamplingParams
from speculon.llm import LLM
from speculon.train.data import Document
from speculon.train.progress import Progress
from speculon.train.record import whole_lines
from speculon.train.settings import SHORTEST, TrainSettings

CROWD = 32  # texts at once, and between two writes to the file
GRAM = 16  # tokens that, said twice, show that an answer runs in circles
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


def regenerate(settings: TrainSettings, documents: list[Document], progress: Progress) -> list[Document]:
    """What the target writes after each prompt, or after a beginning of a plain text; kept in the work
    folder, so done once.
    """
    file = settings.folder / "regenerated.jsonl"
    done = [json.loads(line) for line in whole_lines(file)]
    if len(done) < settings.regenerate:
        progress.tell("loading the target, to write")
        llm = LLM(
            settings.target,
            device=settings.device,
            max_num_seqs=CROWD,
            speculation={"method": "auto", "policy": "goodput"},
        )
        room = min(settings.length, llm.engine.target.max_context) - settings.regenerate_tokens
        with (
            progress.counting("writing texts", settings.regenerate, "texts") as advance,
            file.open("a", encoding="utf-8") as out,
        ):
            advance(len(done))
            for first in range(len(done), settings.regenerate, CROWD):
                numbers = range(first, min(first + CROWD, settings.regenerate))
                prompts = [beginning(documents, settings.seed, number, room) for number in numbers]
                params = [how(settings, number) for number in numbers]
                for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                    done.append({"tokens": [*prompt, *output.token_ids], "prompt_tokens": len(prompt)})
                    out.write(json.dumps(done[-1]) + "\n")
                out.flush()
                advance(len(numbers))
        llm.close()
    return [written(record["tokens"], record["prompt_tokens"]) for record in done[: settings.regenerate]]


def beginning(documents: Seq[Document], seed: int, number: int, room: int) -> list[int]:
    """The prompt of one of the documents, or a piece of it where it is a plain text; at most `room` tokens."""
    rng = random.Random(f"{seed}:beginning:{number}")
    document = documents[rng.randrange(len(documents))]
    if document.prompt:
        return list(document.ids[: document.prompt][-room:])
    length = min(room, len(document.ids), rng.randint(SHORTEST, max(SHORTEST, room)))
    start = rng.randrange(len(document.ids) - length + 1)
    return list(document.ids[start : start + length])


def how(settings: TrainSettings, number: int) -> SamplingParams:
    rng = random.Random(f"{settings.seed}:how:{number}")
    return SamplingParams(
        temperature=rng.choice(TEMPERATURES), max_tokens=settings.regenerate_tokens, seed=rng.randrange(2**32)
    )


def written(ids: list[int], prompt: int) -> Document:
    answer = unlooped(ids[prompt:])
    return Document((*ids[:prompt], *answer), (False,) * prompt + (True,) * len(answer), prompt)


def unlooped(ids: list[int]) -> list[int]:
    """The text before it says a run of GRAM tokens for the second time."""
    seen: set[tuple[int, ...]] = set()
    for end in range(GRAM, len(ids) + 1):
        gram = tuple(ids[end - GRAM : end])
        if gram in seen:
            return ids[: end - GRAM]
        seen.add(gram)
    return ids
