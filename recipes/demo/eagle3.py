"""Train the demo's EAGLE-3 head: `python recipes/demo/eagle3.py --target TARGET --out FOLDER`.

Lays out what the head learns from (texts that the target wrote after beginnings of training files, and such
files), then runs `speculon train eagle3` on it. The texts are those of the draft: with its work folder they
are not written again.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from data import Corpus, load_tokenizer, write_atomically
from draft_texts import OUTPUT, TEMPERATURES, write_texts
from eagle3_card import finish
from report import Report

from speculon.measure.bench import corpus

OPTIONS = {
    "ttt": 4,
    "intermediate": 768,
    "optimizer": "muon",
    "length": 512,
    "rows": 4,
    "prompt-weight": 0.3,
    "eval-every": 400,
    "eval-rows": 32,
    "eval-prompts": 64,
    "cache-gb": 8,
}


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The command line; what it does not know is handed to `speculon train`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target model")
    add("--out", type=Path, required=True, help="folder of the finished drafter")
    add("--work", type=Path, default=Path("build/eagle3"), help="folder of data, checkpoint and log")
    add(
        "--texts-work",
        type=Path,
        default=Path("build/draft"),
        help="the draft's work folder, where the written texts lie",
    )
    add(
        "--stdlib",
        type=Path,
        default=corpus.stdlib_root(),
        help="the standard library the target was trained on",
    )
    add("--minutes", type=float, default=45, help="of training")
    add("--texts", type=int, default=3000, help="written by the target to learn from")
    add("--text-tokens", type=int, default=OUTPUT, help="most tokens of such a text")
    add("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="one is drawn for each text")
    add("--probes", type=int, default=96, help="written after held-out files, to measure on")
    add("--file-tokens", type=int, default=400_000, help="of training files beside them")
    add("--seed", type=int, default=0)
    return parser.parse_known_args()


def lay_out(args: argparse.Namespace) -> tuple[Path, Path, int]:
    """Folders of JSONL for training and for held-out measurements; the tokens of files among the former."""
    learn, held = args.work / "learn", args.work / "held"
    for folder in (args.texts_work, learn, held):
        folder.mkdir(parents=True, exist_ok=True)
    if not (args.texts_work / "tokenizer.json").exists():
        write_atomically(args.texts_work / "tokenizer.json", (args.target / "tokenizer.json").read_bytes())
    data = Corpus(args.stdlib, load_tokenizer(args.texts_work, args.stdlib), args.texts_work / "corpus.json")
    texts_args = argparse.Namespace(**{**vars(args), "work": args.texts_work})
    write_texts(texts_args, data, Report(args.work / "texts.jsonl", quiet=False))
    texts = json.loads((args.texts_work / "texts.json").read_bytes())
    write_lines(learn / "written.jsonl", [{"tokens": ids, "prompt_tokens": n} for n, ids in texts["written"]])
    write_lines(held / "written.jsonl", [{"tokens": ids, "prompt_tokens": n} for n, ids in texts["greedy"]])
    files = some_files(data, args.file_tokens, args.seed)
    if files:
        write_lines(learn / "files.jsonl", [{"tokens": ids} for ids in files])
    return learn, held, sum(map(len, files))


def some_files(data: Corpus, tokens: int, seed: int) -> list[list[int]]:
    """Training files drawn at random until they hold so many tokens."""
    drawn: list[list[int]] = []
    for file in random.Random(seed).sample(data.files, len(data.files)):
        if tokens <= 0:
            break
        drawn.append(file[:-1].tolist())  # the trainer ends each text itself
        tokens -= len(file)
    return drawn


def write_lines(file: Path, records: list[dict]) -> None:
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in records).encode())


def main() -> None:
    args, more = parse_arguments()
    learn, held, file_tokens = lay_out(args)
    options = {
        **OPTIONS,
        "target": args.target,
        "out": args.out,
        "minutes": args.minutes,
        "seed": args.seed,
        "work": args.work / "run",
        "eval-data": held,
        "data": learn,
    }
    command = [sys.executable, "-m", "speculon.cli", "train", "eagle3"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))] + more
    if code := subprocess.run(command).returncode:
        raise SystemExit(code)
    finish(args, file_tokens)


if __name__ == "__main__":
    main()
