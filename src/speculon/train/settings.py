"""What a training run can be told: the same fields feed Python, the command line and the record of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from speculon.checked import Checked

SHORTEST = 8  # tokens of a prompt that is cut out of a plain text


class TrainSettings(Checked):
    """What a run of either training method is told."""

    target: str = Field(description="the model to draft for: a folder, a hub id, or `demo`")
    data: tuple[Path, ...] = Field(
        min_length=1, description="texts to learn from: a file or a folder of plain text or JSONL"
    )
    out: Path = Field(description="folder of the finished drafter")
    work: Path | None = Field(
        None, description="folder of checkpoint, log and cache; a run goes on there (None: OUT.work)"
    )
    eval_data: tuple[Path, ...] = Field(
        (), description="held-out texts (none: one document in fifty of the data)"
    )
    regenerate: int = Field(
        0, ge=0, le=10_000_000, description="texts that the target writes first, to be learned from instead"
    )
    regenerate_tokens: int = Field(256, ge=1, description="of such a text at most")
    prompt_weight: float = Field(
        0.0, ge=0, le=1, description="what a prompt's token counts in the loss; an answer's counts 1"
    )
    length: int = Field(1024, ge=16, le=2**17, description="tokens of a row")
    rows: int = Field(4, ge=1, le=4096, description="rows of a batch")
    steps: int = Field(2000, ge=1, description="of the optimizer")
    minutes: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="of training; in place of steps"
    )
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="of matrices; all else has AdamW")
    lr: float | None = Field(
        None,
        gt=0,
        le=1,
        description="AdamW's peak learning rate (None: 1e-4 at width 4096, more for narrower ones, at most 2e-3)",
    )
    muon_lr: float = Field(1e-2, gt=0, le=1, description="Muon's peak learning rate")
    warmup: float = Field(0.02, ge=0, lt=1, description="share of the run in which the rates rise")
    weight_decay: float = Field(0.01, ge=0, le=1, description="of matrices")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="of products; weights and sums are kept in fp32"
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    cache_gb: float = Field(
        4.0, ge=0, allow_inf_nan=False, description="of the target's hidden states, kept on disk"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of initial weights and order of the data")
    save_minutes: float = Field(2.0, gt=0, description="between two checkpoints")
    eval_every: int = Field(200, ge=1, description="steps between two measurements on held-out rows")
    eval_rows: int = Field(16, ge=0, le=4096, description="held-out rows; 0: never measured")
    eval_prompts: int = Field(
        16, ge=0, le=4096, description="held-out prompts that the finished drafter drafts for; 0: none"
    )
    eval_tokens: int = Field(128, ge=2, description="written after each of them")

    @field_validator("out")
    @classmethod
    def _has_a_name(cls, value: Path) -> Path:
        if value.name in ("", ".."):
            raise ValueError("a folder by its name: another one beside it is called after it")
        return value

    @model_validator(mode="after")
    def _leave_room_for_prompts(self) -> TrainSettings:
        for name, wanted in (("regenerate_tokens", self.regenerate), ("eval_tokens", self.eval_prompts)):
            written = getattr(self, name)
            if wanted and written + SHORTEST > self.length:
                raise ValueError(
                    f"{name} = {written} leaves no prompt of {SHORTEST} tokens in a length of {self.length}"
                )
        return self

    @property
    def folder(self) -> Path:
        """Where the run keeps what it needs to go on."""
        return self.work or self.out.with_name(self.out.name + ".work")


class HeadSettings(Checked):
    """The form of an EAGLE-3 head. Where a field is None the target's own number is taken."""

    taps: str | None = Field(
        None, description="target layers whose outputs are read, as 1,9,16; -1: embeddings (None: three)"
    )
    ttt: int = Field(
        5, ge=1, le=16, description="steps of the training-time test: drafts in a row that are learned"
    )
    decay: float = Field(
        0.8, gt=0, le=1, description="what a step of them counts, compared with the one before"
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="most frequent tokens that it can draft (None: all)"
    )
    layers: int = Field(1, ge=1, le=32, description="of the head")
    intermediate: int | None = Field(None, ge=1, description="width of its MLP")
    heads: int | None = Field(None, ge=1, description="of its attention")
    kv_heads: int | None = Field(None, ge=1, description="of its keys and values")
    norm_before_residual: bool = Field(True, description="the residual stream begins after the norm")
    norm_before_fc: bool = Field(True, description="one norm over all taps")
    fc_norm: bool = Field(False, description="a norm for each tap, in place of the one over all")
    norm_output: bool = Field(True, description="what is fed back has been normed")

    @field_validator("taps")
    @classmethod
    def _are_layers(cls, value: str | None) -> str | None:
        parts = [] if value is None else [part.strip() for part in value.split(",")]
        if not all(part == "-1" or part.isdecimal() for part in parts):
            raise ValueError("layer numbers with commas between, from -1 (the embeddings)")
        if sorted(set(map(int, parts))) != list(map(int, parts)):
            raise ValueError("each layer once, in rising order")
        return value

    @model_validator(mode="after")
    def _one_norm(self) -> HeadSettings:
        if self.fc_norm and self.norm_before_fc and "norm_before_fc" in self.model_fields_set:
            raise ValueError("fc_norm and norm_before_fc exclude each other")
        return self

    @property
    def tap_ids(self) -> tuple[int, ...] | None:
        return None if self.taps is None else tuple(int(part) for part in self.taps.split(","))

    @property
    def norm_all(self) -> bool:
        """Whether one norm lies over all taps."""
        return self.norm_before_fc and not self.fc_norm


class DraftSettings(Checked):
    """The form of a small causal language model. Where a field is None the target's own number is taken."""

    layers: int = Field(2, ge=1, le=256, description="of the draft; one alone cannot copy")
    hidden: int | None = Field(None, ge=1, description="width of its residual stream")
    intermediate: int | None = Field(None, ge=1, description="width of its MLP")
    heads: int | None = Field(None, ge=1, description="of its attention")
    kv_heads: int | None = Field(None, ge=1, description="of its keys and values")
