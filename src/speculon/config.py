"""Everything a user can set, described once: the same fields feed Python, flags, environment and file.

Precedence: request > keyword or flag > environment (`SPECULON_*`) > file (`speculon.toml`, or
`SPECULON_CONFIG`) > default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    InstanceOf,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from speculon.checked import Checked, invalid_parameter, new_or_there
from speculon.errors import ConfigError, InvalidParameter
from speculon.serve_config import ServeConfig

MAX_STOPS = 64  # each stop string is searched for at every token; the OpenAI API allows 4
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 128
MAX_BIASES = 4096
MAX_BAD_WORDS = 256
MAX_SAMPLES = 64
MAX_DRAFTS = 64
MAX_PREDICTION = 2**20  # characters or token ids; a search for the place in so many takes a millisecond
REMEMBERED_BYTES = 21  # of a token in a pool: 12, what arrays keep in reserve, 8 of its slots
POOL_BYTES = 1024  # of an empty pool and its key: 0.8 KB
GIVEN_DRAFTS = 32  # per round, of what came with a request; docs/decisions/011
# characters of a schema, expression or grammar: 1.4 s to compile at the worst seen, mostly a third of one
MAX_GRAMMAR = 2**16
MAX_CHOICES = 1024

# how far to speculate -> most drafts of a round where nobody says a number
USUAL_DRAFTS: Mapping[str, Callable[[SpeculationConfig], int]] = {
    "fixed": lambda config: 4,
    "adaptive": lambda config: config.adaptive_max,
    "solo": lambda config: 4,
    "shadow": lambda config: 4,
    "goodput": lambda config: 16,
}


def known_policy(name: str) -> str:
    if name not in USUAL_DRAFTS:
        raise ValueError(f"known are {', '.join(USUAL_DRAFTS)}")
    return name


PolicyName = Annotated[str, AfterValidator(known_policy)]
MemoryPolicy = Literal["allow", "fallback", "fail"]
Acceptance = Literal["auto", "matching", "rejection"]


class Structured(Checked):
    """The form a text must have. Exactly one field is given.

    >>> SamplingParams(structured={"json_schema": {"type": "object", "properties": {"age": {"type": "integer"}}}})

    JSON is written without whitespace between its parts, so that no model can go on with spaces for ever; a
    schema allows it by `"x-guidance": {"whitespace_flexible": true}`.
    """

    json_schema: dict[str, Any] | bool | None = Field(None, description="a JSON schema; True: any JSON value")
    json_object: bool = Field(False, description="any JSON object")
    regex: str | None = Field(
        None, min_length=1, max_length=MAX_GRAMMAR, description="a regular expression of Rust's syntax"
    )
    choice: tuple[str, ...] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="one of these strings"
    )
    grammar: str | None = Field(
        None, min_length=1, max_length=MAX_GRAMMAR, description="llguidance's Lark dialect"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Structured:
        fields = type(self).model_fields
        given = [name for name in fields if getattr(self, name) not in (None, False)]
        if self.json_schema is False:
            raise InvalidParameter("json_schema", False, "no text matches it")
        if len(given) != 1:
            raise InvalidParameter("kind", given, f"give exactly one of {', '.join(fields)}")
        return self

    @field_validator("json_schema", "choice")
    @classmethod
    def _not_huge(cls, value: Any) -> Any:
        try:
            size = len(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if size > MAX_GRAMMAR:
            raise ValueError(f"at most {MAX_GRAMMAR} characters as JSON, this has {size}")
        return value

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) not in (None, False))


class SamplingParams(Checked):
    """How one request is sampled. Field names and meanings are those of the field's other servers.

    >>> SamplingParams(temperature=0.0, max_tokens=64)
    """

    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of tokens whose probability reaches this")
    top_k: int = Field(0, ge=-1, le=2**31, description="keep this many tokens; 0 or -1 keeps all")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below this share of the likeliest one")
    max_tokens: int | None = Field(
        None, ge=0, description="tokens to write at most; None: to the end of the context"
    )
    min_tokens: int = Field(0, ge=0, description="no stop before this many tokens")
    stop: tuple[str, ...] = Field(
        (), max_length=MAX_STOPS, description="strings that end the text, not shown"
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), max_length=MAX_STOPS, description="token ids that end the text"
    )
    ignore_eos: bool = Field(False, description="write on past the end-of-text token")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="same seed, same text")
    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="texts per prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of this many likeliest tokens"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="the same for the prompt's tokens"
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken from tokens that were written")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="the same, once per time written")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, allow_inf_nan=False, description="divides the logits of tokens in prompt and text"
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, max_length=MAX_BIASES, description="token id -> added"
    )
    bad_words: tuple[str, ...] = Field(
        (), max_length=MAX_BAD_WORDS, description="strings that are never completed"
    )
    structured: Structured | None = Field(
        None, description="the form of the text: a JSON schema, a regex, a choice, a grammar"
    )
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_or_huge_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise ValueError(f"each string needs 1 to {MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"is beyond max_tokens {self.max_tokens}")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class AdaptiveConfig(Checked):
    """How a number of drafts follows what was accepted; see `control.adaptive`.

    As settings: `adaptive_` and the name.
    """

    initial: int = Field(5, le=MAX_DRAFTS, description="drafts of the first rounds")
    min: int = Field(2, ge=1, description="fewest drafts of a round")
    max: int = Field(12, le=MAX_DRAFTS, description="most drafts of a round")
    alpha: float = Field(0.2, ge=0, le=1, description="weight of the latest round; 0.1 to 0.3 serve well")
    cooldown_steps: int = Field(4, ge=0, description="rounds between two looks at the mean")

    @model_validator(mode="after")
    def _orders(self) -> AdaptiveConfig:
        if self.max < self.min:
            raise InvalidParameter("max", self.max, f"must be at least min, {self.min}")
        if not self.min <= self.initial <= self.max:
            raise InvalidParameter("initial", self.initial, f"goes from min, {self.min}, to max, {self.max}")
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
    """A transformers model in memory, as far as settings know it."""

    device: Any

    def get_input_embeddings(self) -> Any: ...


class SpeculationConfig(Checked):
    """What drafts (`method`), how far (`policy`, `num_speculative_tokens`), and the methods' own settings."""

    method: str = Field(
        "auto", description="off | suffix | ngram | draft_model | eagle3 | auto, or a plug-in's name"
    )
    policy: PolicyName = Field(
        "goodput",
        description="how far to speculate: goodput (as far as it pays) | fixed (K drafts) | adaptive (K follows what was "
        "accepted) | solo (fixed, while one sequence runs alone) | shadow (drafts are watched, not used)",
    )
    draft: str | dict[str, str | InstanceOf[ModelObject]] | InstanceOf[ModelObject] | None = Field(
        None,
        description="drafter: a checkpoint, a table {method: path}, auto[:FOLDER] to look for one; in Python also a model object",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_DRAFTS,
        description="drafts per round (K), at most; 0 equals off; None: 16; adaptive_max with policy adaptive, 4 with others",
    )
    acceptance: Acceptance = Field(
        "auto",
        description="of sampled drafts: matching, or rejection; auto: rejection for requests without a seed",
    )
    join: bool | None = Field(
        None,
        description="lookups go on where another method's draft ends, up to K; None: under policy goodput, where it pays",
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
        0.1, ge=0, le=1, description="suffix: least share of the places a draft is read from"
    )
    suffix_min_hits: int = Field(1, ge=1, le=16, description="suffix: places that must agree on a token")
    suffix_pools: int = Field(
        64, ge=0, le=4096, description="suffix: users and prompts whose answers are remembered; 0: none"
    )
    suffix_pool_tokens: int = Field(
        2**15, ge=16, le=2**20, description="suffix: remembered for each, at 21 bytes a token"
    )
    suffix_pool_ttl: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="suffix: seconds after their last use"
    )
    synthetic_acceptance: float = Field(
        0.7, ge=0, le=1, description="synthetic: wanted acceptance per position"
    )
    draft_min_confidence: float = Field(
        0.0, ge=0, lt=1, description="draft_model, eagle3: stop drafting after a token below this"
    )
    memory_policy: MemoryPolicy = Field(
        "fallback", description="for a drafter beyond the memory limit: use it, go on plainly, or fail"
    )
    memory_limit_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="all that the process may hold; None: what it holds and what is free",
    )
    additional_memory_gb: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="to be left for others within the limit"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of a plug-in proposer, or of an eagle3 head whose config is wrong",
    )

    @property
    def remembered_bytes(self) -> int:
        """All pools at their fullest."""
        return self.suffix_pools * (self.suffix_pool_tokens * REMEMBERED_BYTES + POOL_BYTES)

    def most(self, policy: str | None = None) -> int:
        """The most drafts of a round under a policy, or under the one that is set."""
        usual = USUAL_DRAFTS[policy or self.policy]
        return usual(self) if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def adaptive(self) -> AdaptiveConfig:
        """The settings of policy `adaptive`, as it takes them."""
        return AdaptiveConfig(
            **{name: getattr(self, f"adaptive_{name}") for name in AdaptiveConfig.model_fields}
        )

    @property
    def drafts(self) -> dict[str, str | ModelObject]:
        """Draft checkpoints, or model objects, by method."""
        return dict(self.draft or {}) if isinstance(self.draft, dict | None) else {"draft_model": self.draft}

    @model_validator(mode="after")
    def _orders(self) -> SpeculationConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} > prompt_lookup_max {self.prompt_lookup_max}"
            )
        try:
            _ = self.adaptive  # which checks them
        except InvalidParameter as error:
            raise InvalidParameter(f"adaptive_{error.name}", error.value, error.limit) from None
        return self


