"""The runtime of this project: a checked transformers model over pages, with the drafters that read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from speculon.core.config import MAX_DRAFTS, EngineConfig
from speculon.core.errors import InvalidParameter, NeverFits, SpeculonError
from speculon.core.images import ImageInput, PromptImages
from speculon.core.kept_files import chip
from speculon.core.types import Capability
from speculon.decoding.rounds import Span
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.base import Facts
from speculon.runtimes.torch.budget import MemoryBudget, held_memory
from speculon.runtimes.torch.capabilities import capabilities
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.loading import load_drafters
from speculon.runtimes.torch.inspection import target_facts
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_pages import DraftPages, DraftStates
from speculon.runtimes.torch.kv.draft_slots import DraftSlots
from speculon.runtimes.torch.kv.reach import joint_reach
from speculon.runtimes.torch.kv.slots import StateSlots
from speculon.runtimes.torch.kv.states import StateStore
from speculon.runtimes.torch.kv.store import PageStore, View
from speculon.runtimes.torch.model.background import BackgroundCompiler
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import Needs
from speculon.runtimes.torch.step import TorchStep

log = logging.getLogger("speculon")


class TorchRuntime:
    """As `runtimes.base.Runtime` says. Memory is measured here, while only the target is loaded."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None, config: EngineConfig):
        self.target, self.config = target, config
        self.draft_rows = max(config.max_num_seqs * config.speculation.most(), MAX_DRAFTS)  # of a step
        max_context = min(target.max_context, config.max_context or target.max_context)
        host = DrafterHost(
            target,
            tokenizer,
            rows=config.max_batch_tokens + self.draft_rows,
            scored=config.max_num_seqs + self.draft_rows,
            sequences=config.max_num_seqs,
            fuse=config.fuse,
            compile=config.compile == "now",
        )
        needs = target.needs(host.rows, host.scored, config.max_num_seqs)
        budget = MemoryBudget(config, needs, max_context, target.device)
        loaded = load_drafters(config.speculation, host, budget.estimate)
        self.drafters, self.refusals = loaded.proposers, loaded.refusals
        self.estimate = budget.estimate(loaded.needs)
        target.capture(loaded.taps)
        snapshots, pages = budget.snapshots(loaded.needs), budget.pages(loaded.needs)
        self.space = make_pool(target, config, pages, snapshots, joint_reach(target.layers, loaded.needs))
        own = tuple(layer for needs in loaded.needs for layer in needs.layers)
        self.store = PageStore((*target.layers, *own), pages, config.block_size, target.device)
        self.states = target.states(self.space.slots.count)
        for method, drafter in self.drafters.items():
            states = self._draft_states(method, drafter.needs)
            drafter.bind(DraftPages(self.space, self.store, method, loaded.first_layer[method], states))
        self.facts = Facts(
            target.name,
            target.vocab_size,
            max_context,
            target.eos_ids,
            pages * config.block_size,
            takes_trees=not target.recurrent,
            prefix_cache=self.space.prefix_cache,
            batch_invariant=target.batch_invariant,
            parameters=target.num_parameters,
            layers=len(target.layers),
            adapters={name: adapter.digest for name, adapter in target.adapters.items()},
            form={
                "device": str(target.device),
                "chip": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else chip(),
                "dtype": str(target.dtype).removeprefix("torch."),
                "fuse": config.fuse,
                "compile": config.compile,
                "batch_invariant": target.batch_invariant,
                "quantization": config.quantization,
                "threads": torch.get_num_threads(),
            },
        )

        self.compilers = [*self._compilers()] if config.compile == "auto" else []

    def _compilers(self) -> Iterator[BackgroundCompiler]:
        """Of the target and the draft models. Programs of an earlier start take the loop's place at once."""
        for target in (self.target, *(getattr(drafter, "model", None) for drafter in self.drafters.values())):
            if isinstance(target, Target) and target.device.type == "cpu":
                compiler = BackgroundCompiler(target)
                compiler.finish()
                if not compiler.ended:
                    yield compiler

    def _draft_states(self, method: str, needs: Needs) -> DraftStates | None:
        """The recurrent states of a drafter that has any; their slots are the pool's."""
        if not needs.states:
            return None
        slots = DraftSlots(method, self.config.max_num_seqs, needs.spare_states)
        self.space.draft_slots[method] = slots
        return DraftStates(slots, StateStore(needs.states, slots.count, self.target.device))

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def image_rows(self) -> int:
        """Rows of a step that one prompt can have for certain: the most tokens of an image."""
        return self.config.max_batch_tokens - self.config.max_num_seqs

    def keep(self, taps: Mapping[int, Tensor], view: View) -> None:
        """Writes the states [T, D] of a target forward, by layer, to the pages of drafters that read them."""
        for drafter in self.drafters.values():
            if layers := drafter.needs.taps:
                view.keep(drafter.pages.first_layer, [taps[layer] for layer in layers])

    def read_images(self, prompt: list[int], images: Seq[ImageInput]) -> PromptImages:
        """As `Runtime` says; raises `NeverFits` for an image whose tokens are more than one step takes."""
        if self.target.vision is None:
            raise InvalidParameter("images", len(images), self.target.no_images).about("images")
        read, most = self.target.vision.read(prompt, images), self.image_rows
        longest = max((len(block) for block in read.blocks), default=0)
        if longest > most:
            limit = f"an image of {longest} tokens is one chunk of the prompt, of at most {most}"
            raise NeverFits(f"{limit} (max_batch_tokens - max_num_seqs)").about("images")
        return read

    def prepare_images(self, span: Span) -> SpeculonError | None:
        if self.target.vision is None:
            return None
        images = span.seq.request.images.within(span.start, span.end)
        faults = map(self.target.vision.fault, images)
        return next((fault for fault in faults if fault is not None), None)

    def reserve(self, spans: list[Span]) -> TorchStep:
        return TorchStep(self, spans)

    def capabilities(self, config: EngineConfig) -> Iterator[tuple[str, Capability]]:
        return capabilities(self, config)

    def memory(self) -> dict[str, int]:
        return self.estimate.parts()

    def describe(self) -> dict[str, Any]:
        return target_facts(self.target) | {"memory": self.estimate.to_dict()}

    def end(self) -> None:
        """As `Runtime` says: tensors are freed with the last reference to them."""
        for compiler in self.compilers:
            compiler.end()

    def between_rounds(self) -> bool:
        changed = sum(compiler.advance() for compiler in self.compilers)  # all of them
        self.compilers = [compiler for compiler in self.compilers if not compiler.ended]
        return changed > 0

    def loading_ended(self) -> None:
        self.estimate = replace(self.estimate, measured=held_memory(self.device))
        log.info("memory: %s; %d bytes are held now", self.estimate, self.estimate.measured)


def make_pool(
    target: Target, config: EngineConfig, pages: int, snapshots: int, reach: int | None
) -> BlockPool:
    """The owner of so many pages, and of the slots and snapshots of recurrent states."""
    sequences = config.max_num_seqs if target.recurrent else 0
    slots = StateSlots(sequences, snapshots, config.max_batch_tokens, target.by_row)
    prefix_cache = config.prefix_cache and (snapshots > 0 or not target.recurrent)
    rows = config.max_batch_tokens
    return BlockPool(pages, config.block_size, prefix_cache, slots, target.prompts_apart, reach, rows)
