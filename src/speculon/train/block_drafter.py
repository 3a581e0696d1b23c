"""Block drafters as they learn: DFlash, and DSpark with a Markov and a confidence head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.drafters.dflash.config import DFlashConfig
from speculon.drafters.dflash.network import DFlashNetwork
from speculon.train.losses import TINY, cross_entropy, kl
from speculon.train.teacher import Batch

CHUNK = 16  # anchors of a row that attend together; later ones see more of the row
CE, TV = 0.1, 0.9  # shares of DSpark's two losses, as published


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the blocks of a batch learn. Draft k of anchor a predicts token a + 1 + k."""

    anchors: Tensor  # [B, A], rising
    at: Tensor  # [B, A, K], the position a + k, which predicts the same token as the draft
    weights: Tensor  # [B, A, K] of the loss; 0 from the first token on that is not learned

    def of(self, values: Tensor) -> Tensor:
        """values [B, T, ...] at the positions of all drafts [B, A, K, ...]"""
        rows = torch.arange(len(values), device=values.device)[:, None, None]
        return values[rows, self.at]


def draw_blocks(weights: Tensor, count: int, drafts: int, draw: int) -> Blocks:
    """At most `count` anchors of each row [B, T], among those whose next token is learned.

    A function of `draw` and of the weights alone, so that a resumed run has the same blocks.
    """
    last = weights.shape[1] - drafts  # anchors below it have a token for each draft
    chance = torch.rand(len(weights), last, generator=torch.Generator().manual_seed(draw))
    learned = (weights[:, :last] > 0).cpu()
    learned[:, 0] = False  # it has no context
    anchors = (chance + learned).topk(min(count, last)).indices.sort().values.to(weights.device)
    at = anchors[..., None] + torch.arange(drafts, device=weights.device)
    blocks = Blocks(anchors, at, torch.empty(0))
    found = blocks.of(weights)
    return Blocks(anchors, at, found * (found > 0).cumprod(-1))


def decays(drafts: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-k / gamma) for drafts k = 0, 1, ... [K]"""
    return (-torch.arange(drafts, device=device) / gamma).exp()


class DFlashDrafter(DFlashNetwork):
    """Learns the target's probabilities at each position of a block, or the text itself."""

    def __init__(self, config: DFlashConfig, anchors: int, gamma: float, soft: bool):
        super().__init__(config)
        self.anchors, self.gamma, self.soft = anchors, gamma, soft
        self.head: Tensor  # [V, H], the target's
        self.register_buffer("head", torch.empty(0), persistent=False)

    def block_states(self, ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """Normed states [B, A, K, H] of the rows that draft, for blocks that begin at `anchors` [B, A].

        ids [B, T], taps [B, T, k * H]. A block sees the context of all positions before its anchor, and all
        of its own rows. Draft k of anchor a predicts token a + 1 + k.
        """
        config, length, device = self.config, ids.shape[1], ids.device
        context, rows = self.context(taps), torch.arange(config.block_size, device=device)
        cos, sin = self.tables(self.embed, torch.arange(length + len(rows), device=device))
        places = anchors[..., None] + rows  # [B, A, S]
        masks = torch.full((*anchors.shape, len(rows) - 1), config.mask_token_id, device=device)
        x = F.embedding(torch.cat([ids.gather(1, anchors)[..., None], masks], -1), self.embed)
        for layer in self.layers:
            keys, values = layer.keys_values(context, (cos[:length], sin[:length]))  # [B, T, KV, D]
            attend = partial(block_attention, anchors, keys.to(values.dtype), values)
            x = layer(x, (cos[places], sin[places]), attend)
        return self.norm(x[:, :, len(rows) - config.max_drafts :])

    def loss(self, batch: Batch) -> Tensor:
        """sum_k exp(-k / gamma) l_k, a weighted mean over drafts; l is KL(p || q), or cross entropy."""
        blocks, weights = self._drawn(batch)
        hidden, weights = (
            self.block_states(batch.ids, batch.taps, blocks.anchors).flatten(0, 2),
            weights.flatten(),
        )
        if self.soft:
            p, entropy = blocks.of(batch.p).flatten(0, 2), blocks.of(batch.entropy).flatten()
            return kl(hidden, self.head, p, entropy, weights)
        return cross_entropy(hidden, self.head, next_tokens(batch, blocks).flatten(), weights)

    def correct(self, batch: Batch) -> Tensor:
        """Whether the best token of each draft is the target's, in blocks that are learned whole [K, M]."""
        blocks, weights = self._drawn(batch)
        whole = weights[..., -1] > 0  # [B, A]
        logits = self._logits(self.block_states(batch.ids, batch.taps, blocks.anchors), batch, blocks)
        return (logits.argmax(-1) == blocks.of(batch.best))[whole].T

    def _drawn(self, batch: Batch) -> tuple[Blocks, Tensor]:
        """The blocks, and their weights with the decay [B, A, K]."""
        blocks = draw_blocks(batch.weights, self.anchors, self.config.max_drafts, batch.draw)
        return blocks, blocks.weights * decays(self.config.max_drafts, self.gamma, batch.ids.device)

    def _logits(self, hidden: Tensor, batch: Batch, blocks: Blocks) -> Tensor:
        """[B, A, K, V]"""
        return F.linear(hidden, self.head)


class DSparkDrafter(DFlashDrafter):
    """A block drafter whose logits know the drafts before, and which predicts its own acceptance."""

    def __init__(self, config: DFlashConfig, anchors: int, gamma: float, soft: bool, confidence: float):
        super().__init__(config, anchors, gamma, soft)
        self.confidence = confidence  # weight of its loss

    def loss(self, batch: Batch) -> Tensor:
        """KL(p || q), or 0.1 CE + 0.9 TV(p, q), weighted like DFlash's; and c BCE(confidence, 1 - TV).

        The token before each draft is the text's own, as if all earlier drafts were right.
        """
        blocks, weights = self._drawn(batch)
        hidden = self.block_states(batch.ids, batch.taps, blocks.anchors)
        p, log_q = blocks.of(batch.p).float(), self._logits(hidden, batch, blocks).float().log_softmax(-1)
        distance = 0.5 * (p - log_q.exp()).abs().sum(-1)  # [B, A, K]
        if self.soft:
            each = -(p * log_q).sum(-1) - blocks.of(batch.entropy)
        else:
            each = TV * distance - CE * log_q.gather(-1, next_tokens(batch, blocks)[..., None]).squeeze(-1)
        if self.confidence_head is not None:
            accepted = self.confidence_head(hidden, self.markov_head.markov_w1(blocks.of(batch.ids)))
            certain = F.binary_cross_entropy_with_logits(accepted, 1 - distance.detach(), reduction="none")
            each = each + self.confidence * certain
        return (each * weights).sum() / (weights.sum() + TINY)

    def _logits(self, hidden: Tensor, batch: Batch, blocks: Blocks) -> Tensor:
        head = self.markov_head
        return F.linear(hidden, self.head) + head.markov_w2(head(blocks.of(batch.ids), hidden))


def next_tokens(batch: Batch, blocks: Blocks) -> Tensor:
    """The text's token that each draft predicts [B, A, K]"""
    rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None, None]
    return batch.ids[rows, blocks.at + 1]


