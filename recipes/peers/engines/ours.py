"""speculon, through `LLM`."""

from __future__ import annotations

from typing import Any

from worker import Answer, Ask, Settings, serve

from speculon import LLM, SamplingParams
from speculon.core.telemetry import RequestStats


class Speculon:
    packages = ("torch", "transformers")
    compile = "off"

    def __init__(self, settings: Settings):
        self.llm = LLM(
            settings.target,
            speculation=speculation_of(settings),
            dtype=settings.dtype,
            threads=settings.threads,
            prefix_cache=False,
            compile=self.compile,
        )

    def write(self, ask: Ask) -> Answer:
        params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens)
        before = self.llm.engine.counters.steps
        outputs = self.llm.generate(ask.prompts, params)
        stats = RequestStats()
        for output in outputs:
            stats.add(output.outputs[0].stats)
        tokens = [output.token_ids for output in outputs]
        return Answer(
            tokens, stats.drafted_at.total(), stats.accepted, self.llm.engine.counters.steps - before
        )

    def close(self) -> None: ...


def speculation_of(settings: Settings) -> dict[str, Any]:
    """A mode with K is `fixed`, as the other engines are, and so is `off`; one without K has the default
    policy.

    The others look for a single equal token, too; our default asks for two. Prompts come again: no answer is
    remembered.
    """
    found: dict[str, Any] = {"method": settings.method, "prompt_lookup_min": 1, "suffix_pools": 0}
    if settings.k is not None or settings.method == "off":
        found["policy"] = "fixed"
    if settings.k is not None:
        found["num_speculative_tokens"] = settings.k
    if settings.draft and settings.method not in ("off", "ngram", "suffix"):
        found["draft"] = settings.draft
    return found


if __name__ == "__main__":
    serve(Speculon)
