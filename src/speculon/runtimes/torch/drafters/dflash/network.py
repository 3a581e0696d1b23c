"""A DFlash drafter: one forward drafts a block of tokens (z-lab 2026), with the heads of DSpark or the
convolutions and selector of DFlash2 (both 2026).

The target's states at position j become keys and values of every layer, over pages in slot j. A block of rows
attends to them: the anchor, which is the sequence's last token, at position n, and masks after it. With a
Markov head logits depend on the drafts before; a confidence head predicts the chance of acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.errors import WrongPair
from speculon.runtimes.torch.drafters.dflash.config import DFlashConfig, MarkovType
from speculon.runtimes.torch.drafters.dflash.dflash2 import BlockConvolution, BlockRows, CandidateSelector
from speculon.runtimes.torch.drafters.dflash.sight import Sight, attend_blocks
from speculon.runtimes.torch.drafters.layers import DecoderLayer, Joined, Network, TrainedNorm, load_network
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.block import RotaryTables, rotate
from speculon.runtimes.torch.model.linear import Product
from speculon.runtimes.torch.model.target import Target


class MarkovHead(nn.Module):
    """A bias of the logits by the token before, of low rank: w2 m, with m = e = w1[token]."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.vocab_size is not None and config.draft_vocab_size is not None
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.draft_vocab_size, bias=False)

    def start(self, sequences: int) -> Tensor:  # [B, r]
        """The state before the first row."""
        return self.markov_w1.weight.new_zeros(sequences, self.rank)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """m [..., r] of rows with states h [..., H] after e [..., r], and the next state [..., r]."""
        return e, state


class GatedMarkovHead(MarkovHead):
    """m = sigmoid(gate [h; e]) * e"""

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden + self.rank, self.rank)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate_proj(torch.cat([h, e], -1)).sigmoid() * e, state


class RecurrentMarkovHead(MarkovHead):
    """g, c, o = joint [state; e; h]; m = tanh(o); the next state is s(g) state + (1 - s(g)) tanh(c), with s
    the sigmoid.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden, 3 * self.rank)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        g, c, o = self.joint_proj(torch.cat([state, e, h], -1)).chunk(3, -1)
        keep = g.sigmoid()
        return o.tanh(), keep * state + (1 - keep) * c.tanh()


MARKOV_HEADS: Mapping[MarkovType, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(nn.Module):
    """The logit of the chance that a draft is accepted if those before it were, from h, or from h and e."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden + self.with_markov * config.markov_rank, 1)

    def forward(self, h: Tensor, e: Tensor | None) -> Tensor:  # [..., H], [..., r] -> [...]
        if self.with_markov:
            assert e is not None, "it reads the Markov head's embedding"
            h = torch.cat([h, e], -1)
        return self.proj(h).float().squeeze(-1)

    def chances(self, h: Tensor, e: Tensor | None) -> list[float]:
        return self(h, e).sigmoid().tolist()


