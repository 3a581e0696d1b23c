"""Up to which context a drafter is of use: drafts accepted per round, by the tokens of the chat before.

python -m recipes.smollm2.reach smollm2 smollm2-eagle3 spec-bench-dev.jsonl      # half an hour of one core

The same questions are asked at each length. The turns before are other questions of the file with the
target's own answers. Greedy answers count up to where they loop.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from speculon import LLM, SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.measure.bench.data import read_prompts
from speculon.measure.bench.tables import markdown_table
from speculon.train.regenerate import without_loop

HEAD = ["tokens before", "questions", "rounds", "accepted per round", "accepted, by position"]
OFF = {"method": "off"}
LONGEST = 120  # tokens of a question

Turn = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("data", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 400, 800, 1200, 1600, 3000, 6000])
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=64, help="before a question, to choose from")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--drafts", type=int, default=3)
    given = parser.parse_args()
    speculation = {
        "method": "eagle3",
        "policy": "fixed",
        "draft": {"eagle3": given.head},
        "num_speculative_tokens": given.drafts,
    }
    llm = LLM(given.model, threads=1, speculation=speculation)
    found = questions(llm, given.data)
    step = len(found) // (given.questions + given.turns)
    chosen = found[:: max(1, step)]
    last, before = chosen[: given.questions], chosen[given.questions :][: given.turns]
    answers = llm.chat(before, SamplingParams(temperature=0, max_tokens=160), speculation=OFF)
    texts = [llm.tokenizer.decode(without_loop(list(answer.token_ids))) for answer in answers]
    turns = [
        [*question, {"role": "assistant", "content": text}]
        for question, text in zip(before, texts, strict=True)
    ]
    print(markdown_table(HEAD, []))
    for length in given.lengths:
        print(f"| {' | '.join(measure(llm, last, turns, length, given.tokens))} |", flush=True)


def questions(llm: LLM, file: Path) -> list[Turn]:
    """The short first turns of all categories."""
    prompts = [one for some in read_prompts(file).prompts.values() for one in some if not one.follows]
    chats = [
        [dict(message) for message in one.content] for one in prompts if not isinstance(one.content, str)
    ]
    return [chat for chat in chats if len(llm.tokenizer.apply_chat(chat)) <= LONGEST]


def measure(llm: LLM, last: list[Turn], turns: list[Turn], length: int, tokens: int) -> list[str]:
    total, sizes = RequestStats(), list[int]()
    for number, question in enumerate(last):
        prompt = chat_of(llm, question, turns[number:] + turns[:number], length)
        plain = SamplingParams(temperature=0, max_tokens=tokens)
        answer = llm.generate([prompt], plain, speculation=OFF)[0].token_ids
        if count := len(without_loop(list(answer))):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            total.add(llm.generate([prompt], params)[0].outputs[0].stats)
            sizes.append(len(prompt))
    found = total.speculation()
    if not found.rounds:
        return [f"{min(sizes)} to {max(sizes)}", f"{len(sizes)}", "0", ", ".join(total.reasons), ""]
    rounds = found.target_calls
    positions = " ".join(f"{share:.0%}" for share in found.per_position)
    mean = f"{found.tokens_per_target_call - 1:.2f}"
    return [f"{min(sizes)} to {max(sizes)}", f"{len(sizes)}", f"{rounds}", mean, positions]


def chat_of(llm: LLM, question: Turn, turns: list[Turn], length: int) -> list[int]:
    """The question after as many turns as `length` tokens need."""
    for count in range(len(turns) + 1):
        before = [message for turn in islice(turns, count) for message in turn]
        prompt = llm.tokenizer.apply_chat([*before, *question])
        if len(prompt) >= length:
            return prompt
    raise SystemExit(f"{len(turns)} turns have {len(prompt)} tokens: more --turns for {length}")


if __name__ == "__main__":
    main()
