"""The runtime of llama.cpp: one GGUF file, and a stream of its memory for each sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from speculon.checkpoints.locate import name_of
from speculon.core.config import MAX_DRAFTS, EngineConfig
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.images import ImageInput, PromptImages
from speculon.core.kept_files import chip
from speculon.core.memory import held_bytes
from speculon.core.types import Capability, CapabilityRows, on_or_off, row
from speculon.decoding.rounds import Span
from speculon.runtimes.base import Facts
from speculon.runtimes.llama.memory import MemoryPlan
from speculon.runtimes.llama.model import LlamaModel, Rows
from speculon.runtimes.llama.servers import of_this_machine
from speculon.runtimes.llama.step import LlamaStep
from speculon.runtimes.llama.streams import Streams
from speculon.speculation.proposers.compose import Refusal

if TYPE_CHECKING:
    from speculon.runtimes.llama.drafter import LlamaDraftModel

NO_IMAGES = "runtime llama reads no images; runtime torch does, from a folder"
PROBE, SPAN = 24, 4  # tokens before the first place where rows are compared, and the most rows of a span
# Most differences are rounded away, so one place shows little. No further one is begun after so long.
PLACES, SECONDS = 16, 0.3


class LlamaRuntime:
    """As `runtimes.base.Runtime` says."""

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        plan: MemoryPlan,
        repack: bool,
        rollback: int,
        end_ids: frozenset[int],
    ):
        self.config, self.plan, self.repack = config, plan, repack
        self.draft_rows = max(MAX_DRAFTS, 4 * plan.streams)
        scored = plan.streams + self.draft_rows
        self.model = LlamaModel(
            path,
            config,
            repack=repack,
            streams=plan.streams,
            length=plan.length,
            rows=config.max_batch_tokens + self.draft_rows,
            outputs=scored,
            rollback=rollback,
        )
        self.drafters: dict[str, LlamaDraftModel] = {}
        self.refusals: dict[str, Refusal] = {}
        self.space = Streams(self.model, plan.streams, config.prefix_cache)
        self.device = torch.device("cpu")  # of the logits
        self._adapter = ""  # under which rows are computed
        files = {name: Path(file).expanduser() for name, file in config.adapters.items()}
        self._adapters = {name: self.model.load_adapter(file) for name, file in files.items()}
        self.equal_rows, self.places = measure(self.model, self.space)
        lib = self.model.lib
        self.facts = Facts(
            name_of(config.model),
            self.model.vocab_size,
            self.model.length,
            self.model.end_ids | end_ids,
            plan.streams * self.model.length,
            prefix_cache=config.prefix_cache,
            parameters=int(lib.llama_model_n_params(self.model.model)),
            layers=lib.llama_model_n_layer(self.model.model),
            adapters={name: digest(file) for name, file in files.items()},
            form={
                "runtime": "llama.cpp",
                "device": "gpu" if config.gpu_layers != 0 and of_this_machine() else "cpu",
                "chip": chip(),
                "dtype": self.model.description,
                "threads": lib.llama_n_threads(self.model.context),
                "flash_attention": config.flash_attention,
                "kv_cache_type": config.kv_cache_type,
                "gpu_layers": config.gpu_layers,
                "tensor_split": [*config.tensor_split],
                "rpc": [*config.rpc],
                "repack": repack,
            },
        )

    def use_adapter(self, adapter: str) -> None:
        """Computes the next rows under this adapter; the empty one is the model itself."""
        if adapter != self._adapter:
            self.model.use_adapters([self._adapters[adapter]] if adapter else [])
            self._adapter = adapter

    def read_images(self, prompt: list[int], images: Seq[ImageInput]) -> PromptImages:
        raise InvalidParameter("images", len(images), NO_IMAGES).about("images")

    def prepare_images(self, span: Span) -> SpeculonError | None:
        return None

    def reserve(self, spans: list[Span]) -> LlamaStep:
        return LlamaStep(self, spans)

    def capabilities(self, config: EngineConfig) -> Iterator[tuple[str, Capability]]:
        for rows in (self._rollback, self._modes, self._limits):
            yield from rows(config)

    def _rollback(self, config: EngineConfig) -> CapabilityRows:
        model = self.model
        if not model.recurrent:
            yield "rollback.streams", row("on", "rejected rows are removed from the memory of their sequence")
        elif model.rollback:
            why = "recurrent states are kept after each of the latest rows"
            yield "rollback.streams", row("on", why, kept_rows=model.rollback)
        else:
            why = "recurrent states are saved before a draft, and accepted rows run again after a rejection"
            yield "rollback.streams", row("on", why)
        yield "images", row("refused", NO_IMAGES)
        listed = ", ".join(self.facts.adapters)
        rows = row("on", f"{listed}. Drafts are the base's", adapters=len(self.facts.adapters))
        yield "adapters", rows if listed else row("off", "none is loaded (set adapters)")

    def _modes(self, config: EngineConfig) -> CapabilityRows:
        found = "the longest common beginning with an earlier or running sequence"
        yield "prefix_cache", on_or_off(config.prefix_cache, found, "prefix_cache is false")
        why = (
            f"at {self.places} places after {PROBE} tokens, up to {self.equal_rows} rows of a span have the "
            "bits of single ones; beyond, and after longer contexts, texts are equal up to near-ties "
            "(`speculon check` has them)"
        )
        yield "batch_invariant", row("off", why, rows=self.equal_rows)
        why = "weights are rearranged for this chip's kernels"
        yield "repack", on_or_off(self.repack, why, "repack is false, or it ends the process on this chip")

    def _limits(self, config: EngineConfig) -> CapabilityRows:
        why = "set by max_context" if config.max_context else self.plan.why_length
        yield "limits.max_context", row("on", why, tokens=self.facts.max_context)
        why, streams = self.plan.why_streams, self.plan.streams
        yield "limits.pool", row("on", why, pages=streams, tokens=self.facts.capacity)
        yield "limits.page", row("on", "a sequence has a whole context", tokens=self.space.block_size)
        yield "limits.max_num_seqs", row("on", f"{why}; others wait", sequences=streams)

    def memory(self) -> Mapping[str, int]:
        return self.plan.parts()

    def describe(self) -> dict[str, Any]:
        facts, version = self.facts, self.model.lib.llama_version().decode()
        return {
            "dtype": self.model.description,
            "device": facts.form["device"],
            "num_parameters": facts.parameters,
            "max_context": facts.max_context,
            "weight_bytes": self.model.num_bytes,
            "kv_bytes_per_token": self.plan.bytes_per_token,
            "layers": [],
            "states": None,
            "packed": [self.model.description],
            "fused": "llama.cpp",
            "speed": f"by llama.cpp {version}",
            "images": NO_IMAGES,
            "batch_invariant": f"no: equal bits for up to {self.equal_rows} rows of a span, as measured here",
            "adapters": [f"{name}: {file}" for name, file in self.config.adapters.items()],
            "notes": [],
            "checked": f"computed by llama.cpp {version}",
            "supported": True,
            "memory": self.plan.to_dict(),
        }

    def end(self) -> None:
        for drafter in self.drafters.values():
            drafter.model.close()
        self.model.close()

    def between_rounds(self) -> bool:
        return False

    def loading_ended(self) -> None:
        self.plan = replace(self.plan, measured=held_bytes())


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def measure(model: LlamaModel, space: Streams) -> tuple[int, int]:
    """The most rows of a span, up to `SPAN`, whose logits have the bits of single rows here, and the number
    of places where that was compared.

    Tells the streams from how many tokens on a copy is faster than computing.
    """
    tokens = [(7919 * place) % model.vocab_size for place in range(PROBE + PLACES * SPAN)]
    began = perf_counter()
    model.run([Rows(0, 0, tokens[:PROBE], PROBE)])
    row_s = (perf_counter() - began) / PROBE
    equal, places, at = (1 if model.recurrent else SPAN), 0, PROBE
    while equal > 1 and places < PLACES and (not places or perf_counter() - began < SECONDS):
        equal, places = equal_rows(model, at, tokens[at : at + equal]), places + 1
        at += equal
    if not model.recurrent and len(space.streams) > 1:
        model.cut(0, PROBE)
        began = perf_counter()
        model.copy(0, 1)
        model.run([Rows(1, PROBE, tokens[PROBE : PROBE + 1], 1)])
        space.copied_from = max(1, int((perf_counter() - began) / row_s))
        model.cut(1, 0)
    model.cut(0, 0)
    return equal, places


def equal_rows(model: LlamaModel, at: int, tokens: list[int]) -> int:
    """How many of these tokens have the same logits in one call as one by one, in a stream of `at` tokens,
    which then has so many more.
    """
    single = [model.run([Rows(0, at + i, [token], 0)])[0] for i, token in enumerate(tokens)]
    for rows in range(2, len(tokens) + 1):
        model.cut(0, at)
        together, _ = model.run([Rows(0, at, tokens[:rows], 0)])
        if not torch.equal(together, torch.cat(single[:rows])):
            model.cut(0, at + rows - 1)
            return rows - 1
    return len(tokens)
