"""A Gemma 4 assistant (Google 2026): layers whose queries read the target's own keys and values.

A row joins the embedding of a sequence's latest token and a state of the target's width. Its queries have the
position of the sequence's last committed token in all forwards of a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from speculon.core.errors import CorruptWeights
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.config import INTEGERS, read_numbers
from speculon.runtimes.torch.drafters.gemma4_assistant.config import AssistantConfig
from speculon.runtimes.torch.drafters.layers import (
    MLP,
    ORDER,
    Network,
    TrainedNorm,
    load_network,
    make_rotary,
)
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from speculon.runtimes.torch.kv.store import SpanView, View
from speculon.runtimes.torch.model.attention import attend_written
from speculon.runtimes.torch.model.block import AROUND, RotaryTables, rotate, rotation_tables
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import NO_PADDING, LayerSpec

# for each type of attention: the target's layer that is read, and how far back
Layers = Mapping[str, tuple[int, int | None]]
Sources = Mapping[str, tuple[View, int]]  # the same with what each row sees


class WholeView(View):
    """Pages of which a row sees its whole span, whatever the window of the layer is."""

    def spec(self, layer: int) -> LayerSpec:
        return replace(View.spec(self, layer), window=None, padding=NO_PADDING)


def make_sources(layers: Layers, drafts: DraftPages, ends: list[tuple[Sequence, int]]) -> Sources:
    """What one row of each sequence sees of the tokens before position n, the window's and one more."""
    sources = {}
    for kind, (layer, window) in layers.items():
        spans = []
        for row, (seq, n) in enumerate(ends):
            pages = drafts.of(seq)
            whole = SpanView(row, row + 1, drafts.store.where_of(pages, n), n - pages.released)
            keys = whole.context if window is None else min(whole.context, window + 1)
            spans.append(SpanView(row, row + 1, whole.tail(keys), keys))
        sources[kind] = WholeView(drafts.store, slice(0, 0), spans), layer
    return sources


class Queries(nn.Module):
    """The parameters of a layer's attention."""

    def __init__(self, hidden: int, heads: int, dim: int, eps: float):
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm, self.dim = TrainedNorm(dim, eps), dim

    def forward(self, x: Tensor, tables: RotaryTables, view: View, layer: int) -> Tensor:  # [B, H]
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), tables)
        return self.o_proj(attend_written(view, layer, q, 1.0).flatten(-2))


class AssistantLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), and all of it times a number."""

    def __init__(self, config: AssistantConfig, number: int):
        super().__init__()
        self.layer_type = config.types[number]
        self.self_attn = Queries(config.hidden, *config.queries[number], config.eps)
        self.mlp = MLP(config)
        for norm in AROUND:
            setattr(self, norm, TrainedNorm(config.hidden, config.eps))
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, tables: Mapping[str, RotaryTables], sources: Sources) -> Tensor:
        before, after, before_mlp, after_mlp = (getattr(self, norm) for norm in AROUND)
        x = x + after(self.self_attn(before(x), tables[self.layer_type], *sources[self.layer_type]))
        return (x + after_mlp(self.mlp(before_mlp(x)))) * self.layer_scalar


class MaskedEmbedding(nn.Module):
    """Which tokens are scored: those in the groups with the best centroids."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.centroids, self.best = nn.Linear(config.hidden, config.groups, bias=False), config.best
        self.members: Tensor  # [C, V / C]
        self.register_buffer("members", torch.empty(0), persistent=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:  # [B, H], [V, H] -> [B, V]
        """The scores of these tokens, and for all others one value below them."""
        ids = self.members[self.centroids(x).topk(self.best).indices].flatten(1)
        near = (rows[ids] @ x[..., None])[..., 0]
        return (near.amin(-1, keepdim=True) - 1).expand(-1, len(rows)).scatter(1, ids, near)


class AssistantNetwork(Network):
    """An assistant. Its parameters have the names of the published format."""

    reads_states = True
    config: AssistantConfig

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        self.pre_projection = nn.Linear(2 * config.target_hidden, config.hidden, bias=False)
        self.post_projection = nn.Linear(config.hidden, config.target_hidden, bias=False)
        self.layers: Any = nn.ModuleList(AssistantLayer(config, number) for number in range(config.layers))
        self.norm = TrainedNorm(config.hidden, config.eps)
        if config.groups:
            self.masked_embedding = MaskedEmbedding(config)
        else:
            self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.rotaries: Any = {}  # by type of attention

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, sources: Sources) -> Tensor:
        """The states [B, H] of rows with the target's embedding and states [B, Ht]."""
        x = self.pre_projection(torch.cat([embedded, states], -1))
        tables = {}
        for kind, rotary in self.rotaries.items():
            cos, sin = rotary(x, positions[None])
            tables[kind] = rotation_tables(cos, sin, cos.shape[-1])
        for layer in self.layers:
            x = layer(x, tables, sources)
        return self.norm(x)

    def logits(self, x: Tensor, vocab_size: int) -> Tensor:  # [B, H] -> [B, V]
        scores = self.masked_embedding(x, self.embed) if self.config.groups else self.lm_head(x)
        return self.widened(scores.float(), vocab_size)


def load_assistant(config: AssistantConfig, target: Target) -> AssistantNetwork:
    """Raises `CorruptWeights` where the order of tokens is none; see `load_network`."""
    network = load_network(AssistantNetwork, config, target)
    sizes = dict(zip(config.types, config.queries, strict=True))
    network.rotaries = {
        kind: make_rotary(replace(config, rope=rope, head_dim=sizes[kind][1])).to(target.device)
        for kind, rope in config.ropes.items()
    }
    if config.groups:
        order = read_numbers(config.files, config.names.get(ORDER), INTEGERS)
        if sorted(order) != list(range(config.vocab_size)):
            raise CorruptWeights(f"{config.path}: {ORDER} does not name each token once")
        members = torch.tensor(order, device=target.device).view(config.groups, -1)
        network.masked_embedding.members = members
    return network
