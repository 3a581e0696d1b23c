"""What drafts, how far, and what a request may set of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator, Field, InstanceOf, field_validator, model_validator
from pydantic_core import PydanticCustomError

from speculon.core.checked import Checked
from speculon.core.errors import InvalidParameter

OFF, AUTO = "off", "auto"  # names that are no method of their own
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MAX_DRAFTS = 64
MAX_PREDICTION = 2**20  # characters or token ids; a search for the place in so many takes a millisecond
REMEMBERED_BYTES = 21  # of a token in a pool: 12, what arrays keep in reserve, 8 of its slots
POOL_BYTES = 1024  # of an empty pool and its key: 0.8 KB
GIVEN_DRAFTS = 32  # per round, of drafts that a request provides; docs/decisions/011

# policy -> most drafts of a round where no number is set
USUAL_DRAFTS: Mapping[str, Callable[[SpeculationConfig], int]] = {
    "fixed": lambda config: 4,
    "adaptive": lambda config: config.adaptive_max,
    "solo": lambda config: 4,
    "shadow": lambda config: 4,
    "goodput": lambda config: 16,
}


def known_policy(name: str) -> str:
    if name not in USUAL_DRAFTS:
        raise PydanticCustomError(
            "literal_error", "must be one of {names}", {"names": ", ".join(USUAL_DRAFTS)}
        )
    return name


PolicyName = Annotated[str, AfterValidator(known_policy)]
MemoryPolicy = Literal["allow", "fallback", "fail"]
AcceptanceSetting = Literal["auto", "matching", "rejection", "block"]
Quantization = Literal["auto", "none", "int8", "int4"]


class AdaptiveConfig(Checked):
    """How policy `adaptive` sets K from what was accepted. As settings: `adaptive_` and the name."""

    initial: int = Field(5, le=MAX_DRAFTS, description="drafts of the first rounds")
    min: int = Field(2, ge=1, description="fewest drafts of a round")
    max: int = Field(12, le=MAX_DRAFTS, description="most drafts of a round")
    alpha: float = Field(0.2, ge=0, le=1, description="weight of the latest round; 0.1 to 0.3 work well")
    cooldown_steps: int = Field(4, ge=0, description="rounds between two changes of K")

    @model_validator(mode="after")
    def _orders(self) -> AdaptiveConfig:
        if self.max < self.min:
            raise InvalidParameter("max", self.max, f"must be at least min, {self.min}")
        if not self.min <= self.initial <= self.max:
            raise InvalidParameter(
                "initial", self.initial, f"must be from min, {self.min}, to max, {self.max}"
            )
        return self

    def within(self, most: int) -> AdaptiveConfig:
        """The same settings for at most `most` drafts, which is 1 or more."""
        bounds = {name: min(getattr(self, name), most) for name in ("initial", "min", "max")}
        return AdaptiveConfig(**{**self.model_dump(), **bounds})


def as_adaptive(name: str) -> Any:
    """The field of `AdaptiveConfig` as a setting beside others."""
    field = AdaptiveConfig.model_fields[name]
    return Field(field.default, description=f"adaptive: {field.description}")


@runtime_checkable
class ModelObject(Protocol):
    """A transformers model in memory: what settings check of it."""

    device: Any

    def get_input_embeddings(self) -> Any: ...


class SpeculationConfig(Checked):
    """Which method drafts (`method`), how many tokens (`policy` and `num_speculative_tokens`), and the
    settings of the methods.

    >>> LLM("smollm2", speculation=SpeculationConfig(method="suffix", num_speculative_tokens=8))
    """

    method: str = Field(
        "auto",
        description="what drafts: auto | off | suffix | ngram | draft_model | pard | eagle3 | dflash | mtp | "
        "gemma4_assistant, or a plug-in",
    )
    policy: PolicyName = Field(
        "goodput",
        description="how many drafts: goodput (as many as save time) | fixed (K) | adaptive (K follows "
        "acceptance) | solo (fixed, while one sequence runs alone) | shadow (drafts are measured, not used)",
    )
    draft: str | dict[str, str | InstanceOf[ModelObject]] | InstanceOf[ModelObject] | None = Field(
        None,
        description="drafter: a checkpoint, a table {method: path}, or auto[:FOLDER] to search for one; "
        "in Python also a model object",
    )
    known_drafters: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="drafters that draft = auto looks for in the hub's cache, beside the published ones it "
        "knows: {target: [hub ids]}",
    )
    draft_quantization: Quantization = Field(
        "auto",
        description="of drafters' weights: auto | none | int8 | int4, as `quantization`; auto leaves "
        "draft models as they are and gives other drafters as many bits as the target's "
        "layers have",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_DRAFTS,
        description="K, most drafts of a round; 0: no speculation; None: 16 under goodput, adaptive_max "
        "under adaptive, 4 under others",
    )
    draft_depth: int | None = Field(
        None,
        ge=0,
        le=MAX_DRAFTS,
        description="most drafts that follow each other; the others of K branch off, as a tree; 0: "
        "chains; None: under policy goodput a tree where it saves more time, else chains",
    )
    acceptance: AcceptanceSetting = Field(
        "auto",
        description="test of sampled drafts: matching | rejection | block | auto (block without a seed)",
    )
    chained_drafts: bool | None = Field(
        None,
        description="lookups continue the draft of another method, up to K; None: under policy goodput, "
        "where that saves time",
    )
    adaptive_initial: int = as_adaptive("initial")
    adaptive_min: int = as_adaptive("min")
    adaptive_max: int = as_adaptive("max")
    adaptive_alpha: float = as_adaptive("alpha")
    adaptive_cooldown_steps: int = as_adaptive("cooldown_steps")
    prompt_lookup_min: int = Field(2, ge=1, le=32, description="ngram: shortest match in tokens")
    prompt_lookup_max: int = Field(5, ge=1, le=32, description="ngram: longest match in tokens")
    suffix_max_factor: float = Field(
        4.0, gt=0, le=MAX_DRAFTS, allow_inf_nan=False, description="suffix: most drafts per matched token"
    )
    suffix_min_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="suffix: a draft ends where fewer than this share of the matching places continue alike",
    )
    suffix_min_hits: int = Field(
        1, ge=1, le=16, description="suffix: matching places that must continue with the same token"
    )
    suffix_pools: int = Field(
        64,
        ge=0,
        le=4096,
        description="suffix: most pools of earlier answers, one per user or prompt; 0: none",
    )
    suffix_pool_tokens: int = Field(
        2**15, ge=16, le=2**20, description="suffix: most tokens of a pool, of 21 bytes each"
    )
    suffix_pool_ttl: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="suffix: seconds that an unused pool is kept"
    )
    synthetic_acceptance: float = Field(
        0.7, ge=0, le=1, description="synthetic: acceptance rate per position"
    )
    draft_min_confidence: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="draft models and heads: a draft ends after a token to which they give a lower "
        "probability",
    )
    memory_policy: MemoryPolicy = Field(
        "fallback", description="a drafter beyond the memory limit: allow it, fallback to none, or fail"
    )
    memory_limit_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory of the whole process; None: what it holds and what is free",
    )
    additional_memory_gb: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="memory within that limit that stays free"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of a plug-in proposer, or of an eagle3 or dflash drafter whose config is wrong",
    )

    @property
    def remembered_bytes(self) -> int:
        """The bytes of all pools of earlier answers when they are full."""
        return self.suffix_pools * (self.suffix_pool_tokens * REMEMBERED_BYTES + POOL_BYTES)

    def most(self, policy: str | None = None) -> int:
        """The most drafts of a round under this policy; None: under the policy that is set."""
        usual = USUAL_DRAFTS[policy or self.policy]
        return usual(self) if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def adaptive(self) -> AdaptiveConfig:
        """The settings of policy `adaptive`."""
        return AdaptiveConfig(
            **{name: getattr(self, f"adaptive_{name}") for name in AdaptiveConfig.model_fields}
        )

    @property
    def drafts(self) -> dict[str, str | ModelObject]:
        """The draft checkpoints or model objects by method."""
        return dict(self.draft or {}) if isinstance(self.draft, dict | None) else {"draft_model": self.draft}

    @field_validator("known_drafters")
    @classmethod
    def _hub_ids(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for target, drafters in value.items():
            for name in drafters:
                if target == name or not (target.strip() and HUB_ID.fullmatch(name)):
                    raise ValueError(
                        f"{target!r} -> {name!r}: a drafter must be another model's hub id, as org/name"
                    )
        return value

    @model_validator(mode="after")
    def _orders(self) -> SpeculationConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            limit = f"must be at most prompt_lookup_max, {self.prompt_lookup_max}"
            raise InvalidParameter("prompt_lookup_min", self.prompt_lookup_min, limit)
        try:
            _ = self.adaptive  # its validators check the values
        except InvalidParameter as error:
            raise InvalidParameter(f"adaptive_{error.name}", error.value, error.limit) from None
        return self


class RequestSpeculation(Checked):
    """The settings of speculation that one request may choose for itself. None: the engine's setting."""

    features: ClassVar[str] = "parameters"

    method: str | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=MAX_DRAFTS)
    policy: PolicyName | None = None
    acceptance: AcceptanceSetting | None = None
    chained_drafts: bool | None = None
    draft_depth: int | None = Field(None, ge=0, le=MAX_DRAFTS)
    prediction: str | tuple[int, ...] | None = Field(
        None, description="the expected text, as text or token ids: drafts are read from it"
    )
    pool: str | None = Field(
        None,
        max_length=256,
        description="pool of earlier answers to draft from, by name; None: that of the prompt; empty: none",
    )
    tenant: str = Field("", max_length=256, description="owner of the pool: tenants share none")
    defaults: SpeculationConfig | None = Field(
        None, description="for fields that are not set, where they have changed since the engine's start"
    )

    def rule(self, started: AcceptanceSetting) -> AcceptanceSetting:
        """The rule of acceptance of this request; `started` is the engine's rule at its start."""
        return self.acceptance or (started if self.defaults is None else self.defaults.acceptance)

    @field_validator("prediction", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        ids = isinstance(value, list | tuple) and all(isinstance(token, int) for token in value)
        if value is None or ((ids or isinstance(value, str)) and len(value) <= MAX_PREDICTION):
            return value
        known = "too_long" if ids or isinstance(value, str) else "value_error"
        limit = f"must be a string or a list of token ids, at most {MAX_PREDICTION} long"
        raise PydanticCustomError(known, "{limit}", {"limit": limit})
