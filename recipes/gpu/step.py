"""What a decoding step costs on a CUDA device, launched piece by piece and captured (`--compile`).

    python -m recipes.gpu.step --model FOLDER --draft FOLDER

First the target's forward by itself, for 1, 8 and 16 sequences of one row and of five: its time, the time
in which the device computes, and the gaps between launches. Then tokens per second, with and without
speculation.

Last the share of the bandwidth limit for one sequence: the time to read the weights once, at the speed
measured for a copy, divided by the time of the forward and of the whole step. The model is loaded twice,
without and with capture; within a load the modes alternate, as in `speculon bench`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from speculon import LLM
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.plan import BenchPlan
from speculon.measure.bench.provenance import commit
from speculon.measure.bench.run import run
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import PageStore, SpanView
from speculon.runtimes.torch.model.target import Target

SEQUENCES, ROWS, CONTEXT = (1, 8, 16), (1, 5), 512
FORWARDS, WARM = 50, 5
COPY = 1 << 30  # bytes, more than any cache
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True, slots=True)
class Forward:
    """Of one call of the target."""

    ms: float  # median wall time, to the end of the device's work
    busy_ms: float  # in which the device computes or copies
    launches: float

    @property
    def gaps_ms(self) -> float:
        return self.ms - self.busy_ms


def forward_of(target: Target, sequences: int, rows: int) -> Forward:
    """So many sequences of 512 positions, the last `rows` of each computed and scored."""
    device, context = target.device, min(CONTEXT, target.max_context)
    store = PageStore(target.layers, sequences, context, device)
    for pool in (*store.k, *store.v):
        pool.zero_()
    spans = [
        SpanView(i * rows, (i + 1) * rows, slice(i * context, (i + 1) * context), context)
        for i in range(sequences)
    ]
    total = sequences * rows
    positions = torch.arange(context - rows, context, device=device).repeat(sequences)
    batch = Batch(
        [], torch.arange(total, device=device)[None], positions[None], torch.arange(total, device=device)
    )
    times = [target.forward(batch, store.view_of(spans)).ms for _ in range(WARM + FORWARDS)][WARM:]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(WARM):
            target.forward(batch, store.view_of(spans))
    events = seen.events() or []
    work = [(e.time_range.start, e.time_range.end) for e in events if e.device_type is DeviceType.CUDA]
    return Forward(
        median(times), covered(work) / WARM / 1e3, sum(e.name.startswith(LAUNCHES) for e in events) / WARM
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the line some intervals cover together."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written."""
    source = torch.empty(COPY, dtype=torch.uint8, device=device).zero_()
    there, times = torch.empty_like(source), []
    for _ in range(WARM + FORWARDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        there.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * COPY / median(times[WARM:]) * 1e3


def weights_read(target: Target) -> int:
    """Bytes of weights that one forward reads. Of an embedding that is not the head it reads few rows."""
    tied = target.model.config.get_text_config().tie_word_embeddings
    return target.num_bytes - (0 if tied else target.embedding.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--draft", default=None, help="a drafter; without one only lookups draft (demo has its own)"
    )
    parser.add_argument("--modes", default="off,ngram:8,draft_model:4")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("recipes.gpu.step measures a CUDA device, and torch sees none here")
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, speculon {commit()}; {args}")
    report(args, device, copy_bandwidth(device))


def report(args: argparse.Namespace, device: torch.device, bandwidth: float) -> None:
    weights = 0
    for captured in (False, True):
        speculation = {} if args.draft is None else {"draft": args.draft}
        settings = {"max_num_seqs": max(SEQUENCES), "prefix_cache": False, "speculation": speculation}
        llm = LLM(args.model, device=str(device), compile=captured, **settings)
        target = llm.engine.runtime.target
        # of the first load: capture adds its buffers to what is counted
        weights = weights or weights_read(target)
        print(f"\n{target.name}, compile={captured}: {target.runner}; {target.dtype}")
        forwards = {
            (sequences, rows): forward_of(target, sequences, rows) for sequences in SEQUENCES for rows in ROWS
        }
        print("\n| sequences | rows of each | forward, ms | device busy, ms | gaps, ms | launches |")
        print("|---|---|---|---|---|---|")
        for (sequences, rows), one in forwards.items():
            times = f"{one.ms:.3f} | {one.busy_ms:.3f} | {one.gaps_ms:.3f}"
            print(f"| {sequences} | {rows} | {times} | {one.launches:.0f} |")
        plan = BenchPlan(
            workloads=("code",),
            modes=args.modes,
            concurrency=SEQUENCES,
            prompts=args.prompts,
            max_tokens=args.max_tokens,
        )
        cells, _ = run(llm, plan.at_hand(llm.engine.proposers.lacking))
        print("\n| sequences | mode | tokens/s | to plain | tokens per call | step, ms |")
        print("|---|---|---|---|---|---|")
        for cell in cells:
            speed, per_call = (
                f"{cell.tokens_per_second:.0f} | {cell.ratio:.2f}",
                f"{cell.tokens_per_target_call or 1:.2f}",
            )
            print(f"| {cell.concurrency} | {cell.mode} | {speed} | {per_call} | {step_ms(cell):.3f} |")
        least = weights / bandwidth * 1e3
        plain = next(step_ms(cell) for cell in cells if (cell.concurrency, cell.mode) == (1, "off"))
        print(f"\n{weights / 1e9:.3f} GB of weights at {bandwidth / 1e12:.2f} TB/s: {least:.3f} ms,", end=" ")
        shares = f"{least / forwards[1, 1].ms:.0%} of the forward of one row, {least / plain:.0%}"
        print(f"{shares} of its whole step", flush=True)
        del llm, target
        gc.collect()


def step_ms(cell: Cell) -> float:
    """The mean decoding step."""
    return sum(cell.profile.values())


if __name__ == "__main__":
    main()
