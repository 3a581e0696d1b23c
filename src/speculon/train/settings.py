"""Settings of training runs: the fields feed Python, the command line and the record of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from speculon.core.checked import Checked
from speculon.core.errors import InvalidParameter

STEPS = 2000  # guess: where neither steps nor minutes are given
SHORTEST = 8  # tokens of a prompt that is cut from a plain text


class TrainSettings(Checked):
    """Settings of a run, whatever is trained."""

    target: str = Field(description="the model to draft for: a folder, a hub id, or a name")
    data: tuple[Path, ...] = Field(
        min_length=1, description="texts to learn from: a file or a folder of plain text or JSONL"
    )
    out: Path = Field(description="folder of the finished drafter")
    work: Path | None = Field(
        None, description="folder of checkpoint, log and cache; a run resumes there (None: OUT.work)"
    )
    eval_data: tuple[Path, ...] = Field((), description="held-out documents (none: one in fifty of the data)")
    regenerate: int = Field(
        0, ge=0, le=10_000_000, description="answers that the target generates first, which replace the data"
    )
    regenerate_tokens: int = Field(256, ge=1, description="most tokens of such an answer")
    prompt_weight: float = Field(
        0.0, ge=0, le=1, description="loss weight of a prompt's token; an answer's is 1"
    )
    length: int = Field(1024, ge=16, le=2**17, description="tokens of a row")
    rows: int = Field(4, ge=1, le=4096, description="rows of a batch")
    steps: int | None = Field(
        None, ge=1, description=f"most optimizer steps (None: {STEPS}, or no limit with minutes)"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="most minutes of training; with steps, the first one ends it",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="optimizer of matrices; AdamW for all others"
    )
    lr: float | None = Field(
        None,
        gt=0,
        le=1,
        description="AdamW's peak learning rate (None: 1e-4 at width 4096, higher below, at most 2e-3)",
    )
    muon_lr: float = Field(1e-2, gt=0, le=1, description="Muon's peak learning rate")
    warmup: float = Field(0.02, ge=0, lt=1, description="share of the run with rising learning rates")
    weight_decay: float = Field(0.01, ge=0, le=1, description="weight decay of matrices")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="dtype of products (auto: bf16, or fp32 on a CPU that cannot multiply bf16)"
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    cache_gb: float = Field(
        4.0, ge=0, allow_inf_nan=False, description="disk cache of the target's hidden states"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of initial weights and data order")
    save_minutes: float = Field(2.0, gt=0, description="minutes between checkpoints")
    eval_every: int = Field(200, ge=1, description="steps between measurements on held-out rows")
    eval_rows: int = Field(16, ge=0, le=4096, description="held-out rows to measure on; 0: none")
    eval_prompts: int = Field(
        16, ge=0, le=4096, description="held-out prompts to evaluate the drafter on; 0: none"
    )
    eval_tokens: int = Field(128, ge=2, description="tokens generated after each of them")

    @field_validator("out")
    @classmethod
    def _has_a_name(cls, value: Path) -> Path:
        if value.name in ("", ".."):
            raise ValueError("must have a name, since the work folder is named after it")
        return value

    @model_validator(mode="after")
    def _leave_room_for_prompts(self) -> TrainSettings:
        for name, count in (("regenerate_tokens", self.regenerate), ("eval_tokens", self.eval_prompts)):
            if count and getattr(self, name) + SHORTEST > self.length:
                limit = f"leaves no prompt of {SHORTEST} tokens in a length of {self.length}"
                raise InvalidParameter(name, getattr(self, name), limit)
        return self

    @property
    def limits(self) -> dict[str, float]:
        """The ends of the run, `steps` and `minutes`: those given, else `STEPS`."""
        given = {"steps": self.steps, "minutes": self.minutes}
        return {name: most for name, most in given.items() if most is not None} or {"steps": STEPS}

    @property
    def folder(self) -> Path:
        """The folder of checkpoint, log and cache."""
        return self.work or self.out.with_name(self.out.name + ".work")


class DrafterShape(Checked):
    """What both drafters have. None means the target's number."""

    layers: int
    intermediate: int | None = Field(None, ge=1, description="width of its MLP")
    heads: int | None = Field(None, ge=1, description="attention heads")
    kv_heads: int | None = Field(None, ge=1, description="key-value heads")


class HeadSettings(DrafterShape):
    """The shape of an EAGLE-3 head."""

    start: str | None = Field(
        None, description="folder of a head of the same shape to start from (None: random layers)"
    )
    taps: str | None = Field(
        None, description="tapped target layers, as 1,9,16; -1: embeddings (None: three)"
    )
    ttt: int = Field(
        5, ge=1, le=16, description="steps of the training-time test: consecutive drafts that are learned"
    )
    decay: float = Field(0.8, gt=0, le=1, description="loss weight of a step relative to the one before")
    draft_vocab: int | None = Field(
        None, ge=1, description="number of most frequent tokens that can be drafted (None: all)"
    )
    layers: int = Field(1, ge=1, le=32, description="layers of the head")
    norm_before_residual: bool = Field(True, description="the residual stream starts after the norm")
    norm_before_fc: bool = Field(True, description="one norm over all taps")
    fc_norm: bool = Field(False, description="a norm for each tap, in place of the one over all")
    norm_output: bool = Field(True, description="the state that is fed back is normed")

    @field_validator("taps")
    @classmethod
    def _are_layers(cls, value: str | None) -> str | None:
        parts = [] if value is None else [part.strip() for part in value.split(",")]
        if not all(part == "-1" or part.isdecimal() for part in parts):
            raise ValueError("must be layer numbers with commas between them, from -1 (the embeddings) on")
        if sorted(set(map(int, parts))) != list(map(int, parts)):
            raise ValueError("must name each layer once, in rising order")
        return value

    @model_validator(mode="after")
    def _one_norm(self) -> HeadSettings:
        if self.fc_norm and self.norm_before_fc and "norm_before_fc" in self.model_fields_set:
            raise InvalidParameter("norm_before_fc", True, "cannot be used together with fc_norm")
        return self

    @property
    def tap_ids(self) -> tuple[int, ...] | None:
        return None if self.taps is None else tuple(map(int, self.taps.split(",")))

    @property
    def norm_all(self) -> bool:
        """Whether one norm is over all taps."""
        return self.norm_before_fc and not self.fc_norm


class DraftSettings(DrafterShape):
    """The shape of a small causal language model."""

    layers: int = Field(2, ge=1, le=256, description="layers of the draft model; a single one cannot copy")
    hidden: int | None = Field(None, ge=1, description="width of its residual stream")
