"""Train the demo target model: `python recipes/demo/train.py --out FOLDER`.

See README.md beside this file.
"""

import argparse
import os
import signal
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import model
import torch
import torch.distributed as dist
from data import Corpus, load_tokenizer
from trainer import Trainer

from speculon.measure.bench.corpus import stdlib_root


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the finished model")
    add(
        "--work",
        type=Path,
        default=Path("build/demo"),
        help="folder of checkpoints and log; a run resumes from it",
    )
    add("--stdlib", type=Path, default=stdlib_root(), help="the standard library to train on")
    add("--snapshot", type=Path, help="folder for exports along the way")
    add("--minutes", type=float, default=90, help="length of the run in time")
    add("--tokens", type=int, help="length of the run in tokens, instead of --minutes; repeats exactly")
    add(
        "--stages",
        default="0:5x8x512,0.08:10x16x512,0.6:20x16x512,0.88:20x8x1024",
        help="START:LAYERSxROWSxLENGTH,...",
    )
    add(
        "--decay-from",
        type=float,
        default=0.66,
        help="share of the run after which the learning rate goes down",
    )
    add("--warmup", type=int, default=100, help="steps of rising learning rate")
    add("--muon-lr", type=float, default=5e-3)
    add("--adam-lr", type=float, default=3e-3)
    add("--log-every", type=int, default=20, help="steps")
    add("--eval-every", type=int, default=200, help="steps")
    add("--save-minutes", type=float, default=4)
    add("--export-minutes", type=float, default=10)
    add("--probe", type=int, default=64, help="held-out edits tried along the way")
    add("--final-probe", type=int, default=400, help="held-out edits tried at the end")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=2, help="processes of one thread each that share every batch")
    return parser.parse_args()


def work(rank: int, args: argparse.Namespace, tickets: Synchronized) -> None:
    """One worker process."""
    torch.set_num_threads(1)
    if args.workers > 1:
        address = f"file://{(args.work / 'rendezvous').resolve()}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=args.workers)
    model.log_sum_exp = torch.compile(model.log_sum_exp, dynamic=False)
    model.scaled_softmax = torch.compile(model.scaled_softmax, dynamic=False)
    Trainer(args, rank, tickets).run()


def main() -> None:
    """Prepare the corpus once, then start the workers."""
    args = parse_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    tickets = torch.multiprocessing.get_context("spawn").Value("q", 0)
    if args.workers == 1:
        work(0, args, tickets)
        return
    Corpus(args.stdlib, load_tokenizer(args.work, args.stdlib), args.work / "corpus.json")
    (args.work / "rendezvous").unlink(missing_ok=True)
    start = torch.multiprocessing.start_processes
    workers = start(work, (args, tickets), nprocs=args.workers, join=False, start_method="spawn")
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in workers.pids()])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt reaches the workers by itself
    while not workers.join():
        pass


if __name__ == "__main__":
    main()