class BlockLayer(DecoderLayer):
    """A layer whose rows attend to the context and to each other."""

    def __init__(self, config: DFlashConfig, number: int, rows: BlockRows):
        super().__init__(config, number, config.hidden)
        self.attention_conv = BlockConvolution(config, rows) if config.conv_taps else None
        self.mlp_conv = BlockConvolution(config, rows) if config.conv_taps else None
        self.sight = layer_sight(config, number)
        self.kv: Product = Joined([self.self_attn.k_proj, self.self_attn.v_proj])

    def extra_repr(self) -> str:  # part of the key of programs
        return f"{self.sight}"

    def keys_values(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., Hkv, D] of rows x [..., H]."""
        k, v = self.kv(x).unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        norm = self.self_attn.k_norm
        return rotate(k if norm is None else norm(k), tables), v

    def begin(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        normed, of, conv = self.input_layernorm(x), self.self_attn, self.attention_conv
        if conv is not None:
            normed = conv.convolve(normed, conv.kernels(normed)[0])
        q = of.q_proj(normed).unflatten(-1, (-1, self.head_dim))
        q = rotate(q if of.q_norm is None else of.q_norm(q), tables)
        return q, *self.keys_values(normed, tables)

    def end(self, x: Tensor, seen: Tensor) -> Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().end(x, seen)
        # kernels are computed again: of a captured layer's begin, only what attention reads is kept
        _, kernel = self.attention_conv.kernels(self.input_layernorm(x))
        x = x + self.attention_conv.convolve(self.self_attn.o_proj(seen.flatten(-2)), kernel)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(normed, before)), after)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:  # [T, heads, D]
        return attend_blocks(view, self.number, self.sight, q, k, v, self.scaling)


class DFlashNetwork(Network):
    """A DFlash, DFlash2 or DSpark drafter. Its parameters have the names of the published format."""

    reads_states = False
    config: DFlashConfig

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.taps * config.target_hidden, config.hidden, bias="fc.bias" in config.names)
        self.hidden_norm = TrainedNorm(config.hidden, config.eps)
        self.rows = BlockRows(torch.empty(0))
        self.layers: Any = nn.ModuleList(BlockLayer(config, n, self.rows) for n in range(config.layers))
        self.norm = TrainedNorm(config.hidden, config.eps)
        if config.has("lm_head"):
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab_size or 0, bias=False)
        self.markov_head: Any = None if config.markov is None else MARKOV_HEADS[config.markov](config)
        self.candidate_selector: Any = CandidateSelector(config) if config.selector_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    @property
    def in_turn(self) -> bool:
        """Whether a draft depends on the one before."""
        return self.markov_head is not None or self.candidate_selector is not None

    def context(self, taps: Tensor) -> Tensor:  # [..., k * Ht] -> [..., H]
        """What keys and values are made of, from the target's hidden states."""
        return self.hidden_norm(self.fc(taps))

    def write_context(self, taps: Tensor, positions: Tensor, view: View) -> None:
        """Writes keys and values of the target's states [T, k * Ht] at `positions` [T] to the pages."""
        x = self.context(taps)
        tables = self.tables(x, positions)
        for layer in self.layers:
            view.write(layer.number, *layer.keys_values(x, tables))

    def begin(self, ids: Tensor, positions: Tensor, numbers: Tensor) -> tuple[Tensor, RotaryTables]:
        """Of the rows of blocks, which have such numbers in them, and whose view is `block_view`: [T, H]."""
        self.rows.numbers = numbers
        x = F.embedding(ids, self.embed)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        return x, self.tables(x, positions)

    def logits(self, states: Tensor) -> Tensor:  # [R, H] -> [R, Vd]
        """Without what a Markov head or a selector adds."""
        scores, factor, cap = self.lm_head(states).float(), self.config.logit_scale, self.config.logit_cap
        if factor != 1:
            scores = scores * factor
        return scores if cap is None else cap * (scores / cap).tanh()


def layer_sight(config: DFlashConfig, layer: int) -> Sight:
    """What the rows of a block see in a layer."""
    reach = config.reaches[layer]
    return Sight(config.causal[layer], reach, reach is not None and config.window_start == "before_anchor")


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
    scores: list[Tensor]  # `DFlashNetwork.logits` [K, Vd]; of a selector's candidates [K, k]
    candidates: list[Tensor] | None  # of a selector [K, k]
    memory: Tensor | None  # of the Markov head [B, r]
    sure: list[float]  # of the rows of the latest call; empty without a confidence head

    @classmethod
    def of(cls, network: DFlashNetwork, vocab_size: int, states: list[Tensor]) -> Drawing:
        sizes, markov = [len(part) for part in states], network.markov_head
        scores, candidates = network.logits(torch.cat(states)), None
        if (selector := network.candidate_selector) is not None:
            scores, ids = network.widened(scores, vocab_size).topk(selector.top_k)
            candidates = list(ids.split(sizes))
        memory = None if markov is None else markov.start(len(states))
        return cls(network, vocab_size, states, list(scores.split(sizes)), candidates, memory, [])

    def all_logits(self) -> tuple[Tensor, list[float] | None]:
        """Those of all rows [sum of K, V], and what a confidence head says; not where drafts come in turn."""
        assert not self.network.in_turn
        confidence = self.network.confidence_head
        chances = None if confidence is None else confidence.chances(torch.cat(self.states), None)
        return self.network.widened(torch.cat(self.scores), self.vocab_size), chances

    def logits(self, which: list[int], row: int, previous: list[int]) -> Tensor:  # [len(which), V]
        """Those of row `row` of some sequences, after these tokens; rows are asked for in rising order."""
        scores = torch.stack([self.scores[i][row] for i in which])
        markov, confidence, e = self.network.markov_head, self.network.confidence_head, None
        h = torch.stack([self.states[i][row] for i in which])
        before = torch.tensor(previous, device=h.device)
        if markov is not None:
            assert self.memory is not None
            e = markov.markov_w1(before)
            at = torch.tensor(which, device=h.device)
            latent, state = markov.step(e, h, self.memory.index_select(0, at))
            self.memory.index_copy_(0, at, state)
            scores = scores + markov.markov_w2(latent).float()
        self.sure = [] if confidence is None else confidence.chances(h, e)
        if self.candidates is not None:
            found = torch.stack([self.candidates[i][row] for i in which])
            scores = scores + self.network.candidate_selector(before, h, found)
            others = scores.new_full((len(which), self.vocab_size), -torch.inf)
            return others.scatter_(1, found, scores)
        return self.network.widened(scores, self.vocab_size)
