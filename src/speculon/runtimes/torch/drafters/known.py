"""Which drafters are published for which targets, by their names on the hub.

`draft = auto` looks for them in the hub's cache, before any other model there. What they are, and whether
they fit, their checkpoints say. `known_drafters` adds to this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from speculon.checkpoints.hub import hub_id

# from lists of authors (SafeAILab, Red Hat, Z Lab, AngelSlim, Google) and users; a wrong name finds nothing
KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "meta-llama/Llama-3.1-8B-Instruct": (
            "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        ),
        "meta-llama/Llama-3.3-70B-Instruct": (
            "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
            "meta-llama/Llama-3.2-1B-Instruct",
        ),
        "Qwen/Qwen3-1.7B": ("AngelSlim/Qwen3-1.7B_eagle3",),
        "Qwen/Qwen3-4B": ("AngelSlim/Qwen3-4B_eagle3", "z-lab/Qwen3-4B-DFlash-b16"),
        "Qwen/Qwen3-8B": (
            "RedHatAI/Qwen3-8B-speculator.eagle3",
            "Tengyunw/qwen3_8b_eagle3",
            "z-lab/Qwen3-8B-DFlash-b16",
            "Qwen/Qwen3-0.6B",
        ),
        "Qwen/Qwen3-14B": ("RedHatAI/Qwen3-14B-speculator.eagle3", "Qwen/Qwen3-0.6B"),
        "Qwen/Qwen3-32B": ("RedHatAI/Qwen3-32B-speculator.eagle3", "Qwen/Qwen3-0.6B"),
        "Qwen/Qwen3-30B-A3B-Instruct-2507": ("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",),
        "Qwen/Qwen3-235B-A22B": ("RedHatAI/Qwen3-235B-A22B-speculator.eagle3",),
        "Qwen/Qwen3-235B-A22B-Instruct-2507": ("RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3",),
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("z-lab/Qwen3-Coder-30B-A3B-DFlash",),
        "Qwen/Qwen3-Coder-Next": ("z-lab/Qwen3-Coder-Next-DFlash",),
        "Qwen/Qwen3.5-4B": ("z-lab/Qwen3.5-4B-DFlash",),
        "Qwen/Qwen3.5-9B": ("z-lab/Qwen3.5-9B-DFlash",),
        "Qwen/Qwen3.5-27B": ("z-lab/Qwen3.5-27B-DFlash",),
        "Qwen/Qwen3.5-35B-A3B": ("z-lab/Qwen3.5-35B-A3B-DFlash",),
        "openai/gpt-oss-20b": ("RedHatAI/gpt-oss-20b-speculator.eagle3", "z-lab/gpt-oss-20b-DFlash"),
        "openai/gpt-oss-120b": ("z-lab/gpt-oss-120b-DFlash",),
        "google/gemma-3-27b-it": ("google/gemma-3-1b-it",),
        "google/gemma-4-E2B-it": ("google/gemma-4-E2B-it-assistant",),
        "google/gemma-4-E4B-it": ("google/gemma-4-E4B-it-assistant",),
        "google/gemma-4-31B-it": ("google/gemma-4-31B-it-assistant",),
    }
)


def published_for(target: str | Path, more: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The drafters of a target, those of the settings first. A snapshot in the hub's cache has its full
    name, another folder its own, which is compared with the last part of each name.
    """
    name = (hub_id(target) or Path(target).name).casefold()
    names = (
        drafter
        for table in (more, KNOWN)
        for of, drafters in table.items()
        if name and name in (of.casefold(), of.casefold().rpartition("/")[2])
        for drafter in drafters
    )
    return tuple(dict.fromkeys(names))
