"""Memory is estimated before it is used: the number of KV pages, and whether a drafter fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError
from speculon.core.memory import SHARE_OF_FREE, free_bytes, held_bytes
from speculon.runtimes.torch.kv.reach import joint_reach, max_pages
from speculon.runtimes.torch.kv.store import gather_bytes
from speculon.runtimes.torch.needs import LayerSpec, Needs

# of an estimate
PARTS = ("held", "drafters", "scratch", "remembered", "pages", "states", "snapshots", "additional")
SHORTEST = 2  # tokens of a request: one of prompt, one of answer
SHARE_OF_SNAPSHOTS = 0.05  # a few per sequence where states are large

# fp32 tensors of [R, V] that exist at once where tokens are drawn: the logits, adjusted ones, the weights of
# tokens, their exponentials, the noise and the bits that it is made of
TENSORS_OF_LOGITS = 6
# of [T, D], in a layer: the residual, its norm, q, k and v, rotated q and k, what attention yields, and the
# product of that
TENSORS_OF_STATES = 8
TENSORS_OF_MLP = 3  # of [T, I], beside these: gate, up, and their product


def free_memory(device: torch.device) -> int:
    """Free bytes of the device, or of the machine within its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return free_bytes()


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds now: on the device where it has its own memory, else on the machine."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return held_bytes()


