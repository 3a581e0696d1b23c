"""Training methods `dflash` and `dspark`: a block drafter for the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from speculon.errors import InvalidParameter, UnsupportedModel
from speculon.train.block_drafter import DFlashDrafter, DSparkDrafter
from speculon.train.block_export import write_block_drafter
from speculon.train.block_heads import MARKOV_HEADS
from speculon.train.block_network import BlockForm
from speculon.train.data import Rows
from speculon.train.eagle3 import attention_heads
from speculon.train.settings import BlockShape, FlashSettings, SparkSettings
from speculon.train.teacher import Teacher

Drafter = TypeVar("Drafter", bound=DFlashDrafter)
Settings = TypeVar("Settings", FlashSettings, SparkSettings)

TAPS = 5  # evenly spread over the target's layers, as published


class BlockTraining(Generic[Settings]):
    """What both have in common: blocks at the end of a row, and taps."""

    def __init__(self, settings: Settings):
        self.settings: Settings = settings
        self.taps = settings.tap_ids or TAPS

    @property
    def spare(self) -> int:
        """Tokens at the end of a row that predict nothing."""
        return self.settings.block

    def check(self, teacher: Teacher) -> None:
        """Raises InvalidParameter or UnsupportedModel for a form that does not fit the target."""
        check_blocks(self.settings, teacher)


class DFlashTraining(BlockTraining[FlashSettings]):
    """How `train dflash` makes its drafter, and writes it at the end."""

    method = "dflash"

    def drafter(self, teacher: Teacher, rows: Rows) -> DFlashDrafter:
        """Random layers between the target's embeddings and output head, both of which stay the target's."""
        settings = self.settings
        form = block_form(settings, teacher, from_anchor=False)
        soft = settings.loss == "kl"
        return started(DFlashDrafter(form, settings.anchors, settings.decay_length, soft), teacher)

    def write(self, drafter: DFlashDrafter, teacher: Teacher, target: str, folder: Path) -> None:
        write_block_drafter(drafter, teacher, folder)

    def speculation(self, folder: Path) -> Mapping[str, Any]:
        """Settings under which `LLM` drafts with what was written."""
        return speculation_with(folder, self.settings.block - 1)


class DSparkTraining(BlockTraining[SparkSettings]):
    """How `train dspark` makes its drafter: DFlash's network with a Markov and a confidence head."""

    method = "dspark"

    def drafter(self, teacher: Teacher, rows: Rows) -> DSparkDrafter:
        """As of `DFlashTraining`; the anchor's row drafts too, and the Markov head has no effect at first."""
        settings = self.settings
        form = block_form(settings, teacher, from_anchor=True)
        markov = MARKOV_HEADS[settings.markov_head](form.vocab_size, form.hidden, settings.markov_rank)
        soft, gamma, confidence = settings.loss == "kl", settings.decay_length, settings.confidence
        return started(DSparkDrafter(form, settings.anchors, gamma, soft, markov, confidence), teacher)

    def write(self, drafter: DSparkDrafter, teacher: Teacher, target: str, folder: Path) -> None:
        write_block_drafter(drafter, teacher, folder)

    def speculation(self, folder: Path) -> Mapping[str, Any]:
        """Settings under which `LLM` drafts with what was written."""
        return speculation_with(folder, self.settings.block)


def speculation_with(folder: Path, drafts: int) -> dict[str, Any]:
    """Of both: one proposer runs every block drafter."""
    return {"method": "dflash", "draft": {"dflash": str(folder)}, "num_speculative_tokens": drafts}


def check_blocks(settings: BlockShape, teacher: Teacher) -> None:
    """Raises InvalidParameter or UnsupportedModel for a form that does not fit the target."""
    block_form(settings, teacher, from_anchor=False)
    if -1 in teacher.taps:
        raise InvalidParameter("taps", -1, "the format of block drafters numbers layers from 0")
    if teacher.head.bias is not None or teacher.head.weight.shape != teacher.embed.shape:
        raise UnsupportedModel("a block drafter needs an output head of the embedding's shape, without bias")


def started(drafter: Drafter, teacher: Teacher) -> Drafter:
    drafter = drafter.to(teacher.device)
    drafter.start_from(teacher.embed, teacher.norm, teacher.head.weight)
    return drafter


def block_form(settings: BlockShape, teacher: Teacher, from_anchor: bool) -> BlockForm:
    config = teacher.config
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, config)
    rope = getattr(config, "rope_parameters", None) or {}
    mask = mask_token(teacher) if settings.mask_token is None else settings.mask_token
    if mask >= teacher.vocab_size:
        raise InvalidParameter("mask_token", mask, f"the target has {teacher.vocab_size} tokens")
    return BlockForm(
        hidden=teacher.width,
        taps=teacher.taps,
        layers=settings.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or teacher.width // config.num_attention_heads,
        intermediate=settings.intermediate or getattr(config, "intermediate_size", None) or 4 * teacher.width,
        vocab_size=teacher.vocab_size,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        theta=float(rope.get("rope_theta") or 10_000.0),
        block=settings.block,
        mask=mask,
        from_anchor=from_anchor,
    )


def mask_token(teacher: Teacher) -> int:
    """The token for masked rows: one for padding or ends, since no draft follows these."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        found = getattr(teacher.config, name, None)
        first = found[0] if isinstance(found, list) else found
        if first is not None and 0 <= first < teacher.vocab_size and bool(teacher.embed[first].abs().max()):
            return int(first)
    raise InvalidParameter("mask_token", None, "the target has no padding or end token: name one")
