"""Training methods `dflash` and `dspark`: a block drafter for the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch

from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.drafters.dflash.config import DFlashConfig
from speculon.train.block_drafter import DFlashDrafter, DSparkDrafter
from speculon.train.data import Rows
from speculon.train.networks import network_sizes, write_network
from speculon.train.settings import BlockShape, FlashSettings, SparkSettings
from speculon.train.teacher import Teacher
from speculon.train.training import Training

Drafter = TypeVar("Drafter", bound=DFlashDrafter)
Settings = TypeVar("Settings", bound=BlockShape)

TAPS = 5  # evenly spread over the target's layers, as published
HEAD_NORMS = ("q_norm", "k_norm")


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
        """Raises InvalidParameter or UnsupportedModel for a form that does not fit the target."""
        check_blocks(self.settings, teacher)

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
        with torch.no_grad():
            drafter.markov_head.start_from(drafter.embed, drafter.head)
        return drafter


def check_blocks(settings: BlockShape, teacher: Teacher) -> None:
    """Raises InvalidParameter or UnsupportedModel for a form that does not fit the target."""
    block_config(settings, teacher)
    if -1 in teacher.taps:
        raise InvalidParameter("taps", -1, "the format of block drafters numbers layers from 0")
    if teacher.head.bias is not None or teacher.head.weight.shape != teacher.embed.shape:
        raise UnsupportedModel("a block drafter needs an output head of the embedding's shape, without bias")


def started(drafter: Drafter, teacher: Teacher) -> Drafter:
    drafter = drafter.to(teacher.device)
    drafter.start_from(teacher.embed, teacher.norm)
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
        found = getattr(teacher.config, name, None)
        first = found[0] if isinstance(found, list) else found
        if first is not None and 0 <= first < teacher.vocab_size and bool(teacher.embed[first].abs().max()):
            return int(first)
    raise InvalidParameter("mask_token", None, "the target has no padding or end token: name one")
