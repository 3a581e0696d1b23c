"""How well lookups draft known texts, without any model: tokens per call, and the time of a lookup.

    python recipes/suffix/replay.py --cases 40 -k 8

code, edit, prose: the held-out texts of `speculon bench`, as their authors wrote them; one pool for all of a
workload. loop: a user has the same function edited six times, the prompt holds it as it is; a pool for each
user. blind: the same answers, but the prompt names the function only.
Drafts are accepted as far as they agree with the known text; speed takes a call of n rows for
5.6 + 0.22 (n - 1) ms.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from time import thread_time
from typing import Any

from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import SamplingParams, SpeculationConfig
from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Ending, Request, Rules, Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.measure.bench import corpus, workloads
from speculon.speculation.proposers.base import Proposer, TargetFacts
from speculon.speculation.proposers.registry import find_factory

EDITS = 6
CONTEXT = 4096
MODES: dict[str, tuple[str, bool, dict[str, Any]]] = {  # method, whether with pools, settings
    "ngram": ("ngram", False, {}),
    "suffix, no pool": ("suffix", False, {}),
    "suffix": ("suffix", True, {}),
    "suffix, factor 1": ("suffix", True, {"suffix_max_factor": 1}),
    "suffix, factor 2": ("suffix", True, {"suffix_max_factor": 2}),
    "suffix, factor 8": ("suffix", True, {"suffix_max_factor": 8}),
    "suffix, 2 hits": ("suffix", True, {"suffix_min_hits": 2}),
    "suffix, probability 0.3": ("suffix", True, {"suffix_min_probability": 0.3}),
}


@dataclass(frozen=True)
class Known:
    user: str
    prompt: list[int]
    answer: list[int]


def code(tokenizer: Tokenizer, cases: int) -> Iterator[Known]:
    for case in workloads.build("code", tokenizer, workloads.Size(cases, 400, CONTEXT)):
        path, _, line = case.name.rpartition(":")
        source = (corpus.read_source(path) or "").splitlines(keepends=True)
        tokens = tokenizer.encode("".join(source[int(line) - 1 :])[:16_000])
        yield Known("all", case.prompt, tokens[len(case.prompt) :][:400])


def edit(tokenizer: Tokenizer, cases: int) -> Iterator[Known]:
    for case in workloads.build("edit", tokenizer, workloads.Size(cases, 512, CONTEXT)):
        yield Known("all", case.prompt, tokenizer.encode(case.reference or "", add_special_tokens=False))


def prose(tokenizer: Tokenizer, cases: int) -> Iterator[Known]:
    for _, text in islice(workloads.shuffled("prose", workloads.docstrings()), cases):
        tokens = tokenizer.encode(text)
        half = min(len(tokens) // 2, workloads.PROMPT_TOKENS)
        yield Known("all", tokens[:half], tokens[half:][:400])


def loop(tokenizer: Tokenizer, cases: int, blind: bool = False) -> Iterator[Known]:
    long = (f for f in workloads.shuffled("loop", corpus.held_out_functions()) if 1200 < len(f.source) < 6000)
    for function in islice((f for f in long if len(f.identifiers) >= 4), cases // 5):
        rng, source, names = random.Random(function.name), function.source, list(function.identifiers)
        rng.shuffle(names)
        for i in range(EDITS):
            at = i % len(names)
            old, names[at] = names[at], corpus.draw_new_name(rng, source)
            message = f"Write {function.name} again; {names[at]} instead of {old}."
            prompt = message if blind else corpus.edit_prompt(source, old, names[at])
            source = corpus.edit_answer(source, old, names[at])
            answer = tokenizer.encode(source, add_special_tokens=False)
            yield Known(f"{function.path} {function.name}", workloads.ask(tokenizer, prompt), answer)


def write(proposer: Proposer, known: Known, k: int, pooled: bool, number: int) -> tuple[int, int, int, float]:
    """(calls, drafted, accepted, seconds of lookups); the first one reads the prompt and is not timed."""
    params, pool = SamplingParams(), known.user if pooled else ""
    request = Request(
        str(number), len(known.prompt), params, 0, CONTEXT, Rules.of(params), Ending(), pool=pool
    )
    seq = Sequence(number, request, [*known.prompt, known.answer[0]], RequestStats())
    proposer.admit(seq)
    proposer.propose([seq], [1])
    at, calls, drafted, accepted, seconds = 1, 0, 0, 0, 0.0
    while at < len(known.answer):
        began = thread_time()
        (draft,) = proposer.propose([seq], [max(1, min(k, len(known.answer) - at - 1))])
        seconds += thread_time() - began
        pairs = zip(draft.tokens, known.answer[at:], strict=False)
        agreed = next(
            (i for i, (draft_token, token) in enumerate(pairs) if draft_token != token),
            min(len(draft.tokens), len(known.answer) - at),
        )
        seq.tokens += known.answer[at : at + agreed + 1]
        at += agreed + 1
        calls, drafted, accepted = calls + 1, drafted + len(draft.tokens), accepted + agreed
    proposer.release(seq)
    return calls, drafted, accepted, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("-k", type=int, default=8)
    args = parser.parse_args()
    tokenizer = Tokenizer(load_tokenizer(locate("demo")))
    texts = {find.__name__: list(find(tokenizer, args.cases)) for find in (code, edit, prose, loop)}
    texts["blind"] = list(loop(tokenizer, args.cases, blind=True))
    print("| tokens per call, speed, accepted, us |", " | ".join(texts), "|\n|---|" + "---|" * len(texts))
    for label, (method, pooled, settings) in MODES.items():
        cells = []
        for known in texts.values():
            proposer = find_factory(method)(
                SpeculationConfig(**settings), TargetFacts(tokenizer.vocab_size, CONTEXT)
            )
            done = [write(proposer, one, args.k, pooled, i) for i, one in enumerate(known)]
            calls, drafted, accepted, seconds = (sum(column) for column in zip(*done, strict=True))
            tokens = sum(len(one.answer) - 1 for one in known)
            speed = 5.6 * tokens / (5.6 * calls + 0.22 * drafted)
            cells.append(
                f"{tokens / calls:.2f}, {speed:.2f}, {accepted / max(drafted, 1):.0%}, "
                f"{seconds / calls * 1e6:.0f}"
            )
        print(f"| {label} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