def block_attention(
    anchors: Tensor, k: Tensor, v: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, scaling: float
) -> Tensor:
    """Attention of blocks to the context before their anchors, and in both directions to themselves.

    q [B, A, S, heads, D]; k, v [B, T, KV, D]; own_k, own_v [B, A, S, KV, D]; anchors [B, A] in rising order
    -> [B, A, S, heads, D]
    """
    q, own_k = q.to(v.dtype), own_k.to(v.dtype)
    parts = [slice(start, start + CHUNK) for start in range(0, q.shape[1], CHUNK)]
    out = []
    for part in parts:
        stop = int(anchors[:, part].max())
        some = (k[:, :stop], v[:, :stop], own_k[:, part], own_v[:, part])
        out.append(attend(q[:, part], *some, anchors[:, part]))
    return torch.cat(out, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, anchors: Tensor) -> Tensor:
    """`block_attention` without chunks."""
    batch, count, rows, heads, dim = q.shape
    kv, length = k.shape[2], k.shape[1]
    # [B, KV, A, G * S, D]
    q = q.unflatten(3, (kv, heads // kv)).permute(0, 3, 1, 4, 2, 5).reshape(batch, kv, count, -1, dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, KV, T, D]
    own_k, own_v = own_k.permute(0, 3, 1, 2, 4), own_v.permute(0, 3, 1, 2, 4)  # [B, KV, A, S, D]
    far = (q.flatten(2, 3) @ k.transpose(-1, -2)).view(batch, kv, count, -1, length)
    hidden = torch.arange(length, device=q.device) >= anchors[:, None, :, None, None]
    far = far.masked_fill(hidden, float("-inf"))
    near = q @ own_k.transpose(-1, -2)  # [B, KV, A, G * S, S]
    p = (torch.cat([far, near], -1).float() * dim**-0.5).softmax(-1).to(v.dtype)
    mixed = (p[..., :length].flatten(2, 3) @ v).view(batch, kv, count, -1, dim) + p[..., length:] @ own_v
    mixed = mixed.view(batch, kv, count, heads // kv, rows, dim)
    return mixed.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)  # [B, A, S, heads, D]
