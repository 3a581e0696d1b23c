"""The target's outputs after beginnings of files: to train a draft model on, and to measure it."""

import argparse
import json
import random
from collections.abc import Sequence

from data import Corpus, write_atomically
from report import Report
from tokenizer import chat_prompt

from speculon import LLM, SamplingParams
from speculon.measure.bench import corpus

PROMPT, OUTPUT, GRAM = 256, 160, 16  # tokens; OUTPUT is the default of --text-tokens
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # one is drawn for each text
BATCH = 48


def write_texts(args: argparse.Namespace, data: Corpus, report: Report) -> None:
    """texts.json: prompt length and ids of what the target wrote after training files, and after held-out
    ones.
    """
    path = args.work / "texts.json"
    if path.exists():
        return
    llm = LLM(str(args.target), dtype="float32", max_num_seqs=BATCH, prefix_cache=False, warmup=False)
    rng = random.Random(args.seed)
    names = corpus.stdlib_files(args.stdlib, held_out=True)
    held = [llm.tokenizer.encode(text) for name in names if (text := corpus.read_source(name, args.stdlib))]
    made = {
        "written": write_after(
            llm,
            [beginning(rng, data) for _ in range(args.texts)],
            rng,
            report,
            args.temperatures,
            args.text_tokens,
        ),
        "greedy": write_after(
            llm, [cut(rng, rng.choice(held)) for _ in range(args.probes)], rng, report, (0.0,)
        ),
        "sampled": write_after(
            llm, [cut(rng, rng.choice(held)) for _ in range(args.probes)], rng, report, (1.0,)
        ),
    }
    write_atomically(path, json.dumps(made).encode())


def beginning(rng: random.Random, data: Corpus) -> list[int]:
    """A piece of a training file; now and then a task of the chat kind."""
    if rng.random() < 0.75:
        return cut(rng, rng.choice(data.files).tolist())
    function = rng.choice([snippet for snippet in data.snippets if snippet.length <= 160])
    old = rng.choice(function.identifiers)
    prompt = corpus.edit_prompt(function.source, old, corpus.draw_new_name(rng, function.source))
    return data.encode(chat_prompt(prompt))


def cut(rng: random.Random, ids: list[int]) -> list[int]:
    length = rng.randrange(32, PROMPT + 1)
    start = rng.randrange(max(1, len(ids) - length))
    return ids[start : start + length]


def write_after(
    llm: LLM,
    prompts: list[list[int]],
    rng: random.Random,
    report: Report,
    temperatures: Sequence[float],
    tokens: int = OUTPUT,
) -> list[tuple[int, list[int]]]:
    """(length of the prompt, prompt and answer) of each, up to where the answer begins to repeat itself."""
    texts: list[tuple[int, list[int]]] = []
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
        params = [
            SamplingParams(temperature=rng.choice(temperatures), max_tokens=tokens, seed=rng.randrange(2**32))
            for _ in some
        ]
        outputs = llm.generate(some, params, speculation={"method": "off"})
        texts += [(len(p), [*p, *unlooped(o.token_ids)]) for p, o in zip(some, outputs, strict=True)]
        report.log(texts=len(texts), of=len(prompts), tokens=sum(len(ids) - n for n, ids in texts))
    return [(n, ids) for n, ids in texts if len(ids) > n]


def unlooped(ids: list[int]) -> list[int]:
    """The text before it says a run of GRAM tokens for the second time."""
    seen: set[tuple[int, ...]] = set()
    for end in range(GRAM, len(ids) + 1):
        gram = tuple(ids[end - GRAM : end])
        if gram in seen:
            return ids[: end - GRAM]
        seen.add(gram)
    return ids
