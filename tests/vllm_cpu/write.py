"""Writes texts with vLLM on the demo checkpoint, in a process of its own; its argument is JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ENDED_BY = ("ConfigError", "InvalidParameter")


def main(how: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from speculon.checkpoints.locate import locate

    drafts: dict[str, Any] | None = how.pop("drafts")
    prompts, temperature = how.pop("prompts"), how.pop("temperature", 0.0)
    llm = LLM(
        str(locate("demo")),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        speculative_config=drafts,
        **how,
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=64), use_tqdm=False)
    found = {"texts": [list(output.outputs[0].token_ids) for output in outputs], "counters": counters()}
    print(f"\n{json.dumps(found)}", file=sys.__stdout__, flush=True)
    os._exit(0)  # the workers of several ranks are ended with the process


def counters() -> dict[str, float]:
    """Of all processes that wrote to the folder."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return {
        f"{sample.name} {' '.join(sample.labels.values())}".strip(): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.startswith("speculon_vllm_")
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
