"""A DFlash drafter: one forward drafts a block of tokens (z-lab 2026).

The target's states at position j become keys and values of every layer, over pages in slot j. A block of rows
attends to them: the anchor, which is the sequence's last token, at position n, and masks after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.errors import WrongPair
from speculon.core.types import Needs
from speculon.decoding.kv.store import View
from speculon.drafters.dflash.attention import Sight, attend_blocks
from speculon.drafters.dflash.config import DFlashConfig
from speculon.drafters.dflash.heads import MARKOV_HEADS, ConfidenceHead
from speculon.drafters.layers import DecoderLayer, Joined, Network, Norm, load_network
from speculon.drafters.runner import needs_of
from speculon.target.block import Tables, rotate
from speculon.target.linear import Product
from speculon.target.target import Target


class BlockLayer(DecoderLayer):
    """A layer whose rows attend to the context and to each other."""

    def __init__(self, config: DFlashConfig, number: int):
        super().__init__(config, number, config.hidden)
        self.sight = sight_of(config, number)
        self.kv: Product = Joined([self.self_attn.k_proj, self.self_attn.v_proj])

    def extra_repr(self) -> str:  # part of the key of programs
        return f"{self.sight}"

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., Hkv, D] of rows x [..., H]."""
        k, v = self.kv(x).unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        norm = self.self_attn.k_norm
        return rotate(k if norm is None else norm(k), tables), v

    def begin(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        normed, of = self.input_layernorm(x), self.self_attn
        q = of.q_proj(normed).unflatten(-1, (-1, self.head_dim))
        q = rotate(q if of.q_norm is None else of.q_norm(q), tables)
        return q, *self.keys_values(normed, tables)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:  # [T, heads, D]
        return attend_blocks(view, self.number, self.sight, q, k, v, self.scaling)


class DFlashNetwork(Network):
    """A DFlash or DSpark drafter. Its parameters have the names of the published format."""

    reads_states = False
    config: DFlashConfig

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.taps * config.target_hidden, config.hidden, bias="fc.bias" in config.names)
        self.hidden_norm = Norm(config.hidden, config.eps)
        self.layers: Any = nn.ModuleList(BlockLayer(config, number) for number in range(config.layers))
        self.norm = Norm(config.hidden, config.eps)
        if config.has("lm_head"):
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab_size or 0, bias=False)
        self.markov_head: Any = None if config.markov is None else MARKOV_HEADS[config.markov](config)
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def context(self, taps: Tensor) -> Tensor:  # [..., k * Ht] -> [..., H]
        """What keys and values are made of, from the target's hidden states."""
        return self.hidden_norm(self.fc(taps))

    def write_context(self, taps: Tensor, positions: Tensor, view: View) -> None:
        """Writes keys and values of the target's states [T, k * Ht] at `positions` [T] to the pages."""
        x = self.context(taps)
        tables = self.tables(x, positions)
        for layer in self.layers:
            view.write(layer.number, *layer.keys_values(x, tables))

    def forward(self, ids: Tensor, positions: Tensor, view: View) -> Tensor:
        """The normed states [T, H] of the rows of blocks; ids, positions [T], and `block_view` of them."""
        x, tables = self.begin(ids, positions)
        for layer in self.layers:
            x = layer.end(x, layer.attend(*layer.begin(x, tables), view))
        return self.end(x)

    def begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tables]:
        """What the first layer reads [T, H], and the rotary tables of all."""
        x = F.embedding(ids, self.embed)
        return x, self.tables(x, positions)

    def end(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self.norm(x)


def sight_of(config: DFlashConfig, layer: int) -> Sight:
    """What the rows of a block see in a layer."""
    window, causal = config.windows[layer], config.causal[layer]
    if window is None:
        return Sight(causal)
    reach = window - 1 if config.window_start == "row" else window
    return Sight(causal, reach, config.window_start == "before_anchor")


def dflash_needs(
    config: DFlashConfig, target: Target, rows: int, scored: int, compile: bool = False
) -> Needs:
    """The needs of a drafter that is not loaded; T = `rows` and R = `scored` in its largest forward."""
    reaches = [sight_of(config, layer).reach for layer in range(config.layers)]
    spans = [None if reach is None else reach + 1 for reach in reaches]  # a row and the pages before it
    taps = config.tap_layouts(len(target.layers))[0]
    return needs_of(config, taps, spans, target, rows, scored, compile, max_drafts=config.max_drafts)


def load_dflash(config: DFlashConfig, target: Target) -> DFlashNetwork:
    """Raises `WrongPair` for a mask token without an embedding; see `load_network`."""
    network = load_network(DFlashNetwork, config, target)
    if config.mask_token_id >= len(network.embed):
        raise WrongPair(
            f"{config.path}: mask_token_id {config.mask_token_id} of {len(network.embed)} embeddings"
        )
    return network


@dataclass(slots=True)
class Drawing:
    """The rows of one round's blocks that draft, sampled left to right."""

    network: DFlashNetwork
    vocab_size: int
    states: list[Tensor]  # of each sequence [K, H]
    scores: list[Tensor]  # without the Markov head [K, Vd]
    memory: Tensor | None  # of the Markov head [B, r]
    sure: list[float]  # of the rows of the latest call; empty without a confidence head

    @classmethod
    def of(cls, network: DFlashNetwork, vocab_size: int, states: list[Tensor]) -> Drawing:
        sizes, markov = [len(part) for part in states], network.markov_head
        scores = network.lm_head(torch.cat(states)).float().split(sizes)
        memory = None if markov is None else markov.start(len(states))
        return cls(network, vocab_size, states, list(scores), memory, [])

    def all_logits(self) -> tuple[Tensor, list[float] | None]:
        """Those of all rows [sum of K, V], and what a confidence head says, where there is no Markov head."""
        assert self.network.markov_head is None
        confidence = self.network.confidence_head
        chances = None if confidence is None else confidence.chances(torch.cat(self.states), None)
        return self.network.widened(torch.cat(self.scores), self.vocab_size), chances

    def logits(self, which: list[int], row: int, previous: list[int]) -> Tensor:  # [len(which), V]
        """Those of row `row` of some sequences, after these tokens; rows are asked for in rising order."""
        scores = torch.stack([self.scores[i][row] for i in which])
        markov, confidence, e = self.network.markov_head, self.network.confidence_head, None
        h = torch.stack([self.states[i][row] for i in which])
        if markov is not None:
            assert self.memory is not None
            e = markov.markov_w1(torch.tensor(previous, device=h.device))
            at = torch.tensor(which, device=h.device)
            latent, state = markov.step(e, h, self.memory.index_select(0, at))
            self.memory.index_copy_(0, at, state)
            scores = scores + markov.markov_w2(latent).float()
        self.sure = [] if confidence is None else confidence.chances(h, e)
        return self.network.widened(scores, self.vocab_size)
