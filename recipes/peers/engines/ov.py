"""OpenVINO GenAI: its continuous batching pipeline, with prompt lookup or a draft model."""

from __future__ import annotations

from typing import Any

import numpy
import openvino
import openvino_genai as genai
from worker import Answer, Ask, Settings, serve

NGRAM = 5  # longest match that is looked for, as in the other engines
CACHE_GB = 1


class OpenVino:
    packages = ("openvino", "openvino-genai")

    def __init__(self, settings: Settings):
        self.settings = settings
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = settings.texts
        scheduler.enable_prefix_caching = False
        exact = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": settings.threads,
        }
        speculation: dict[str, Any] = {}
        if settings.method == "ngram":
            speculation["prompt_lookup"] = True
        elif settings.method == "draft_model":
            speculation["draft_model"] = genai.draft_model(settings.draft, "CPU", **exact)
        self.pipeline = genai.ContinuousBatchingPipeline(
            settings.target, scheduler, "CPU", {**exact, **speculation}
        )

    def config(self, ask: Ask) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = ask.max_tokens
        config.stop_token_ids = set(self.settings.eos)
        config.eos_token_id = self.settings.eos[0]
        config.do_sample = ask.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = ask.temperature, 1.0, 2**31 - 1
        if self.settings.method != "off":
            config.num_assistant_tokens = self.settings.k
        if self.settings.method == "ngram":
            config.max_ngram_size = NGRAM
        return config

    def write(self, ask: Ask) -> Answer:
        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in ask.prompts]
        results = self.pipeline.generate(ids, [self.config(ask) for _ in ids])
        tokens = [list(result.m_generation_ids[0]) for result in results]
        # both accounts are of all texts together, and every result has the same
        if metrics := results[0].extended_perf_metrics:
            return Answer(tokens, metrics.get_num_draft_tokens(), metrics.get_num_accepted_tokens())
        return Answer(tokens, calls=len(results[0].perf_metrics.raw_metrics.m_batch_sizes))

    def close(self) -> None: ...


if __name__ == "__main__":
    serve(OpenVino)
