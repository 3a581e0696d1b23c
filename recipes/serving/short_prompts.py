"""How long a short prompt waits for long ones, and what that costs the long ones.

python -m recipes.serving.short_prompts      # prints a table; 5 minutes
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter

from speculon.core.config import EngineConfig, SamplingParams
from speculon.engine.build import build_engine
from speculon.engine.engine import Engine
from speculon.measure.bench.tables import markdown_table

HEAD = ["rows of a step", "idle", "behind long prompts", "in steps", "long prompts, with / without it"]
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SHORT = "short"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--prompts", type=int, default=6, help="long ones, which come at once")
    parser.add_argument("--tokens", type=int, default=1900, help="of each long one")
    parser.add_argument("--short", type=int, default=4, help="tokens of the short one")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds until the short one comes")
    parser.add_argument("--repeats", type=int, default=5, help="of which medians are taken")
    args = parser.parse_args()
    print(markdown_table(HEAD, [measure(args, rows) for rows in args.rows]))


def measure(args: argparse.Namespace, rows: int) -> list[str]:
    """With the short prompt and without it, in turns."""
    config = EngineConfig(model=args.model, max_batch_tokens=rows, prefix_cache=False, threads=1)
    engine = build_engine(config, texts=False)
    idle, busy, steps, ratios = list[float](), list[float](), list[int](), list[float]()
    for _ in range(args.repeats):
        idle.append(run(engine, 0, args)[0])
        _, _, without = run(engine, args.prompts, args, late=False)
        waited, count, with_it = run(engine, args.prompts, args)
        busy.append(waited)
        steps.append(count)
        ratios.append(with_it / without)
    engine.close()
    seconds = [f"{median(some):.3f} s" for some in (idle, busy)]
    return [str(rows), *seconds, f"{median(steps):.0f}", f"{median(ratios):.2f}"]


def run(
    engine: Engine, prompts: int, args: argparse.Namespace, late: bool = True
) -> tuple[float, int, float]:
    """Seconds and steps of the short prompt until its first token, and the sum of the long ones' seconds."""
    rng = random.Random(0)
    began = perf_counter()
    for i in range(prompts):
        engine.add_request(ids(rng, engine, args.tokens), ONE_TOKEN, request_id=f"long {i}")
    arrived, waited, steps, total = None, 0.0, 0, 0.0
    while engine.has_work or (late and arrived is None):
        now = perf_counter()
        if late and arrived is None and (not prompts or now - began >= args.delay):
            arrived = now
            engine.add_request(ids(rng, engine, args.short), ONE_TOKEN, request_id=SHORT)
        events = engine.step()
        steps += arrived is not None and not waited
        for event in events:
            if event.request_id == SHORT:
                waited = perf_counter() - (arrived or began)
            else:
                total += perf_counter() - began
    return waited, steps, total


def ids(rng: random.Random, engine: Engine, count: int) -> list[int]:
    return [rng.randrange(engine.runtime.target.vocab_size) for _ in range(count)]


if __name__ == "__main__":
    main()
