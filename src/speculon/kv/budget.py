"""How many KV pages to own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from speculon.config import EngineConfig
from speculon.core import LayerSpec, ceil_div
from speculon.errors import ConfigError

SHARE_OF_FREE = 0.3  # guess: leaves room for weights that load later and for other programs


def free_memory(device: torch.device) -> int:
    """Bytes that a pool may come from: the device's free memory, or the machine's, within a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def count_pages(config: EngineConfig, layers: tuple[LayerSpec, ...], max_context: int, device: torch.device) -> int:
    """`num_blocks` as set, or what `max_num_seqs` full contexts can use within the memory that is given or free."""
    page_bytes = config.block_size * sum(layer.bytes_per_token for layer in layers)
    free = free_memory(device)
    if config.num_blocks is not None:
        check_free("num_blocks", config.num_blocks, config.num_blocks * page_bytes, free)
        return config.num_blocks
    useful = config.max_num_seqs * ceil_div(max_context, config.block_size)
    budget = int(config.kv_memory_gb * 2**30) if config.kv_memory_gb else int(free * SHARE_OF_FREE)
    pages = min(useful, budget // page_bytes)
    check_free("kv_memory_gb", config.kv_memory_gb, pages * page_bytes, free)
    if pages < 1:
        raise ConfigError(f"kv_memory_gb: {budget} bytes hold no page of {page_bytes} bytes ({config.block_size} tokens)")
    return pages


def check_free(name: str, value: float | None, wanted: int, free: int) -> None:
    if wanted > free:
        raise ConfigError(f"{name} = {value}: the page pool needs {wanted} bytes, {free} are free")
