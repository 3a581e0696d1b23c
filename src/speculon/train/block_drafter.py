"""Block drafters with their losses: DFlash, and DSpark with a Markov and a confidence head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.train.block_heads import ConfidenceHead, MarkovHead
from speculon.train.block_network import BlockForm, BlockNetwork
from speculon.train.losses import TINY, cross_entropy, kl
from speculon.train.teacher import Batch

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


class DFlashDrafter(BlockNetwork):
    """Learns the target's probabilities at each position of a block, or the text itself."""

    def __init__(self, form: BlockForm, anchors: int, gamma: float, soft: bool):
        super().__init__(form)
        self.anchors, self.gamma, self.soft = anchors, gamma, soft

    def loss(self, batch: Batch) -> Tensor:
        """sum_k exp(-k / gamma) l_k, a weighted mean over drafts; l is KL(p || q), or cross entropy."""
        blocks, weights = self._drawn(batch)
        hidden, weights = self(batch.ids, batch.taps, blocks.anchors).flatten(0, 2), weights.flatten()
        if self.soft:
            p, entropy = blocks.of(batch.p).flatten(0, 2), blocks.of(batch.entropy).flatten()
            return kl(hidden, self.head, p, entropy, weights)
        return cross_entropy(hidden, self.head, next_tokens(batch, blocks).flatten(), weights)

    def correct(self, batch: Batch) -> Tensor:
        """Whether the best token of each draft is the target's, in blocks that are learned whole [K, M]."""
        blocks, weights = self._drawn(batch)
        whole = weights[..., -1] > 0  # [B, A]
        logits = self._logits(self(batch.ids, batch.taps, blocks.anchors), batch, blocks)
        return (logits.argmax(-1) == blocks.of(batch.best))[whole].T

    def _drawn(self, batch: Batch) -> tuple[Blocks, Tensor]:
        """The blocks, and their weights with the decay [B, A, K]."""
        blocks = draw_blocks(batch.weights, self.anchors, self.form.drafts, batch.draw)
        return blocks, blocks.weights * decays(self.form.drafts, self.gamma, batch.ids.device)

    def _logits(self, hidden: Tensor, batch: Batch, blocks: Blocks) -> Tensor:
        """[B, A, K, V]"""
        return F.linear(hidden, self.head)


class DSparkDrafter(DFlashDrafter):
    """A block drafter whose logits know the drafts before, and which predicts its own acceptance."""

    def __init__(
        self, form: BlockForm, anchors: int, gamma: float, soft: bool, markov: MarkovHead, confidence: float
    ):
        super().__init__(form, anchors, gamma, soft)
        self.confidence, self.markov_head = confidence, markov
        width = form.hidden + markov.markov_w1.embedding_dim
        self.confidence_head = ConfidenceHead(width) if confidence else None

    @torch.no_grad()
    def start_from(self, embed: Tensor, norm: Tensor | None, head: Tensor) -> None:
        super().start_from(embed, norm, head)
        self.markov_head.start_from(embed, head)

    def loss(self, batch: Batch) -> Tensor:
        """KL(p || q), or 0.1 CE + 0.9 TV(p, q), weighted like DFlash's; and c BCE(confidence, 1 - TV).

        The token before each draft is the text's own, as if all earlier drafts were right.
        """
        blocks, weights = self._drawn(batch)
        hidden = self(batch.ids, batch.taps, blocks.anchors)
        p, log_q = blocks.of(batch.p).float(), self._logits(hidden, batch, blocks).float().log_softmax(-1)
        distance = 0.5 * (p - log_q.exp()).abs().sum(-1)  # [B, A, K]
        if self.soft:
            each = -(p * log_q).sum(-1) - blocks.of(batch.entropy)
        else:
            each = TV * distance - CE * log_q.gather(-1, next_tokens(batch, blocks)[..., None]).squeeze(-1)
        if self.confidence_head is not None:
            before = self.markov_head.markov_w1(blocks.of(batch.ids))
            accepted = self.confidence_head.proj(torch.cat([hidden, before], -1)).float().squeeze(-1)
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
