"""Modules for multi-token prediction (DeepSeek-V3 2024) over pages: layers of the target's own class.

Module k pairs a hidden state h with token x and yields the state after it:
layer(proj([norm(embed(x)), norm(h)])), then a norm; the head turns that into logits. Row i of module 0 reads
the target's state g_i, after its final norm, and token x_{i+1}. Row i of module k reads row i of module k - 1
and token x_{i+k+1}. A row lies in the slot of its token, so the first k + 1 slots of module k stay empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.attention import running

Operation = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Module:
    """One prediction module, in the target's dtype and on its device."""

    embed: Tensor  # [V, H]
    embed_norm: nn.Module
    state_norm: nn.Module
    proj: nn.Module  # 2 H -> H
    hidden_first: bool
    layer: nn.Module  # a decoder layer of the target's class
    norm: nn.Module
    head: Operation  # H -> V

    def join(self, ids: Tensor, states: Tensor) -> Tensor:
        """What the layer reads: [..., T], [..., T, H] -> [..., T, H]."""
        parts = [self.embed_norm(F.embedding(ids, self.embed)), self.state_norm(states)]
        if self.hidden_first:
            parts.reverse()
        return self.proj(torch.cat(parts, -1))

    def __call__(
        self, ids: Tensor, states: Tensor, tables: Any, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The states [T, H] after rows `ids` [T] with `states` [T, H], at rotary `positions` [T]."""
        x = self.join(ids, states)[None]
        out = self.layer(x, attention_mask=mask, position_ids=positions[None], position_embeddings=tables)
        return self.norm(out[0] if isinstance(out, tuple) else out)[0]

    def use_attention(self, name: str) -> None:
        """Switches the attention function of the layer, by its name in transformers."""
        for part in self.layer.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation = name  # type: ignore[union-attr]


@dataclass(slots=True)
class MtpHead:
    """All modules of a checkpoint, with what they share of the target."""

    modules: list[Module]
    final_norm: Operation  # the target's, which its taps have not passed
    rotary: Callable[[Tensor, Tensor], Any]

    @property
    def last(self) -> int:
        """The module that drafts all tokens after its own, too."""
        return len(self.modules) - 1

    def run(self, module: int, ids: Tensor, states: Tensor, positions: Tensor, view: View) -> Tensor:
        """One forward of a module over pages; ids and positions [T], states [T, H] -> [T, H]."""
        tables = self.rotary(states[None], positions[None])
        with running(view):
            return self.modules[module](ids, states, tables, positions)

    def logits(self, module: int, states: Tensor, vocab_size: int) -> Tensor:  # [R, H] -> [R, V]
        scores = self.modules[module].head(states).float()[:, :vocab_size]
        return F.pad(scores, (0, vocab_size - scores.shape[1]), value=-torch.inf)  # either may be padded