def inner_size(config: Any) -> int:
    """The width inside an MLP; the largest where layers differ."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(inner) if isinstance(inner, list | tuple) else inner


def scratch_bytes(config: Any, dtype: torch.dtype, device: torch.device, rows: int, scored: int) -> int:
    """Memory of the intermediate results of one forward of T = `rows` with R = `scored` of them sampled."""
    states = rows * width_of_states(config.hidden_size, inner_size(config)) * dtype.itemsize
    logits = scored * config.vocab_size * TENSORS_OF_LOGITS * torch.float32.itemsize
    return states + logits + 2 * gather_bytes(device)  # the gather buffer may double


def width_of_states(hidden: int, inner: int) -> int:
    """Numbers of one row that exist at once within a layer."""
    return TENSORS_OF_STATES * hidden + TENSORS_OF_MLP * inner


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The peak memory of an engine in bytes, part by part, and its limit."""

    held: int  # libraries and the target's weights
    drafters: int  # weights
    scratch: int  # intermediate results of one step
    remembered: int  # earlier answers, with full pools
    pages: int  # K and V of target and drafters
    states: int  # recurrent states of all sequences
    snapshots: int  # of these states, for later prompts
    additional: int  # set aside by the user
    limit: int
    policy: str
    measured: int | None = None  # what the process held once everything was loaded

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    def parts(self) -> dict[str, int]:
        """Bytes of each part of the total."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def action(self) -> str:
        """`use`, `plain` or `refuse`: what the memory policy does with the drafters."""
        if self.fits or self.policy == "allow":
            return "use"
        return "plain" if self.policy == "fallback" else "refuse"

    def to_dict(self) -> dict[str, int | str | bool]:
        return {**asdict(self), "estimate": self.total, "fits": self.fits, "action": self.action}

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {getattr(self, name)}" for name in PARTS)
        sign = "<=" if self.fits else ">"
        estimate = f"estimate {self.total} bytes ({parts}) {sign} limit {self.limit}"
        return f"{estimate}; memory_policy {self.policy}: {self.action}"


class MemoryBudget:
    """The memory of one engine, measured when only its target is loaded.

    `held` and `free` are bytes that are expected instead, of a process that has not been started.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Needs,
        max_context: int,
        device: torch.device,
        held: int | None = None,
        free: int | None = None,
    ):
        self._config, self._target, self._max_context = config, target, max_context
        self._held = held_memory(device) if held is None else held
        self._free, answers = free_memory(device) if free is None else free, self._for_answers()
        self._remembered = answers if device.type == "cpu" else 0  # they are always on the CPU

    def _for_answers(self) -> int:
        """Bytes of all pools of earlier answers. Raises `ConfigError` where they exceed free memory."""
        settings, free = self._config.speculation, free_memory(torch.device("cpu"))
        if settings.remembered_bytes > free:
            needed = f"{settings.suffix_pools} pools of them need {settings.remembered_bytes} bytes"
            raise ConfigError(
                f"suffix_pool_tokens = {settings.suffix_pool_tokens}: {needed}, {free} are free; lower it "
                "or suffix_pools"
            )
        return settings.remembered_bytes

    def estimate(self, drafters: Sequence[Needs]) -> MemoryEstimate:
        """With these drafters, loaded or not."""
        settings = self._config.speculation
        everyone, pages = (self._target, *drafters), self._count(drafters) * self._page_bytes(drafters)
        limit_gb = settings.memory_limit_gb
        return MemoryEstimate(
            held=self._held,
            drafters=sum(needs.bytes_fixed for needs in drafters),
            scratch=max(needs.bytes_scratch for needs in everyone),  # one model runs at a time
            remembered=self._remembered,
            pages=pages,
            states=self._states(drafters),
            snapshots=self._for_snapshots(drafters),
            additional=int(settings.additional_memory_gb * 2**30),
            limit=self._held + self._free if limit_gb is None else int(limit_gb * 2**30),
            policy=settings.memory_policy,
        )

    def pages(self, drafters: Sequence[Needs]) -> int:
        """Pages of the pool. Raises `ConfigError` where free or given memory is too small for them."""
        config, count, page_bytes = self._config, self._count(drafters), self._page_bytes(drafters)
        name = "kv_memory_gb" if config.num_blocks is None else "num_blocks"
        if (states := self._states(drafters)) and self._left(drafters) <= 0:
            reason = (
                f"the recurrent states of this many sequences take {states} bytes, {self._free} are free; "
                "lower it"
            )
            raise ConfigError(f"max_num_seqs = {config.max_num_seqs}: {reason}")
        if count < 1:
            page = f"{page_bytes} bytes ({config.block_size} tokens)"
            raise ConfigError(
                f"{name}: {self._for_pages(drafters)} bytes are left for KV pages, and one page takes {page}"
            )
        if count * config.block_size < SHORTEST:
            few = f"{count} pages of {config.block_size} tokens"
            raise ConfigError(
                f"{name}: {few} are too few for any request, which has at least {SHORTEST} tokens"
            )
        free = self._left(drafters) - self._for_snapshots(drafters)
        if count * page_bytes > free:
            needed = f"the KV pages need {count * page_bytes} bytes, {free} are free; lower it"
            raise ConfigError(f"{name} = {getattr(config, name)}: {needed}")
        return count

    def pool_bytes(self, drafters: Sequence[Needs]) -> int:
        """Bytes of the page pool; 0 where no page fits."""
        return self._count(drafters) * self._page_bytes(drafters)

    def snapshots(self, drafters: Sequence[Needs]) -> int:
        """Snapshots of recurrent states. Raises `ConfigError` where given memory is too small or not free."""
        each, memory_gb = self._target.bytes_snapshot, self._config.snapshot_memory_gb
        needed = self._for_snapshots(drafters)
        if memory_gb and each and self._config.prefix_cache:
            if not needed:
                raise ConfigError(f"snapshot_memory_gb = {memory_gb}: one snapshot takes {each} bytes")
            if needed > (free := self._left(drafters)):
                reason = f"the snapshots need {needed} bytes, {free} are free"
                raise ConfigError(f"snapshot_memory_gb = {memory_gb}: {reason}")
        return needed // each if each else 0

    def _for_snapshots(self, drafters: Sequence[Needs]) -> int:
        """Bytes of whole snapshots, one for each page at most."""
        each, memory_gb = self._target.bytes_snapshot, self._config.snapshot_memory_gb
        if not each or not self._config.prefix_cache:
            return 0
        share = max(0, self._left(drafters)) * SHARE_OF_SNAPSHOTS
        room = share if memory_gb is None else memory_gb * 2**30
        return each * min(int(room // each), self._config.num_blocks or self._useful(drafters))

    def _count(self, drafters: Sequence[Needs]) -> int:
        """`num_blocks`, or what `max_num_seqs` full contexts need, within given or free memory."""
        set_count = self._config.num_blocks
        return set_count or min(
            self._useful(drafters), self._for_pages(drafters) // self._page_bytes(drafters)
        )

    def _useful(self, drafters: Sequence[Needs]) -> int:
        """Pages of full contexts; of their windows alone, where no prefix cache keeps the others."""
        config = self._config
        reach = None if config.prefix_cache else joint_reach(self._target.layers, drafters)
        each = max_pages(self._max_context, config.max_batch_tokens, reach, config.block_size)
        return config.max_num_seqs * each

    def _for_pages(self, drafters: Sequence[Needs]) -> int:
        if self._config.kv_memory_gb:
            return int(self._config.kv_memory_gb * 2**30)
        return max(0, int((self._left(drafters) - self._for_snapshots(drafters)) * SHARE_OF_FREE))

    def _states(self, drafters: Sequence[Needs]) -> int:
        return sum(needs.bytes_states for needs in (self._target, *drafters))

    def _left(self, drafters: Sequence[Needs]) -> int:
        weights = sum(needs.bytes_fixed for needs in drafters)
        return self._free - self._remembered - self._states(drafters) - weights

    def _page_bytes(self, drafters: Sequence[Needs]) -> int:
        # at least 1: a model without attention keeps nothing in pages, whose number then only counts tokens
        layers = (*self._target.layers, *self._layers(drafters))
        return max(1, self._config.block_size * sum(layer.bytes_per_token for layer in layers))

    def _layers(self, drafters: Sequence[Needs]) -> list[LayerSpec]:
        return [layer for needs in drafters for layer in needs.layers]
