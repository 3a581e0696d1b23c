"""Training methods `dflash` and `dspark`: a block drafter for the target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.drafters.dflash.config import DFlashConfig
from speculon.drafters.dflash.network import DFlashNetwork, MarkovHead, RecurrentMarkovHead
from speculon.train.data import Rows
from speculon.train.losses import TINY, cross_entropy, kl
from speculon.train.settings import BlockShape, FlashSettings, SparkSettings
from speculon.train.teacher import Batch, Teacher
from speculon.train.training import Training, begin, network_sizes, write_network

TAPS = 5  # evenly spread over the target's layers, as published
HEAD_NORMS = ("q_norm", "k_norm")
CE, TV = 0.1, 0.9  # shares of DSpark's two losses, as published
CHUNK = 16  # anchors of a row that attend together; later ones see more of the row


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
    learned = blocks.of(weights)
    return Blocks(anchors, at, learned * (learned > 0).cumprod(-1))


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
        hidden = self.block_states(batch.ids, batch.taps, blocks.anchors).flatten(0, 2)
        weights = weights.flatten()
        if self.soft:
            p, entropy = blocks.of(batch.p).flatten(0, 2), blocks.of(batch.entropy).flatten()
            return kl(hidden, self.head, p, entropy, weights)
        return cross_entropy(hidden, self.head, blocks.of(batch.ids.roll(-1, 1)).flatten(), weights)

    def correct(self, batch: Batch) -> Tensor:
        """Whether the best token of each draft is the target's, in blocks that are learned whole [K, M]."""
        blocks, weights = self._drawn(batch)
        whole = weights[..., -1] > 0  # [B, A]
        logits = self._logits(self.block_states(batch.ids, batch.taps, blocks.anchors), batch, blocks)
        return (logits.argmax(-1) == blocks.of(batch.best))[whole].T

    def _drawn(self, batch: Batch) -> tuple[Blocks, Tensor]:
        """The blocks, and their weights with the decay [B, A, K]."""
        drafts = self.config.max_drafts
        blocks = draw_blocks(batch.weights, self.anchors, drafts, batch.draw)
        decay = (-torch.arange(drafts, device=batch.ids.device) / self.gamma).exp()  # [K]
        return blocks, blocks.weights * decay

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
            each = TV * distance - CE * log_q.gather(-1, blocks.of(batch.ids.roll(-1, 1))[..., None]).squeeze(
                -1
            )
        if self.confidence_head is not None:
            accepted = self.confidence_head(hidden, self.markov_head.markov_w1(blocks.of(batch.ids)))
            certain = F.binary_cross_entropy_with_logits(accepted, 1 - distance.detach(), reduction="none")
            each = each + self.confidence * certain
        return (each * weights).sum() / (weights.sum() + TINY)

    def _logits(self, hidden: Tensor, batch: Batch, blocks: Blocks) -> Tensor:
        head = self.markov_head
        latents = markov_latents(head, blocks.of(batch.ids), hidden)
        return F.linear(hidden, self.head) + head.markov_w2(latents)


