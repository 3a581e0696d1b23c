"""What one HTTP request asks of the engine, and how its answer is to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from speculon.config import RequestSpeculation, SamplingParams
from speculon.engine.admission import read_prediction
from speculon.errors import InvalidParameter, TooLong, UnknownModel, shorten
from speculon.config.serve import ServeConfig
from speculon.server.calls import Reply, Spoken
from speculon.server.schemas import Content, Sampling
from speculon.text import Tokenizer

DEFAULT_TOKENS = 16  # of a completion that does not say, as OpenAI


@dataclass(frozen=True, slots=True)
class House:
    """What a request is read against."""

    name: str  # of the model, as clients call it
    tokenizer: Tokenizer
    max_context: int
    vocab_size: int
    method: str
    config: ServeConfig

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise UnknownModel(f"model = {shorten(asked)}: this server serves {self.name!r}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        One that is far too long is refused by its beginning: others wait while it is read.
        """
        part = 4 * self.max_context
        while part < len(text):
            # whatever a cut in a word may have changed
            if len(self.tokenizer.encode(text[:part])) > 2 * self.max_context:
                raise TooLong(f"prompt of {len(text)} characters > context {self.max_context} tokens")
            part *= 4
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def length_of(self, asked: int | None, prompts: list[list[int]], usual: int | None = None) -> int:
        """`max_tokens` of a request; of one that does not say, the usual or all that the context and the
        server's limit leave.
        """
        limit, longest = self.config.max_request_tokens, max(map(len, prompts))
        if longest > self.max_context:  # told before it travels; the engine judges the rest
            raise TooLong(f"prompt {longest} > context {self.max_context} tokens")
        if asked is None:
            return min(most for most in (usual, limit, self.max_context - longest) if most is not None)
        if limit is not None and asked > limit:
            raise InvalidParameter("max_tokens", asked, f"this server writes at most {limit} tokens per text")
        return asked


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request: every prompt is written `params.n` times."""

    kind: Literal["text_completion", "chat.completion"]
    prompts: list[list[int]]
    params: SamplingParams
    speculation: RequestSpeculation
    method: str  # what drafts, for the account
    stream: bool = False
    usage: bool = False  # in the stream's last chunk
    stats: bool = False
    echo: bool = False
    asked: tuple[bytes, ...] = ()  # each prompt, as it is captured; empty: nothing is
    reply: Callable[[], Reply] = field(default=Spoken)

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.params.n


def sampling_of(body: Sampling, **more: Any) -> SamplingParams:
    """The fields both surfaces share; a field that is not said keeps our default.

    Raises `InvalidParameter`.
    """
    names = set(SamplingParams.model_fields) & (set(Sampling.model_fields) - {"logit_bias"})
    said = {name: value for name in names if (value := getattr(body, name)) is not None}
    biases = {"logit_bias": read_biases(body.logit_bias)} if body.logit_bias else {}
    return SamplingParams(
        **{**said, **biases, **structured_of(body), **{k: v for k, v in more.items() if v is not None}}
    )


def read_biases(said: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in said.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidParameter("logit_bias", token, "keys are token ids")
        if not -100 <= bias <= 100:
            raise InvalidParameter("logit_bias", {token: bias}, "from -100 to 100")
        biases[int(token)] = bias
    return biases


def structured_of(body: Sampling) -> dict[str, Any]:
    """`response_format` as the engine's `structured`."""
    asked = body.response_format
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"structured": {"json_object": True}}
    if asked.json_schema is None:
        raise InvalidParameter("response_format.json_schema", None, "is needed with type json_schema")
    return {"structured": {"json_schema": asked.json_schema.schema_}}


def speculation_of(body: Sampling, house: House) -> RequestSpeculation:
    asked = body.speculation
    said = asked.model_dump(exclude={"stats"}, exclude_none=True) if asked else {}
    name = said.get("pool", next((name for name in callers(body) if name and name.strip()), None))
    said |= {} if name is None else {"pool": pool_of(name)}
    if body.prediction is None:
        return RequestSpeculation(**said)
    # refuses one that is too long
    speculation = RequestSpeculation(**said, prediction=text_of(body.prediction.content))
    # here, where no step waits for it
    ids = read_prediction(speculation.prediction, house.tokenizer, house.vocab_size)
    return speculation.model_copy(update={"prediction": ids})


def callers(body: Sampling) -> tuple[str | None, ...]:
    """Who asks, in OpenAI's words; whoever names a user does not want him among all that share a cache key."""
    return body.safety_identifier, body.user, body.prompt_cache_key


def pool_of(name: str) -> str:
    """A caller's name for a pool as the engine hears it; the empty name is nobody's.

    Names go no further than here.
    """
    return name and hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def shared(body: Sampling, house: House) -> dict[str, Any]:
    """What both surfaces say alike."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidParameter("stream_options", options.model_dump(), "only with stream = true")
    speculation = speculation_of(body, house)
    return {
        "speculation": speculation,
        "method": speculation.method or house.method,
        "stream": bool(body.stream),
        "usage": options is not None and options.include_usage,
        "stats": body.speculation is not None and body.speculation.stats,
    }


def text_of(content: Content | None) -> str:
    """One text from a string or from text parts."""
    return content or "" if isinstance(content, str | None) else "".join(part.text for part in content)
