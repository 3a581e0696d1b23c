"""transformers: generate, with prompt lookup or an assistant model.

Batches are padded on the left.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from worker import Answer, Ask, Settings, serve

NGRAM = 5  # longest match that is looked for, as in the other engines


class Transformers:
    packages = ("transformers", "torch")

    def __init__(self, settings: Settings):
        torch.set_num_threads(settings.threads)
        self.eos = list(settings.eos)
        self.target = load(settings.target, settings.dtype)
        self.calls = 0
        self.target.register_forward_pre_hook(self.count)
        self.speculation: dict[str, Any] = {}
        if settings.method == "ngram":
            self.speculation = {"prompt_lookup_num_tokens": settings.k, "max_matching_ngram_size": NGRAM}
        elif settings.method == "draft_model":
            draft = self.speculation["assistant_model"] = load(settings.draft, settings.dtype)
            if settings.k is not None:
                draft.generation_config.update(
                    num_assistant_tokens=settings.k,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )

    def count(self, module: Any, args: tuple[Any, ...]) -> None:
        self.calls += 1

    @torch.inference_mode()
    def write(self, ask: Ask) -> Answer:
        width, before = max(map(len, ask.prompts)), self.calls
        padding = [width - len(prompt) for prompt in ask.prompts]
        sampling = (
            {"do_sample": True, "temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
            if ask.temperature
            else {}
        )
        whole = self.target.generate(
            torch.tensor(
                [[self.eos[0]] * pad + prompt for pad, prompt in zip(padding, ask.prompts, strict=True)]
            ),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=ask.max_tokens,
            eos_token_id=self.eos,
            pad_token_id=self.eos[0],
            **{"do_sample": False, **sampling, **self.speculation},
        )
        return Answer(whole[:, width:].tolist(), calls=self.calls - before)

    def close(self) -> None: ...


def load(folder: str | None, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


if __name__ == "__main__":
    serve(Transformers)