def block_attention(
    anchors: Tensor, k: Tensor, v: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, scaling: float
) -> Tensor:
    """Attention of blocks to the context before their anchors, and in both directions to themselves.

    q [B, A, S, heads, D]; k, v [B, T, KV, D]; own_k, own_v [B, A, S, KV, D]; anchors [B, A] in rising order
    -> [B, A, S, heads, D]
    """
    q, own_k = q.to(v.dtype), own_k.to(v.dtype)
    out = []
    for start in range(0, q.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
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


Drafter = TypeVar("Drafter", bound=DFlashDrafter)
Settings = TypeVar("Settings", bound=BlockShape)


class BlockTraining(Training[Settings, Drafter]):
    """What both have in common: one proposer runs every block drafter."""

    proposer = "dflash"

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.taps = settings.tap_ids or TAPS

    @property
    def spare(self) -> int:
        return self.settings.block

    def check(self, teacher: Teacher) -> None:
        block_config(self.settings, teacher)
        if -1 in teacher.taps:
            raise InvalidParameter("taps", -1, "the format of block drafters numbers layers from 0")
        if teacher.head.bias is not None or teacher.head.weight.shape != teacher.embed.shape:
            raise UnsupportedModel(
                "a block drafter needs an output head of the embedding's shape, without bias"
            )

    def write(self, drafter: Drafter, teacher: Teacher, target: str, folder: Path) -> None:
        """In the formats in which DFlash and DSpark are published."""
        write_network(drafter, published_config(drafter), folder)


class DFlashTraining(BlockTraining[FlashSettings, DFlashDrafter]):
    """How `train dflash` makes its drafter, and writes it at the end."""

    method = "dflash"

    @property
    def drafts(self) -> int:
        """The anchor's row does not draft."""
        return self.settings.block - 1

    def drafter(self, teacher: Teacher, rows: Rows) -> DFlashDrafter:
        """Random layers between the target's embeddings and output head, both of which stay the target's."""
        settings = self.settings
        config, soft = block_config(settings, teacher), settings.loss == "kl"
        return started(DFlashDrafter(config, settings.anchors, settings.decay_length, soft), teacher)


class DSparkTraining(BlockTraining[SparkSettings, DSparkDrafter]):
    """How `train dspark` makes its drafter: DFlash's network with a Markov and a confidence head."""

    method = "dspark"

    def drafter(self, teacher: Teacher, rows: Rows) -> DSparkDrafter:
        """As of `DFlashTraining`; the anchor's row drafts too, and the Markov head has no effect at first."""
        settings, soft = self.settings, self.settings.loss == "kl"
        config = block_config(settings, teacher)
        drafter = DSparkDrafter(config, settings.anchors, settings.decay_length, soft, settings.confidence)
        drafter = started(drafter, teacher)
        start_markov(drafter.markov_head, drafter.embed, drafter.head)
        return drafter


def markov_latents(markov: MarkovHead, tokens: Tensor, hidden: Tensor) -> Tensor:
    """m [..., K, r] of drafts with states [..., K, H] after `tokens` [..., K]."""
    e = markov.markov_w1(tokens)
    if not isinstance(markov, RecurrentMarkovHead):
        return markov.step(e, hidden, e)[0]
    state, rows = e.new_zeros(*e.shape[:-2], markov.rank), []
    for each, h in zip(e.unbind(-2), hidden.unbind(-2), strict=True):
        latent, state = markov.step(each, h, state)
        rows.append(latent)
    return torch.stack(rows, -2)


@torch.no_grad()
def start_markov(markov: MarkovHead, embed: Tensor, head: Tensor) -> None:
    """No bias at first: w2 is 0, or m is, where w1 and w2 can start as embeddings and output head."""
    if not isinstance(markov, RecurrentMarkovHead):
        nn.init.zeros_(markov.markov_w2.weight)
        return
    nn.init.zeros_(markov.joint_proj.weight)
    nn.init.zeros_(markov.joint_proj.bias)
    if embed.shape == markov.markov_w1.weight.shape:
        markov.markov_w1.weight.copy_(embed)
        markov.markov_w2.weight.copy_(head)


def started(drafter: Drafter, teacher: Teacher) -> Drafter:
    drafter = drafter.to(teacher.device)
    begin(drafter, teacher.embed, teacher.norm)
    drafter.head = teacher.head.weight.detach().float()
    return drafter


def block_config(settings: BlockShape, teacher: Teacher) -> DFlashConfig:
    """In a DSpark drafter the anchor's row drafts, too."""
    mask = mask_token(teacher) if settings.mask_token is None else settings.mask_token
    if mask >= teacher.vocab_size:
        raise InvalidParameter("mask_token", mask, f"the target has {teacher.vocab_size} tokens")
    layers = range(settings.layers)
    norms = [f"layers.{layer}.self_attn.{name}.weight" for layer in layers for name in HEAD_NORMS]
    spark: dict[str, Any] = {}
    if isinstance(settings, SparkSettings):
        read = settings.confidence > 0
        spark = {
            "markov": settings.markov_head,
            "markov_rank": settings.markov_rank,
            "confidence": read,
            "confidence_with_markov": read,
        }
    return DFlashConfig(
        **network_sizes(settings, teacher),
        causal=(False,) * settings.layers,
        tap_ids=teacher.taps,
        block_size=settings.block,
        sample_from_anchor=isinstance(settings, SparkSettings),
        mask_token_id=mask,
        target_layers=len(teacher.layers),
        names={name: name for name in norms},
        **spark,
    )


def published_config(drafter: DFlashDrafter) -> dict[str, Any]:
    """The fields of a Qwen3, the block size, and z-lab's table; or the flat form of DeepSpec."""
    config = drafter.config
    form = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.tap_ids or ())}
    own: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": form}
    if config.sample_from_anchor:
        own = {
            "architectures": ["Qwen3DSparkModel"],
            **form,
            "num_anchors": drafter.anchors,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return {
        **own,
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.act,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.layers,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": dict(config.rope),
        "tie_word_embeddings": False,
    }


def mask_token(teacher: Teacher) -> int:
    """The token for masked rows: one for padding or ends, since no draft follows these."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        token = getattr(teacher.config, name, None)
        first = token[0] if isinstance(token, list) else token
        if first is not None and 0 <= first < teacher.vocab_size and bool(teacher.embed[first].abs().max()):
            return int(first)
    raise InvalidParameter("mask_token", None, "the target has no padding or end token: name one")
