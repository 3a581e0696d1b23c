"""Baselines of one checkpoint, dtype and threads: transformers, and plain decoding that is not invariant."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.llm import LLM
from speculon.loading.headers import read_checkpoint
from speculon.loading.load import load_config, load_model
from speculon.loading.locate import locate
from speculon.loading.reading import quiet
from speculon.measure.bench.measure import Measurement, measure
from speculon.measure.bench.plan import VARIANT, parse_mode
from speculon.measure.bench.widen import widen
from speculon.measure.bench.workloads import Case
from speculon.speculation.proposers.registry import OFF


class TransformersBaseline:
    """A second copy of the weights, with the library's attention, DynamicCache and loop."""

    def __init__(self, llm: LLM, widened_to: int | None = None):
        target = llm.engine.target
        self.tokenizer: Tokenizer = llm.tokenizer
        self.eos_ids = sorted(target.eos_ids)
        with quiet():
            checkpoint, trusted = read_checkpoint(locate(llm.config.model)), llm.config.trust_remote_code
            config = load_config(checkpoint, trusted)
            self.model: Any = load_model(checkpoint, config, target.dtype, target.device, trusted)
        self.model.eval()
        if widened_to:
            widen(self.model, widened_to, target.name)  # with the same random columns

    @torch.inference_mode()
    def measure(self, cases: list[Case]) -> Measurement:
        """One greedy case after the other."""
        assert all(case.params.greedy for case in cases)
        rows = [torch.tensor([case.prompt], device=self.model.device) for case in cases]
        began = perf_counter()
        with quiet():
            wholes = [
                self.model.generate(
                    row,
                    attention_mask=torch.ones_like(row),
                    do_sample=False,
                    repetition_penalty=1.0,  # some checkpoints have another default
                    max_new_tokens=case.params.max_tokens,
                    eos_token_id=self.eos_ids or None,
                    pad_token_id=self.eos_ids[0] if self.eos_ids else 0,
                )
                for row, case in zip(rows, cases, strict=True)
            ]
        seconds = perf_counter() - began
        outputs = [whole[0, len(case.prompt) :].tolist() for whole, case in zip(wholes, cases, strict=True)]
        for output in outputs:
            if output and output[-1] in self.eos_ids:
                output.pop()
        return Measurement(seconds, outputs, [self.tokenizer.decode(output) for output in outputs])


class BatchVariant:
    """A second engine with the same settings and drafters, and `batch_invariant` = false."""

    def __init__(self, llm: LLM):
        settings = {name: getattr(llm.config, name) for name in llm.config.model_fields_set}
        own = {"batch_invariant": False, "warmup": False, "state": None, "events": None}
        self.llm = LLM(**{**settings, **own})

    def measure(self, cases: list[Case]) -> Measurement:
        return measure(self.llm, cases, parse_mode(OFF).speculation, VARIANT)
