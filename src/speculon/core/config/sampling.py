"""How one request is sampled, and the form that its text must have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from speculon.core.checked import Checked
from speculon.core.errors import InvalidParameter

MAX_STOPS = 64  # each stop string is searched for at every token; the OpenAI API allows 4
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 128
MAX_BIASES = 4096
MAX_BAD_WORDS = 256
MAX_SAMPLES = 64
# characters of a schema, expression or grammar: 1.4 s to compile at the worst seen, mostly a third of one
MAX_GRAMMAR = 2**16
MAX_CHOICES = 1024
SEEDS = range(-(2**63), 2**63)  # as OpenAI
# (token ids of prompt, output and the drafts before a row; logits [V]) -> logits [V]
LogitsProcessor = Callable[[list[int], Any], Any]
IN_PYTHON = ("logits_processor",)  # parameters that have no flag, no setting and no field of a body
SEED_SCHEMA = {"type": "integer", "minimum": SEEDS[0], "maximum": SEEDS[-1]}


class Structured(Checked):
    """The form that a text must have. Exactly one field is set.

    >>> SamplingParams(structured={"json_schema": {"properties": {"age": {"type": "integer"}}}})

    JSON is written without whitespace between its parts, because a model could otherwise write spaces without
    end. A schema with `"x-guidance": {"whitespace_flexible": true}` allows whitespace.
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
        None, min_length=1, max_length=MAX_GRAMMAR, description="a grammar in llguidance's form of Lark"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Structured:
        if self.json_schema is False:
            raise InvalidParameter("json_schema", False, "must not be false: no text matches this schema")
        if len(self._chosen) != 1:
            limit = f"give exactly one of {', '.join(type(self).model_fields)}"
            raise InvalidParameter("fields", list(self._chosen), limit)
        return self

    @field_validator("json_schema", "choice")
    @classmethod
    def _not_huge(cls, value: Any) -> Any:
        try:
            size = len(json.dumps(value))
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode, without a lone surrogate") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"must be JSON ({error})") from None
        if size > MAX_GRAMMAR:
            raise ValueError(f"must have at most {MAX_GRAMMAR} characters as JSON, and has {size}")
        return value

    @property
    def _chosen(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def constraint(self) -> tuple[str, Any]:
        """The field that is given, and its value."""
        ((name, value),) = self._chosen.items()
        return name, value


class Thinking(Checked):
    """The tags around a model's thinking before its answer.

    With `opened` the prompt already ends with the opening tag. Otherwise the thinking begins if the text
    begins with `start`.
    """

    start: str = Field("<think>", min_length=1, max_length=MAX_STOP_CHARS)
    end: str = Field("</think>", min_length=1, max_length=MAX_STOP_CHARS)
    opened: bool = False


class SamplingParams(Checked):
    """How one request is sampled. The names and meanings are those of vLLM's sampling parameters.

    >>> SamplingParams(temperature=0.0, max_tokens=64)

    Raises `InvalidParameter` for a value out of its range; the message names the field, the value and the
    limit.
    """

    features: ClassVar[str] = "parameters"

    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="0: greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="keep the likeliest tokens up to this sum of probabilities"
    )
    top_k: int = Field(0, ge=-1, le=2**31, description="keep this many tokens; 0 or -1 keeps all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="drop tokens below this share of the likeliest token's probability"
    )
    max_tokens: int | None = Field(
        None, ge=0, description="most tokens to write; None: to the end of the context"
    )
    min_tokens: int = Field(0, ge=0, description="no stop before this many tokens")
    stop: tuple[str, ...] = Field(
        (),
        max_length=MAX_STOPS,
        description="string, or name of a special token, that ends the text and is not shown",
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), max_length=MAX_STOPS, description="token id that ends the text"
    )
    ignore_eos: bool = Field(False, description="do not stop at the end-of-text token")
    seed: Annotated[int, WithJsonSchema(SEED_SCHEMA)] | None = Field(
        None, description="the same seed gives the same text; -1: none"
    )
    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="completions per prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of this many likeliest tokens"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of the prompt's tokens, likewise"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted from the logits of tokens already written"
    )
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted from them once per occurrence")
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="divides the logits of tokens in the prompt and the text",
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, max_length=MAX_BIASES, description="{token id: number added to its logit}"
    )
    bad_words: tuple[str, ...] = Field(
        (),
        max_length=MAX_BAD_WORDS,
        description="string that no token completes; longer words with it neither",
    )
    structured: Structured | None = Field(
        None, description="form of the text: a JSON schema, a regex, a choice or a grammar"
    )
    thinking: Thinking | None = Field(
        None, description="tags of a thinking: stop strings and the form begin after it"
    )
    logits_processor: Annotated[LogitsProcessor, WithJsonSchema({"type": "null"})] | None = Field(
        None, description="function of (token ids so far, logits) that returns the logits to sample from"
    )
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    include_stop_str_in_output: bool = Field(
        False, description="keep the stop string at the end of the text; stop tokens are never shown"
    )

    @field_validator("seed")
    @classmethod
    def _minus_one_is_none(cls, value: int | None) -> int | None:
        if value is not None and value not in SEEDS:
            raise ValueError(f"must be from {SEEDS[0]} to {SEEDS[-1]}, where -1 means no seed")
        return None if value == -1 else value

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_or_huge_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise ValueError(f"each string must have from 1 to {MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", self.min_tokens, f"must be at most max_tokens, {self.max_tokens}"
            )
        return self

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """What is set here, and else what is set in `defaults`."""
        set_here = self.model_dump(exclude_unset=True)
        return SamplingParams(**{**defaults.model_dump(exclude_unset=True), **set_here})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