class RequestSpeculation(Checked):
    """What one request may say about its own speculation."""

    method: str | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=MAX_DRAFTS)
    policy: PolicyName | None = None
    acceptance: Acceptance | None = None
    join: bool | None = None
    prediction: str | tuple[int, ...] | None = Field(
        None, description="what the text will mostly be, as text or token ids"
    )
    pool: str | None = Field(
        None,
        max_length=256,
        description="whose earlier answers may be drafted from; None: those to the same prompt, empty: nobody's",
    )
    tenant: str = Field(
        "", max_length=256, description="on whose account: no pool is shared between two of them"
    )

    @field_validator("prediction", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        ids = isinstance(value, list | tuple) and all(isinstance(token, int) for token in value)
        if value is None or ((ids or isinstance(value, str)) and len(value) <= MAX_PREDICTION):
            return value
        raise ValueError(f"a string or a list of token ids, at most {MAX_PREDICTION} long")


class EngineConfig(BaseSettings):
    """The engine's settings. `EngineConfig(block_size=32)` reads environment and file for the rest."""

    model_config = SettingsConfigDict(
        env_prefix="SPECULON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = Field(
        "demo", description="a folder, a hub id, or `demo`: the model that ships with speculon"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the checkpoint's; fp32 where the chip has no bf16"
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N | mps")
    threads: int | None = Field(None, ge=1, description="CPU threads of a forward; None: torch's choice")
    fuse: bool = Field(
        True, description="rewrite layers into fewer, faster operations where that computes the same"
    )
    compile: bool = Field(
        False,
        description="compile the fused steps (CPU, fp32: minutes at the first load; 5 copies of weights that are packed), "
        "or capture them as graphs (CUDA)",
    )
    max_context: int | None = Field(
        None, ge=2, description="longest prompt + answer in tokens; None: the model's"
    )
    max_num_seqs: int = Field(32, ge=1, le=4096, description="texts written at the same time")
    max_batch_tokens: int = Field(512, ge=1, description="rows of one forward; longer prompts come in chunks")
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV page")
    num_blocks: int | None = Field(None, ge=1, description="KV pages; None: from kv_memory_gb")
    kv_memory_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory of the page pool; None: at most 30 % of what is free",
    )
    prefix_cache: bool = Field(True, description="keep finished pages for prompts that begin alike")
    events: Path | None = Field(
        None,
        description="a file that gets a line of JSON per round: numbers, reasons, request ids; no text, no token ids",
    )
    events_limit_mb: float = Field(
        256.0,
        ge=1,
        allow_inf_nan=False,
        description="of that file and the part before it, FILE.1; beyond, the older half goes",
    )
    rehearse: bool | None = Field(
        None,
        description="up to two seconds of rounds about nothing at start, to know what they cost; None: with policy goodput",
    )
    state: Path | None = Field(
        None,
        description="a folder that keeps what was learned across restarts: earlier answers, as token ids, and what policy "
        "goodput has learned",
    )
    allow_pickle: bool = Field(False, description="accept pickle checkpoints (weights_only)")
    trust_remote_code: bool = Field(False, description="run Python code that comes with a checkpoint")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)

    file: ClassVar[str] = "speculon.toml"

    @field_validator("events")
    @classmethod
    def _can_be_a_file(cls, value: Path | None) -> Path | None:
        if value is not None and (
            not value.absolute().parent.is_dir() or (value.exists() and not value.is_file())
        ):
            raise ValueError("a file, in a folder that is there")
        return value

    @field_validator("state")
    @classmethod
    def _can_be_a_folder(cls, value: Path | None) -> Path | None:
        return new_or_there(value)

    def __init__(self, /, **values: Any):
        unknown = {k for k in os.environ if k.startswith("SPECULON_")} - set(self._env_names())
        if unknown:
            raise ConfigError(f"unknown setting in the environment: {', '.join(sorted(unknown))}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(str(invalid_parameter(error))) from None
        except SettingsError as error:
            raise ConfigError(f"{error}: {error.__cause__}") from None
        except (TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{os.environ.get('SPECULON_CONFIG', self.file)}: {error}") from None

    @classmethod
    def _env_names(cls) -> list[str]:
        tables: dict[str, type[BaseModel]] = {"SPECULATION": SpeculationConfig, "SERVE": ServeConfig}
        nested = [
            f"SPECULON_{table}__{name.upper()}"
            for table, kind in tables.items()
            for name in kind.model_fields
        ]
        return ["SPECULON_CONFIG", *nested, *(f"SPECULON_{name.upper()}" for name in cls.model_fields)]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get("SPECULON_CONFIG", cls.file)
        if "SPECULON_CONFIG" in os.environ and not os.path.isfile(path):
            raise ConfigError(f"SPECULON_CONFIG = {path!r}: no such file")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)
